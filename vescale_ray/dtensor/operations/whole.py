"""Operations on DTensors of which every rank holds all elements, or a contribution to all of them. They run on the local tensors.

Torch's rules for DTensors are not used: many operations have none, and some results that they leave pending are wrong (a sum of norms).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_ray.compat.core import DisableTorchDispatch
from vescale_ray.compat.tensor import DTensorSpec, TensorMeta
from vescale_ray.dtensor.autograd import made
from vescale_ray.dtensor.operations.argument_tensors import each, each_argument, tensor_arguments
from vescale_ray.dtensor.operations.schema import lazy_conjugation
from vescale_ray.dtensor.transfer import arrived


def held_whole(operands: Sequence[DTensor]) -> bool:
    """True if every rank holds all elements of each operand, or a contribution to all, on one mesh."""
    mesh = operands[0].device_mesh
    whole = all(p.is_replicate() or p.is_partial() for v in operands for p in v.placements)  # torch's _StridedShard is no Shard
    return whole and all(v.device_mesh is mesh or v.device_mesh == mesh for v in operands)


def on_local(func: Any, like: DTensor, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on each rank's local tensors. The results have the mesh and the placements of ``like``."""
    mesh, placements, known = like.device_mesh, like.placements, like._spec.tensor_meta

    def local(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        held = value._local_tensor
        return held if type(held) is Tensor else arrived(held)

    def distributed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.resolve_conj().resolve_neg()
        meta = TensorMeta(value.shape, value.stride(), value.dtype)
        return made(value, like._spec if meta == known else DTensorSpec(mesh, placements, tensor_meta=meta))

    args, kwargs = each_argument(local, args, kwargs)
    with lazy_conjugation(tensor_arguments(args, kwargs)):
        return each(distributed, func(*args, **kwargs))


def write_local(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an in-place or ``out=`` operation if every rank holds all elements; torch lacks a rule for many. It returns the given
    DTensors."""
    known: list[tuple[DTensor, Tensor]] = []
    outs = {a.name for a in func._schema.arguments if a.is_out}

    def local(value: Any, fresh: bool = False) -> Any:
        if not isinstance(value, DTensor):
            return value
        known.append((value, value._local_tensor.clone() if fresh else value._local_tensor))
        return known[-1][1]

    with lazy_conjugation(tensor_arguments(args, kwargs)):
        result = func(*each(local, args), **{k: each(partial(local, fresh=k in outs), v) for k, v in kwargs.items()})
    for value, written_to in known:
        if written_to.shape != value.shape:  # a copy: torch resizes out= tensors to the result
            raise RuntimeError(f"{func} gives a result of shape {tuple(written_to.shape)}: out= is a DTensor of shape {tuple(value.shape)}")
    for value, written_to in known:
        if written_to is not value._local_tensor:
            value._local_tensor.copy_(written_to)
    return each(lambda r: next((value for value, of in known if of is r), r), result)


def reshape_in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run ``squeeze_`` or a similar operation on a DTensor whose elements every rank holds. The outer tensor gets the new shape, too."""
    value: DTensor = args[0]
    known = f"a {type(value).__name__} of shape {tuple(value.shape)} with placements {value.placements}"
    local = arrived(value._local_tensor).detach()  # another object on the same memory: views may hold the first one
    if func._schema.name.removeprefix("aten::") not in _RESHAPES or not held_whole([value]):
        refuse_new_shape(func, known)
    func(local, *args[1:], **kwargs)
    with DisableTorchDispatch():
        func(value, *args[1:], **kwargs)
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    value._local_tensor, value._spec = local, DTensorSpec(value.device_mesh, value.placements, tensor_meta=meta)
    return value


_RESHAPES = frozenset({"squeeze_", "unsqueeze_", "t_", "transpose_", "swapdims_", "swapaxes_", "detach_"})
"""Operations that only change the shape of a tensor, in place."""


def refuse_new_shape(func: Any, described: str) -> None:
    """Raise if ``func`` would change the shape or the memory of a DTensor in place, as ``resize_`` does."""
    if torch.Tag.inplace_view in func.tags:
        raise RuntimeError(
            f"{func} would change the shape or the memory of {described} in place: use an operation that returns a new tensor (t() for "
            "t_()), or work on full_tensor()"
        )


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    return isinstance(value, DTensor)
