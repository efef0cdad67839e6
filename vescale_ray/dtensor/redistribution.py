"""Redistribution of ragged tensors: one collective for each move, which carries exactly the elements that must move.

| from -> to                        | collective                                              | elements a rank receives           |
|-----------------------------------|---------------------------------------------------------|------------------------------------|
| Ragged -> Replicate               | all-gather; uneven parts: one uneven all-to-all         | numel - own                        |
| Ragged, one owner -> Replicate    | broadcast                                               | numel                              |
| Replicate -> Ragged               | none: a slice                                           | 0                                  |
| Partial -> Ragged                 | reduce-scatter; uneven parts: an all-to-all and a sum   | own, from each other rank          |
| Ragged -> other Ragged            | one uneven all-to-all, straight between the two parts   | new part minus the old part        |
| Ragged <-> Shard(d)               | one uneven all-to-all of boxes                          | the same                           |
| Ragged, Replicate -> Partial      | none: one rank keeps a value, the others the neutral    | 0                                  |
| several mesh dimensions at once   | one uneven all-to-all of boxes over all ranks           | new part minus the old part        |

The steps themselves are in ``transfer.py``. Two cases go step by step through Replicate: placements other than ours and ``Shard``,
and several mesh dimensions at once on a mesh that is not the whole world. Such a mesh has no process group. This module does not know
autograd (see ``autograd.py``). Every step can be asynchronous: a :class:`Transfer` is complete after its wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale_ray.communication.collectives import all_reduce
from vescale_ray.compat.tensor import DTensorSpec, TensorMeta, redistribute_local_tensor
from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.dtensor.spec import (
    LocalSharding,
    Placements,
    ShapedSpec,
    contiguous_stride,
    layout_of,
    positive_dims,
    ragged_mesh_dim,
    section,
)
from vescale_ray.dtensor.transfer import (
    COMBINE,
    Transfer,
    arrived,
    coordinate_of,
    exchange,
    exchange_boxes,
    explain,
    flat_of,
    gather,
    local_shape,
    reduce_scatter,
    slices,
)
from vescale_ray.geometry import Shape


def plain_spec(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
    """Return a row-major spec for torch's own DTensor."""
    return ShapedSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype))


def move(local: torch.Tensor, source: DTensorSpec, placements: Sequence[Placement]) -> tuple[torch.Tensor, DTensorSpec]:
    """Move the tensor that is ``local`` under ``source`` to ``placements``; return its local tensor and spec. Either may be ragged.

    Raises:
        ValueError: no tensor of this package or torch's can have these placements.
    """
    transfer, spec = start(local, source, placements)
    return transfer.wait(), spec


def start(local: torch.Tensor, source: DTensorSpec, placements: Sequence[Placement]) -> tuple[Transfer, DTensorSpec]:
    """Start a :func:`move`; its last collective may still be in flight."""
    assert source.tensor_meta is not None
    mesh, shape, dtype = source.mesh, tuple(source.tensor_meta.shape), source.tensor_meta.dtype
    if len(placements) != mesh.ndim:
        raise ValueError(f"{len(placements)} placements for a mesh of {mesh.ndim} dimensions: give one for each")
    want = positive_dims(placements, shape)
    if want == source.placements:
        return Transfer(local), source
    if not dist.is_initialized():
        raise RuntimeError(
            f"a tensor of shape {shape} on {mesh} needs the other ranks' parts, and this process has no process group: load whole tensors, "
            f"which get_model_state_dict of vescale_ray.state_dict with full_state_dict=True gives, or use to_local(), this rank's part"
        )
    ragged = ragged_mesh_dim(want) is not None
    if not ragged and ragged_mesh_dim(source.placements) is None:
        target = plain_spec(mesh, want, shape, dtype)
        if all(p.is_replicate() for p in want) and all(p.is_replicate() or p.is_partial() for p in source.placements):
            for dim, placement in enumerate(source.placements):
                local = _reduced(local, mesh, dim, placement)
            return Transfer(local), target
        return Transfer(arrived(redistribute_local_tensor(local, source, target))), target
    # This also checks the target before anything is sent.
    target = layout_of(mesh, want, shape).spec(dtype) if ragged else plain_spec(mesh, want, shape, dtype)
    if local.is_meta:
        return Transfer(local.new_empty(local_shape(mesh, want, shape))), target
    if not all(type(p) is Shard or isinstance(p, RaggedShard | Replicate) or p.is_partial() for p in source.placements):
        # The order of the cuts of torch's _StridedShard is in the spec, not in its placements.
        whole = plain_spec(mesh, [p if p.is_partial() else Replicate() for p in source.placements], shape, dtype)
        local, source = arrived(redistribute_local_tensor(local, source, whole)), whole
    return _steps(local, mesh, tuple(source.placements), target.placements, shape, dtype), target


