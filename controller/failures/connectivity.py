"""The policy for nodes that do not reach each other over the network of the process groups, though the controller reaches them all.

No collective between such nodes ends, no worker is at fault, and no new group of the same workers can form. The run goes on without some of
the nodes. The policy finds them by probes: one worker of each node tries to connect to the others
(:mod:`vescale_ray.workers.network.reachability`). It probes when training stands still and no worker is known to hang, and before a worker
on a new node joins. A failure counts only if two probes in a row have found it, so that a short disturbance of the network costs nothing.

The policy makes no connection itself. It returns a :class:`Probe`, and the caller hands in the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vescale_ray.config import ElasticSection
from vescale_ray.controller.protocol import Event
from vescale_ray.workers.messages import Ticket, WorkerInfo

TRY_S = 1.5
"""Timeout of one connection, in seconds. If the first packet is lost, the kernel makes the connection after one second."""
GAP_S = 1.0
"""Seconds from a probe that has found no failure to the next one. The gap doubles each time."""
LONGEST_GAP_S = 60.0
PROVEN_S = 300.0
"""If a spare waits for longer than this (seconds), it is probed again."""
SHOWN = 4
"""Maximum number of nodes that one line names."""

Pair = tuple[str, str]
Answers = Mapping[str, Collection[str]]
"""For each worker that has answered a probe, the workers that it does not reach."""


@dataclass(frozen=True)
class Network:
    """The controller's view of the workers: their identities, the ``silent`` ones, which owe an answer, and the monotonic time in
    seconds."""

    infos: Mapping[str, WorkerInfo]
    silent: Collection[str]
    now: float

    def nodes(self, workers: Iterable[str]) -> dict[str, str]:
        """Return the node of each worker. A worker that the controller does not know, or that has no probe port, is left out."""
        return {worker: self.infos[worker].node for worker in workers if worker in self.infos and self.infos[worker].address}

    def hosts(self, workers: Iterable[str]) -> dict[str, str]:
        return {self.infos[worker].node: self.infos[worker].host for worker in workers}


@dataclass(frozen=True, eq=False)
class Probe:
    """Connections to try, from each worker to the listed others. Probes compare by identity, so that answers can be matched to them."""

    tries: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class CutOff:
    """Workers to do without, because their nodes are cut off.

    Attributes:
        workers: each worker's node.
        unreached: for each of these nodes, the nodes that it does not reach.
        hosts: the nodes' addresses.
        lasts_s: seconds since the first of the consecutive probes that found the failure.
    """

    workers: Mapping[str, str]
    unreached: Mapping[str, tuple[str, ...]]
    hosts: Mapping[str, str]
    lasts_s: float = 0.0

    def why(self, node: str) -> str:
        """Return the reason to end the workers of ``node``, in words."""
        others = [self.hosts[other] for other in self.unreached[node]]
        some = ", ".join(others[:SHOWN]) + (f" and {len(others) - SHOWN} more" if len(others) > SHOWN else "")
        return f"its node ({self.hosts[node]}) and {some} do not reach each other"


NOBODY = CutOff({}, {}, {})


@dataclass(frozen=True)
class Admission:
    """Joiners that may join, joiners that are refused, and the probe to make for the remaining ones, if any."""

    admitted: tuple[str, ...]
    refused: CutOff = NOBODY
    probe: Probe | None = None


@dataclass
class _Series:
    """Consecutive probes of the same workers. A failure counts only if two probes in a row have found it."""

    about: tuple[str, ...] = ()
    probe: Probe | None = None
    """The probe whose answers are awaited."""
    answers: Answers | None = None
    speakers: Mapping[str, str] = field(default_factory=dict)
    """The workers that probe each other, one for each node, with their nodes."""
    broken: frozenset[Pair] | None = None
    """Pairs of nodes that did not reach each other in any probe since the one that began at ``since``."""
    since: float = 0.0
    began: float = 0.0

    def restart(self) -> None:
        """Start a new series with the next probe."""
        self.about = ()

    def take(self, answers: Answers) -> None:
        """Take the answers to the probe."""
        self.answers = answers

    def broken_twice(
        self, about: tuple[str, ...], nodes: Mapping[str, str], network: Network, only: str | None = None
    ) -> frozenset[Pair] | Probe | None:
        """Return pairs of nodes that did not reach each other in at least two probes in a row.

        Returns an empty set if the last probe found no such pair. Returns a probe if one is to be made now, and None while the result is
        not known.

        Args:
            about: the workers; a change of them begins the series anew.
            nodes: their nodes. One worker of each node makes the connections.
            only: the node whose connections are tried; None tries all.
        """
        if about != self.about:
            self.about, self.probe, self.broken = about, None, None
        if self.probe is None:
            speakers: dict[str, str] = {}
            for worker in sorted(nodes, key=lambda w: w in network.silent):
                speakers.setdefault(nodes[worker], worker)
            self.speakers = {worker: node for node, worker in speakers.items()}
            tries = {w: [o for o in self.speakers if o != w and only in (None, nodes[w], nodes[o])] for w in self.speakers}
            self.probe, self.answers = Probe({worker: others for worker, others in tries.items() if others}), None
            self.began = network.now
            return self.probe
        if self.answers is None:
            return None
        pairs = frozenset(_pair(self.speakers[worker], self.speakers[other]) for worker, others in self.answers.items() for other in others)
        self.probe, before = None, self.broken
        if not pairs:
            self.broken = None
            return pairs
        if before is not None and pairs & before:
            self.broken = pairs & before
            return self.broken
        self.broken, self.since = pairs, self.began
        return None  # the next call begins the second probe


class Connectivity:
    """Finds the workers of one run that are cut off. It takes values, and returns probes and decisions."""

    def __init__(self, elastic: ElasticSection) -> None:
        self._elastic = elastic
        self._told: Ticket | None = None
        """Last generation for which ``network_broken`` was emitted."""
        self._stalled, self._joining = _Series(), _Series()
        self._proven: dict[str, tuple[float, frozenset[str]]] = {}
        """For each node of a joiner: when it was probed, and the nodes found to be connected to it in both directions."""
        self._next, self._gap = 0.0, GAP_S
        self._still = False

    def answered(self, probe: Probe, answers: Answers) -> None:
        """Take the answers to a probe. Answers to a probe that is no longer awaited are ignored."""
        for series in (self._stalled, self._joining):
            if series.probe is probe:
                series.take(answers)

    def progressed(self) -> None:
        """Record that the members make progress: this ends the probes of a stall, and the next probe is due at once."""
        self._still = False
        self._stalled.restart()
        self.hurry()

    def hurry(self) -> None:
        """Make the next probe at once, and reset the gap between probes."""
        self._next, self._gap = 0.0, GAP_S

    def cut_off(self, members: Sequence[str], leavers: Sequence[str], network: Network) -> CutOff | Probe | None:
        """Find the workers to do without when all ``members`` stand still, because nodes do not reach each other.

        Returns the probe to make if one is due, and None while the result is not known; call it again. Nodes of ``leavers``, which still
        have to give their shards to the members, are chosen first.
        """
        self._still = True
        self._joining.restart()
        party = (*members, *leavers)
        nodes, now = network.nodes(party), network.now
        if len(set(nodes.values())) < 2:
            return NOBODY
        broken = None if now < self._next else self._stalled.broken_twice(party, nodes, network)
        if broken is None or isinstance(broken, Probe):
            return broken
        broken = frozenset(pair for pair in broken if set(pair) <= set(nodes.values()))  # without the nodes that are gone
        if not broken:
            self._next, self._gap = now + self._gap, min(2 * self._gap, LONGEST_GAP_S)
            return NOBODY
        weights: Counter[str] = Counter()
        for worker, node in nodes.items():
            weights[node] += 1 if worker in leavers else len(party)
        gone = fewest(broken, weights, {node: place for place, node in enumerate(weights)})
        self._proven = {}  # these results are older than the failure
        workers = {w: node for w, node in nodes.items() if node in gone}
        return CutOff(workers, _unreached(broken, gone), network.hosts(nodes), now - self._stalled.since)

    @property
    def patience_s(self) -> float:
        """Seconds to wait for the network to recover, if the run cannot replace the cut-off workers at once."""
        return self._elastic.collective_timeout_s / 2

    def due(self, cut: CutOff, members: Sequence[str], spares: int, ticket: Ticket) -> tuple[bool, list[Event]]:
        """Return whether to end the cut-off workers now, and the events to record. ``spares``: number of warm workers that could take a
        place. If most of the members are cut off, no node is at fault, and no worker is ended."""
        elastic, gone = self._elastic, [w for w in members if w in cut.workers]
        if not cut.workers:
            return False, []
        if 2 * len(gone) > len(members):
            told, self._told = self._told, ticket
            unreached = {node: list(others) for node, others in cut.unreached.items()}
            return False, [] if told == ticket else [Event("network_broken", {"workers": gone, "unreached": unreached})]
        come = elastic.replace_lost or elastic.grow or spares >= len(gone)
        enough = len(members) - len(gone) >= elastic.min_workers
        if not come and not enough:
            return False, []  # ending them would end the run, so the collectives' timeout and the budget decide
        return (come and enough) or cut.lasts_s >= self.patience_s, []

    def admit(self, joiners: Sequence[str], members: Sequence[str], network: Network) -> Admission:
        """Admit the ``joiners`` whose nodes are connected to the nodes of all members and of the joiners admitted before them.

        Joiners that are not connected are refused. A joiner whose connections are not known yet is neither admitted nor refused; call it
        again. While the members stand still nothing is probed: if a member is the unreachable one, no joiner could be admitted.
        """
        nodes, now = network.nodes((*members, *joiners)), network.now
        party = {nodes[w] for w in members if w in nodes}
        waiting = {nodes[w] for w in joiners if w in nodes} - party
        self._proven = {node: known for node, known in self._proven.items() if node in waiting and now - known[0] < PROVEN_S}
        fine: list[str] = []
        for worker in joiners:
            node = nodes.get(worker)
            # A worker that cannot be probed counts as connected.
            if node is None or node in party or party <= self._proven.get(node, (0.0, frozenset()))[1]:
                fine.append(worker)
                party |= {node} if node is not None else set()
        unknown = [w for w in joiners if w not in fine]
        if not unknown or self._still:
            return Admission(tuple(fine))
        node = nodes[unknown[0]]  # one node at a time: mostly there is one joiner, or all are on one node
        about = (*members, *fine, unknown[0])
        broken = self._joining.broken_twice(about, network.nodes(about), network, node)
        if isinstance(broken, Probe):
            return Admission(tuple(fine), probe=broken)
        if broken:
            cut = {w: node for w in unknown if nodes[w] == node}
            refused = CutOff(cut, _unreached(broken, [node]), network.hosts(nodes), now - self._joining.since)
            return Admission(tuple(fine), refused)
        if broken is not None:
            self._proven[node] = (now, frozenset(party))
        return Admission(tuple(fine))


def fewest(broken: Iterable[Pair], weights: Mapping[str, int], order: Mapping[str, int]) -> frozenset[str]:
    """Return the nodes to do without so that no ``broken`` pair is left.

    The function removes the node with the most broken pairs per unit of its weight, until no pair is left. Of equal nodes it takes the last
    in ``order``. So it removes a single node that is cut off from the others, or the lighter of two groups of nodes that do not reach each
    other.
    """
    ways: dict[str, set[str]] = {}
    for one, other in broken:
        ways.setdefault(one, set()).add(other)
        ways.setdefault(other, set()).add(one)
    left = {node: len(others) for node, others in ways.items()}
    gone: set[str] = set()
    while left:
        node = max(left, key=lambda n: (left[n] / weights[n], order[n]))
        gone.add(node)
        del left[node]
        for other in ways[node] & left.keys():
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
