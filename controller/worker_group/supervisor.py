"""The supervisor actor: creates and kills workers. It decides nothing, so that little in it can fail.

It owns the workers, because Ray ends an actor with its owner: if the controller owned them, they would die with it. It gives their handles
to each controller. Each worker has a placement group of its own. One group for all could not shrink, would hold a draining node, and its
removal would end the survivors, too. Pending groups without a worker (*requests*) show Ray's autoscaler what the run would use. Once Ray
has placed such a group, the next worker uses it. If a *standby* can replace a lost worker, that worker's group stays reserved for a
moment. Ray removes all groups with this actor.

It holds the ``TCPStore`` of each generation, through which process groups meet. A store on a worker would die with the worker.

Ray's control store gives and takes back places. It may not answer for a while (its machine is busy, or it restarts). So calls to it have
their own threads and lock: the supervisor can end a worker meanwhile, and a recovery does not wait for the control store.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from vescale_ray.controller.protocol import Dismissal, Places
from vescale_ray.controller.worker_group.agent import fetch_stacks, fetch_starved, send_signal
from vescale_ray.controller.worker_group.agents import AGENT_S, Agents
from vescale_ray.controller.worker_group.standbys import Standbys, WorkerPlace, later
from vescale_ray.workers.messages import WorkerInfo
from vescale_ray.workers.worker import actor_class

_log = logging.getLogger(__name__)

STORES = 2
CALLS = 16
"""Calls served at a time. If a rack is lost, each waits :data:`AGENT_S` for one of its nodes, and the controller waits for all."""
REMOVALS, REMOVAL_GAP_S = 5, 2.0
NODE_LABEL = "ray.io/node-id"
"""Ray's own label of each node."""
LEAST_CPU = 0.001
"""CPUs of a placement group that needs none: a group can't be empty."""
VACANT_S = 60.0
"""The place of a lost worker that nobody takes is given back after this time."""
PLACED_S, PLACED_GAP_S = 0.3, 0.02
"""Longest wait for a new place, if a standby may take it. Ray gives one within hundredths of a second if there is room."""


@dataclass
class _Child:
    """A worker and its placement group. ``node``: where it runs; None until it is warm."""

    handle: Any
    group: PlacementGroup
    node: str | None = None

    def arrive(self, node: str) -> None:
        self.node = node


