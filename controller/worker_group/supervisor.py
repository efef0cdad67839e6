"""The supervisor actor: creates and kills, and decides nothing, so that there is nothing in it that could fail.

It owns the workers. A controller that owned them would take them along when it dies (Ray ends an actor with its owner); this
one hands out their handles, also to the controller that comes after. Each worker has a placement group of its own: one
for all could not shrink, would hold a draining node, and removing it would end the survivors too. Groups without a worker, *wishes*, show
Ray's autoscaler what the run would use; the next worker moves into one that has got its place. Ray removes all of them with this actor.

It holds the ``TCPStore`` of each generation, through which process groups meet: on a worker it would die with it.

Places are Ray's control store's to give and take, which may not answer for a while (its machine is busy, or it is restarted). So what asks
it has threads and a lock of its own: a worker is ended all the same, and a recovery does not wait for the control store.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from vescale_ray.controller.protocol import Dismissal, Places
from vescale_ray.controller.worker_group.agent import fetch_stacks, fetch_starved, send_signal, start_agent
from vescale_ray.workers.messages import WorkerInfo
from vescale_ray.workers.worker import actor_class

_log = logging.getLogger(__name__)

AGENT_S = 1.0
"""An agent that has not answered for so long is on a node that is gone, or has stopped; a recovery waits for this."""
GONE_S = 10.0
"""It is not asked again for so long."""
STORES = 2
CALLS = 16
"""Calls that are answered at a time: where a rack is lost each waits :data:`AGENT_S` for one of its nodes, and the controller for all."""
REMOVALS, REMOVAL_GAP_S = 5, 2.0
NODE_LABEL = "ray.io/node-id"
"""Ray's own label of each node."""
LEAST_CPU = 0.001
"""A placement group can't be of nothing."""


@dataclass
class _Child:
    """``node``: where it runs; None until it is warm."""

    handle: Any
    group: PlacementGroup
    node: str | None = None