def _steps(local: torch.Tensor, mesh: DeviceMesh, have: Placements, want: Placements, shape: Shape, dtype: torch.dtype) -> Transfer:
    """Reduce pending sums, move the elements, and leave the wanted sums pending. Nearly always only one of the three is needed."""
    transfer = Transfer(local)
    goal = ragged_mesh_dim(want)
    direct = goal is not None and ragged_mesh_dim(have) is None and type(have[goal]) is Partial
    if goal is not None and direct and have[goal].reduce_op in COMBINE:  # type: ignore[attr-defined]
        # The reduce-scatter comes first, so other pending dimensions reduce only this rank's part.
        others = tuple(p if i == goal or p.is_partial() or want[i].is_partial() else want[i] for i, p in enumerate(have))
        if others != have:
            local = _plain_move(local, mesh, have, others, shape, dtype)
        have = tuple(want[goal] if i == goal else p for i, p in enumerate(others))
        op = others[goal].reduce_op  # type: ignore[attr-defined]
        transfer = reduce_scatter(local, layout_of(mesh, have, shape), op)
    for dim, placement in enumerate(have):
        if placement.is_partial() and placement != want[dim]:
            transfer = Transfer(_reduced(transfer.wait(), mesh, dim, placement))
            have = tuple(Replicate() if i == dim else p for i, p in enumerate(have))
    pending = [i for i, p in enumerate(want) if p.is_partial() and p != have[i]]
    if have == want:
        return transfer
    if len(pending) == 1 and all(p == q for i, (p, q) in enumerate(zip(have, want, strict=True)) if i not in pending):
        if isinstance(have[pending[0]], RaggedShard):
            return Transfer(_embedded(transfer.wait(), layout_of(mesh, have, shape), want[pending[0]]))
    moved = tuple(Replicate() if i in pending else p for i, p in enumerate(want))
    if moved != have:
        transfer = _move_elements(transfer.wait(), mesh, have, moved, shape, dtype)
    return Transfer(contribution(transfer.wait(), mesh, want, pending)) if pending else transfer


def contribution(value: torch.Tensor, mesh: DeviceMesh, placements: Placements, dims: Sequence[int]) -> torch.Tensor:
    """Return this rank's contribution to ``value``, which all ranks have. Reduced over mesh dimensions ``dims``, the contributions give
    ``value``."""
    for dim in dims:
        if mesh.get_local_rank(dim) != 0 or placements[dim].reduce_op == "avg":  # type: ignore[attr-defined]
            value = _neutral(value, placements[dim], value)
    return value


def _move_elements(local: torch.Tensor, mesh: DeviceMesh, have: Placements, want: Placements, shape: Shape, dtype: torch.dtype) -> Transfer:
    """Move between layouts with the same pending sums; at least one layout is ragged."""
    changed = [i for i, (p, q) in enumerate(zip(have, want, strict=True)) if p != q]
    from_, to = ragged_mesh_dim(have), ragged_mesh_dim(want)
    if all(type(p) is Shard or isinstance(p, RaggedShard | Replicate | Partial) for p in (*have, *want)):
        if from_ is None and all(have[i].is_replicate() and _inside_section(want, i) for i in changed):
            rest = tuple(p if p == q else Replicate() for p, q in zip(have, want, strict=True))
            return Transfer(_own(local, mesh, rest, want, shape))
        if changed == [from_] and changed == [to]:
            return exchange(local, layout_of(mesh, have, shape), layout_of(mesh, want, shape))
        if changed == [from_] and want[changed[0]].is_replicate():
            return gather(local, layout_of(mesh, have, shape))
        if len(changed) == 1 and changed[0] in (from_, to) and _inside_section(have, changed[0]) and _inside_section(want, changed[0]):
            return exchange_boxes(local, mesh, have, want, shape, changed[0])
        if mesh.size() == dist.get_world_size():
            return exchange_boxes(local, mesh, have, want, shape, None)
    # Step by step: first the whole tensor (along the changed dimensions) on every rank, then this rank's part.
    if from_ is not None:
        local = gather(local, layout_of(mesh, have, shape)).wait()
        have = tuple(Replicate() if i == from_ else p for i, p in enumerate(have))
    whole = tuple(Replicate() if not p.is_partial() else p for p in want)
    local = _plain_move(local, mesh, have, whole, shape, dtype)
    if to is None:
        return Transfer(_plain_move(local, mesh, whole, want, shape, dtype))
    return Transfer(_own(local, mesh, whole, want, shape))


