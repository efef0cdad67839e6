"""Llama against an independent implementation (explicit loops, complex rotation) and the defining properties of its parts."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_ray.models import llama, moe
from vescale_ray.models.llama import Llama, LlamaConfig, RMSNorm

SIZES = {
    "multi-head": LlamaConfig(dim=32, layers=2, heads=4, kv_heads=4, ffn=48, vocab=64),
    "grouped": LlamaConfig(dim=48, layers=3, heads=6, kv_heads=2, ffn=80, vocab=50, rope_theta=500.0),
    "multi-query": LlamaConfig(dim=32, layers=1, heads=4, kv_heads=1, ffn=32, vocab=64),
    "tied": LlamaConfig(dim=32, layers=2, heads=2, kv_heads=1, ffn=48, vocab=64, tie=True),
}


def made(config: LlamaConfig, seed: int = 0, *, scale: float = 10.0) -> Llama:
    """A model whose weights are large enough that attention is far from uniform."""
    model = Llama(config)
    model.reset_parameters(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(scale)
            elif parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))
    return model


def tokens_of(config: LlamaConfig, batch: int, seq: int, seed: int = 0) -> Tensor:
    return torch.randint(config.vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def oracle(model: Llama, tokens: Tensor) -> Tensor:
    """Llama from the papers in float64: one position and one head at a time, rotation by complex multiplication, no torch.nn."""
    c = model.config
    w = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    head_dim, group = c.dim // c.heads, c.heads // c.kv_heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / math.sqrt(float((x * x).mean()) + c.norm_eps) * weight

    def turn(x: Tensor, position: int) -> Tensor:
        half = head_dim // 2
        out = torch.empty_like(x)
        for i in range(half):
            angle = position / c.rope_theta ** (2 * i / head_dim)
            z = complex(float(x[i]), float(x[i + half])) * complex(math.cos(angle), math.sin(angle))
            out[i], out[i + half] = z.real, z.imag
        return out

    def sentence(row: list[int]) -> Tensor:
        xs = [w["embed.weight"][token] for token in row]
        for n in range(c.layers):
            p = f"layers.{n}."
            qs, ks, vs = [], [], []
            for position, x in enumerate(xs):
                h = norm(x, w[p + "attention_norm.weight"])
                qs.append([turn(q, position) for q in (w[p + "attention.q_proj.weight"] @ h).split(head_dim)])
                ks.append([turn(k, position) for k in (w[p + "attention.k_proj.weight"] @ h).split(head_dim)])
                vs.append((w[p + "attention.v_proj.weight"] @ h).split(head_dim))
            after = []
            for position, x in enumerate(xs):
                heads = []
                for head in range(c.heads):
                    scores = [float(qs[position][head] @ ks[past][head // group]) / math.sqrt(head_dim) for past in range(position + 1)]
                    weights = [math.exp(score - max(scores)) for score in scores]
                    heads.append(sum(weight / sum(weights) * vs[past][head // group] for past, weight in enumerate(weights)))
                after.append(x + w[p + "attention.o_proj.weight"] @ torch.cat(heads))  # type: ignore[arg-type]
            xs = []
            for x in after:
                h = norm(x, w[p + "ffn_norm.weight"])
                gate = w[p + "ffn.gate_proj.weight"] @ h
                xs.append(x + w[p + "ffn.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * (w[p + "ffn.up_proj.weight"] @ h)))
        head_weight = w["embed.weight"] if c.tie else w["head.weight"]
        return torch.stack([head_weight @ norm(x, w["norm.weight"]) for x in xs])

    return torch.stack([sentence(row) for row in tokens.tolist()])


@pytest.mark.parametrize("name", SIZES)
def test_logits_match_an_independent_implementation(name: str) -> None:
    config = SIZES[name]
    model = made(config).double()
    tokens = tokens_of(config, 2, 9)
    # Rotation and norms use float32 by design, even in a float64 model.
    torch.testing.assert_close(model(tokens), oracle(model, tokens), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", SIZES)
def test_gradients_match_finite_differences(name: str) -> None:
    config = SIZES[name]
    model = made(config)
    tokens = tokens_of(config, 2, 8)

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    loss().backward()
    generator = torch.Generator().manual_seed(1)
    step = 1e-3
    for parameter in model.parameters():
        assert parameter.grad is not None
        direction = torch.randn(parameter.shape, generator=generator)
        direction /= direction.norm()
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            above = float(loss())
            parameter.sub_(direction, alpha=2 * step)
            below = float(loss())
            parameter.add_(direction, alpha=step)
        assert float((parameter.grad * direction).sum()) == pytest.approx((above - below) / (2 * step), rel=0.05, abs=2e-3)


def test_rms_norm_gives_root_mean_square_one_at_any_scale() -> None:
    norm = RMSNorm(64, 1e-6)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-2, 1.0, 10.0, 1e3, 1e5])[:, None]
    torch.testing.assert_close(norm(x).square().mean(-1).sqrt(), torch.ones(5), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tie", [False, True])
def test_untrained_loss_is_the_logarithm_of_the_vocabulary(tie: bool) -> None:
    model = Llama(LlamaConfig(dim=128, layers=4, heads=4, kv_heads=2, ffn=384, tie=tie))
    model.reset_parameters(0)
    tokens = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(0))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(math.log(256), abs=0.1)


def test_bfloat16_result_is_finite_and_near_float32() -> None:
    config = SIZES["grouped"]
    model = made(config, scale=3.0)
    tokens = tokens_of(config, 2, 32)
    wide = model(tokens)
    logits = model.bfloat16()(tokens)
    assert logits.dtype is torch.bfloat16
    assert bool(torch.isfinite(logits).all())
    torch.testing.assert_close(logits.float(), wide, rtol=0.1, atol=0.15)
    logits.float().logsumexp(-1).sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


def test_meta_device_build_filled_by_name_equals_a_plain_build() -> None:
    config = SIZES["grouped"]
    with torch.device("meta"):
        model = Llama(config)
    assert not list(model.buffers()), "a buffer would hold garbage after to_empty"
    model.to_empty(device="cpu")
    for number, (name, parameter) in enumerate(model.named_parameters()):
        full = torch.full(parameter.shape, float("nan"))
        model.init_parameter(name, full, torch.Generator().manual_seed(number))
        with torch.no_grad():
            parameter.copy_(full)
    plain = Llama(config)
    for number, (name, parameter) in enumerate(plain.named_parameters()):
        plain.init_parameter(name, parameter.data, torch.Generator().manual_seed(number))
    tokens = tokens_of(config, 2, 8)
    assert torch.equal(model(tokens), plain(tokens))


def test_initial_values_follow_the_generator_and_documented_size() -> None:
    config = LlamaConfig(dim=128, layers=8, heads=4, kv_heads=2, ffn=256)
    model = Llama(config)
    for name, parameter in model.named_parameters():
        one, two, other = torch.empty(parameter.shape), torch.empty(parameter.shape), torch.empty(parameter.shape)
        model.init_parameter(name, one, torch.Generator().manual_seed(5))
        model.init_parameter(name, two, torch.Generator().manual_seed(5))
        model.init_parameter(name, other, torch.Generator().manual_seed(6))
        assert torch.equal(one, two)
        if parameter.dim() == 1:
            assert bool((one == 1).all())
            continue
        assert not torch.equal(one, other)
        std = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02  # sqrt(2 * 8 layers) = 4
        assert float(one.std()) == pytest.approx(std * 0.986, rel=0.03)  # 0.986 remains after cutting at three deviations
        assert float(one.abs().max()) <= 3 * std * 1.0001


def test_a_tied_head_is_the_embedding_and_counted_once() -> None:
    config = SIZES["tied"]
    model = Llama(config)
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_parameter_count_matches_the_formula() -> None:
    c = SIZES["grouped"]
    d, kv = c.dim, c.kv_heads * c.dim // c.heads
    expected = 2 * c.vocab * d + d + c.layers * (2 * d * d + 2 * d * kv + 3 * d * c.ffn + 2 * d)
    assert sum(p.numel() for p in Llama(c).parameters()) == expected


@pytest.mark.parametrize("change", [{"dim": 0}, {"layers": 0}, {"heads": 5}, {"kv_heads": 4}, {"dim": 42, "heads": 6}, {"vocab": -1}])
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="|".join(change)):
        LlamaConfig(**{**vars(SIZES["grouped"]), **change})


def test_a_sequence_longer_than_the_model_takes_is_refused() -> None:
    model = Llama(LlamaConfig(dim=8, layers=1, heads=1, kv_heads=1, ffn=8, max_seq=4))
    with pytest.raises(ValueError, match="max_seq"):
        model(torch.zeros(1, 5, dtype=torch.int64))


@pytest.mark.parametrize("module", [llama, moe])
def test_model_file_names_no_distributed_code(module: ModuleType) -> None:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    imported = {alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"__future__", "dataclasses", "typing", "torch", "torch.nn.functional", "vescale_ray.models.llama"}
    assert not any(word in source.lower() for word in ("distributed", "fsdp", "dtensor", "world", "fully_shard"))
