"""Tensor classes with hooks that define the gathered data, against torch's fully_shard with the same class, in the same test."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.fsdp.towers import filled
from tests.fsdp.transformer import apart, part
from tests.fsdp.units import unit_of
from tests.ranks import on_processes, on_threads, run_gloo, run_threads
from vescale_ray.fsdp import fully_shard


class Rounded(torch.Tensor):
    """A weight that is sent as int8 with a scale for each row, and used in its rounded form."""

    calls: list[str] = []

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Rounded:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self.data_inside = data

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Rounded({self.data_inside})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_inside"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Rounded:
        return Rounded(inner["data_inside"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def bare(value: Any) -> Any:
            return value.data_inside if isinstance(value, Rounded) else value

        def wrapped(value: Any) -> Any:
            return cls(value) if isinstance(value, torch.Tensor) and not isinstance(value, Rounded) else value

        out = function(*pytree.tree_map(bare, args), **pytree.tree_map(bare, kwargs or {}))
        if function in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar):
            return args[0]
        return pytree.tree_map(wrapped, out)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: MixedPrecisionPolicy
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        data = self.data_inside
        scale = data.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return ((data / scale).round().to(torch.int8), scale), tuple(outer_size)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        codes, scale = outputs
        whole = (codes.to(torch.float32) * scale).to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole[: out.shape[0]])
            return None
        return whole, (whole,)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(12, 12), nn.LayerNorm(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def models() -> tuple[Any, Any]:
    base = filled(Model())
    pair: tuple[Any, Any] = (copy.deepcopy(base), copy.deepcopy(base))
    for model in pair:
        for layer in model.layers:
            layer.linear.weight = nn.Parameter(Rounded(layer.linear.weight.detach().clone()))
    return pair


def shard(model: Any, how: Any, **options: Any) -> Any:
    for layer in model.layers:
        how(layer, **options)
    return how(model, **options)


def bare(value: Any) -> torch.Tensor:
    local = value.detach()._local_tensor if hasattr(value, "_local_tensor") else value.detach()
    return local.data_inside if isinstance(local, Rounded) else local


def trains_as_torchs(rank: int, world: int, shape: tuple[int, ...], dtype: str | None, reshard: bool) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    pair = models()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard}
    ours, theirs = (shard(model, how, **options) for model, how in zip(pair, (fully_shard, torch_fully_shard), strict=True))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for step in range(4):
        for model in (ours, theirs):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                data = torch.randn(24, 12, generator=torch.Generator().manual_seed(10 * step + micro))
                model(part(data, rank, world)).float().square().mean().backward()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if "linear.weight" in name:
                assert isinstance(p._local_tensor, Rounded) and p.placements == q.placements
                assert apart(bare(p.grad), bare(q.grad)) <= (1e-5 if dtype is None else 3e-2), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        assert apart(bare(layer.linear.weight), bare(other.linear.weight)) <= (1e-5 if dtype is None else 3e-2)


@pytest.mark.parametrize(("shape", "dtype", "reshard"), [((2,), None, True), ((4,), "bfloat16", True), ((2, 2), None, False)])
def test_training_is_that_of_torchs_fully_shard(shape: tuple[int, ...], dtype: str | None, reshard: bool) -> None:
    run_threads(4 if shape == (2, 2) else shape[0], trains_as_torchs, shape, dtype, reshard)


def test_training_on_gloo_is_that_of_torchs_fully_shard() -> None:
    run_gloo(2, trains_as_torchs, (2,), None, True)


class Scaled(Rounded):
    """Like float8 weights: one scale for the whole weight, from the largest value of all shards."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        largest = self.data_inside.abs().amax()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())  # raises for a mesh of more than one dimension
        scale = largest / 127
        return ((self.data_inside / scale).round().to(torch.int8), scale.view(1, 1)), mesh.size()

    def fsdp_post_all_gather(self, outputs: tuple[torch.Tensor, ...], metadata: Any, *rest: Any, **more: Any) -> Any:
        assert outputs[1].numel() == metadata == 2  # two shards, regardless of the number of replicas
        codes, scales = outputs
        return super().fsdp_post_all_gather((codes, scales[:1].expand(codes.shape[0], 1)), metadata, *rest, **more)