class Supervisor:
    """Workers of one run.

    Args:
        config: the run's resolved configuration as nested plain values.
        tag: goes into the names of the placement groups, so that a person who lists them knows whose they are.
    """

    def __init__(self, config: Mapping[str, Any], tag: str) -> None:
        self._config = config
        self._tag = tag
        self._placing = threading.Lock()
        """Of the wishes, of who has no place yet, and of hiring."""
        self._returns = ThreadPoolExecutor(1, thread_name_prefix="vescale-places")
        self._children: dict[str, _Child] = {}
        self._wishes: list[PlacementGroup] = []
        self._elsewhere: dict[PlacementGroup, frozenset[str]] = {}
        """The nodes on which each wish gets no place."""
        self._wished = 0
        self._unplaced: set[str] = set()
        self._closed = False
        self._epoch = 0
        """Of the newest controller that has asked who is there."""
        self._count = 0
        self._lock = threading.Lock()
        self._agents: dict[str, Future[Any]] = {}
        """Started in the thread that gives places back: the control store has to do with it, too, and may let it wait."""
        self._gone: dict[str, float] = {}
        self._stores: list[Any] = []
        self._state: str | None = None
        self._node = ray.get_runtime_context().get_node_id()

    def store(self) -> tuple[str, int]:
        """Host and port of a new store, for one generation. The one before stays, in case that is not over everywhere.

        A group of N ranks leaves about 8 N bytes for each of them in its store: for a thousand, 8 MB with every generation, for ever."""
        # torch takes a second or more to import: not in the constructor, where everyone would wait for it.
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
    def hire(self, avoid: Collection[str] = (), epoch: int = 0) -> tuple[str, Any]:
        """Start a worker; its id and handle, at once. It comes up when Ray has a place for it: that of a wish, if one has got a place on
        another node than those to ``avoid``; on one of these it does not come up. ``epoch``: of the controller that hires."""
        wanted = self._config["ray"]
        cpus, gpus = max(float(wanted["cpus_per_worker"]), LEAST_CPU), float(wanted["gpus_per_worker"])
        with self._placing:
            if self._closed:
                raise RuntimeError("the run is over: its supervisor takes on nobody")
            worker = f"w{self._count}"
            self._count += 1
            group = next((wish for wish in self._wishes if _node_of(wish) not in (None, *avoid)), None)
            if group is not None:
                self._wishes.remove(group)
                self._elsewhere.pop(group, None)
            else:
                group = self._group(worker, avoid)
            try:
                handle = (
                    actor_class()
                    .options(
                        num_cpus=cpus,
                        num_gpus=gpus,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
                    )
                    .remote(worker, self._config)
                )
            except BaseException:
                self._returns.submit(_remove, group)
                raise
            child = _Child(handle, group)
            with self._lock:
                if epoch >= self._epoch:
                    self._children[worker] = child
                    self._unplaced.add(worker)
                    return worker, handle
            # The control store has kept it waiting for so long that its controller is gone, and the next has counted its workers.
            self._returns.submit(_give_back, child)
            raise RuntimeError(f"controller {epoch} is gone: what it hires now nobody would know of")

    @ray.method(concurrency_group="places")
    def wish(self, count: int, avoid: Collection[str]) -> Places:
        """Have ``count`` wishes, none of them on the nodes to ``avoid``; those that still wait are taken back first. What all groups have
        got."""
        return self._wish(count, avoid)

    def _wish(self, count: int, avoid: Collection[str]) -> Places:
        with self._placing:
            nodes = {wish: _node_of(wish) for wish in self._wishes}
            # Also one that waits, and not for a place on a node that may be had again.
            hemmed = {wish for wish, node in nodes.items() if node is None and self._elsewhere[wish].difference(avoid)}
            surplus = [wish for wish, node in nodes.items() if node in avoid or wish in hemmed]
            kept = sorted((wish for wish in self._wishes if wish not in surplus), key=lambda wish: nodes[wish] is None)
            surplus += kept[count:]
            self._wishes = kept[:count]
            for wish in surplus:
                remove_placement_group(wish)
                del self._elsewhere[wish]
            while len(self._wishes) < count and not self._closed:
                self._wished += 1  # Ray wants each name once
                self._wishes.append(self._group(f"wish{self._wished}", avoid))
                self._elsewhere[self._wishes[-1]] = frozenset(avoid)
            with self._lock:
                groups = {w: self._children[w].group for w in self._unplaced if w in self._children}
            self._unplaced = {worker for worker, group in groups.items() if _node_of(group) is None}
            return Places(tuple(nodes.get(wish) for wish in self._wishes), frozenset(self._unplaced))

    def _group(self, of: str, avoid: Collection[str]) -> PlacementGroup:
        wanted = self._config["ray"]
        cpus, gpus = max(float(wanted["cpus_per_worker"]), LEAST_CPU), float(wanted["gpus_per_worker"])
        elsewhere: Any = [{NODE_LABEL: f"!in({', '.join(sorted(avoid))})"}] if avoid else None
        bundles = [{"CPU": cpus, **({"GPU": gpus} if gpus else {})}]
        return placement_group(bundles, strategy="PACK", name=f"{self._tag}:{of}", bundle_label_selector=elsewhere)

    def keep(self, state: str) -> None:
        """Keep the controller's durable state while it can't be written to the run's folder."""
        self._state = state

    def kept(self) -> str | None:
        """The durable state that was kept last; None: there is none."""
        return self._state

    def roster(self, epoch: int = 0) -> dict[str, Any]:
        """Handles of all workers that were not dismissed, for the controller ``epoch``; those before it hire nobody any more."""
        with self._lock:
            self._epoch = max(self._epoch, epoch)
            return {worker: child.handle for worker, child in self._children.items()}

    def dismiss(self, worker: str, info: WorkerInfo | None) -> Dismissal:
        """End a worker and give its place back. ``info`` lets it be killed by process id: ``ray.kill`` takes 5 s on a stopped process."""
        with self._lock:
            child = self._children.pop(worker, None)
        sent = None if info is None else self._signal(info, signal.SIGKILL)
        if child is not None:
            self._returns.submit(_give_back, child)
        node = info.node if info is not None else child.node if child is not None else None
        if node is not None:
            self._retire(node)
        return Dismissal.ENDED if info is None or sent else Dismissal.GONE if sent is not None else Dismissal.UNKNOWN

    def signal(self, info: WorkerInfo, number: int) -> bool:
        """Send a signal to a worker's process; False if that process is gone."""
        return bool(self._signal(info, number))

    def _signal(self, info: WorkerInfo, number: int) -> bool | None:
        """As :meth:`signal`; None if its node does not answer."""
        if info.node == self._node:
            return send_signal(info.pid, info.born, number)
        sent = self._on_node(info.node, AGENT_S, "signal", info.pid, info.born, number)
        return None if sent is None else bool(sent)

    def stacks(self, info: WorkerInfo, wait_s: float) -> str:
        """The stacks of a worker's process, which need not answer itself; or why there are none."""
        if info.node == self._node:
            return fetch_stacks(info.pid, info.born, info.stacks, wait_s)
        return str(self._on_node(info.node, wait_s + AGENT_S, "stacks", info.pid, info.born, info.stacks, wait_s) or "(its node is gone)")

    def starved(self, node: str, infos: Sequence[WorkerInfo]) -> list[float] | None:
        """Seconds so far for which the training threads of workers of a node got no processor; None if that does not answer."""
        threads = [(info.pid, info.born, info.thread) for info in infos]
        told = fetch_starved(threads) if node == self._node else self._on_node(node, AGENT_S, "starved", threads)
        return None if told is None else list(told)

    def station(self, worker: str, node: str) -> None:
        """Have an agent on ``node``, where ``worker`` is, if that is another one than this; for as long as a worker is there. A node with
        any process on it is in use for Ray: its autoscaler would never end it, and one that drains would stay until its deadline."""
        with self._lock:
            child = self._children.get(worker)
            if child is not None:
                child.node = node
                self._have_agent(node)

    def _have_agent(self, node: str) -> None:
        if node != self._node and node not in self._agents:
            self._agents[node] = self._returns.submit(start_agent, node)

    def _retire(self, node: str) -> None:
        """End the agent of ``node`` if no worker is there any more."""
        with self._lock:
            agent = None if any(child.node == node for child in self._children.values()) else self._agents.pop(node, None)
        if agent is not None:
            self._returns.submit(_end_agent, agent)

    def _on_node(self, node: str, wait_s: float, method: str, *args: Any) -> Any:
        """The answer of the agent of ``node``; None if the node is gone, and the process with it."""
        if time.monotonic() - self._gone.get(node, -GONE_S) < GONE_S:
            return None
        with self._lock:
            self._have_agent(node)
            agent = self._agents[node]
        began = time.monotonic()
        try:
            ref = getattr(agent.result(wait_s), method).remote(*args)
            done, _ = ray.wait([ref], timeout=max(0.0, began + wait_s - time.monotonic()))
            if done:
                return ray.get(done[0])
        except TimeoutError:
            pass  # it could not be started yet
        except Exception as error:
            _log.warning("the agent on node %s has ended or could not be started: %s", node, error)
            with self._lock:
                if self._agents.get(node) is agent:
                    del self._agents[node]
        self._gone[node] = time.monotonic()
        return None

    def close(self) -> None:
        """End all workers and agents, and give all places back. Nobody is hired after it: nobody would give that place back."""
        with self._placing:
            self._closed = True
        self._wish(0, ())
        for worker in self.roster():
            self.dismiss(worker, None)
        with self._lock:
            agents, self._agents = list(self._agents.values()), {}
        for agent in agents:
            self._returns.submit(_end_agent, agent)
        self._returns.shutdown()


