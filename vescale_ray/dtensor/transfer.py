"""Single steps of a redistribution, each with at most one collective.

The steps move a tensor between two ragged layouts, to and from the whole, and as boxes between any layouts. ``redistribution.py``
chooses among them. They do not know autograd. Every step can be asynchronous: a :class:`Transfer` is complete after its wait. gloo has
no collectives over uneven lists, so uneven parts use an all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale_ray.communication import collectives
from vescale_ray.communication.collectives import all_gather, all_to_all, broadcast
from vescale_ray.compat.core import disable_current_modes, run_as_is
from vescale_ray.compat.distributed import AsyncCollectiveTensor
from vescale_ray.dtensor.operations.argument_tensors import each_argument
from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.dtensor.spec import LocalSharding, Placements, holding, ragged_mesh_dim, section
from vescale_ray.geometry import Box, Shape

Slices = tuple[slice, ...]

# Dtypes that every backend accepts. The others (bool, float8, int16, complex, ..) travel as bytes, because gloo rejects them.
MOVABLE = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8})

COMBINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda parts: parts.sum(0, dtype=parts.dtype),
    "avg": lambda parts: parts.sum(0, dtype=parts.dtype) / parts.shape[0],
    "product": lambda parts: parts.prod(0, dtype=parts.dtype),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}


class Transfer:
    """A local tensor in flight: ``out`` is complete after :meth:`wait`, which may be called again."""

    __slots__ = ("_finish", "_source", "_work", "out")

    def __init__(self, out: torch.Tensor, work: Any = None, finish: Callable[[], object] | None = None) -> None:
        self.out, self._work, self._finish = out, work, finish
        self._source: tuple[torch.Tensor, int] | None = None

    def watch(self, source: torch.Tensor) -> None:
        """Make :meth:`wait` raise if ``source``, which the collective reads, is written before the wait."""
        self._source = source, writes_of(source)

    @property
    def done(self) -> bool:
        return self._work is None and self._finish is None

    def wait(self) -> torch.Tensor:
        work, finish, self._work, self._finish = self._work, self._finish, None, None
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                explain(error, self.out.shape)
                raise
        if finish is not None:
            finish()  # writes into out
        source, self._source = self._source, None
        if source is not None and writes_of(source[0]) != source[1]:
            raise RuntimeError(
                "a ragged tensor was written while an asynchronous redistribution was reading it: use the result, or wait() for it, before "
                "writing the tensor that it was made of"
            )
        return self.out


class ArrivingTensor(AsyncCollectiveTensor):
    """The local tensor of a redistribution with ``async_op=True``: its first use waits for the transfer.

    torch's AsyncCollectiveTensor only waits for a collective. Here a transfer may also have to move received elements into place.
    """

    __slots__ = ["transfer"]
    transfer: Transfer

    @staticmethod
    def of(transfer: Transfer) -> torch.Tensor:
        """Return the transfer's result without waiting for it: a plain tensor if the transfer is done, else an :class:`ArrivingTensor`."""
        if transfer.done:
            return transfer.out
        result = AsyncCollectiveTensor.__new__(ArrivingTensor, transfer.out)
        result.transfer = transfer
        return result

    def trigger_wait(self) -> torch.Tensor:
        self.completed = True
        return self.transfer.wait()

    def wait(self) -> torch.Tensor:
        return self.trigger_wait()

    @classmethod
    @run_as_is
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = each_argument(arrived, args, kwargs or {})
        return func(*args, **kwargs)


def explain(error: RuntimeError, shape: Sequence[int]) -> None:
    """Add the usual reason to a collective's error: not all ranks call the operation."""
    error.add_note(
        f"this rank waited for the other ranks in an operation that gathers, moves or reduces a sharded tensor (its result here has shape "
        f"{tuple(shape)}): call full_tensor(), item(), float() and other reads of parameters and gradients on all ranks, in the same order"
    )


