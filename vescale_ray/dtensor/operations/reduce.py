"""Reductions of ragged tensors: each rank reduces its part, and the rest stays pending in torch's Partial.

A reduction over all dimensions gives a DTensor with a pending sum, product, maximum, minimum or norm, like a reduction of a Shard(0)
DTensor. So ``clip_grad_norm_`` works unchanged. Unlike torch's, ``.item()`` of the result is the whole answer. A reduction over inner
dimensions only (none of the merged ones) needs no communication and stays ragged. Comparisons that give one bool are completed at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from vescale_ray.communication.collectives import all_reduce
from vescale_ray.dtensor.derived import DerivedDTensor, derived
from vescale_ray.dtensor.operations.operands import gathered, operand
from vescale_ray.dtensor.operations.schema import meta_like
from vescale_ray.dtensor.spec import LocalSharding, enclose, norm_partial, sharding_of, wrap
from vescale_ray.geometry import Shape


def reduce_op(cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run sum, mean, prod, amax, amin, max, min, linalg_vector_norm, any, all. NotImplemented if only some merged dims are reduced."""
    given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    x = given["self"]
    if not isinstance(x, cls) or "out" in kwargs:
        return NotImplemented
    sharding, local = sharding_of(x._spec), x._local_tensor
    ndim, name = len(sharding.shape), func._schema.name.removeprefix("aten::")
    expected = _expected(func, tuple(sharding.shape), x.dtype, _frozen(args[1:]), _frozen(tuple(kwargs.items())))
    keepdim, dtype, order = bool(given.get("keepdim", False)), given.get("dtype"), given.get("ord", 2)
    dims = _dims(given.get("dim"), ndim)
    if "dim" in given and name in ("max", "min"):
        return NotImplemented  # these give indices, too
    if name == "prod" and x.dtype.is_complex:
        return NotImplemented  # no all-reduce multiplies complex numbers
    merged = len(sharding.placement.dims)
    if dims is not None and len(dims) < ndim:
        if min(dims) < merged or any(type(p) is Shard and p.dim in dims for p in sharding.placements):
            return NotImplemented
        shape = [1 if i in dims else n for i, n in enumerate(sharding.shape) if keepdim or i not in dims]
        value = _KERNELS[name](local, [d - merged + 1 for d in dims], keepdim, dtype, order)
        return wrap(cls, value, sharding.resized(shape, () if keepdim else dims).spec(value.dtype))
    whole_shape = (1,) * ndim if keepdim else ()
    if expected != whole_shape:
        return NotImplemented  # any() and all() over no dimension keep every element
    value = _local_value(name, local, sharding, dtype, order)
    if name in ("any", "all"):
        joined = _join(value, "max" if name == "any" else "min", sharding)
        return _result(joined.view(whole_shape), Replicate(), sharding)
    return _result(value.reshape(whole_shape), _PENDING[name] or norm_partial(order), sharding)


