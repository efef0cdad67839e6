"""Communication of Muon: matrices travel to their root ranks, are orthogonalized, and travel back.

A *bucket* of matrices makes one round trip in BF16. This loses nothing, because Newton-Schulz rounds its input to BF16 and returns
BF16::

    depart    every rank writes its pieces, ordered by root, into one buffer               -> one uneven all-to-all
    compute   a root joins the pieces in rank order, which is memory order; Newton-Schulz;
              cuts the results again, ordered by rank                                       -> one uneven all-to-all
    land      every rank has the updates of its pieces                                         (replicas share: one more)

    bucket 0   depart ~~~~~~~> compute ~~~~~~~~~~~~~~~~~~~~~~> land          ~~~ on the wire
    bucket 1            depart ~~~~~~~~~~~> compute ~~~~~~~~~~~~~~~~~~> land     two buckets are in flight at a time
    bucket 2                               depart ~~~~~~~~~~~> ..

A rank's own pieces of matrices that it roots are not sent. A bucket that sends nothing needs no collective. This module writes
neither parameters nor states, so if a collective fails, no part of the step has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_ray.communication import wait_notes
from vescale_ray.communication.point_to_point import all_to_all, is_pairwise
from vescale_ray.optim.matrix.matrices import Holding, MatrixSpan, held_numel
from vescale_ray.optim.matrix.newton_schulz import Coefficients, NewtonSchulz, flops
from vescale_ray.optim.matrix.roots import Roots, assign_buckets, assign_roots

WIRE = torch.bfloat16
_TAG = 0x56530003
"""Tag of these messages on gloo, distinct from the engine's and from users' tags."""
BUCKET_BYTES = 64 << 20
"""Approximate BF16 bytes that a root receives in one bucket. Large enough to hide a collective's latency, small against a rank's
states."""


@dataclass(frozen=True)
class Job:
    """One matrix to orthogonalize.

    Attributes:
        param: index of its parameter in the optimizer.
        span: position of the matrix in the parameter's section.
        cuts: rank -> elements ``[begin, end)`` of the matrix on that rank, in rank order, which is memory order.
        offsets: rank -> start of these elements in the rank's local tensor.
        rounds, eps: parameters of Newton-Schulz.
    """

    param: int
    span: MatrixSpan
    cuts: Mapping[int, tuple[int, int]]
    offsets: Mapping[int, int]
    rounds: Coefficients
    eps: float

    @classmethod
    def of(cls, param: int, span: MatrixSpan, intervals: Sequence[tuple[int, int]], rounds: Coefficients, eps: float) -> Job:
        cuts = span.cuts(intervals)
        offsets = {rank: span.start + begin - intervals[rank][0] for rank, (begin, _) in cuts.items()}
        return cls(param, span, cuts, offsets, rounds, eps)

    def local(self, rank: int) -> slice:
        """Return the matrix's elements within the flat local tensor of ``rank``."""
        begin, end = self.cuts[rank]
        return slice(self.offsets[rank], self.offsets[rank] + end - begin)


