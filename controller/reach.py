"""Nodes that don't reach each other over the network of the process groups, though the controller reaches them all.

No collective between them ends, nobody is to blame, and a new group of the same workers can't be formed: the run goes on without the nodes
that have to go. Whether it is so is asked of the workers (:mod:`vescale_ray.workers.reach`), one of each node: where training stands still
and nobody is seen to hang, and before a worker on another node joins. Only what was found twice in a row counts: a network that stumbles
for a moment costs nothing but the moment.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vescale_ray.workers.messages import WorkerInfo

TRY_S = 1.5
"""A connection may take so long: one that lost its first packet is made after a second."""
GAP_S = 1.0
"""From one look at those that stand still to the next, if the last has found nothing; twice as long each time."""
LONGEST_GAP_S = 60.0
PROVEN_S = 300.0
"""A spare that waits for longer than this is tried again."""
SHOWN = 4
"""Nodes in a line."""
EXACTLY, SEARCH_S = 40, 0.2
"""Nodes among which the fewest are searched for, and for how long: the controller waits for that."""


class Reaching(Protocol):
    """Questions that are asked."""

    def unreached(self) -> dict[str, frozenset[str]] | None: ...


class Asks(Protocol):
    """What is used of :class:`~vescale_ray.controller.crew.Crew`."""

    def info(self, worker: str) -> WorkerInfo | None: ...

    def silent(self, seconds: float) -> list[str]: ...

    def ask_reach(self, asked: Mapping[str, Collection[str]], wait_s: float) -> Reaching: ...


Pair = tuple[str, str]


@dataclass(frozen=True)
class CutOff:
    """Workers that would have to go, each with its node, and which nodes each of these does not reach.

    Attributes:
        hosts: the nodes' addresses.
        lasts_s: for so long it has been found again and again.
    """

    workers: Mapping[str, str]
    unreached: Mapping[str, tuple[str, ...]]
    hosts: Mapping[str, str]
    lasts_s: float = 0.0

    def why(self, node: str) -> str:
        """In words, for a worker of that node."""
        others = [self.hosts[other] for other in self.unreached[node]]
        some = ", ".join(others[:SHOWN]) + (f" and {len(others) - SHOWN} more" if len(others) > SHOWN else "")
        return f"its node ({self.hosts[node]}) and {some} do not reach each other"


NOBODY = CutOff({}, {}, {})


@dataclass
class _Looks:
    """One look after the other at the same workers. Only what two in a row have found counts."""

    crew: Asks
    about: tuple[str, ...] = ()
    asked: Reaching | None = None
    tries: Mapping[str, str] = field(default_factory=dict)
    """The nodes of those that try and are tried."""
    broken: frozenset[Pair] | None = None
    """Pairs of nodes that did not reach each other in any look since the one that began at ``since``."""
    since: float = 0.0
    began: float = 0.0

    def twice(self, about: tuple[str, ...], nodes: Mapping[str, str], now: float, only: str | None = None) -> frozenset[Pair] | None:
        """Pairs of nodes that have not reached each other in two looks or more; none after a look that has found none; None: not known
        yet.

        Args:
            about: workers; of others everything begins anew.
            nodes: theirs. One worker tries for each.
            now: the time.
            only: the node whose ways count; None: all.
        """
        if about != self.about:
            self.about, self.asked, self.broken = about, None, None
        if self.asked is None:
            silent = self.crew.silent(0.0)
            speakers: dict[str, str] = {}
            for worker in sorted(nodes, key=lambda w: w in silent):
                speakers.setdefault(nodes[worker], worker)
            self.tries = {worker: node for node, worker in speakers.items()}
            ways = {w: [o for o in self.tries if o != w and only in (None, nodes[w], nodes[o])] for w in self.tries}
            self.asked, self.began = self.crew.ask_reach({worker: others for worker, others in ways.items() if others}, TRY_S), now
            return None
        answers = self.asked.unreached()
        if answers is None:
            return None
        pairs = frozenset(_pair(self.tries[worker], self.tries[other]) for worker, others in answers.items() for other in others)
        self.asked, before = None, self.broken
        if not pairs:
            self.broken = None
            return pairs
        if before is not None and pairs & before:
            self.broken = pairs & before
            return self.broken
        self.broken, self.since = pairs, self.began
        return None


class Reach:
    """Of one run. Used from the conductor's thread alone; nothing here waits.

    Args:
        crew: whom to ask.
        clock: seconds that never go back.
    """

    def __init__(self, crew: Asks, clock: Callable[[], float] = time.monotonic) -> None:
        self._crew, self._clock = crew, clock
        self._still, self._joins = _Looks(crew), _Looks(crew)
        self._proven: dict[str, tuple[float, frozenset[str]]] = {}
        """Of the nodes of those that may join: when it was found which others they reach, and are reached by."""
        self._next, self._gap = 0.0, GAP_S
        self._stand = False

    def moves(self) -> None:
        """Those that train don't stand still (any more)."""
        self._still.about, self._stand = (), False
        self.hurry()

    def hurry(self) -> None:
        """There is more reason to look now than a moment ago."""
        self._next, self._gap = 0.0, GAP_S

    def cut_off(self, members: Sequence[str], leavers: Sequence[str] = ()) -> CutOff | None:
        """All ``members`` stand still: those that would have to go, since their nodes and others' don't reach each other. None: not known
        yet, call it again and again. ``leavers``, who still have to give them something, are the first to go."""
        self._stand, self._joins.about = True, ()
        party = (*members, *leavers)
        nodes, now = self._nodes(party), self._clock()
        if len(set(nodes.values())) < 2:
            return NOBODY
        broken = None if now < self._next else self._still.twice(party, nodes, now)
        if broken is None:
            return None
        broken = frozenset(pair for pair in broken if set(pair) <= set(nodes.values()))  # who is gone is nobody's neighbour
        if not broken:
            self._next, self._gap = now + self._gap, min(2 * self._gap, LONGEST_GAP_S)
            return NOBODY
        weights: Counter[str] = Counter()
        for worker, node in nodes.items():
            weights[node] += 1 if worker in leavers else len(party)
        gone = fewest(broken, weights, {node: place for place, node in enumerate(weights)})
        self._proven = {}  # of another time
        workers = {w: node for w, node in nodes.items() if node in gone}
        return CutOff(workers, _unreached(broken, gone), self._hosts(nodes), now - self._still.since)

    def admitted(self, joiners: Sequence[str], members: Sequence[str]) -> tuple[list[str], CutOff]:
        """Those of ``joiners`` that reach the nodes of all members and of those admitted before them, and are reached by them; and those
        that don't. Of the others it is not known yet: call it again and again. Nobody is tried while the members stand still:
        it may be they who are not reached, and none could join."""
        nodes, now = self._nodes((*members, *joiners)), self._clock()
        party = {nodes[w] for w in members if w in nodes}
        waiting = {nodes[w] for w in joiners if w in nodes} - party
        self._proven = {node: known for node, known in self._proven.items() if node in waiting and now - known[0] < PROVEN_S}
        fine: list[str] = []
        for worker in joiners:
            node = nodes.get(worker)
            # Of whom nobody can tell it is taken to be so.
            if node is None or node in party or party <= self._proven.get(node, (0.0, frozenset()))[1]:
                fine.append(worker)
                party |= {node} if node is not None else set()
        unknown = [w for w in joiners if w not in fine]
        if unknown and not self._stand:
            node = nodes[unknown[0]]  # one after another: mostly there is one, or all are on one node
            about = (*members, *fine, unknown[0])
            broken = self._joins.twice(about, {w: nodes[w] for w in about if w in nodes}, now, node)
            if broken:
                refused = {w: node for w in unknown if nodes[w] == node}
                return fine, CutOff(refused, _unreached(broken, [node]), self._hosts(nodes), now - self._joins.since)
            if broken is not None:
                self._proven[node] = (now, frozenset(party))
        return fine, NOBODY

    def _hosts(self, nodes: Mapping[str, str]) -> dict[str, str]:
        return {node: info.host for worker, node in nodes.items() if (info := self._crew.info(worker)) is not None}

    def _nodes(self, workers: Iterable[str]) -> dict[str, str]:
        """Nodes of those that can be tried."""
        infos = {worker: self._crew.info(worker) for worker in workers}
        return {worker: info.node for worker, info in infos.items() if info is not None and info.address}