def writes_of(tensor: Any) -> int:
    """Count the writes of a ragged tensor: in place, through a list, through its local tensor, or through that of a view's base."""
    try:
        through = getattr(tensor, "_written_through", ())
        return int(tensor._version + tensor._local_tensor._version + sum(t._version for t in through))
    except RuntimeError:  # tensors made in inference mode have no version counter
        return 0


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor, after a wait if it is still in flight."""
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


# -- one mesh dimension, the ragged one: the others stay as they are, so all steps stay inside one section -------------------


def gather(local: torch.Tensor, sharding: LocalSharding) -> Transfer:
    """Gather the whole section into new memory. Collective over the ragged mesh dimension.

    Even parts take one all-gather without copies, a single owner one broadcast, and uneven parts one uneven all-to-all.
    """
    shape, numel, world = sharding.section, sharding.section_numel, sharding.world
    flat = flat_of(local)
    if world == 1 or numel == 0:
        return Transfer(flat.clone().view(shape) if numel else local.new_empty(shape))
    counts, group = _counts(sharding), _group(sharding)
    out = flat.new_empty(numel)
    raw_out, raw, size = movable(out), movable(flat), flat.dtype.itemsize if flat.dtype not in MOVABLE else 1
    if max(counts) == numel:
        if flat.numel():
            out.copy_(flat)
        work = broadcast(raw_out, counts.index(numel), group)
    elif max(counts) * world == numel:
        work = all_gather(raw_out, raw, group)
    else:
        given, wanted = [flat.numel() * size] * world, [n * size for n in counts]
        work = all_to_all(raw_out, raw.repeat(world), wanted, given, group)
    return Transfer(out.view(shape), work)


def take(full: torch.Tensor, sharding: LocalSharding) -> torch.Tensor:
    """Return this rank's part of the whole tensor in new memory; no communication."""
    return view_of(full, sharding).clone()


def view_of(full: torch.Tensor, sharding: LocalSharding) -> torch.Tensor:
    """Return this rank's part of the whole tensor as a view (of a copy, if its section of ``full`` is not contiguous)."""
    if full.shape != sharding.shape:
        raise ValueError(f"{sharding.describe()} can't take its part of a tensor of shape {tuple(full.shape)}")
    if tuple(sharding.section) != tuple(sharding.shape):
        full = full[slices(sharding.offsets, sharding.section)]
    return flat_of(full)[sharding.start : sharding.end].view(sharding.local_shape)


def reduce_scatter(full: torch.Tensor, sharding: LocalSharding, op: str) -> Transfer:
    """Reduce the ranks' ``full`` sections by ``op``, a key of ``COMBINE``, and return this rank's part. One collective.

    If parts are even and ``op`` is sum or mean, it is a reduce-scatter. The mean is a sum divided by the ranks, because gloo has no
    AVG. Otherwise each part goes to its owner, which reduces in rank order.
    """
    world, flat = sharding.world, flat_of(full)
    if sharding.section_numel == 0 or world == 1:
        return Transfer(flat[sharding.start : sharding.end].clone().view(sharding.local_shape))
    counts, group = _counts(sharding), _group(sharding)
    mine = counts[sharding.rank]
    out = flat.new_empty(mine)
    if op in ("sum", "avg") and max(counts) * world == sharding.section_numel and flat.dtype in MOVABLE:
        work = collectives.reduce_scatter(out, flat, group)
        finish = (lambda: out.copy_(out / world)) if op == "avg" else None
        return Transfer(out.view(sharding.local_shape), work, finish)
    parts, size = flat.new_empty(world * mine), flat.dtype.itemsize if flat.dtype not in MOVABLE else 1
    given, wanted = [n * size for n in counts], [mine * size] * world
    work = all_to_all(movable(parts), movable(flat), wanted, given, group)
    return Transfer(out.view(sharding.local_shape), work, lambda: out.copy_(COMBINE[op](parts.view(world, mine))))