class Supervisor:
    """Owner of one run's workers.

    Args:
        config: the run's resolved configuration as nested plain values.
        tag: goes into the names of the placement groups, so that a person who lists them knows whose they are.
        pickled: reference to the objects of the caller, in a list, so that only workers read them; or nothing.
    """

    def __init__(self, config: Mapping[str, Any], tag: str, pickled: Sequence[Any] = ()) -> None:
        self._config, self._pickled = config, pickled
        self._tag = tag
        self._placing = threading.Lock()
        """Guards the requests, the list of workers without a place, and hiring."""
        self._returns = ThreadPoolExecutor(1, thread_name_prefix="vescale-places")
        self._children: dict[str, _Child] = {}
        self._requests: list[PlacementGroup] = []
        self._elsewhere: dict[PlacementGroup, frozenset[str]] = {}
        """By request, the nodes on which it gets no place."""
        self._requested = 0
        self._unplaced: set[str] = set()
        self._closed = False
        self._epoch = 0
        """Epoch of the newest controller that has called :meth:`roster`."""
        self._count = 0
        self._lock = threading.Lock()
        self._node = ray.get_runtime_context().get_node_id()
        self._agents = Agents(self._node, self._returns.submit)
        self._vacant: list[WorkerPlace] = []
        """Places of lost workers."""
        self._standbys = Standbys(int(config["elastic"]["standby"]), self._start_standby, self._returns.submit)
        self._stores: list[Any] = []
        self._state: str | None = None

    def store(self) -> tuple[str, int]:
        """Return the host and port of a new store, for one generation. The last store stays, in case its generation is not over everywhere.

        A group of N ranks leaves about 8 N bytes per rank in its store: 8 MB for 1,000 ranks. Older stores are closed to free this."""
        # torch takes a second or more to import. In the constructor, all callers would wait for it.
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        made = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        with self._lock:
            self._stores.append(made)
            old = self._stores[:-STORES]
            del self._stores[:-STORES]
        del old  # closed here, and not under the lock
        return host, int(made.port)

    @ray.method(concurrency_group="places")
    def hire(self, avoid: Collection[str] = (), epoch: int = 0, *ended: Dismissal) -> tuple[str, Any, bool]:
        """Start a worker, and return its id and handle without waiting, and whether it was a standby. It comes up when Ray has a place for
        it, on none of the nodes to ``avoid``. It takes the place of a lost worker or of a request, if there is one.

        ``epoch``: epoch of the calling controller. ``ended``: ends of workers, which Ray waits for before this call.
        """
        with self._placing:
            if self._closed:
                raise RuntimeError("the run is over: its supervisor hires no more workers")
            worker = self._next_id()
            place = self._vacated(avoid) or self._placed(worker, avoid)
            taken = self._standbys.take(place.node, place.devices) if place.node is not None and place.devices is not None else None
            try:
                worker, handle = taken or (worker, self._start(worker, place.group))
            except BaseException:
                self._returns.submit(_remove, place.group)
                raise
            child = _Child(handle, place.group, place.node if taken else None)
            with self._lock:
                if epoch >= self._epoch:
                    self._children[worker] = child
                    if not taken:
                        self._unplaced.add(worker)
                    return worker, handle, taken is not None
            # The control store was so slow that the calling controller is gone, and the next one has counted its workers.
            self._returns.submit(_give_back, child)
            raise RuntimeError(f"controller {epoch} was replaced: its successor would not know of a worker that it hires")

    def _next_id(self) -> str:
        with self._lock:
            self._count += 1
            return f"w{self._count - 1}"

    def _start(self, worker: str, group: PlacementGroup) -> Any:
        cpus, gpus = self._each()
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        actor = actor_class().options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=where)
        return actor.remote(worker, self._config, False, *self._pickled)

    def _start_standby(self, node: str) -> tuple[str, Any]:
        worker, where = self._next_id(), NodeAffinitySchedulingStrategy(node, soft=False)
        actor = actor_class().options(num_cpus=0, num_gpus=0, scheduling_strategy=where)
        return worker, actor.remote(worker, self._config, True, *self._pickled)

    def standbys(self) -> dict[str, int]:
        """Return the number of standbys that can take a place, by node."""
        return self._standbys.ready()

    def _each(self) -> tuple[float, float]:
        """CPUs and GPUs of a worker."""
        wanted = self._config["ray"]
        return max(float(wanted["cpus_per_worker"]), LEAST_CPU), float(wanted["gpus_per_worker"])

    def _vacated(self, avoid: Collection[str]) -> WorkerPlace | None:
        """Take the place of a lost worker, if one is reserved. Reserved places on nodes to ``avoid`` are given back."""
        with self._lock:
            vacant, self._vacant = self._vacant, []
            fit = [place for place in vacant if place.node not in avoid]
            self._vacant = fit[1:]
        for place in vacant:
            if place not in fit:
                self._give_vacant_back(place)
        return fit[0] if fit else None

    def _placed(self, worker: str, avoid: Collection[str]) -> WorkerPlace:
        """Take a request that Ray has placed, or create a placement group for ``worker``.

        If standbys are ready and workers need no GPU, wait for a moment until Ray has placed the group: a standby on that node can then
        become the worker. With GPUs a standby can't, because the devices of a new group are not known.
        """
        group = next((request for request in self._requests if _node_of(request) not in (None, *avoid)), None)
        if group is not None:
            self._requests.remove(group)
            self._elsewhere.pop(group, None)
        else:
            group = self._group(worker, avoid)
        if not self._standbys.ready() or self._each()[1]:
            return WorkerPlace(group)
        until = time.monotonic() + PLACED_S
        while (node := _node_of(group)) is None and time.monotonic() < until:
            time.sleep(PLACED_GAP_S)
        return WorkerPlace(group, node, "")

    @ray.method(concurrency_group="places")
    def request_places(self, count: int, avoid: Collection[str]) -> Places:
        """Keep ``count`` requests (placement groups without a worker), on none of the nodes to ``avoid``. Return the state of all groups.

        Surplus requests are removed; requests that Ray has not placed go first.
        """
        return self._request_places(count, avoid)

    def _request_places(self, count: int, avoid: Collection[str]) -> Places:
        with self._placing:
            nodes = {request: _node_of(request) for request in self._requests}
            # Replace also a request that waits but excludes a node which may be used again.
            overconstrained = {request for request, node in nodes.items() if node is None and self._elsewhere[request].difference(avoid)}
            surplus = [request for request, node in nodes.items() if node in avoid or request in overconstrained]
            kept = sorted((request for request in self._requests if request not in surplus), key=lambda request: nodes[request] is None)
            surplus += kept[count:]
            self._requests = kept[:count]
            for request in surplus:
                remove_placement_group(request)
                del self._elsewhere[request]
            while len(self._requests) < count and not self._closed:
                self._requested += 1  # Ray wants each name once
                self._requests.append(self._group(f"request{self._requested}", avoid))
                self._elsewhere[self._requests[-1]] = frozenset(avoid)
            with self._lock:
                groups = {w: self._children[w].group for w in self._unplaced if w in self._children}
            self._unplaced = {worker for worker, group in groups.items() if _node_of(group) is None}
            return Places(tuple(nodes.get(request) for request in self._requests), frozenset(self._unplaced))

    def _group(self, of: str, avoid: Collection[str]) -> PlacementGroup:
        cpus, gpus = self._each()
        elsewhere: Any = [{NODE_LABEL: f"!in({', '.join(sorted(avoid))})"}] if avoid else None
        bundles = [{"CPU": cpus, **({"GPU": gpus} if gpus else {})}]
        return placement_group(bundles, strategy="PACK", name=f"{self._tag}:{of}", bundle_label_selector=elsewhere)

    @ray.method(concurrency_group="state")
    def keep(self, state: str) -> None:
        """Keep the controller's durable state for a restarted controller."""
        self._state = state

    @ray.method(concurrency_group="state")
    def kept(self) -> str | None:
        """Return the durable state that was kept last; None if there is none."""
        return self._state

    def roster(self, epoch: int = 0) -> dict[str, Any]:
        """Return handles of all workers that were not dismissed, for the controller ``epoch``. Earlier controllers can't hire any more."""
        with self._lock:
            self._epoch = max(self._epoch, epoch)
            return {worker: child.handle for worker, child in self._children.items()}

    def dismiss(self, worker: str, info: WorkerInfo | None, vacate: bool = False) -> Dismissal:
        """End a worker and give its place back. ``info`` lets it be killed by process id: ``ray.kill`` takes 5 s on a stopped process.

        ``vacate``: the next worker may take the place. It stays reserved for :data:`VACANT_S` if there is a standby on its node."""
        with self._lock:
            child = self._children.pop(worker, None)
        sent = None if info is None else self._signal(info, signal.SIGKILL)
        node = info.node if info is not None else child.node if child is not None else None
        if child is not None:
            if vacate and info is not None and sent is not None and self._can_be_taken(info):
                self._vacate(WorkerPlace(child.group, info.node, info.devices))
            else:
                self._returns.submit(_give_back, child)
        if node is not None:
            self._retire(node)
        return Dismissal.ENDED if info is None or sent else Dismissal.GONE if sent is not None else Dismissal.UNKNOWN

    def _can_be_taken(self, info: WorkerInfo) -> bool:
        """Return whether a standby could take a worker's place."""
        return info.node in self._standbys.ready() and (bool(info.devices) or not self._each()[1])

    def _vacate(self, place: WorkerPlace) -> None:
        with self._lock:
            self._vacant.append(place)
        later(VACANT_S, self._expire, place)

    def _expire(self, place: WorkerPlace) -> None:
        with self._lock:
            if place not in self._vacant:
                return
            self._vacant.remove(place)
        self._give_vacant_back(place)

    def _give_vacant_back(self, place: WorkerPlace) -> None:
        self._returns.submit(_remove, place.group)
        assert place.node is not None
        self._retire(place.node)

    def signal(self, info: WorkerInfo, number: int) -> bool:
        """Send a signal to a worker's process; False if that process is gone."""
        return bool(self._signal(info, number))

    def _signal(self, info: WorkerInfo, number: int) -> bool | None:
        """As :meth:`signal`; None if its node does not answer."""
        if info.node == self._node:
            return send_signal(info.pid, info.born, number)
        sent = self._agents.call(info.node, AGENT_S, "signal", info.pid, info.born, number)
        return None if sent is None else bool(sent)

    def stacks(self, info: WorkerInfo, wait_s: float) -> str:
        """Return the stacks of a worker's process, or why there are none. The process itself need not answer."""
        if info.node == self._node:
            return fetch_stacks(info.pid, info.born, info.stacks, wait_s)
        return str(
            self._agents.call(info.node, wait_s + AGENT_S, "stacks", info.pid, info.born, info.stacks, wait_s) or "(its node is gone)"
        )

    def starved(self, node: str, infos: Sequence[WorkerInfo]) -> list[float] | None:
        """Return the seconds for which the training threads of a node's workers got no processor so far; None without an answer."""
        threads = [(info.pid, info.born, info.thread) for info in infos]
        told = fetch_starved(threads) if node == self._node else self._agents.call(node, AGENT_S, "starved", threads)
        return None if told is None else list(told)

    def station(self, worker: str, node: str) -> None:
        """Keep an agent on ``node``, where ``worker`` is, unless it is the supervisor's own. The agent ends with the last worker there.
        Ray counts a node with any process as in use: its autoscaler would never end it, and a draining node would stay to its deadline."""
        with self._lock:
            child = self._children.get(worker)
            if child is not None:
                child.arrive(node)
                self._agents.have(node)
                self._standbys.keep(node)

    def _retire(self, node: str) -> None:
        """End the agent and the standbys of ``node`` if no worker and no worker's place is on it any more."""
        with self._lock:
            if any(child.node == node for child in self._children.values()) or any(place.node == node for place in self._vacant):
                return
            self._agents.end(node)
            self._standbys.release(node)

    def close(self) -> None:
        """End all workers and agents, and give all places back. Later calls of :meth:`hire` fail, since their place would stay taken."""
        with self._placing:
            self._closed = True
        self._request_places(0, ())
        for worker in self.roster():
            self.dismiss(worker, None)
        with self._lock:
            vacant, self._vacant = self._vacant, []
        for place in vacant:
            self._give_vacant_back(place)
        self._agents.close()
        self._returns.shutdown()


