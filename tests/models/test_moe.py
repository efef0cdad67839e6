"""The mixture of experts against transformers' GptOss with the same weights, and the defining properties of its parts."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_ray.models import moe
from vescale_ray.models.moe import Experts, MoE, MoEConfig, balance_loss, grouped_product
from vescale_ray.optim import OptimizerConfig, route_parameters
from vescale_ray.workers.steps.slot_batches import positions_in

os.environ["HF_HUB_OFFLINE"] = "1"
SIZES: dict[str, Any] = {"dim": 32, "heads": 4, "kv_heads": 2, "experts": 6, "top_k": 2, "ffn": 24, "head_dim": 8, "vocab": 50}
SMALL = MoEConfig(**SIZES, layers=4, window=4, rope_theta=1e4)
NAMES = {
    "embed.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "head.": "lm_head.",
    "norm.": "model.norm.",
    ".attention_norm": ".input_layernorm",
    ".ffn_norm": ".post_attention_layernorm",
    ".attention.": ".self_attn.",
    ".ffn.": ".mlp.",
}


def theirs(name: str) -> str:
    """The name of a parameter in transformers' model."""
    for ours, other in NAMES.items():
        name = name.replace(ours, other) if ours.startswith(".") or name.startswith(ours) else name
    return name


def spread(model: Any, seed: int = 0, size: float = 0.3) -> Any:
    """The model with weights that make attention and routing far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, size, generator=generator)
    return model


def pair(config: MoEConfig, **changes: Any) -> tuple[MoE, Any]:
    """Our model and transformers', in float64, with the same weights."""
    transformers = pytest.importorskip("transformers")
    given = transformers.GptOssConfig(
        num_hidden_layers=config.layers,
        num_local_experts=config.experts,
        vocab_size=config.vocab,
        hidden_size=config.dim,
        intermediate_size=config.ffn,
        head_dim=config.head_dim,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        sliding_window=config.window,
        num_experts_per_tok=config.top_k,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        max_position_embeddings=128,
        output_router_logits=True,
        attn_implementation="eager",
        experts_implementation="eager",
        use_cache=False,
    )
    other = spread(transformers.GptOssForCausalLM(given).double())
    ours = MoE(config).double()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(other.get_parameter(theirs(name)))
    assert {theirs(name) for name, _ in ours.named_parameters()} == {name for name, _ in other.named_parameters()}
    return ours, other


def test_logits_and_gradients_equal_transformers() -> None:
    ours, other = pair(SMALL)
    tokens = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(0))
    mine, expected = ours(tokens).logits, other(tokens).logits
    # Norms and rotation use float32 in both.
    torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
    direction = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for logits in (mine, expected):
        (logits * direction).sum().backward()
    for name, parameter in ours.named_parameters():
        grad = other.get_parameter(theirs(name)).grad
        assert float(grad.abs().max()) > 1e-3 or name.endswith("k_proj.bias"), "a gradient of zeros compares nothing"
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-5, msg=name)


def test_the_balance_loss_of_a_layer_equals_transformers() -> None:
    # With several layers, transformers averages loads and probabilities over the layers before it multiplies them.
    ours, other = pair(MoEConfig(**SIZES, layers=1))
    tokens = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(0))
    mine, expected = ours(tokens).aux_loss, other(tokens).aux_loss
    torch.testing.assert_close(mine.float(), expected, rtol=1e-5, atol=1e-6)
    mine.backward()
    expected.backward()
    router = "layers.0.ffn.router.weight"
    grad = other.get_parameter(theirs(router)).grad
    torch.testing.assert_close(ours.get_parameter(router).grad, grad, rtol=1e-4, atol=1e-6)
    several = MoE(SMALL)
    spread(several)
    assert 2.0 <= float(several(tokens).aux_loss.detach()) < 6.0


def test_even_routing_has_the_least_balance_loss() -> None:
    even = torch.zeros(12, 6)
    assert float(balance_loss(even, torch.full((6,), 4))) == pytest.approx(2.0)
    one = torch.full((12, 6), -50.0)
    one[:, 0] = 50.0
    assert float(balance_loss(one, torch.tensor([12, 12, 0, 0, 0, 0]))) == pytest.approx(6.0)
    scores = torch.zeros(12, 6, requires_grad=True)
    balance_loss(scores, torch.tensor([12, 6, 6, 0, 0, 0])).backward()
    assert scores.grad is not None
    assert bool((scores.grad[:, 0] > 0).all()) and bool((scores.grad[:, 3] < 0).all()), "the gradient lowers the busiest expert's score"


