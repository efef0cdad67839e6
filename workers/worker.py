"""The worker actor: one process that lives through many generations. :class:`Worker` is a plain class; ``actor_class`` makes it a Ray
actor.

Two kinds of threads meet in a worker. The *training thread* alone uses torch, the process group, the trainer and the snapshots. It executes
one order after another and reports by publishing items. The actor's *control threads* answer polls and accept orders. They never wait for
the training thread, so a worker answers within milliseconds during any computation. :class:`WorkerState` is all that both sides use.

A worker decides nothing. When its generation ends, it waits for an order. The controller decides whether it goes on, with which workers,
and from which step.

A *standby* is a worker that pauses in its warm-up before it uses a device (``standby``).
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from vescale_ray.config.given import STREAM
from vescale_ray.errors import one_line
from vescale_ray.workers.messages import Give, Join, Order, Outlined, Ticket, WorkerInfo, WorkerPhase, WorkerReport
from vescale_ray.workers.monitoring.heartbeat import IN, RECORDER, Heartbeat, offer_stacks, stacks
from vescale_ray.workers.monitoring.process import born
from vescale_ray.workers.network.reachability import ProbePort, choose_interface, group_address, unreached
from vescale_ray.workers.standby import VISIBLE, Standby, hide_devices
from vescale_ray.workers.worker_state import WorkerState

if TYPE_CHECKING:
    import torch

    from vescale_ray.config import RunConfig
    from vescale_ray.data.dataset import Dataset
    from vescale_ray.workers.membership import Resources
    from vescale_ray.workers.resharding.held_state import HeldState

_log = logging.getLogger(__name__)


class Worker:
    """One worker of a run.

    Args:
        worker: id in the run, never reused for another process.
        config: resolved configuration of the run, as nested plain values, and the identity of its data under :data:`STREAM`.
        standby: use no device before :meth:`employ`.
        pickled: objects of the caller (:class:`vescale_ray.config.Given`), or nothing.
    """

    def __init__(self, worker: str, config: Mapping[str, Any], standby: bool = False, pickled: bytes = b"") -> None:
        self._worker, self._config, self._pickled = worker, config, pickled
        self._standby = Standby() if standby else None
        self._state = WorkerState(worker)
        self._heartbeat: Heartbeat | None = None
        self._resources: Resources | None = None
        """Set by the training thread when it is warm."""
        # Daemon, so that a hung collective does not keep the process from exiting.
        self._thread = threading.Thread(target=self._live, name="vescale-train", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------------------- control threads

    @ray.method(concurrency_group="control")
    def hello(self, wait_s: float) -> WorkerInfo | None:
        """Return the identity of this worker once it is warm (:meth:`WorkerState.identity`)."""
        return self._state.identity(wait_s)

    @ray.method(concurrency_group="lifeline")
    def prepared(self) -> None:
        """Block until this standby has done all that needs no device. Raises if it can't."""
        assert self._standby is not None
        self._standby.wait_prepared()

    @ray.method(concurrency_group="control")
    def employ(self, devices: str) -> None:
        """Make this standby a worker (:meth:`Standby.employ`)."""
        assert self._standby is not None
        self._standby.employ(devices)

    @ray.method(concurrency_group="control")
    def poll(self, seen: int, known: tuple[WorkerPhase, Ticket] | None, wait_s: float) -> WorkerReport:
        """Phase and items (:meth:`WorkerState.report`), and the position of the training thread."""
        report = self._state.report(seen, known, wait_s, self._held)
        if self._resources is None:
            return report
        heartbeat = self._resources.heartbeat
        at = heartbeat.where()
        return replace(
            report,
            beats=heartbeat.beats,
            where=at.text,
            waiting=at.waiting,
            in_long_work=heartbeat.in_long_work or at.compiling,
            starved_s=heartbeat.starved_s(),
            writing=self._resources.writer.writing,
        )

    @ray.method(concurrency_group="control")
    def outlined(self) -> Outlined | None:
        """Inputs of the layouts (:attr:`WorkerState.outlined`)."""
        return self._state.outlined

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """Return the Python stacks of all threads. If the training thread waits in a collective, a first line ``in: ..`` names it."""
        collective = self._heartbeat.collective() if self._heartbeat is not None else ""
        return (f"{IN}{collective}\n\n" if collective else "") + stacks()

    @ray.method(concurrency_group="control")
    def unreached(self, addresses: Mapping[str, str], wait_s: float) -> tuple[str, ...]:
        """Return the workers whose probe port this process does not reach within ``wait_s`` seconds. ``addresses``: probe port of each
        worker."""
        return unreached(addresses, wait_s)

    @ray.method(concurrency_group="control")
    def give_order(self, order: Order) -> None:
        """Accept or refuse an order (:meth:`WorkerState.give_order`)."""
        self._state.give_order(order)

    @ray.method(concurrency_group="control")
    def ask(self, ticket: Ticket, flags: int) -> None:
        """Add flags to the next step's exchange (:meth:`WorkerState.ask`)."""
        self._state.ask(ticket, flags)

    @ray.method(concurrency_group="control")
    def fence(self, ticket: Ticket) -> None:
        """Close the generations up to ``ticket`` (:meth:`WorkerState.fence`)."""
        self._state.fence(ticket)

    @ray.method(concurrency_group="lifeline")
    def lifeline(self, call: int) -> None:
        """Block until a later call (:meth:`WorkerState.hold`). The call fails within milliseconds if the process dies."""
        self._state.hold(call)

    def _held(self) -> Sequence[HeldState]:
        return self._resources.snapshots.held() if self._resources is not None else ()

    # ---------------------------------------------------------------------------------------------------- training thread

    def _live(self) -> None:
        self._heartbeat = Heartbeat()
        try:
            info, self._resources = self._warm_up(self._heartbeat)
            self._resources.next_model.prepare()  # imports what the model's factory needs, so that other ranks do not wait for it
        except BaseException as error:
            why = f"worker {self._worker} cannot start: {type(error).__name__}: {one_line(error)}"
            self._state.cannot_start(why)
            if self._standby is not None:
                self._standby.fail(why)
            return
        self._state.started(info)
        try:
            self._take_orders(self._resources)
        except BaseException:
            # Otherwise the process would still answer polls, and all ranks would wait for it.
            _log.exception("worker %s exits: an unexpected error ended its training thread", self._worker)
            os._exit(1)

    def _take_orders(self, resources: Resources) -> None:
        from vescale_ray.workers.membership import Membership
        from vescale_ray.workers.resharding.shard_move import give

        while True:
            if self._state.phase is not WorkerPhase.FINISHED:
                resources.next_model.prepare()
            order = self._state.next_order()
            if isinstance(order, Join):
                Membership(order, resources, self._state).run()
            elif isinstance(order, Give):
                give(order, resources.snapshots, self._state, resources.config.elastic.collective_timeout_s)
            else:
                resources.writer.save_held(order, self._state.ticket, self._worker, resources.snapshots)
                self._state.rest()

    def _warm_up(self, heartbeat: Heartbeat) -> tuple[WorkerInfo, Resources]:
        """Do the slow work that needs no peer: imports, data set, device."""
        begin = time.perf_counter()
        for name, value in RECORDER.items():
            os.environ.setdefault(name, value)
        if self._standby is not None:
            hide_devices()
        import torch

        from vescale_ray.config import Given, parse_config
        from vescale_ray.workers.building.model_building import NextModel
        from vescale_ray.workers.building.rehearsal import rehearse
        from vescale_ray.workers.membership import Resources
        from vescale_ray.workers.monitoring.profiling import StepProfiler
        from vescale_ray.workers.network import process_groups
        from vescale_ray.workers.resharding.memory_snapshots import Snapshots
        from vescale_ray.workers.saving import Writer
        from vescale_ray.workers.steps.completing import Completer

        config = parse_config({name: section for name, section in self._config.items() if name != STREAM})
        if self._pickled:
            config, self._pickled = config.with_given(Given(*pickle.loads(self._pickled))), b""
        torch.set_num_threads(config.train.threads)
        # A backward pass, also one on the CPU, has torch count the GPUs once and for all. A standby of a GPU rehearses when it has one.
        device = None if self._standby is not None and _uses_gpu(config) else _device(config)
        dataset, eval_sets = _open_data(config, self._config.get(STREAM, {}))
        node, host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        choose_interface(host)
        next_model = NextModel(config)
        if device is not None:
            rehearse(config, device, next_model)
        process_groups.prepare()
        if self._standby is not None:
            next_model.prepare()
            self._standby.await_devices()
            begin = time.perf_counter()
        if device is None:
            device = _device(config)
            rehearse(config, device, next_model)
        snapshots = Snapshots(config.elastic.snapshot_every, pin=device.type == "cuda", node=node)
        writer = Writer(config.checkpoint_root, self._state.publish, read_back=config.checkpoint.keep_verified)
        info = WorkerInfo(
            worker=self._worker,
            pid=os.getpid(),
            born=born(os.getpid()),
            node=node,
            host=host,
            device=str(device),
            warm_seconds=time.perf_counter() - begin,
            pod=socket.gethostname(),
            stacks=offer_stacks(),
            thread=threading.get_native_id(),
            address=ProbePort(group_address(host)).address,
            devices=os.environ.get(VISIBLE, "") if config.ray.gpus_per_worker > 0 else "",
        )
        profiler = StepProfiler(config, device, heartbeat, self._state.publish)
        completer = Completer(config, dataset)
        return info, Resources(config, device, dataset, snapshots, writer, heartbeat, next_model, eval_sets, profiler, completer)