def _end_agent(agent: Future[Any]) -> None:
    """After it was started, in the same thread."""
    ray.kill(agent.result(0.0), no_restart=True)


def _give_back(child: _Child) -> None:
    try:
        ray.kill(child.handle, no_restart=True)
    except Exception as error:
        _log.warning("a worker could not be ended by Ray, it goes with its place: %s", error)
    _remove(child.group)


def _remove(group: PlacementGroup) -> None:
    """Give a place back; again and again where the control store refuses: what is not given back is lost to the run until it ends."""
    for attempt in range(1, REMOVALS + 1):
        try:
            return remove_placement_group(group)
        except Exception as error:
            _log.warning("a place could not be given back (try %d of %d): %s", attempt, REMOVALS, error)
            time.sleep(REMOVAL_GAP_S)


def _node_of(group: PlacementGroup) -> str | None:
    """The node where a placement group of one bundle has its place; None while it waits, also after its node was lost."""
    about = placement_group_table(group)
    nodes = about.get("bundles_to_node_id") or {}
    return str(nodes[0]) if about.get("state") == "CREATED" and nodes.get(0) else None


def supervisor_name(run_id: str) -> str:
    """Name of the run's supervisor in Ray."""
    return f"supervisor:{run_id}"


def give_places_back(name: str, run_id: str) -> None:
    """Remove the placement groups that a run's supervisor has left: none, if it could still close. They would go with the job of the
    driver's process, which may have more to do."""
    for found in placement_group_table().values():
        if found["state"] != "REMOVED" and str(found["name"]).startswith(_tag(name, run_id) + ":"):
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(found["placement_group_id"]))))


def _tag(name: str, run_id: str) -> str:
    return f"{name}:{run_id}"


def actor_of(config: Mapping[str, Any], run_id: str, node: str, namespace: str) -> Any:
    """Start a run's supervisor on ``node``; its handle."""
    groups: Any = {"concurrency_groups": {"places": 2}}
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
        .remote(config, _tag(config["run"]["name"], run_id))
    )