def test_every_position_is_computed_by_its_experts() -> None:
    """Without capacity, all positions may choose one expert; each row's result is that of a loop over rows and experts."""
    layer: Any = spread(MoE(SMALL).layers[0]).ffn.double()
    with torch.no_grad():
        layer.router.bias[3] = 50.0
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out, _ = layer(x)
    e = layer.experts
    for row, got in zip(x.flatten(0, 1), out.flatten(0, 1), strict=True):
        scores = layer.router.weight @ row + layer.router.bias
        best = sorted(range(6), key=lambda i: -scores[i].item())[:2]
        assert best[0] == 3
        weights = torch.stack([scores[i] for i in best]).softmax(0)
        expected = torch.zeros(32, dtype=torch.float64)
        for weight, i in zip(weights, best, strict=True):
            both = row @ e.gate_up_proj[i] + e.gate_up_proj_bias[i]
            gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
            expected += weight * ((gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ e.down_proj[i] + e.down_proj_bias[i])
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_grouped_kernel_equals_products_of_groups(dtype: torch.dtype) -> None:
    counts, generator = torch.tensor([3, 0, 7, 1, 0]), torch.Generator().manual_seed(0)
    rows, matrices = torch.randn(11, 16, generator=generator).to(dtype), torch.randn(5, 16, 24, generator=generator).to(dtype)
    results = []
    for kernel in (False, True):
        operands = [one.clone().requires_grad_() for one in (rows, matrices)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe, "_has_kernel", lambda *_: kernel)  # noqa: B023
            out = grouped_product(operands[0], operands[1], counts)
        (out * torch.linspace(-1, 1, 24).to(dtype)).sum().backward()
        results.append([out, *(one.grad for one in operands)])
    for loop, grouped in zip(*results, strict=True):
        torch.testing.assert_close(loop, grouped)


def test_experts_without_rows_have_gradients_of_zeros() -> None:
    experts = spread(Experts(SMALL))
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    experts(rows, torch.tensor([0, 4, 0, 0, 0, 0])).sum().backward()
    for parameter in experts.parameters():
        assert bool((parameter.grad[1] != 0).any()) and not bool(parameter.grad[[0, 2, 3, 4, 5]].any())
    none = torch.zeros(0, 32, requires_grad=True)
    experts.zero_grad()
    experts(none, torch.zeros(6, dtype=torch.int64)).sum().backward()
    assert none.grad is not None
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in experts.parameters())


def test_documents_compute_as_each_alone() -> None:
    model = spread(MoE(SMALL))
    tokens = torch.tensor([[5, 6, 1, 7, 8, 9, 10, 11, 12, 1, 3, 4, 1]])
    packed = model(tokens, position_ids=positions_in(tokens, 1)).logits
    alone = torch.cat([model(part[None]).logits[0] for part in (tokens[0, :3], tokens[0, 3:10], tokens[0, 10:])])
    torch.testing.assert_close(packed[0], alone, rtol=1e-4, atol=1e-4)


def test_a_windowed_layer_sees_its_window_only() -> None:
    model = spread(MoE(MoEConfig(**SIZES, layers=1, window=3)))
    tokens = torch.randint(50, (1, 8), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 2] = (other[0, 2] + 1) % 50
    differ = ((model(tokens).logits - model(other).logits).abs() > 1e-4).any(-1)[0]
    assert differ.tolist() == [False, False, True, True, True, False, False, False]


def test_bfloat16_result_is_finite_and_near_float32() -> None:
    model = spread(MoE(SMALL), size=0.1)
    with torch.no_grad():
        for layer in model.layers:
            layer.ffn.router.bias.copy_(torch.arange(6.0))  # a choice that rounding does not change
    tokens = torch.randint(50, (2, 11), generator=torch.Generator().manual_seed(0))
    wide = model(tokens).logits
    output = model.bfloat16()(tokens)
    assert output.logits.dtype is torch.bfloat16 and output.aux_loss.dtype is torch.float32
    torch.testing.assert_close(output.logits.float(), wide, rtol=0.1, atol=0.1)
    output.logits.float().logsumexp(-1).sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


def test_meta_device_build_filled_by_name_equals_a_plain_build() -> None:
    with torch.device("meta"):
        model = MoE(SMALL)
    assert not list(model.buffers()), "a buffer would hold garbage after to_empty"
    tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(0))
    assert model(tokens.to("meta")).logits.shape == (2, 8, 50)
    model.to_empty(device="cpu")
    plain, generator = MoE(SMALL), torch.Generator().manual_seed(7)
    plain.reset_parameters(7)
    for name, parameter in model.named_parameters():
        full = torch.full(parameter.shape, float("nan"))
        model.init_parameter(name, full, generator)
        with torch.no_grad():
            parameter.copy_(full)
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_operations_are_those_of_the_experts_a_token_uses() -> None:
    products = 0

    class Counted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal products
            out = func(*args, **(kwargs or {}))
            if func in (F.linear, Tensor.matmul, Tensor.__matmul__):
                products += 2 * out.numel() * args[0].shape[-1]
            elif func is F.scaled_dot_product_attention:
                products += 4 * out.numel() * (args[1].shape[-2] - 1)  # the sink's key and value are zeros
            return out

    with Counted():
        MoE(SMALL)(torch.zeros(1, 16, dtype=torch.int64))
    assert products * 3 == 16 * MoE(SMALL).flops_per_token(16)


def test_muon_steps_the_experts_and_not_their_biases() -> None:
    """A stack of biases has two dimensions and is no matrix."""
    routes = route_parameters(MoE(SMALL), OptimizerConfig(name="muon")).routes
    stepped = {one.name.removeprefix("layers.0.") for one in routes if one.optimizer == "muon" and one.name.startswith("layers.0.")}
    projections = {f"attention.{p}_proj.weight" for p in "qkvo"}
    assert stepped == projections | {"ffn.router.weight", "ffn.experts.gate_up_proj", "ffn.experts.down_proj"}


@pytest.mark.parametrize(
    "change", [{"dim": 0}, {"head_dim": 7}, {"kv_heads": 3}, {"top_k": 7}, {"experts": 0}, {"router_aux_loss_coef": float("nan")}]
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="|".join(change)):
        MoEConfig(**{**vars(SMALL), **change})


def test_a_sequence_longer_than_the_model_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="max_seq"):
        MoE(MoEConfig(**SIZES, layers=1, max_seq=4))(torch.zeros(1, 5, dtype=torch.int64))