def exchange(local: torch.Tensor, source: LocalSharding, target: LocalSharding) -> Transfer:
    """Move between two ragged layouts of a tensor on the same mesh dimension; only elements whose owner changes travel.

    Both layouts are intervals of the same elements in rank order, so the collective reads and writes the parts themselves. If no
    element changes owner (the layouts differ in dims only), there is no collective.
    """
    before, after = source.placement.intervals(source.section), target.placement.intervals(target.section)
    flat = flat_of(local)
    if before == after:
        return Transfer(flat.clone().view(target.local_shape))
    out = flat.new_empty(target.end - target.start)
    size = flat.dtype.itemsize if flat.dtype not in MOVABLE else 1
    given = [max(0, min(source.end, end) - max(source.start, start)) * size for start, end in after]
    wanted = [max(0, min(target.end, end) - max(target.start, start)) * size for start, end in before]
    work = all_to_all(movable(out), movable(flat), wanted, given, _group(source))
    return Transfer(out.view(target.local_shape), work)


# -- boxes: any placements on any mesh dimensions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """Sends and receives of one rank: (index of its box, part of that box), by rank of the group, in the same order on both sides."""

    sends: tuple[tuple[tuple[int, Slices], ...], ...]
    receives: tuple[tuple[tuple[int, Slices], ...], ...]
    stays: tuple[tuple[int, Slices, int, Slices], ...]


