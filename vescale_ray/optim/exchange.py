"""Matrices to their roots, orthogonalized, and back: the communication of Muon.

A *bucket* of matrices makes one round trip, in BF16, which loses nothing (Newton-Schulz rounds to BF16 before it does anything, and
its result is BF16)::

    depart    every rank writes its pieces, ordered by root, into one buffer               -> one uneven all-to-all
    compute   a root joins the pieces in rank order, which is memory order; Newton-Schulz;
              cuts the results again, ordered by rank                                       -> one uneven all-to-all
    land      every rank has the updates of its pieces                                         (replicas share: one more)

    bucket 0   depart ~~~~~~~> compute ~~~~~~~~~~~~~~~~~~~~~~> land          ~~~ on the wire
    bucket 1            depart ~~~~~~~~~~~> compute ~~~~~~~~~~~~~~~~~~> land     two buckets are under way at a time
    bucket 2                               depart ~~~~~~~~~~~> ..

What a rank roots and holds itself is not sent; a bucket of which nothing has to be sent needs no collective. Nothing is written to
parameters or states here: if a collective fails, the step has not happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_ray.optim.matrices import Holding, MatrixSpan, held_numel
from vescale_ray.optim.newton_schulz import Coefficients, NewtonSchulz, flops
from vescale_ray.optim.roots import Roots, assign_buckets, assign_roots

WIRE = torch.bfloat16
BUCKET_BYTES = 64 << 20
"""Of BF16 that a root receives in one bucket, about. Large enough to hide a collective's latency, small against the states of a rank."""


@dataclass(frozen=True)
class Job:
    """One matrix.

    Attributes:
        param: its parameter's index in the optimizer.
        span: where in the parameter's section it lies.
        cuts: rank -> elements of the matrix ``[begin, end)`` that it holds, in rank order, which is memory order.
        offsets: rank -> where in its local tensor these begin.
        rounds, eps: of Newton-Schulz.
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
        """Its elements in the flat local tensor of ``rank``."""
        begin, end = self.cuts[rank]
        return slice(self.offsets[rank], self.offsets[rank] + end - begin)


@dataclass(frozen=True)
class Itinerary:
    """Who orthogonalizes what, and when, in one domain (parameters that the same ranks share): the same on all its ranks.

    Attributes:
        jobs: all matrices, in model order.
        roots: by job: ``replica * world + rank``; replica 0 only (of every replica, then) where replicas don't share the work.
        buckets: indices of jobs.
        world, replicas: ranks that share a parameter, replicas that share the work (1: each does all of it).
    """

    jobs: tuple[Job, ...]
    roots: Roots
    buckets: tuple[tuple[int, ...], ...]
    world: int
    replicas: int

    def where(self, index: int) -> tuple[int, int]:
        """(replica, rank) of a job's root."""
        return divmod(self.roots.root[index], self.world)

    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank sends in a step, both ways, in each replica's own group; by ``replica * world + rank``."""
        sent = [0] * (self.world * self.replicas)
        for index, job in enumerate(self.jobs):
            replica, root = self.where(index)
            for rank, numel in held_numel(job.cuts).items():
                if rank != root:
                    sent[replica * self.world + rank] += WIRE.itemsize * numel
                    sent[replica * self.world + root] += WIRE.itemsize * numel
        return tuple(sent)

    def travels(self, bucket: Sequence[int], replica: int) -> bool:
        """Whether anything of a bucket has to be sent in a replica's group."""
        found = ((self.where(i), self.jobs[i].cuts) for i in bucket)
        return any(rank != root for (where, root), cuts in found if where == replica for rank in cuts)

    @property
    def collectives(self) -> int:
        """All-to-alls of a step in a replica's group (the busiest one's): two per bucket of which something has to be sent."""
        return 2 * max(sum(self.travels(bucket, q) for bucket in self.buckets) for q in range(self.replicas))

    def fingerprint(self) -> str:
        """Equal where the plan is."""
        return repr(
            (self.world, self.replicas, self.roots.root, self.buckets, [(j.param, j.span, tuple(j.cuts.items())) for j in self.jobs])
        )