def fewest(broken: Collection[Pair], weights: Mapping[str, int], order: Mapping[str, int]) -> frozenset[str]:
    """The nodes to do without so that no ``broken`` pair is left: those with the fewest workers (``weights``) together, and of choices that
    cost the same the one whose nodes are part of more pairs, then that with the later nodes (``order``).

    A minimum vertex cover, found by branch and bound; of more than :data:`EXACTLY` nodes in a tangle, or after :data:`SEARCH_S`, what is
    had if the node with the most broken pairs for its workers goes first, then the next.
    """
    ways: dict[str, set[str]] = {}
    for one, other in broken:
        ways.setdefault(one, set()).add(other)
        ways.setdefault(other, set()).add(one)

    def cost(chosen: frozenset[str]) -> tuple[int, int, int]:
        return sum(weights[n] for n in chosen), -sum(len(ways[n]) for n in chosen), -sum(order[n] for n in chosen)

    def worst(open_: Mapping[str, int]) -> str:
        return max(open_, key=lambda n: (open_[n] / weights[n], order[n]))

    best = _greedy(ways, worst)
    end = time.monotonic() + SEARCH_S
    pending: list[tuple[frozenset[str], frozenset[str]]] = [(frozenset(), frozenset())] if len(ways) <= EXACTLY else []
    while pending and time.monotonic() < end:
        gone, kept = pending.pop()
        if sum(weights[n] for n in gone) > cost(best)[0]:
            continue
        open_ = {n: len(ways[n] - gone) for n in ways if n not in gone and ways[n] - gone}
        if not open_:
            best = min(best, gone, key=cost)
            continue
        node = worst(open_)
        if not ways[node] & kept:
            pending.append((gone | ways[node], kept | {node}))
        pending.append((gone | {node}, kept))
    return best


def _greedy(ways: Mapping[str, Collection[str]], worst: Callable[[Mapping[str, int]], str]) -> frozenset[str]:
    left = {node: len(others) for node, others in ways.items()}
    gone: set[str] = set()
    while left:
        node = worst(left)
        gone.add(node)
        del left[node]
        for other in ways[node]:
            if other in left:
                left[other] -= 1
                if not left[other]:
                    del left[other]
    return frozenset(gone)


def _pair(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def _unreached(broken: Iterable[Pair], gone: Collection[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {node: [] for node in gone}
    for one, other in sorted(broken):
        for node, far in ((one, other), (other, one)):
            if node in gone and far not in gone:
                found[node].append(far)
    return {node: tuple(others) for node, others in found.items()}