@dataclass(frozen=True)
class Itinerary:
    """Plan of one domain (parameters that the same ranks share): the root of each matrix, and the buckets. All ranks have the same plan.

    Attributes:
        jobs: all matrices, in model order.
        roots: root of each job, as ``replica * world + rank``; if replicas don't share the work, replica is 0 and stands for each.
        buckets: indices of the jobs in each bucket.
        world: number of ranks that share a parameter.
        replicas: number of replicas that share the work (1: each replica does all of it).
    """

    jobs: tuple[Job, ...]
    roots: Roots
    buckets: tuple[tuple[int, ...], ...]
    world: int
    replicas: int

    def where(self, index: int) -> tuple[int, int]:
        """Return (replica, rank) of a job's root."""
        return divmod(self.roots.root[index], self.world)

    def sent_bytes(self) -> tuple[int, ...]:
        """Return the bytes that each rank sends in a step, both ways, in each replica's own group, by ``replica * world + rank``."""
        sent = [0] * (self.world * self.replicas)
        for index, job in enumerate(self.jobs):
            replica, root = self.where(index)
            for rank, numel in held_numel(job.cuts).items():
                if rank != root:
                    sent[replica * self.world + rank] += WIRE.itemsize * numel
                    sent[replica * self.world + root] += WIRE.itemsize * numel
        return tuple(sent)

    def travels(self, bucket: Sequence[int], replica: int) -> bool:
        """Return whether any piece of a bucket must be sent in a replica's group."""
        found = ((self.where(i), self.jobs[i].cuts) for i in bucket)
        return any(rank != root for (where, root), cuts in found if where == replica for rank in cuts)

    @property
    def collectives(self) -> int:
        """Number of all-to-alls of a step in the busiest replica's group: two per bucket that sends anything."""
        return 2 * max(sum(self.travels(bucket, q) for bucket in self.buckets) for q in range(self.replicas))

    def fingerprint(self) -> str:
        """Return a text that is equal for equal plans."""
        return repr(
            (self.world, self.replicas, self.roots.root, self.buckets, [(j.param, j.span, tuple(j.cuts.items())) for j in self.jobs])
        )


def plan(jobs: Sequence[Job], world: int, *, replicas: int = 1, bucket_bytes: int = BUCKET_BYTES) -> Itinerary:
    """Choose roots by cost and locality over all jobs, then buckets. A pure function with the same result on every rank."""
    costs = [flops(job.span.rows, job.span.cols, len(job.rounds.triples)) for job in jobs]
    held = [{replica * world + rank: numel for replica in range(replicas) for rank, numel in held_numel(job.cuts).items()} for job in jobs]
    roots = assign_roots(costs, held, world * replicas)
    buckets = assign_buckets(roots, [WIRE.itemsize * job.span.numel for job in jobs], bucket_bytes)
    return Itinerary(tuple(jobs), roots, buckets, world, replicas)


Update = Callable[[Job, slice], Tensor]
"""Function that returns the input of the orthogonalization, flat and of any dtype, for a job and a slice of the local tensor."""


class Exchange:
    """Runs an :class:`Itinerary` on one rank.

    Args:
        held: :class:`Holding` of any of the itinerary's parameters. All have the same process groups.
        device: device of the buffers and of Newton-Schulz.
        home: device of the parameters and of the returned updates; it differs with CPU offload.
    """

    def __init__(
        self, itinerary: Itinerary, held: Holding, device: torch.device, newton_schulz: NewtonSchulz, *, home: torch.device | None = None
    ) -> None:
        self.itinerary = itinerary
        self.group, self.rank, self.device, self.home = held.group, held.rank, device, home or device
        self.shared = itinerary.replicas > 1
        self.replica = held.replica if self.shared else 0
        self.replicate_group = held.replicate_group
        self.newton_schulz = newton_schulz
        self._legs: tuple[frozenset[int], list[_Leg]] | None = None

    def run(self, update: Update, active: frozenset[int]) -> dict[int, Tensor]:
        """Return the orthogonalized updates of this rank's pieces, flat BF16, by job index, for jobs whose parameters are ``active``.

        Collective over the domain; every rank calls it with the same ``active``.
        """
        if self._legs is None or self._legs[0] != active:
            chosen = ([i for i in bucket if self.itinerary.jobs[i].param in active] for bucket in self.itinerary.buckets)
            self._legs = active, [_Leg(self, indices) for indices in chosen if indices]
        landed: dict[int, Tensor] = {}
        under_way: list[_Bucket] = []
        for leg in self._legs[1]:
            under_way.append(_Bucket(self, leg))
            under_way[-1].depart(update)
            if len(under_way) >= 2:
                under_way[-2].compute()
            if len(under_way) >= 3:
                landed.update(under_way.pop(0).land())
        if under_way:
            under_way[-1].compute()
        for bucket in under_way:
            landed.update(bucket.land())
        return landed if self.home == self.device else {i: tensor.to(self.home) for i, tensor in landed.items()}

    def _send(self, buffer: Tensor, given: Sequence[int], wanted: Sequence[int], group: dist.ProcessGroup | None) -> tuple[Tensor, Any]:
        arriving = buffer.new_empty(sum(wanted))
        if group is not None and is_pairwise(group, buffer.device):  # as fast as gloo's own, and the wait ends if a peer dies meanwhile
            return arriving, all_to_all(arriving, buffer, wanted, given, group, _TAG)
        return arriving, dist.all_to_all_single(arriving, buffer, list(wanted), list(given), group=group, async_op=True)