def plan(jobs: Sequence[Job], world: int, *, replicas: int = 1, bucket_bytes: int = BUCKET_BYTES) -> Itinerary:
    """Choose roots by cost and locality over all jobs, then buckets. Pure; the same on every rank."""
    costs = [flops(job.span.rows, job.span.cols, len(job.rounds.triples)) for job in jobs]
    held = [{replica * world + rank: numel for replica in range(replicas) for rank, numel in held_numel(job.cuts).items()} for job in jobs]
    roots = assign_roots(costs, held, world * replicas)
    buckets = assign_buckets(roots, [WIRE.itemsize * job.span.numel for job in jobs], bucket_bytes)
    return Itinerary(tuple(jobs), roots, buckets, world, replicas)


Update = Callable[[Job, slice], Tensor]
"""Flat elements of what is to be orthogonalized, any dtype: of a job, this slice of the local tensor."""


class Exchange:
    """Carries an :class:`Itinerary` out, on one rank.

    Args:
        held: any of the domain's parameters' holding: they share the groups.
        device: of the buffers.
    """

    def __init__(self, itinerary: Itinerary, held: Holding, device: torch.device, newton_schulz: NewtonSchulz) -> None:
        self.itinerary = itinerary
        self.group, self.rank, self.device = held.group, held.rank, device
        self._newton_schulz = newton_schulz
        self._shared = itinerary.replicas > 1
        self._replica = held.replica if self._shared else 0
        self._replicate_group = held.replicate_group

    def run(self, update: Update, active: frozenset[int]) -> dict[int, Tensor]:
        """Orthogonalized updates of this rank's pieces, flat BF16, by job index; of the jobs whose parameters are ``active``.

        Collective over the domain; every rank calls it with the same ``active``.
        """
        landed: dict[int, Tensor] = {}
        under_way: list[_Bucket] = []
        for indices in self.itinerary.buckets:
            chosen = [i for i in indices if self.itinerary.jobs[i].param in active]
            if not chosen:
                continue
            under_way.append(_Bucket(self, chosen))
            under_way[-1].depart(update)
            if len(under_way) >= 2:
                under_way[-2].compute()
            if len(under_way) >= 3:
                landed.update(under_way.pop(0).land())
        if under_way:
            under_way[-1].compute()
        for bucket in under_way:
            landed.update(bucket.land())
        return landed

    def _send(self, buffer: Tensor, given: Sequence[int], wanted: Sequence[int], group: dist.ProcessGroup | None) -> tuple[Tensor, Any]:
        arriving = buffer.new_empty(sum(wanted))
        return arriving, dist.all_to_all_single(arriving, buffer, list(wanted), list(given), group=group, async_op=True)