def exchange_boxes(
    local: torch.Tensor, mesh: DeviceMesh, source: Placements, target: Placements, shape: Shape, dim: int | None
) -> Transfer:
    """Move between any two layouts, with one all-to-all over mesh dimension ``dim``, or over all ranks (None).

    If several ranks hold an element, it comes from the one with the receiver's coordinates on the replicated dimensions. If the
    receiver has it, nothing is sent.
    """
    sizes, me = tuple(mesh.shape), coordinate_of(mesh)
    before, after = holding(sizes, source, shape, me), holding(sizes, target, shape, me)
    out = local.new_empty(local_shape(mesh, target, shape))
    group = None if dim is None else mesh.get_group(dim)
    plan = _plan(sizes, source, target, shape, me, _members(mesh, me, dim, group))
    local = arrived(local).detach().resolve_conj().resolve_neg()
    have, put = _views(local, source, before), _views(out, target, after)
    for i, from_, k, to in plan.stays:
        put[k][to] = have[i][from_]
    outgoing = [have[i][part].reshape(-1) for pieces in plan.sends for i, part in pieces]
    landing = [put[k][part] for pieces in plan.receives for k, part in pieces]
    size = local.dtype.itemsize if local.dtype not in MOVABLE else 1
    given = [sum(have[i][part].numel() for i, part in pieces) * size for pieces in plan.sends]
    wanted = [sum(put[k][part].numel() for k, part in pieces) * size for pieces in plan.receives]
    sent = torch.cat(outgoing) if outgoing else local.new_empty(0)
    got = local.new_empty(sum(wanted) // size)
    work = all_to_all(movable(got), movable(sent), wanted, given, group)

    def finish() -> None:
        for view, segment in zip(landing, got.split([v.numel() for v in landing]), strict=True):
            view.copy_(segment.view(view.shape))

    return Transfer(out, work, finish)


@lru_cache(maxsize=1024)
def _plan(sizes: Shape, source: Placements, target: Placements, shape: Shape, me: Shape, members: tuple[Shape, ...]) -> _Plan:
    same = [i for i, p in enumerate(source) if p.is_replicate() or p.is_partial()]
    before, after = holding(sizes, source, shape, me), holding(sizes, target, shape, me)
    sends: list[tuple[tuple[int, Slices], ...]] = []
    receives: list[tuple[tuple[int, Slices], ...]] = []
    stays: list[tuple[int, Slices, int, Slices]] = []
    for other in members:
        out: list[tuple[int, Slices]] = []
        into: list[tuple[int, Slices]] = []
        if other == me:
            stays.extend((i, from_, k, to) for i, k, from_, to in _common(before, after))
        elif all(other[i] == me[i] for i in same):
            out.extend((i, from_) for i, _, from_, _ in _common(before, holding(sizes, target, shape, other)))
            into.extend((k, to) for _, k, _, to in _common(holding(sizes, source, shape, other), after))
        sends.append(tuple(out))
        receives.append(tuple(into))
    return _Plan(tuple(sends), tuple(receives), tuple(stays))


def _common(source: Sequence[Box], target: Sequence[Box]) -> Iterable[tuple[int, int, Slices, Slices]]:
    """Yield the boxes that two holdings share, as (source box, target box, slices of the source, slices of the target)."""
    for i, (a, m) in enumerate(source):
        for k, (b, n) in enumerate(target):
            low = tuple(map(max, a, b))
            high = tuple(min(x + s, y + t) for x, s, y, t in zip(a, m, b, n, strict=True))
            if all(x < y for x, y in zip(low, high, strict=True)):
                yield (
                    i,
                    k,
                    tuple(slice(x - o, y - o) for x, y, o in zip(low, high, a, strict=True)),
                    tuple(slice(x - o, y - o) for x, y, o in zip(low, high, b, strict=True)),
                )


def _views(local: torch.Tensor, placements: Placements, held: Sequence[Box]) -> list[torch.Tensor]:
    """Return each box of a holding as a view of the local tensor."""
    if ragged_mesh_dim(placements) is None:
        return [local] if held else []
    flat, views, position = local.contiguous().view(-1), [], 0
    for _, sizes in held:
        numel = math.prod(sizes)
        views.append(flat[position : position + numel].view(sizes))
        position += numel
    return views


def _members(mesh: DeviceMesh, me: Shape, dim: int | None, group: dist.ProcessGroup | None) -> tuple[Shape, ...]:
    """Return the mesh coordinates of a group's ranks, in its order."""
    if dim is not None:
        return tuple((*me[:dim], i, *me[dim + 1 :]) for i in range(mesh.size(dim)))
    with disable_current_modes():  # torch.compile traces with fake tensors, and the mesh's is none
        ranks = mesh.mesh.flatten().tolist()
    where = dict(zip(ranks, product(*(range(n) for n in mesh.shape)), strict=True))
    return tuple(where[r] for r in range(len(ranks)))


def local_shape(mesh: DeviceMesh, placements: Placements, shape: Shape) -> Shape:
    """Return the shape of this rank's local tensor."""
    sizes = section(tuple(mesh.shape), placements, shape, coordinate_of(mesh))[1]
    dim = ragged_mesh_dim(placements)
    if dim is None:
        return sizes
    ragged = placements[dim]
    assert isinstance(ragged, RaggedShard)
    return ragged.local_shape(sizes, coordinate_of(mesh)[dim])


# -- small helpers -------------------------------------------------------------------------------------------------------------


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in row-major order, contiguous, with lazy conjugation and negation resolved, which collectives ignore.

    (``reshape(-1)`` of one column would be a strided view.)
    """
    return arrived(tensor).detach().resolve_conj().resolve_neg().contiguous().view(-1)


def movable(flat: torch.Tensor) -> torch.Tensor:
    """Return the elements, or their bytes if the backend doesn't know the dtype."""
    return flat if flat.dtype in MOVABLE else flat.view(torch.uint8)


def slices(offsets: Sequence[int], sizes: Sequence[int]) -> Slices:
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def _counts(sharding: LocalSharding) -> list[int]:
    return [end - start for start, end in sharding.placement.intervals(sharding.section)]


def _group(sharding: LocalSharding) -> dist.ProcessGroup:
    return sharding.mesh.get_group(sharding.mesh_dim)


def coordinate_of(mesh: DeviceMesh) -> Shape:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this process is not part of {mesh}")
    return tuple(coordinate)