@dataclass(frozen=True)
class _MessagePart:
    """Elements ``[begin, end)`` of a job's matrix, at elements ``[at, at + end - begin)`` of a message."""

    job: int
    begin: int
    end: int
    at: int


class _Leg:
    """One rank's part of a bucket: its sends, receives and matrices; computed once, used in every step.

    Attributes:
        mine: jobs whose root is this rank.
        own: for each job of ``mine``, the elements that this rank holds itself.
        outgoing, incoming: pieces in the message to the roots, by root; pieces in the message from the holders, by holder.
        given, wanted: elements of these messages, by rank.
        theirs: by replica, this rank's pieces whose root is in that replica. ``sizes``: number of elements of these pieces.
    """

    def __init__(self, exchange: Exchange, chosen: Sequence[int]) -> None:
        plan, rank = exchange.itinerary, exchange.rank
        by_root: list[list[int]] = [[] for _ in range(plan.world)]
        by_holder: list[list[int]] = [[] for _ in range(plan.world)]
        self.mine: list[int] = []
        self.own: dict[int, tuple[int, int]] = {}
        self.theirs: list[list[int]] = [[] for _ in range(plan.replicas)]
        for i in chosen:
            (replica, root), cuts = plan.where(i), plan.jobs[i].cuts
            if rank in cuts:
                self.theirs[replica].append(i)
            if replica != exchange.replica:
                continue
            if root == rank:
                self.mine.append(i)
                for holder in cuts:
                    if holder == rank:
                        self.own[i] = cuts[rank]
                    else:
                        by_holder[holder].append(i)
            elif rank in cuts:
                by_root[root].append(i)
        self.travels = plan.travels(chosen, exchange.replica)
        """True if any rank of the group must send anything; the same on all ranks."""
        self.outgoing, self.given = _message(by_root, lambda i, _: plan.jobs[i].cuts[rank])
        self.incoming, self.wanted = _message(by_holder, lambda i, holder: plan.jobs[i].cuts[holder])
        self.sizes = [sum(_numel(plan.jobs[i], rank) for i in indices) for indices in self.theirs]
        self.alike: dict[tuple[int, int, Coefficients, float], list[int]] = {}
        for i in self.mine:
            job = plan.jobs[i]
            self.alike.setdefault((job.span.rows, job.span.cols, job.rounds, job.eps), []).append(i)


def _message(by_rank: Sequence[Sequence[int]], cut: Callable[[int, int], tuple[int, int]]) -> tuple[list[_MessagePart], list[int]]:
    """Return the pieces in message order, and the number of elements for each rank."""
    pieces: list[_MessagePart] = []
    sizes: list[int] = []
    position = 0
    for rank, indices in enumerate(by_rank):
        before = position
        for i in indices:
            begin, end = cut(i, rank)
            pieces.append(_MessagePart(i, begin, end, position))
            position += end - begin
        sizes.append(position - before)
    return pieces, sizes


