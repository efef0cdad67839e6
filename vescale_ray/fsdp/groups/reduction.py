"""The reduce-scatter of a group's gradients, and the handles to wait on.

Gradients may arrive in a narrower dtype than the one that sums them (BF16 gradients, FP32 sums). Each value is then cast once, exactly.
On gloo the ranks exchange the narrow values and sum them locally. Elsewhere the cast goes through two staging buffers of a bounded size,
chunk by chunk, so that no rank holds all gradients in the wide dtype. The reductions of a unit's groups share the calls and the staging.

gloo has no reduce-scatter: torch emulates it by a clone and an all-reduce of everything, with twice the bytes on the wire. So the ranks
exchange their parts pairwise. Sums are local, in rank order, in FP32 or better, so the result depends on the values alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vescale_ray.communication.point_to_point import Messages, tag_of
from vescale_ray.compat.core import foreach_copy_
from vescale_ray.compat.distributed import reduce_scatter_many
from vescale_ray.compat.fsdp import ReduceScatter
from vescale_ray.fsdp.buffers.memory import NOWHERE, Buffer, Pool, may_stay
from vescale_ray.fsdp.communication.comm import Done, EventPending, Lane, Pending, Works, allocate
from vescale_ray.planner.step_buffers import ALIGNED_BYTES, staging_bytes

_LEAST_PIECE = 1 << 12
_MOST_ROWS = 128
"""Maximum number of rows of a chunk that are cast as a list of tensors."""


def reduce_scatter(
    out: torch.Tensor,
    full: torch.Tensor,
    group: dist.ProcessGroup,
    lane: Lane,
    pool: Pool,
    factor: float,
    dtype: torch.dtype,
    *,
    together: Sums,
    pairwise: bool,
    leaves_out: bool = False,
    sum_only: bool = False,
    ordered: bool = False,
    custom: ReduceScatter | None = None,
    staging: int | None = None,
    name: str = "",
) -> Pending:
    """Sum every rank's ``full`` in ``dtype`` and write this rank's part, times ``factor``, to ``out``, which may have another dtype.

    The process group's own reduce-scatter starts with ``together.start``; the others start at once.

    ``full`` belongs to the operation until the result's ``wait`` has returned. ``leaves_out``: buffers of gathered parameters have no
    memory for this rank's part. A pairwise exchange needs no memory for that part either, so it can use such a buffer. ``sum_only``: never
    use AVG. ``ordered``: return an :class:`InOrder`, which sums only when its ``add_to`` is called. ``custom``: a collective that gets AVG
    if ``factor`` is the mean, else SUM, and may return work to wait for. It needs ``full`` in ``dtype``, unless its attribute ``narrow`` is
    true. ``staging``: bytes of a buffer for chunks that are cast; None: the default. ``name``: the gradients' name. Pairwise messages are
    matched only to messages of the same name.
    """
    lane.issued += 1
    world = group.size()
    if ordered:
        return InOrder(full, group, lane, pool, factor, dtype, pairwise=pairwise, leaves_out=leaves_out, name=name)
    if custom is not None:
        lane.after_current()
        with lane.context():
            average = not sum_only and dtype != torch.float16 and abs(factor * world - 1.0) < 1e-12
            target = allocate(custom, out.numel(), dtype, out.device).view(dtype)
            work = custom(target, full, group, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM, async_op=lane.stream is None)
            rest = _CastAndScale(lane, out, target, 1.0 if average else factor, [] if work is None else [work])
            if lane.stream is None:
                return rest
            rest.wait()
            return lane.mark()
    if pairwise:
        return _ExchangeAndSum(out, full, group, lane, pool, factor, dtype, leaves_out, name)
    return together.add(out, full, group, factor, dtype, sum_only=sum_only, staging=staging)


@dataclass(eq=False)
class _Sum:
    """One reduce-scatter of a :class:`Sums`. ``target``: the sum, which is ``out`` if the dtypes allow it."""

    out: torch.Tensor
    full: torch.Tensor
    factor: float
    target: torch.Tensor
    pending: Pending


class Sums:
    """Reduce-scatters that are collected and then started in one call per process group, or in one call per chunk if they are cast."""

    __slots__ = ("_asked", "_lane")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._asked: dict[tuple[dist.ProcessGroup, torch.dtype, torch.dtype, Any, int | None], list[_Sum]] = {}

    def add(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        group: dist.ProcessGroup,
        factor: float,
        dtype: torch.dtype,
        *,
        sum_only: bool,
        staging: int | None,
    ) -> Pending:
        lane, op, world = self._lane, dist.ReduceOp.SUM, group.size()
        with lane.context():
            target = out if out.dtype == dtype else torch.empty_like(out, dtype=dtype)
        if lane.stream is None:
            pending: Pending = _CastAndScale(lane, out, target, factor)
        else:
            pending = lane.later()
            halved = full.dtype == dtype == torch.float16
            if not (sum_only or halved) and abs(factor * world - 1.0) < 1e-12 and dist.get_backend(group) == "nccl":
                op, factor = dist.ReduceOp.AVG, 1.0
        self._asked.setdefault((group, full.dtype, dtype, op, staging), []).append(_Sum(out, full, factor, target, pending))
        return pending

    def start(self) -> None:
        asked, self._asked = self._asked, {}
        if asked:
            self._lane.after_current()
        for (group, arrives, dtype, op, staging), sums in asked.items():
            with self._lane.context():
                self._start(sums, group, op, staging, casts=arrives != dtype)

    def _start(self, sums: list[_Sum], group: dist.ProcessGroup, op: Any, staging: int | None, *, casts: bool) -> None:
        lane, works = self._lane, []
        if group.size() == 1:
            for one in sums:
                one.target.copy_(one.full)
        elif casts:
            works = _sum_in_chunks([(one.target, one.full) for one in sums], group, op, staging)
        else:
            for one in sums if lane.stream is not None else []:
                if one.full.dtype == torch.float16 and one.factor != 1.0:
                    # A sum over many ranks can leave FP16's range: divide by a part of the divisor before, by the rest after (as FSDP2).
                    before = float(group.size()) ** -0.5
                    one.full.mul_(before)
                    one.factor /= before
            works = reduce_scatter_many([(one.target, one.full) for one in sums], op=op, group=group, async_op=lane.stream is None)
        for one in sums:
            if isinstance(one.pending, _CastAndScale):
                one.pending.follow(works)
            else:
                rest = _CastAndScale(lane, one.out, one.target, one.factor)
                rest.follow(works)
                rest.wait()
        lane.started([one.pending for one in sums if isinstance(one.pending, EventPending)], works)


def _sum_in_chunks(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup, op: Any, given: int | None) -> list[Any]:
    """Cast and reduce-scatter gradients in chunks; a chunk has the same range of every rank's part. While one is reduced, the next is cast.

    ``pairs``: targets and gradients. A chunk may cover the end of one pair and the beginning of the next, with one collective for both.

    Returns the work of the last two chunks. Earlier work has been waited for.
    """
    world, wide = group.size(), pairs[0][0]
    aligned = max(1, ALIGNED_BYTES // wide.element_size())
    size = sum(target.numel() for target, _ in pairs)
    most = staging_bytes(world * size * wide.element_size(), given) // (world * wide.element_size())
    chunk = max(aligned, most // aligned * aligned)
    staging = [wide.new_empty(world * min(chunk, size)) for _ in range(1 if size <= chunk else 2)]
    works: list[list[Any]] = []
    for index, pieces in enumerate(_chunks([target.numel() for target, _ in pairs], chunk)):
        if len(works) == 2:
            for work in works.pop(0):
                work.wait()
        call, used = [], 0
        for which, start, stop in pieces:
            target, full = pairs[which]
            cast = staging[index % 2][used : used + world * (stop - start)]
            _copy_rows(cast.view(world, -1), full.view(world, -1)[:, start:stop])
            call.append((target[start:stop], cast))
            used += cast.numel()
        works.append(reduce_scatter_many(call, op=op, group=group, async_op=True))
    return [work for call in works for work in call]


def _copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Cast the rows of ``source``, which lie apart. One kernel for a list of rows takes half the time of a copy of a strided tensor on an
    H200, but each row costs time of the host."""
    if len(target) <= _MOST_ROWS:
        foreach_copy_([*target], [*source])
    else:
        target.copy_(source)


