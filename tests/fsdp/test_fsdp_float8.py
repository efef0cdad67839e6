"""Float8 training tensors, whose all-gather hooks send e4m3 codes with one scale per tensor, against torch's fully_shard in the same test.

``Cast`` and ``Codes`` are made as torchao's ``WeightWithDynamicFloat8CastTensor`` and ``Float8TrainingTensor``: a scale from the largest
element on all ranks, and a weight that stays in codes until the product. If torchao is installed, its own tensors are tested, too.
"""

from __future__ import annotations

import copy
import gc
import importlib
import math
import weakref
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
from tests.ranks import on_threads, run_gloo, run_threads
from vescale_ray.fsdp import fully_shard

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
WIDTH = 16
aten = torch.ops.aten


class Codes(torch.Tensor):
    """A gathered weight: codes and a scale. Only :class:`Product` reads it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Codes:
        return torch.Tensor._make_wrapper_subclass(cls, codes.size(), strides=codes.stride(), dtype=dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: torch.dtype, *_: Any) -> Codes:
        return Codes(inner["codes"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function in (aten.detach.default, aten.as_strided.default, aten.view.default):
            return Codes(function(args[0].codes, *args[1:]), args[0].scale, args[0].dtype)
        raise NotImplementedError(f"{function} of a weight in codes")


class Cast(torch.Tensor):
    """A weight's shard in FP32, which is sent in codes."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Cast:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self.data_inside = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_inside"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Cast:
        return Cast(inner["data_inside"])

    KEPT = {
        getattr(aten, name)
        for name in ("detach", "empty_like", "new_zeros", "slice", "copy_", "view", "as_strided", "_to_copy", "split", "clone")
    }

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(Cast, lambda one: one.data_inside, (args, kwargs or {}))
        out = function(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, Cast, out) if function.overloadpacket in cls.KEPT else out

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        largest = self.data_inside.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = LARGEST / largest.clamp(min=1e-12)
        return ((self.data_inside * scale).to(E4M3),), (scale,)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        (codes,), (scale,) = outputs, metadata
        if out is not None:
            assert isinstance(out, Codes)
            out.scale = scale
            return None
        return Codes(codes, scale, param_dtype), (codes,)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert isinstance(weight, Codes), type(weight)
        ctx.save_for_backward(x, weight)
        return x @ (weight.codes.float() / weight.scale).to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ (weight.codes.float() / weight.scale).to(x.dtype), grads[0].t() @ x


class Float8Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight) + self.bias


class Block(nn.Module):
    def __init__(self, linear: Any = nn.Linear) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Stack(nn.Module):
    def __init__(self, linear: Any = nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(linear) for _ in range(3))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def ours() -> tuple[Any, Any]:
    model = filled(Stack(Float8Linear))
    for layer in model.layers:
        for linear in (layer.up, layer.down):
            linear.weight = nn.Parameter(Cast(linear.weight.detach()))
    return model, lambda sharded: None


def torchaos() -> tuple[Any, Any]:
    float8: Any = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = float8.convert_to_float8_training(filled(Stack()), config=config, module_filter_fn=lambda module, name: name != "head")
    return model, float8.precompute_float8_dynamic_scale_for_fsdp


def values(parameter: Any) -> torch.Tensor:
    """This rank's elements."""
    local = parameter.detach()
    for inner in ("_local_tensor", "data_inside", "_tensor"):
        local = getattr(local, inner, local)
    return local


def trains_as_torchs(rank: int, world: int, make: str, shape: tuple[int, ...], dtype: str | None, reshard: bool) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    base, after_step = torchaos() if make == "torchao" else ours()
    pair: list[Any] = [base, copy.deepcopy(base)]
    functions: tuple[Any, Any] = (fully_shard, torch_fully_shard)
    for model, how in zip(pair, functions, strict=True):
        for unit in (*model.layers, model):
            how(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in pair]
    found: list[list[float]] = [[], []]
    for step in range(4):
        for model, optimizer, losses in zip(pair, optimizers, found, strict=True):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                data = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro))
                loss = model(part(data, rank, world)).float().square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            after_step(model)
    limit = 1e-4 if dtype is None else 3e-2
    assert found[0] == pytest.approx(found[1], rel=limit) and found[0][-1] < found[0][0]
    for (name, p), q in zip(pair[0].named_parameters(), pair[1].parameters(), strict=True):
        if name.endswith(("up.weight", "down.weight")):
            assert type(p._local_tensor) is type(q._local_tensor) is not torch.Tensor and p.placements == q.placements, name
            assert apart(values(p), values(q)) <= limit, name


@pytest.mark.parametrize(("shape", "dtype", "reshard"), [((2,), None, True), ((4,), "bfloat16", False), ((2, 2), "bfloat16", True)])
def test_float8_tensors_train_as_under_torchs_fully_shard(shape: tuple[int, ...], dtype: str | None, reshard: bool) -> None:
    run_threads(math.prod(shape), trains_as_torchs, "ours", shape, dtype, reshard)


@on_threads(2)
def test_inner_tensors_are_no_marks_of_a_parameter(rank: int, world: int) -> None:
    """Otherwise a sharded weight would keep the whole one, and a gathered weight would lose its codes. Marks travel."""
    model, _ = ours()
    layer: Any = model.layers[0]
    layer.up.weight.decay = 0.5
    whole = weakref.ref(layer.up.weight.data_inside)
    fully_shard(layer)
    gc.collect()
    assert whole() is None and not hasattr(layer.up.weight, "data_inside") and layer.up.weight.decay == 0.5
    layer.unshard()
    assert isinstance(layer.up.weight, Codes) and layer.up.weight.codes.shape == (2 * WIDTH, WIDTH) and layer.up.weight.decay == 0.5
    del layer.up.weight.decay
    layer.reshard()
    assert not hasattr(layer.up.weight, "decay") and not hasattr(layer.up.weight, "codes")


@pytest.mark.parametrize(("shape", "dtype", "reshard"), [((2,), None, False), ((2, 2), "bfloat16", True)])
def test_torchaos_float8_tensors_train_as_under_torchs(shape: tuple[int, ...], dtype: str | None, reshard: bool) -> None:
    pytest.importorskip("torchao.float8")
    run_gloo(math.prod(shape), trains_as_torchs, "torchao", shape, dtype, reshard, timeout=120)
