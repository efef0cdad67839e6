"""Operations on DTensors of which every rank holds all elements, or a contribution to all of them. They run on the local tensors.

Torch's rules for DTensors are not used: many operations have none, and some results that they leave pending are wrong (a sum of norms).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from vescale_ray.compat.core import tree_map, tree_map_only
from vescale_ray.compat.tensor import DTensorSpec, TensorMeta
from vescale_ray.dtensor.autograd import made
from vescale_ray.dtensor.operations.schema import lazy_conjugation
from vescale_ray.dtensor.transfer import arrived


def held_whole(operands: Sequence[DTensor]) -> bool:
    """Whether every rank holds all elements of each operand, or a contribution to all, on one mesh."""
    mesh = operands[0].device_mesh
    whole = all(p.is_replicate() or p.is_partial() for v in operands for p in v.placements)  # torch's _StridedShard is no Shard
    return whole and all(v.device_mesh is mesh or v.device_mesh == mesh for v in operands)


def on_local(func: Any, mesh: DeviceMesh, placements: tuple[Placement, ...], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on each rank's local tensors."""

    def local(value: Any) -> Any:
        return arrived(value._local_tensor) if isinstance(value, DTensor) else value

    def distributed(value: Tensor) -> DTensor:
        value = value.resolve_conj().resolve_neg()
        return made(value, DTensorSpec(mesh, placements, tensor_meta=TensorMeta(value.shape, value.stride(), value.dtype)))

    args, kwargs = tree_map(local, (args, kwargs))
    with lazy_conjugation(args, kwargs):
        return tree_map_only(Tensor, distributed, func(*args, **kwargs))


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

    with lazy_conjugation(args, kwargs):
        result = func(*tree_map(local, args), **{k: tree_map(lambda v, k=k: local(v, k in outs), v) for k, v in kwargs.items()})
    for value, written_to in known:
        if written_to.shape != value.shape:  # a copy: torch resizes out= tensors to the result
            raise RuntimeError(f"{func} gives a result of shape {tuple(written_to.shape)}: out= is a DTensor of shape {tuple(value.shape)}")
    for value, written_to in known:
        if written_to is not value._local_tensor:
            value._local_tensor.copy_(written_to)
    return tree_map(lambda r: next((value for value, of in known if of is r), r), result)


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    return isinstance(value, DTensor)