def _chunks(sizes: Sequence[int], chunk: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut ranges of ``sizes`` elements into chunks of ``chunk`` elements: lists of ``(range, start, stop)``."""
    pieces: list[tuple[int, int, int]] = []
    room = chunk
    for which, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            pieces.append((which, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield pieces
                pieces, room = [], chunk
    if pieces:
        yield pieces


class _CastAndScale:
    """A reduce-scatter whose result has to be cast or scaled once it is there."""

    __slots__ = ("_factor", "_lane", "_out", "_target", "_works")

    def __init__(self, lane: Lane, out: torch.Tensor, target: torch.Tensor, factor: float, works: Sequence[Any] = ()) -> None:
        self._works, self._lane, self._factor = works, lane, factor
        self._out: torch.Tensor = out
        self._target: torch.Tensor | None = target

    def follow(self, works: Sequence[Any]) -> None:
        """Wait for ``works``, which have started now."""
        self._works = works

    def wait(self) -> None:
        target, works, self._target, self._works = self._target, self._works, None, ()
        if target is None:
            return
        Works(self._lane, *works).wait()
        if target is not self._out:
            self._out.copy_(target)
        if self._factor != 1.0:
            self._out.mul_(self._factor)


def _exchange(mine: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup, lane: Lane, name: str) -> Messages:
    """Send row i of ``mine`` to rank i, and receive every other rank's row in ``parts``."""
    rank, world = group.rank(), group.size()
    messages = Messages(group, tag_of(f"reduce-scatter {name}, {mine.nbytes} bytes"), lane)
    for distance in range(1, world):
        source, target = (rank - distance) % world, (rank + distance) % world
        messages.receive(parts[source], source)
        messages.send(mine[target], target)
    return messages


def _scratch(full: torch.Tensor, group: dist.ProcessGroup, pool: Pool, leaves_out: bool) -> Buffer:
    """Memory for the other ranks' parts: a released buffer of gathered parameters if the sizes match."""
    nbytes = full.numel() * full.element_size()
    part = nbytes // group.size()
    own = (group.rank() * part, (group.rank() + 1) * part) if leaves_out and may_stay(nbytes, full.device) else NOWHERE
    scratch = pool.take(nbytes, full.device, stays=own)
    scratch.clean_for = None
    return scratch


class _ExchangeAndSum:
    """Reduce-scatter as a pairwise exchange of parts and a local sum in rank order.

    If the dtypes allow it, one of the other ranks' parts is received in the memory of the result itself. The rest (none with two ranks) is
    received in scratch memory, which is that of just released gathered parameters if the sizes match.
    """

    __slots__ = ("_factor", "_first", "_messages", "_out", "_parts", "_pool", "_scratch", "_sums_in")

    def __init__(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        group: dist.ProcessGroup,
        lane: Lane,
        pool: Pool,
        factor: float,
        dtype: torch.dtype,
        leaves_out: bool,
        name: str,
    ) -> None:
        self._out, self._pool, self._factor = out, pool, factor
        self._sums_in = torch.promote_types(torch.promote_types(out.dtype, torch.float32), dtype)
        rank, world, size = group.rank(), group.size(), out.numel()
        mine = full.view(world, size)
        self._parts = list(mine.unbind())
        others = [r for r in range(world) if r != rank]
        self._first: int | None = None
        """The rank whose part is received in the result. It is one of the first two summands on every rank, so the order is kept."""
        if out.dtype == self._sums_in and full.element_size() <= out.element_size():
            self._first = others.pop(0)
            self._parts[self._first] = out.view(full.dtype)[-size:]
        self._scratch = _scratch(full, group, pool, leaves_out) if others else None
        if self._scratch is not None:
            received = self._scratch.flat(full.dtype).view(world, size)
            for r in others:
                self._parts[r] = received[r]
        self._messages = _exchange(mine, self._parts, group, lane, name)

    def wait(self) -> None:
        parts, self._parts = self._parts, []
        if not parts:
            return
        self._messages.wait()
        out = self._out
        if self._first is not None and parts[0].dtype == out.dtype:
            total = torch.add(parts[0], parts[1], out=out)
        elif self._first is not None:
            total = _spread(parts[self._first], out).add_(parts[1 - self._first])
        else:
            total = parts[0].to(self._sums_in, copy=True).add_(parts[1])
        for part in parts[2:]:
            total.add_(part)
        if self._factor != 1.0:
            total.mul_(self._factor)
        if total is not out:
            out.copy_(total)
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            self._pool.give_back(scratch)


def _spread(packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Cast ``packed``, which lies at the end of the memory of ``out``, to ``out``, in pieces that overwrite no value before it is read."""
    size, wide, narrow, start = out.numel(), out.element_size(), packed.element_size(), 0
    while start < size:
        stop = (size * (wide - narrow) + start * narrow) // wide  # the bytes of out[:stop] end where packed[start:] begins
        if stop - start < _LEAST_PIECE:
            out[start:] = packed[start:].clone()
            break
        out[start:stop] = packed[start:stop]
        start = stop
    return out


class InOrder:
    """Reduce-scatter as an exchange of parts and a sum in rank order that continues an earlier sum.

    Each part is scaled before it is added. The additions are then those of one process that adds the ranks'
    gradients one after the other, for any number of ranks.
    """

    __slots__ = ("_dtype", "_factor", "_parts", "_pending", "_pool", "_scratch")

    def __init__(
        self,
        full: torch.Tensor,
        group: dist.ProcessGroup,
        lane: Lane,
        pool: Pool,
        factor: float,
        dtype: torch.dtype,
        *,
        pairwise: bool,
        leaves_out: bool,
        name: str,
    ) -> None:
        rank, world = group.rank(), group.size()
        self._factor, self._dtype = factor, dtype
        if factor != 1.0 and full.dtype == dtype:
            full.mul_(factor)
            self._factor = 1.0
        mine = full.view(world, -1)
        self._parts, self._pool = list(mine.unbind()), pool
        self._scratch: Buffer | None = None
        self._pending: Pending = Done()
        if pairwise:
            self._scratch = _scratch(full, group, pool, leaves_out)
            received = self._scratch.flat(full.dtype).view(world, -1)
            self._parts = [mine[r] if r == rank else received[r] for r in range(world)]
            self._pending = _exchange(mine, self._parts, group, lane, name)
        elif world > 1:
            received = torch.empty_like(mine)
            self._parts = list(received.unbind())
            lane.after_current()
            with lane.context():
                work = dist.all_to_all_single(received.view(-1), full, group=group, async_op=lane.stream is None)
                self._pending = Works(lane, work) if work is not None else lane.mark()

    def add_to(self, total: torch.Tensor) -> None:
        """Add the ranks' parts to ``total``, rank 0's first."""
        self._pending.wait()
        for part in self._parts:
            # Narrow parts are scaled in the wide dtype: a product in the narrow one would round.
            total.add_(part if self._factor == 1.0 else part.to(self._dtype).mul_(self._factor))
        self.wait()

    def wait(self) -> None:
        """Wait, and drop the received parts."""
        self._pending.wait()
        self._parts = []
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            self._pool.give_back(scratch)