class _Bucket:
    """One bucket of one step, in flight."""

    def __init__(self, exchange: Exchange, leg: _Leg) -> None:
        self._exchange, self._leg, self._jobs = exchange, leg, exchange.itinerary.jobs
        self._arriving: Tensor | None = None
        self._work: Any = None
        self._own: dict[int, Tensor] = {}

    def depart(self, update: Update) -> None:
        leg, jobs, rank, device = self._leg, self._jobs, self._exchange.rank, self._exchange.device
        buffer = torch.empty(sum(leg.given), dtype=WIRE, device=device)
        for piece in leg.outgoing:
            buffer[piece.at : piece.at + piece.end - piece.begin].copy_(update(jobs[piece.job], jobs[piece.job].local(rank)))
        if leg.travels:
            self._arriving, self._work = self._exchange._send(buffer, leg.given, leg.wanted, self._exchange.group)
        self._own = {i: update(jobs[i], jobs[i].local(rank)).to(device, WIRE) for i in leg.own}

    def compute(self) -> None:
        leg = self._leg
        arrived = self._waited()
        whole = {i: self._joined(i) for i in leg.mine}
        for piece in leg.incoming:
            assert arrived is not None
            whole[piece.job].view(-1)[piece.begin : piece.end] = arrived[piece.at : piece.at + piece.end - piece.begin]
        self._own = {}
        del arrived
        for (_, _, rounds, eps), indices in leg.alike.items():
            results = self._exchange.newton_schulz([whole[i] for i in indices], rounds, eps)
            whole.update(zip(indices, (result.contiguous().view(-1) for result in results), strict=True))
        buffer = torch.empty(sum(leg.wanted), dtype=WIRE, device=self._exchange.device)
        for piece in leg.incoming:
            buffer[piece.at : piece.at + piece.end - piece.begin] = whole[piece.job][piece.begin : piece.end]
        for i, (begin, end) in leg.own.items():
            # Clone a part, so that it does not keep the whole matrix alive.
            self._own[i] = whole[i] if end - begin == whole[i].numel() else whole[i][begin:end].clone()
        if leg.travels:
            self._arriving, self._work = self._exchange._send(buffer, leg.wanted, leg.given, self._exchange.group)

    def land(self) -> dict[int, Tensor]:
        arrived, landed = self._waited(), dict(self._own)
        for piece in self._leg.outgoing:
            assert arrived is not None
            landed[piece.job] = arrived[piece.at : piece.at + piece.end - piece.begin]
        return self._shared_with_replicas(landed) if self._exchange.shared else landed

    def _shared_with_replicas(self, landed: dict[int, Tensor]) -> dict[int, Tensor]:
        """Exchange, in one all-to-all, the updates that each replica computed for this rank's pieces."""
        leg, me, replicas = self._leg, self._exchange.replica, self._exchange.itinerary.replicas
        mine = [landed[i] for i in leg.theirs[me]]
        packed = torch.cat(mine) if mine else torch.empty(0, dtype=WIRE, device=self._exchange.device)
        given = [0 if q == me else leg.sizes[me] for q in range(replicas)]
        wanted = [0 if q == me else leg.sizes[q] for q in range(replicas)]
        arrived, work = self._exchange._send(packed.repeat(replicas - 1), given, wanted, self._exchange.replicate_group)
        _wait(work)
        position = 0
        for i in (i for q, indices in enumerate(leg.theirs) if q != me for i in indices):
            numel = _numel(self._jobs[i], self._exchange.rank)
            landed[i] = arrived[position : position + numel]
            position += numel
        return landed

    def _joined(self, index: int) -> Tensor:
        """Return the matrix with this rank's own part filled in."""
        span, own = self._jobs[index].span, self._own.get(index)
        if own is not None and own.numel() == span.numel:
            return own.view(span.rows, span.cols)
        matrix = torch.empty(span.rows, span.cols, dtype=WIRE, device=self._exchange.device)
        if own is not None:
            begin, end = self._leg.own[index]
            matrix.view(-1)[begin:end] = own
        return matrix

    def _waited(self) -> Tensor | None:
        work, arriving, self._work, self._arriving = self._work, self._arriving, None, None
        if work is not None:
            _wait(work)
        return arriving


def _wait(work: Any) -> None:
    with wait_notes.counted("all_to_all"):
        work.wait()


def _numel(job: Job, rank: int) -> int:
    begin, end = job.cuts[rank]
    return end - begin


def domains(holdings: Iterable[tuple[int, Holding]]) -> dict[tuple[str, str], list[int]]:
    """Return the indices of parameters by domain, in the order of the parameters, which is the same on every rank."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, held in holdings:
        found.setdefault(held.domain, []).append(index)
    return found