def foreach_norm(cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return one pending norm per tensor. torch computes the norms of its own DTensors in the list."""
    tensors, rest = args[0], args[1:]
    order = rest[0] if rest else kwargs.get("ord", 2)
    ragged = [t for t in tensors if isinstance(t, cls)]
    locals_, shardings = [t._local_tensor for t in ragged], [sharding_of(t._spec) for t in ragged]
    given = rest[1] if len(rest) > 1 else kwargs.get("dtype")
    for of in {t.dtype for t in locals_}:
        _result_dtype("linalg_vector_norm", of, given, float(order))
    if math.isinf(order) or order < 0:  # torch refuses these norms of empty tensors, which a rank may hold
        _refuse_empty(f"{func}: the norm of order {order}", ragged)
        values = [_local_value("linalg_vector_norm", t, s, given, order) for t, s in zip(locals_, shardings, strict=True)]
    else:
        values = func(locals_, *rest, **kwargs)
        if 0 in map(_NUMEL, locals_):  # for empty tensors torch does not always return the usual dtype
            values = [v.to(_result_dtype("linalg_vector_norm", t.dtype, given, float(order))) for v, t in zip(values, locals_, strict=True)]
    partial = norm_partial(order)
    kinds = list(zip(shardings, [v.dtype for v in values], strict=True))
    specs = {kind: kind[0].reduced_spec(partial, (), kind[1]) for kind in set(kinds)}
    results = map(enclose, repeat(DerivedDTensor), values, map(specs.__getitem__, kinds))
    if len(ragged) == len(tensors):
        return list(results)
    others = iter(func([t for t in tensors if not isinstance(t, cls)], *rest, **kwargs))
    return [next(results) if isinstance(t, cls) else next(others) for t in tensors]


def foreach_max(cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return one pending maximum per tensor."""
    _refuse_empty(f"{func}: the maximum", [t for t in args[0] if isinstance(t, cls)])
    return [
        _result(_local_value("max", t._local_tensor, sharding_of(t._spec), None, 2), Partial("max"), sharding_of(t._spec))
        if isinstance(t, cls)
        else torch.max(t)
        for t in args[0]
    ]


def _refuse_empty(what: str, tensors: Sequence[DTensor]) -> None:
    for sharding in (sharding_of(t._spec) for t in tensors):
        if sharding.numel == 0:
            raise RuntimeError(f"{what} of no elements, as of {sharding.describe()}, is not defined: leave out empty tensors")


def equal(cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if all local parts are equal; the answer is the same on every rank."""
    if args[0].shape != args[1].shape:
        return False
    return _compared(cls, torch.equal, args, kwargs)


def allclose(cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if all local parts are close; the answer is the same on every rank."""
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    if not any(isinstance(v, cls) and v.shape == shape for v in args[:2]):
        return NotImplemented  # the result is larger than any ragged operand
    return _compared(cls, torch.allclose, args, kwargs)


def _compared(cls: type[DTensor], compare: Callable[..., bool], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    sharding = next(sharding_of(v._spec) for v in args[:2] if isinstance(v, cls) and v.shape == shape)
    left, right = (operand(cls, v, sharding, compare.__name__) for v in args[:2])
    same = compare(left, right, *args[2:], **kwargs)
    return bool(_join(torch.tensor(same, device=left.device), "min", sharding).item())


def scalar(cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``.item()``: the one element, from the rank that holds it."""
    return gathered(cls, args[0])._local_tensor.item()


def amp_unscale(cls: type[DTensor], func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Unscale the local gradients for GradScaler. If one rank finds an inf or nan, all ranks report it."""
    grads, found_inf, scale = args
    cut = {(id(s.mesh), *s.cut_dims()): s for s in (sharding_of(g._spec) for g in grads if isinstance(g, cls))}
    others = [g for g in grads if not isinstance(g, cls)]
    if others:
        func(others, found_inf, scale, **kwargs)
    ragged = [g for g in grads if isinstance(g, cls)]
    func([g._local_tensor for g in ragged], found_inf, scale, **kwargs)
    if not torch.is_inference_mode_enabled():
        torch.autograd.graph.increment_version([t for g in ragged for t in (g, g._local_tensor)])
    for sharding in cut.values():
        found_inf.copy_(_join(found_inf, "max", sharding))


@lru_cache(maxsize=4096)
def _expected(func: Any, shape: Shape, dtype: torch.dtype, args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> Shape | None:
    """Return the shape of the operation's result on the whole tensor; None if the operation has several results.

    The operation runs on the meta device, which computes shapes alone. So torch refuses wrong arguments (a missing dimension, for example)
    on every rank alike. Empty tensors and tensors without dimensions are on the CPU, because torch's meta kernels accept more of them than
    its real kernels do.
    """
    whole = torch.zeros(shape, dtype=dtype) if not shape or 0 in shape else meta_like(shape, dtype)
    result = func(whole, *args, **dict(kwargs))
    return tuple(result.shape) if isinstance(result, Tensor) else None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _result(value: Tensor, partial: Placement, sharding: LocalSharding) -> DTensor:
    return derived(value, sharding.reduced_spec(partial, value.shape, value.dtype))


def _join(value: Tensor, op: str, sharding: LocalSharding) -> Tensor:
    """All-reduce one number over the ranks that share the tensor. A bool is sent as int32."""
    dims = [] if value.is_meta else [dim for dim in sharding.cut_dims() if sharding.mesh.size(dim) > 1]
    if not dims:
        return value
    moved = value.to(torch.int32) if value.dtype is torch.bool else value.clone()
    for dim in dims:
        all_reduce(moved, op, sharding.mesh.get_group(dim))
    return moved.to(value.dtype)


def _dims(dim: Any, ndim: int) -> list[int] | None:
    """Return the reduced dimensions, non-negative; None for all. Invalid dimensions were refused before."""
    if dim is None or (isinstance(dim, list | tuple) and not dim) or ndim == 0:
        return None
    return sorted({d % ndim for d in ([dim] if isinstance(dim, int) else dim)})


def _local_value(name: str, local: Tensor, sharding: LocalSharding, dtype: torch.dtype | None, order: float) -> Tensor:
    """Return this rank's 0-dim contribution; without elements, the reduction's neutral element."""
    flat = local.reshape(-1)
    kind = _result_dtype(name, flat.dtype, dtype, order)
    if name == "mean":
        accumulate = dtype or flat.dtype
        if not accumulate.is_floating_point and not accumulate.is_complex:
            raise RuntimeError(f"mean(): the input must be floating point or complex, but is {accumulate}")
        wide = torch.float32 if accumulate in (torch.bfloat16, torch.float16) else accumulate
        return (flat.sum(dtype=wide) / sharding.numel).to(accumulate)
    if flat.numel() == 0 and _needs_elements(name, order):
        return flat.new_full((), _lowest(name, flat.dtype, order), dtype=kind)
    return _KERNELS[name](flat, [0], False, dtype, order)


@lru_cache(maxsize=1024)
def _result_dtype(name: str, of: torch.dtype, dtype: torch.dtype | None, order: float) -> torch.dtype:
    """Return the dtype of a reduction, computed from one element. For an empty tensor torch accepts arguments that it refuses otherwise,
    and the ranks must raise together: a rank that went on would wait for the others."""
    return _KERNELS[name](torch.ones(1, dtype=of), [0], False, dtype, order).dtype


def _needs_elements(name: str, order: float) -> bool:
    """True if torch refuses this reduction of an empty tensor."""
    return name in ("max", "amax", "min", "amin") or (name == "linalg_vector_norm" and (order < 0 or math.isinf(order)))


def _lowest(name: str, dtype: torch.dtype, order: float) -> Any:
    if name == "linalg_vector_norm":
        return 0.0 if order > 0 else math.inf
    biggest = name in ("min", "amin")
    if dtype is torch.bool:
        return biggest
    if dtype.is_floating_point:
        return math.inf if biggest else -math.inf
    return torch.iinfo(dtype).max if biggest else torch.iinfo(dtype).min


_NUMEL = torch.Tensor.numel

_Kernel = Callable[[Tensor, list[int], bool, "torch.dtype | None", float], Tensor]

_KERNELS: dict[str, _Kernel] = {
    "sum": lambda x, dims, keep, dtype, order: torch.sum(x, dims, keep, dtype=dtype),
    "mean": lambda x, dims, keep, dtype, order: torch.mean(x, dims, keep, dtype=dtype),
    "prod": lambda x, dims, keep, dtype, order: torch.prod(x, dims[0], keep, dtype=dtype),
    "amax": lambda x, dims, keep, dtype, order: torch.amax(x, dims, keep),
    "max": lambda x, dims, keep, dtype, order: torch.amax(x, dims, keep),
    "amin": lambda x, dims, keep, dtype, order: torch.amin(x, dims, keep),
    "min": lambda x, dims, keep, dtype, order: torch.amin(x, dims, keep),
    "any": lambda x, dims, keep, dtype, order: torch.any(x, dims, keep),
    "all": lambda x, dims, keep, dtype, order: torch.all(x, dims, keep),
    "linalg_vector_norm": lambda x, dims, keep, dtype, order: torch.linalg.vector_norm(x, order, dims, keep, dtype=dtype),
}

_PENDING: dict[str, Placement | None] = {
    "sum": Partial("sum"),
    "mean": Partial("sum"),
    "prod": Partial("product"),
    "amax": Partial("max"),
    "max": Partial("max"),
    "amin": Partial("min"),
    "min": Partial("min"),
    "linalg_vector_norm": None,  # the pending reduction depends on the norm's order
}

REDUCTIONS = frozenset(_KERNELS)