class _Bucket:
    """One bucket of one step, on its way."""

    def __init__(self, exchange: Exchange, chosen: Sequence[int]) -> None:
        self._exchange, self._plan, self._rank = exchange, exchange.itinerary, exchange.rank
        self._chosen = chosen
        self._here = [i for i in chosen if self._plan.where(i)[0] == exchange._replica]
        self._mine = [i for i in self._here if self._plan.where(i)[1] == self._rank]
        jobs = self._plan.jobs
        self._travels = self._plan.travels(chosen, exchange._replica)  # the same on all ranks of the group
        world = range(self._plan.world)
        self._out = [[i for i in self._here if self._plan.where(i)[1] == r and self._rank in jobs[i].cuts] for r in world]
        self._in = [[i for i in self._mine if r in jobs[i].cuts] for r in world]
        self._out[self._rank], self._in[self._rank] = [], []
        self._given = [sum(_numel(jobs[i], self._rank) for i in indices) for indices in self._out]
        self._wanted = [sum(_numel(jobs[i], r) for i in indices) for r, indices in enumerate(self._in)]
        self._arriving: Tensor | None = None
        self._work: Any = None
        self._own: dict[int, Tensor] = {}

    def depart(self, update: Update) -> None:
        jobs, rank = self._plan.jobs, self._rank
        buffer = torch.empty(sum(self._given), dtype=WIRE, device=self._exchange.device)
        position = 0
        for indices in self._out:
            for i in indices:
                numel = _numel(jobs[i], rank)
                buffer[position : position + numel].copy_(update(jobs[i], jobs[i].local(rank)))
                position += numel
        if self._travels:
            self._arriving, self._work = self._exchange._send(buffer, self._given, self._wanted, self._exchange.group)
        self._own = {i: update(jobs[i], jobs[i].local(rank)).to(WIRE) for i in self._mine if rank in jobs[i].cuts}

    def compute(self) -> None:
        jobs, rank = self._plan.jobs, self._rank
        arrived = self._waited()
        whole = {i: self._joined(jobs[i], i) for i in self._mine}
        position = 0
        for source, indices in enumerate(self._in):
            for i in indices:
                begin, end = jobs[i].cuts[source]
                assert arrived is not None
                whole[i].view(-1)[begin:end] = arrived[position : position + end - begin]
                position += end - begin
        self._own = {}
        del arrived
        alike: dict[tuple[int, int, Coefficients, float], list[int]] = {}
        for i in self._mine:
            alike.setdefault((jobs[i].span.rows, jobs[i].span.cols, jobs[i].rounds, jobs[i].eps), []).append(i)
        for (_, _, rounds, eps), indices in alike.items():
            results = self._exchange._newton_schulz([whole[i] for i in indices], rounds, eps)
            whole.update(zip(indices, (result.contiguous().view(-1) for result in results), strict=True))
        buffer = torch.empty(sum(self._wanted), dtype=WIRE, device=self._exchange.device)
        position = 0
        for source, indices in enumerate(self._in):
            for i in indices:
                begin, end = jobs[i].cuts[source]
                buffer[position : position + end - begin] = whole[i][begin:end]
                position += end - begin
        for i in self._mine:
            if rank in jobs[i].cuts:
                begin, end = jobs[i].cuts[rank]
                # A copy of a part, so that the matrix does not stay alive for it.
                self._own[i] = whole[i] if end - begin == whole[i].numel() else whole[i][begin:end].clone()
        if self._travels:
            self._arriving, self._work = self._exchange._send(buffer, self._wanted, self._given, self._exchange.group)

    def land(self) -> dict[int, Tensor]:
        jobs, rank = self._plan.jobs, self._rank
        arrived, landed, position = self._waited(), dict(self._own), 0
        for indices in self._out:
            for i in indices:
                numel = _numel(jobs[i], rank)
                assert arrived is not None
                landed[i] = arrived[position : position + numel]
                position += numel
        return self._shared_with_replicas(landed) if self._exchange._shared else landed

    def _shared_with_replicas(self, landed: dict[int, Tensor]) -> dict[int, Tensor]:
        """The updates of this rank's pieces that other replicas computed, for ours: one all-to-all between the replicas."""
        jobs, rank, replicas = self._plan.jobs, self._rank, self._plan.replicas
        theirs = [[i for i in self._chosen if self._plan.where(i)[0] == q and rank in jobs[i].cuts] for q in range(replicas)]
        sizes = [sum(_numel(jobs[i], rank) for i in indices) for indices in theirs]
        me = self._exchange._replica
        mine = [landed[i] for i in theirs[me]]
        packed = torch.cat(mine) if mine else torch.empty(0, dtype=WIRE, device=self._exchange.device)
        given = [0 if q == me else sizes[me] for q in range(replicas)]
        wanted = [0 if q == me else sizes[q] for q in range(replicas)]
        arrived, work = self._exchange._send(packed.repeat(replicas - 1), given, wanted, self._exchange._replicate_group)
        work.wait()
        position = 0
        for q, indices in enumerate(theirs):
            for i in indices if q != me else ():
                numel = _numel(jobs[i], rank)
                landed[i] = arrived[position : position + numel]
                position += numel
        return landed

    def _joined(self, job: Job, index: int) -> Tensor:
        """The matrix with this rank's own part in its place."""
        own = self._own.get(index)
        if own is not None and own.numel() == job.span.numel:
            return own.view(job.span.rows, job.span.cols)
        matrix = torch.empty(job.span.rows, job.span.cols, dtype=WIRE, device=self._exchange.device)
        if own is not None:
            begin, end = job.cuts[self._rank]
            matrix.view(-1)[begin:end] = own
        return matrix

    def _waited(self) -> Tensor | None:
        work, arriving, self._work, self._arriving = self._work, self._arriving, None, None
        if work is not None:
            work.wait()
        return arriving


def _numel(job: Job, rank: int) -> int:
    begin, end = job.cuts[rank]
    return end - begin


def domains(holdings: Iterable[tuple[int, Holding]]) -> dict[tuple[str, str], list[int]]:
    """Indices of parameters by domain, in the order of the parameters, which is the same on every rank."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, held in holdings:
        found.setdefault(held.domain, []).append(index)
    return found