@on_threads(4)
def test_with_replicas_a_hook_gets_the_mesh_of_the_shards(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layer = Layer()
    weight = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    layer.linear.weight = nn.Parameter(Scaled(weight))
    fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    layer(torch.ones(2, 12))
    scale = weight.abs().amax() / 127
    assert torch.equal(layer.linear.weight.detach(), (weight / scale).round() * scale)


class Eight(Rounded):
    """A weight that is sent and used as float8. Like NF4 weights, it supports only slices from the start."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.slice.Tensor and args[2]:
            raise NotImplementedError("a slice that starts in the middle")
        return super().__torch_dispatch__(function, types, args, kwargs)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:  # type: ignore[override]
        return (self.data_inside.to(torch.float8_e4m3fn),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        whole = outputs[0].to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return None
        return whole, (whole,)


@on_processes(2)
def test_frozen_unsliceable_float8_weights_may_be_trained_later(rank: int, world: int) -> None:
    model: Any = Model()
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(k)).to(torch.float8_e4m3fn))
    plain = copy.deepcopy(model)
    for layer, other in zip(model.layers, plain.layers, strict=True):
        layer.linear.weight = nn.Parameter(Eight(layer.linear.weight.detach()), requires_grad=False)
        other.linear.weight.requires_grad = False
    shard(model, fully_shard)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, plain)]
    for step in range(5):
        if step == 3:  # frozen parameters are trained from now on, so the gathered weights need their hooks
            for m in (model, plain):
                m.requires_grad_(True)
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        model(part(x, rank, world)).square().mean().backward()
        plain(x).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None and "linear.weight" in name:
                assert apart(bare(p.grad), q.grad.chunk(world)[rank]) <= 1e-5, name
            elif q.grad is not None:
                assert apart(p.grad.full_tensor(), q.grad) <= 1e-5, name
        for optimizer in optimizers:
            optimizer.step()
        for m in (model, plain):
            m.zero_grad()


@on_threads(5)
def test_unevenly_divided_rows_have_plain_gradients(rank: int, world: int) -> None:
    """12 rows over 5 ranks: 3, 3, 3, 3 and none. The hook sees the rank's rows only; the engine adds the padding."""
    (ours, _), x = models(), torch.randn(10, 12, generator=torch.Generator().manual_seed(3))
    plain: Any = copy.deepcopy(models()[0])
    for layer in plain.layers:
        data = layer.linear.weight.data_inside
        scale = data.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        layer.linear.weight = nn.Parameter((data / scale).round() * scale)
    shard(ours, fully_shard)
    ours(part(x, rank, world)).square().mean().backward()
    plain(x).square().mean().backward()
    rows = slice(3 * rank, min(12, 3 * rank + 3))
    for layer, other in zip(ours.layers, plain.layers, strict=True):
        got, expected = bare(layer.linear.weight.grad), other.linear.weight.grad[rows]
        assert got.shape == expected.shape and apart(got, expected) <= 1e-5
    # The gathered memory is freed between passes.
    group = next(g for g in unit_of(ours.layers[0]).groups if g.params[0].name == "linear.weight")
    for gathered in group._tensors[0].outputs:
        with pytest.raises(RuntimeError, match="linear.weight.* resharded"):
            gathered.sum()


@on_threads(2)
def test_blocks_and_other_dimensions_are_refused(rank: int, world: int) -> None:
    from torch.distributed.tensor import Shard

    from vescale_ray.geometry import Block

    with pytest.raises(ValueError, match="'linear.weight' has all-gather hooks of its own"):
        fully_shard(models()[0].layers[0], block_policy=lambda name, p: Block.rows(2) if name == "linear.weight" else None)
    with pytest.raises(ValueError, match="sharded along dimension 0"):
        fully_shard(models()[0].layers[0], shard_placement_fn=lambda p: Shard(1) if isinstance(p.data, Rounded) else None)


@on_threads(2)
def test_a_write_to_a_gathered_parameter_raises(rank: int, world: int) -> None:
    x = torch.ones(2, 12)
    uses: list[Any] = [lambda model: model(x), lambda model: model.layers[1].reshard()]
    for use in uses:
        model = shard(models()[0], fully_shard, reshard_after_forward=False)
        out = model(x)
        with torch.no_grad():
            model.layers[1].linear.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"gathered parameters of 'layers.1 .*written in place.*: layers.1.linear.weight. "):
            use(model)
        model.reset_iter_state()
        assert torch.equal(model(x), out)


class Plain(Rounded):
    """A weight that is sent and used as it is: the gathered parameter is a view of what was received."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:  # type: ignore[override]
        return (self.data_inside,), None

    def fsdp_post_all_gather(self, outputs: tuple[torch.Tensor, ...], *_: Any, out: torch.Tensor | None = None) -> Any:
        return None if out is not None else (outputs[0], ())


@on_threads(2)
def test_training_follows_an_evaluation_in_inference_mode(rank: int, world: int) -> None:
    layer = models()[0].layers[0]
    weight = layer.linear.weight.data_inside
    layer.linear.weight = nn.Parameter(weight.clone())
    plain = copy.deepcopy(layer)
    layer.linear.weight = nn.Parameter(Plain(weight))
    fully_shard(layer)
    x = torch.ones(2, 12)
    with torch.inference_mode():
        assert apart(layer(x), plain(x)) <= 1e-5
    layer(x).sum().backward()
    plain(x).sum().backward()
    assert apart(bare(layer.linear.weight.grad), plain.linear.weight.grad.chunk(world)[rank]) <= 1e-5


def views_of_outputs(rank: int, world: int) -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    ours = copy.deepcopy(plain)
    for layer in ours:
        layer.weight = nn.Parameter(Plain(layer.weight.detach().clone()))
        fully_shard(layer)
    fully_shard(ours)
    x = torch.randn(2, 8)
    for _ in range(3):
        for model in (ours, plain):
            model.zero_grad()
            model(x).square().sum().backward()
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            own = q.grad.chunk(world)[rank] if q.dim() == 2 else q.grad
            torch.testing.assert_close(bare(p.grad) if q.dim() == 2 else p.grad.full_tensor(), own)


def test_parameters_may_be_views_of_the_gathered_tensors() -> None:
    run_gloo(2, views_of_outputs)