def _inside_section(placements: Placements, dim: int) -> bool:
    """Return whether mesh dimension ``dim`` cuts inside the sections that the others leave.

    If a later mesh dimension shards the same tensor dimension, a Shard does not.
    """
    placement = placements[dim]
    if type(placement) is not Shard:
        return True
    return not any(type(p) is Shard and p.dim == placement.dim for p in placements[dim + 1 :])


def _own(local: torch.Tensor, mesh: DeviceMesh, have: Placements, want: Placements, shape: Shape) -> torch.Tensor:
    """Cut this rank's part under the placements ``want`` out of its part under ``have``, which must contain it. No communication."""
    sizes, me = tuple(mesh.shape), coordinate_of(mesh)
    offsets = section(sizes, have, shape, me)[0]
    inner, part = section(sizes, want, shape, me)
    relative = tuple(a - b for a, b in zip(inner, offsets, strict=True))
    cut = local.detach()[slices(relative, part)] if part else local.detach()
    dim = ragged_mesh_dim(want)
    if dim is None:
        return cut.clone()
    sharding = layout_of(mesh, want, shape)
    return flat_of(cut)[sharding.start : sharding.end].clone().view(sharding.local_shape)


def _embedded(local: torch.Tensor, sharding: LocalSharding, pending: Placement) -> torch.Tensor:
    """Return the section with this rank's part in place and the neutral element elsewhere; its reduction is the tensor."""
    out = _neutral(local.new_empty(sharding.section), pending, None)
    factor = sharding.world if pending.reduce_op == "avg" else 1  # type: ignore[attr-defined]
    flat = flat_of(local)
    out.view(-1)[sharding.start : sharding.end] = flat * factor if factor != 1 else flat
    return out


def _neutral(like: torch.Tensor, pending: Placement, value: torch.Tensor | None) -> torch.Tensor:
    """Return a contribution that leaves the reduction unchanged: ``value`` if repeating it is harmless, else the neutral element."""
    op = getattr(pending, "reduce_op", None)
    if type(pending) is not Partial or op not in COMBINE:
        raise ValueError(f"can't redistribute to {pending}: known pending reductions are {', '.join(sorted(COMBINE))}")
    if value is not None and op in ("avg", "max", "min"):
        return value
    if op in ("sum", "avg"):
        return torch.zeros_like(like)
    if op == "product":
        return torch.ones_like(like)
    if like.dtype is torch.bool:
        return torch.full_like(like, op == "min")
    if like.dtype.is_floating_point:
        return torch.full_like(like, math.inf if op == "min" else -math.inf)
    return torch.full_like(like, torch.iinfo(like.dtype).max if op == "min" else torch.iinfo(like.dtype).min)


def _plain_move(
    local: torch.Tensor, mesh: DeviceMesh, have: Placements, want: Placements, shape: Shape, dtype: torch.dtype
) -> torch.Tensor:
    """Run torch's own redistribution."""
    if have == want:
        return local
    return arrived(redistribute_local_tensor(local, plain_spec(mesh, have, shape, dtype), plain_spec(mesh, want, shape, dtype)))


def _reduced(local: torch.Tensor, mesh: DeviceMesh, dim: int, placement: Placement) -> torch.Tensor:
    """Reduce Partial to Replicate on one dimension, without torch's planner, whose caches would keep the mesh and its process groups."""
    if not isinstance(placement, Partial) or mesh.size(dim) == 1:
        return local
    try:
        return _summed(arrived(local), mesh, dim, placement)
    except RuntimeError as error:
        explain(error, local.shape)
        raise


def _summed(value: torch.Tensor, mesh: DeviceMesh, dim: int, placement: Partial) -> torch.Tensor:
    if type(placement) is Partial and placement.reduce_op == "avg":  # gloo has no avg
        total = value.detach().clone()
        all_reduce(total, "sum", mesh.get_group(dim))
        return total.div_(mesh.size(dim))
    # A single 16-bit number is rounded once, after the sum. Larger tensors travel as they are.
    sent = value.float() if value.numel() == 1 and value.dtype in (torch.bfloat16, torch.float16) else value
    total = arrived(placement._reduce_value(sent, mesh, dim)).to(value.dtype)
    if value.is_floating_point() and type(placement) is Partial and placement.reduce_op in ("max", "min"):
        # A maximum on gloo may lose a NaN, depending on its rank; the result must be NaN.
        lost = value.detach().isnan().to(torch.int32)
        all_reduce(lost, "max", mesh.get_group(dim))
        total = torch.where(lost > 0, torch.full_like(total, math.nan), total)
    return total
