"""parallelize_experts below fully_shard against one process that computes all experts."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as recomputed

from tests.fsdp.transformer import apart, full
from tests.models import hf_folders
from tests.ranks import on_processes, on_threads, run_threads
from vescale_ray import FSDPModule, MixedPrecisionPolicy, checkpoint, fully_shard, parallelize_experts
from vescale_ray.checkpoint.huggingface_layout import file_layout
from vescale_ray.models import hf
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.models.moe import Experts, MoE, MoEConfig
from vescale_ray.optim import AdamW, OptimizerConfig, build_optimizer, clip_grad_norm_, route_parameters
from vescale_ray.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict

os.environ["HF_HUB_OFFLINE"] = "1"
SIZES: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "experts": 4, "top_k": 2, "ffn": 12, "head_dim": 8, "vocab": 40}
MESHES = [(2, 1), (1, 2), (2, 2)]
ROWS = 2


def made(dtype: torch.dtype = torch.float64, scale: float = 0.3, **changes: Any) -> Any:
    model = MoE(MoEConfig(**{**SIZES, "router_aux_loss_coef": 0.5, **changes}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, scale, generator=generator)
    return model.to(dtype)


def two_dims(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))


def sharded(model: Any, mesh: DeviceMesh | None, **options: Any) -> Any:
    """The model below fully_shard over all ranks, with experts over the mesh's second dimension if there is one."""
    if mesh is not None:
        for experts in parallelize_experts(model, mesh["ep"]):
            fully_shard(experts, mesh=mesh["dp"], **options)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def tokens_of(step: int, world: int) -> Tensor:
    return torch.randint(40, (world, ROWS, 9), generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    output = model(tokens[:, :-1])
    return F.cross_entropy(output.logits.flatten(0, 1), tokens[:, 1:].flatten()) + model.router_aux_loss_coef * output.aux_loss


def alone(model: Any, step: int, world: int) -> list[Tensor]:
    """Losses of all ranks' batches, with the gradients of their mean."""
    losses = [loss_of(model, tokens) for tokens in tokens_of(step, world)]
    (torch.stack(losses).mean()).backward()
    return losses


def check_gradients(model: Any, dense: Any, bound: float = 1e-5) -> None:
    for name, parameter in dense.named_parameters():
        grad = model.get_parameter(name).grad
        if not bool(parameter.grad.any()):
            assert grad is None or not bool(full(grad).any()), name
        else:
            assert apart(full(grad), parameter.grad) <= bound, name


@pytest.mark.parametrize(("shape", "optimizer"), [*((shape, "adamw") for shape in MESHES), ((2, 2), "muon")])
@on_threads(lambda shape: math.prod(shape))
def test_training_equals_dense_experts_in_one_process(rank: int, world: int, shape: tuple[int, int], optimizer: Any) -> None:
    mesh = two_dims(shape)
    model, dense = made(), made()
    config = OptimizerConfig(optimizer, lr=0.01)
    for experts in parallelize_experts(model, mesh["ep"]):
        assert experts.gate_up_proj.to_local().shape == (4 // shape[1], 16, 24)
    policy = route_parameters(model, config).block_policy
    for layer in model.layers:
        fully_shard(layer.ffn.experts, mesh=mesh["dp"], block_policy=policy)
        fully_shard(layer, block_policy=policy)
    fully_shard(model, block_policy=policy)
    optimizers = [build_optimizer(one, config, log=None) for one in (model, dense)]
    # Muon's BF16 products make a difference in the last bit of a gradient one in the third digit of the update.
    bound = 1e-5 if optimizer == "adamw" else 5e-3
    for step in range(3):
        loss = loss_of(model, tokens_of(step, world)[rank])
        loss.backward()
        expected = alone(dense, step, world)
        assert float(loss.detach()) == pytest.approx(float(expected[rank].detach()), rel=bound)
        check_gradients(model, dense, bound if step else 1e-5)
        norms = [float(clip_grad_norm_(one.parameters(), 0.1, exact=exact)) for one, exact in ((model, step == 1), (dense, False))]
        assert norms[0] == pytest.approx(norms[1], rel=bound) and norms[1] > 0.1
        for one in optimizers:
            one.step()
            one.zero_grad()
    for name, parameter in dense.named_parameters():
        assert apart(full(model.get_parameter(name)), parameter) <= bound, name


def starve(layer: Any) -> None:
    """All rows choose experts 0 and 1, those of the first rank of two."""
    layer.ffn.router.bias.copy_(torch.tensor([60.0, 50.0, 0.0, 0.0]))


def tie(layer: Any) -> None:
    """All experts have equal scores."""
    layer.ffn.router.weight.zero_()
    layer.ffn.router.bias.zero_()


def split(layer: Any) -> None:
    """Each row's experts follow from the sign of one element, so that ranks differ in the experts that they use."""
    layer.ffn.router.weight.zero_()
    layer.ffn.router.weight[:2, 0], layer.ffn.router.weight[2:, 0] = 50.0, -50.0


@pytest.mark.parametrize("change", [starve, tie, split])
@pytest.mark.parametrize("shape", MESHES[1:])
@on_threads(lambda shape: math.prod(shape))
def test_gradients_equal_dense_ones_for_any_routing(rank: int, world: int, shape: tuple[int, int], change: Any) -> None:
    model, dense = made(), made()
    with torch.no_grad():
        for layer in (*model.layers, *dense.layers):
            change(layer)
    model = sharded(model, two_dims(shape))
    loss_of(model, tokens_of(0, world)[rank]).backward()
    alone(dense, 0, world)
    if change is starve:
        assert not bool(dense.layers[0].ffn.experts.down_proj.grad[2:].any())
    check_gradients(model, dense)


@on_threads(4)
def test_parallel_experts_equal_those_of_fully_shard_alone(rank: int, world: int) -> None:
    """With sums in place of means, two micro-batches per step, and a rank without a contribution."""
    grads = []
    for mesh in (two_dims((2, 2)), None):
        model = sharded(made(), mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
        for turn in range(2):
            model.set_requires_gradient_sync(turn == 1)
            (loss_of(model, tokens_of(turn, world)[rank]) * (rank != 3)).backward()
        grads.append({name: full(parameter.grad) for name, parameter in model.named_parameters()})
    for name, grad in grads[1].items():
        assert apart(grads[0][name], grad) <= 1e-10, name


@on_threads(4)
def test_a_stand_in_batch_leaves_no_nan_in_parallel_experts(rank: int, world: int) -> None:
    """The batch of the last rank is a stand-in whose rows are NaN. It still computes the rows of the others."""
    model, dense = sharded(made(), two_dims((2, 2))), made()
    model.set_contributes(rank < 3)
    tokens = tokens_of(0, world)
    if rank == 3:
        model.layers[0].register_forward_pre_hook(lambda _, given: (given[0] * float("nan"), *given[1:]))
    loss = loss_of(model, tokens[rank])
    (loss * (rank < 3)).backward()
    losses = [loss_of(dense, one) for one in tokens[:3]]
    (sum(losses) / 4).backward()
    assert loss.isnan() if rank == 3 else float(loss.detach()) == pytest.approx(float(losses[rank].detach()), rel=1e-5)
    check_gradients(model, dense)


@pytest.mark.parametrize("block", ["flat 1024", "flat 90", "tile 4x8"])
@on_threads(4)
def test_8_bit_states_of_parallel_experts_equal_those_without(rank: int, world: int, block: str) -> None:
    """Blocks of experts, blocks across rows with a short one at the end, and tiles."""
    states = []
    for mesh in (two_dims((2, 2)), None):
        model = made(torch.float32, experts=2)
        config = OptimizerConfig("adamw8bit", lr=0.01, options={"block": block, "min_8bit_numel": 128})
        found = parallelize_experts(model, mesh["ep"]) if mesh is not None else []
        policy = route_parameters(model, config).block_policy
        for experts in found:
            fully_shard(experts, mesh=mesh["dp"] if mesh is not None else None, block_policy=policy)
        for layer in model.layers:
            fully_shard(layer, block_policy=policy)
        optimizer = build_optimizer(fully_shard(model, block_policy=policy), config, log=None)
        for step in range(2):
            loss_of(model, tokens_of(step, world)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
        states.append(
            {(name, kind): full(one).float() for name, of in state.items() for kind, one in of.items() if isinstance(one, DTensor)}
        )
    assert states[0].keys() == states[1].keys() and ("layers.0.ffn.experts.gate_up_proj", "exp_avg_scale") in states[0]
    for key, one in states[1].items():
        assert states[0][key].shape == one.shape, key
        if key[1] == "exp_avg_scale":
            assert apart(states[0][key], one) <= 1e-4, key


@on_processes(4)
def test_checkpoints_of_parallel_experts_load_into_other_meshes(rank: int, world: int, tmp_path: Path) -> None:
    """On gloo, with the layers recomputed in backward."""
    model, dense = sharded(made(), two_dims((2, 2))), made()
    for layer in model.layers:
        layer.forward = _Recomputed(layer.forward)
    optimizer, other = AdamW(model.parameters(), lr=0.01), AdamW(dense.parameters(), lr=0.01)
    loss_of(model, tokens_of(0, world)[rank]).backward()
    alone(dense, 0, world)
    check_gradients(model, dense)
    optimizer.step()
    other.step()
    checkpoint.save({"model": model, "optimizer": optimizer}, str(tmp_path / "ours"), step=1)
    options = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    for name, parameter in dense.named_parameters():
        assert apart(whole[name], parameter) <= 1e-5 and apart(moments["state"][name]["exp_avg"], other.state[parameter]["exp_avg"]) <= 1e-5
    for mesh in (two_dims((1, 4)), None):
        loaded = sharded(made(scale=0.0), mesh)
        state = {"model": loaded, "optimizer": AdamW(loaded.parameters(), lr=0.01)}
        assert checkpoint.load(state, str(tmp_path / "ours")).step == 1
        again = get_optimizer_state_dict(loaded, state["optimizer"], options=options)
        fresh = sharded(made(scale=0.0), mesh)
        set_model_state_dict(fresh, whole, options=options)
        for name in whole:
            assert torch.equal(full(loaded.get_parameter(name)), whole[name]) and torch.equal(full(fresh.get_parameter(name)), whole[name])
            assert torch.equal(again["state"][name]["exp_avg"], moments["state"][name]["exp_avg"]), name


class _Recomputed:
    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, *args: Any) -> Any:
        return recomputed(self.forward, *args, use_reentrant=False)


@on_threads(4)
def test_bfloat16_experts_from_the_meta_device_train(rank: int, world: int) -> None:
    """Each rank fills its part of a whole parameter; parameters without memory become DTensors, too."""
    plain: Any = made(torch.float32)
    losses, grads = [], []
    for mesh in (two_dims((2, 2)), None):
        with torch.device("meta"):
            model: Any = MoE(MoEConfig(**SIZES))
        model = sharded(model, mesh, to_empty=True, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                model.get_parameter(name).copy_(parameter)
                assert torch.equal(full(model.get_parameter(name)), parameter), name
        loss = loss_of(model, tokens_of(0, world)[rank])
        loss.backward()
        losses.append(loss.item())
        grads.append({name: full(parameter.grad) for name, parameter in model.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for name, grad in grads[1].items():
        assert apart(grads[0][name], grad) <= 2e-2, name


@on_threads(4)
def test_experts_that_can_not_be_distributed_are_refused(rank: int, world: int) -> None:
    mesh = two_dims((2, 2))
    odd = made(experts=3)
    with pytest.raises(ValueError, match=r"layers.0.ffn.experts.gate_up_proj of shape \(3, 16, 24\): the 2 ranks of .* do not divide"):
        parallelize_experts(odd, mesh["ep"])
    assert all(type(parameter) is nn.Parameter for parameter in odd.parameters()), "a refusal changes nothing"
    with pytest.raises(ValueError, match=r"Llama has no module of class Scaled: name the class of its experts with kind"):
        parallelize_experts(Llama(LlamaConfig(dim=8, layers=1, heads=1, kv_heads=1, ffn=8)), mesh["ep"], kind=Scaled)
    with pytest.raises(ValueError, match=r"Llama has no module of vescale_ray.models.moe.Experts or fused experts of transformers"):
        parallelize_experts(Llama(LlamaConfig(dim=8, layers=1, heads=1, kv_heads=1, ffn=8)), mesh["ep"])
    with pytest.raises(ValueError, match=r"give the one dimension whose ranks share the experts, such as mesh\['ep'\]"):
        parallelize_experts(made(), mesh)
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
        parallelize_experts(made(), 2)  # type: ignore[arg-type]
    late = sharded(made(), None)
    with pytest.raises(ValueError, match=r"fully_shard has sharded layers.0.ffn.experts already: call parallelize_experts before it"):
        parallelize_experts(late, mesh["ep"])
    twice = made()
    parallelize_experts(twice, mesh["ep"])
    with pytest.raises(ValueError, match=r"gate_up_proj is a DTensor already: call parallelize_experts once"):
        parallelize_experts(twice, mesh["ep"])
    with pytest.raises(ValueError, match=r"apply fully_shard to the module of experts first, over the other dimension of that mesh"):
        fully_shard(twice.layers[0])
    nested = made()
    nested.layers[0].ffn.experts.gate = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"layers.0.ffn.experts.gate: all experts must be parameters of one module"):
        parallelize_experts(nested, mesh["ep"])


class Scaled(Experts):
    """Experts of a user's own class, with a parameter that two layers share."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        scale: Any = self.scale
        return super().forward(rows, counts) * scale.repeat_interleave(counts, 0, output_size=len(rows))


@on_threads(2)
def test_shared_and_frozen_experts_stay_shared_and_frozen(rank: int, world: int) -> None:
    model, dense = made(), made()
    for one in (model, dense):
        scale = nn.Parameter(torch.linspace(1, 2, 4, dtype=torch.float64)[:, None])
        for layer in one.layers:
            layer.ffn.experts.__class__ = Scaled
            layer.ffn.experts.scale = scale
            layer.ffn.experts.down_proj.requires_grad_(False)
    mesh = two_dims((1, 2))
    found = parallelize_experts(model, mesh["ep"], kind=Scaled)
    assert found[0].scale is found[1].scale
    fully_shard(found, mesh=mesh["dp"])
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    loss_of(model, tokens_of(0, world)[rank]).backward()
    alone(dense, 0, world)
    assert model.layers[0].ffn.experts.down_proj.grad is None
    for name, parameter in dense.named_parameters():
        if parameter.requires_grad:
            assert apart(full(model.get_parameter(name).grad), parameter.grad) <= 1e-5, name


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_of_transformers_equal_dense_ones(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = hf.open_folder(hf_folders.write(tmp_path, kind))
    dense = transformers.AutoModelForCausalLM.from_pretrained(folder.path)
    weights = {name: one.detach().clone() for name, one in [*dense.named_parameters(), *dense.named_buffers()]}
    starve_last(dense)
    losses = [square_of(dense, tokens) for tokens in tokens_of(0, 4)]
    torch.stack(losses).mean().backward()
    grads = {name: parameter.grad for name, parameter in dense.named_parameters() if parameter.grad is not None}
    run_threads(4, transformers_experts, folder, [hf.build(folder) for _ in range(4)], weights, [one.item() for one in losses], grads)


def transformers_experts(rank: int, world: int, folder: hf.HfFolder, models: Any, weights: Any, losses: Any, grads: Any) -> None:
    model, mesh = models[rank], two_dims((2, 2))
    found = parallelize_experts(model, mesh["ep"])
    assert found[0].gate_up_proj.to_local().shape[0] == 2
    for experts in found:
        fully_shard(experts, mesh=mesh["dp"])
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    for name, buffer in model.named_buffers():
        buffer.copy_(weights[name])
    layout = file_layout(hf.build(folder))
    checkpoint.import_hf(folder.path, model, layout=layout, exclude=[name for name, _ in model.named_buffers()])
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter), weights[name]), name
    starve_last(model)
    loss = square_of(model, tokens_of(0, world)[rank])
    loss.backward()
    assert loss.item() == pytest.approx(losses[rank], rel=1e-5)
    for name, grad in grads.items():
        assert apart(full(model.get_parameter(name).grad), grad) <= 1e-5, name


def square_of(model: Any, tokens: Tensor) -> Tensor:
    squares: Tensor = model(tokens).logits.square().mean()
    return squares


def starve_last(model: Any) -> None:
    """No rank of the second half gets a row in the last layer."""
    model.model.layers[-1].mlp.experts.register_forward_pre_hook(_to_first_experts)


def _to_first_experts(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    rows, chosen, weights = given
    return rows, torch.arange(2).expand_as(chosen), weights


@pytest.mark.slow
@on_processes(1)
def test_the_gpu_check_of_experts_passes_on_a_cpu(rank: int, world: int) -> None:
    from benchmarks.gpu_experts import check_experts  # type: ignore[import-not-found]

    assert "equal those of single products" in check_experts(torch.device("cpu"))