def _open_data(config: RunConfig, begun: Mapping[str, Any]) -> tuple[Dataset, dict[str, Dataset]]:
    """Open the data set and the evaluation sets. ``begun``: the identity of the driver's data.

    Raises:
        BadInput: the data can't be used, or is not the driver's.
    """
    from vescale_ray.data.dataset import check_same_data
    from vescale_ray.data.dataset_loading import load_dataset, load_eval_sets
    from vescale_ray.data.loading_figures import take_errors

    dataset = load_dataset(config.data, given=config.given.dataset)
    check_same_data(dataset, begun)
    take_errors(dataset)  # the driver has told those of files that can't be opened
    return dataset, load_eval_sets(config.data, dataset)


def _uses_gpu(config: RunConfig) -> bool:
    return config.train.device == "cuda" or (config.train.device == "auto" and config.ray.gpus_per_worker > 0)


def _device(config: RunConfig) -> torch.device:
    """Return the device of this worker's shards, made ready."""
    import torch

    if not _uses_gpu(config):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("train.device needs a GPU, but this process sees none: set ray.gpus_per_worker or train.device=cpu")
    device = torch.device("cuda", 0)
    if config.elastic.deterministic:
        # cuBLAS reads this at first use. Otherwise two streams may take its workspace in any order.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    return device


def actor_class() -> Any:
    """:class:`Worker` as a Ray actor class. ``max_restarts=0``, since a restarted process would be empty but keep the old name."""
    options: Any = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"control": 4, "lifeline": 2}}
    return ray.remote(**options)(Worker)