def _give_back(child: _Child) -> None:
    try:
        ray.kill(child.handle, no_restart=True)
    except Exception as error:
        _log.warning("Ray could not end a worker; it ends with its placement group: %s", error)
    _remove(child.group)


def _remove(group: PlacementGroup) -> None:
    """Give a place back, and try again if the control store refuses. A place not given back is lost to the run until its end."""
    for attempt in range(1, REMOVALS + 1):
        try:
            return remove_placement_group(group)
        except Exception as error:
            _log.warning("a placement group could not be removed (try %d of %d): %s", attempt, REMOVALS, error)
            time.sleep(REMOVAL_GAP_S)


def _node_of(group: PlacementGroup) -> str | None:
    """Return the node where a placement group of one bundle has its place; None while it waits, also after its node was lost."""
    about = placement_group_table(group)
    nodes = about.get("bundles_to_node_id") or {}
    return str(nodes[0]) if about.get("state") == "CREATED" and nodes.get(0) else None


def supervisor_name(run_id: str) -> str:
    """Return the name of the run's supervisor in Ray."""
    return f"supervisor:{run_id}"


def give_places_back(name: str, run_id: str) -> None:
    """Remove the placement groups of a run whose supervisor could not close. Ray removes them only when the driver's job ends, and the
    driver's process may go on."""
    for found in placement_group_table().values():
        if found["state"] != "REMOVED" and str(found["name"]).startswith(_tag(name, run_id) + ":"):
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(found["placement_group_id"]))))


def _tag(name: str, run_id: str) -> str:
    return f"{name}:{run_id}"


def actor_of(config: Mapping[str, Any], run_id: str, node: str, namespace: str, pickled: bytes = b"") -> Any:
    """Start a run's supervisor on ``node``, and return its handle."""
    groups: Any = {"concurrency_groups": {"places": 2, "state": 1}}
    return (
        ray.remote(**groups)(Supervisor)
        .options(
            name=supervisor_name(run_id),
            namespace=namespace,
            num_cpus=0,
            max_restarts=0,
            max_concurrency=CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(config, _tag(config["run"]["name"], run_id), [ray.put(pickled)] if pickled else [])
    )
