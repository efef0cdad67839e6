"""The worker actor: one process that lives through many generations. :class:`Worker` is a plain class; ``actor_class`` makes it a Ray
actor.

Two kinds of threads meet here. The *training thread* alone uses torch, the process group, the trainer and the snapshots. It executes one
order after another and reports by publishing items. The actor's *control threads* answer polls and accept orders. They never wait for the
training thread, so a worker answers within milliseconds during any computation. ``self._change`` (a condition) guards everything that both
sides use.

A worker decides nothing. When its group breaks, it dissolves the group at once, because the other survivors wait for its sockets to close
(``process_groups``). It then waits for an order. The controller decides whether it goes on, with which workers, and from which step.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from vescale_ray.communication import wait_notes
from vescale_ray.workers.messages import (
    NO_TICKET,
    Evaluated,
    FaultKind,
    Filled,
    Give,
    Item,
    Join,
    Order,
    Origin,
    Outlined,
    Save,
    SavedShard,
    Skipped,
    Stepped,
    Ticket,
    WorkerFault,
    WorkerInfo,
    WorkerPhase,
    WorkerReport,
)
from vescale_ray.workers.monitoring.heartbeat import IN, RECORDER, Heartbeat, offer_stacks, stacks
from vescale_ray.workers.network.connections import Connections
from vescale_ray.workers.network.reachability import Door, choose_interface, group_address, unreached

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig
    from vescale_ray.data.corpus import Corpus
    from vescale_ray.workers.messages import StepRecord
    from vescale_ray.workers.network.process_groups import Closing
    from vescale_ray.workers.resharding.memory_snapshots import Snapshots
    from vescale_ray.workers.resharding.reshard import ReshardReport
    from vescale_ray.workers.resharding.shards import Shards
    from vescale_ray.workers.saving import Writer
    from vescale_ray.workers.trainer import Blank, Trainer

_log = logging.getLogger(__name__)

LEAVER_SECONDS = 600.0
"""Longest wait, in seconds, of a leaver for the others, who first form the new generation and build their trainers. A fence ends it early.
A member that has built its trainer waits for the others only as long as in any collective."""

FILL_SECONDS = 3600.0
"""Longest wait, in seconds, of a rank that has its values (read, moved or initialised) for the other ranks. A fence ends it early. If a
rank sends no heartbeat for long, the controller ends it."""
COPIED_SECONDS = 0.5
"""If a model takes more seconds than this to build, the worker builds it once and copies it for each generation. (A Llama takes
milliseconds.)"""


class Refused(ValueError):
    """An order or request does not fit the worker's state; the message says why. Nothing was changed."""


class Worker:
    """One worker of a run.

    Args:
        worker: id in the run, never reused for another process.
        config: resolved configuration of the run, as nested plain values.
    """

    def __init__(self, worker: str, config: Mapping[str, Any]) -> None:
        self._worker = worker
        self._config_tree = config
        self._change = threading.Condition()
        self._phase = self._resting = WorkerPhase.WARMING
        self._ticket = NO_TICKET
        self._fenced = NO_TICKET
        self._fault: WorkerFault | None = None
        self._completed = 0
        self._asked = 0
        self._order: Order | None = None
        self._items: deque[tuple[int, Item]] = deque()
        self._last_item = 0
        self._info: WorkerInfo | None = None
        self._warm_error: str | None = None
        self._lifeline = 0
        self._outlined: Outlined | None = None
        self._lines: tuple[Connections, ...] = ()
        """Connections of the groups that the training thread is in or forms."""
        self._heartbeat: Heartbeat | None = None
        self._blank: Blank | None = None
        """Unsharded model for the next generation's trainer, built while the worker is idle."""
        self._template: Blank | None = None
        """Original of a model that is slow to build; later blanks are copies of it."""
        self._closing: Closing | None = None
        """Barrier of the move that this generation began with, until every rank has passed it."""
        # Daemon, so that a hung collective does not keep the process from exiting.
        self._thread = threading.Thread(target=self._live, name="vescale-train", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------------------- control threads

    @ray.method(concurrency_group="control")
    def hello(self, wait_s: float) -> WorkerInfo | None:
        """Identity of this worker once it is warm; None if it is still warming up after ``wait_s`` seconds.

        Raises:
            RuntimeError: the worker cannot start; the message is one line.
        """
        with self._change:
            self._change.wait_for(lambda: self._info or self._warm_error, wait_s)
            if self._warm_error:
                raise RuntimeError(self._warm_error)
            return self._info

    @ray.method(concurrency_group="control")
    def poll(self, seen: int, known: tuple[WorkerPhase, Ticket] | None, wait_s: float) -> WorkerReport:
        """Report the items after ``seen``. Returns at once if there are any, or if phase and ticket differ from ``known``, those of the
        last report; otherwise after ``wait_s`` seconds.

        ``seen`` also acknowledges: items up to it are dropped. A restarted controller passes -1 and gets all items still kept, which always
        include the last vote for a checkpoint.
        """
        with self._change:
            self._change.wait_for(lambda: self._last_item > seen or (self._phase, self._ticket) != known, wait_s)
            if seen >= 0:
                self._forget(seen)
            items = tuple(entry for entry in self._items if entry[0] > seen)
            out = self._phase in (WorkerPhase.PARKED, WorkerPhase.FINISHED)
            held = tuple(self._snapshots.held()) if out else ()
            report = WorkerReport(self._worker, self._ticket, self._phase, self._completed, items, held, self._fault, _memory())
        if self._heartbeat is None:
            return report
        at = self._heartbeat.where()
        slow = self._heartbeat.unhurried or at.compiling
        beats, starved_s = self._heartbeat.beats, self._heartbeat.starved_s()
        writing = self._writer.writing
        return replace(report, beats=beats, where=at.text, waiting=at.waiting, unhurried=slow, starved_s=starved_s, writing=writing)

    @ray.method(concurrency_group="control")
    def outlined(self) -> Outlined | None:
        """Inputs of the layouts at every world size. None until this worker has first built a model or, if it joined a running group, taken
        a step. All workers keep them for a restarted controller."""
        return self._outlined

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """The Python stacks of all threads. If the training thread waits in a collective, a first line ``in: ..`` names it."""
        collective = self._heartbeat.collective() if self._heartbeat is not None else ""
        return (f"{IN}{collective}\n\n" if collective else "") + stacks()

    @ray.method(concurrency_group="control")
    def unreached(self, addresses: Mapping[str, str], wait_s: float) -> tuple[str, ...]:
        """The workers whose probe port this process does not reach within ``wait_s`` seconds. ``addresses``: probe port of each worker."""
        return unreached(addresses, wait_s)

    @ray.method(concurrency_group="control")
    def give_order(self, order: Order) -> None:
        """Accept an order; the training thread executes it.

        Raises:
            Refused: the order is older than an earlier order or fence, or the worker is busy.
        """
        with self._change:
            newest = max(self._ticket, self._fenced)
            if order.ticket < self._ticket or (not isinstance(order, Save) and order.ticket <= newest):
                raise Refused(f"{self._worker}: an order of {order.ticket} comes too late: {newest} has ended or is running")
            if self._order is not None or self._phase not in (WorkerPhase.PARKED, WorkerPhase.FINISHED, WorkerPhase.IDLE):
                raise Refused(f"{self._worker} is {self._phase} in {self._ticket}: it takes an order of {order.ticket} once it is parked")
            self._order = order
            # Set the phase now, not when the training thread starts, so that the next poll sees it. The training thread may still be
            # building a model. In this phase the controller allows it the time to form a group, and detects if it hangs.
            if isinstance(order, Save):
                self._resting, self._phase = self._phase, WorkerPhase.SAVING
            else:
                self._enter(order.ticket, WorkerPhase.GIVING if isinstance(order, Give) else WorkerPhase.FORMING)
            self._change.notify_all()

    @ray.method(concurrency_group="control")
    def ask(self, ticket: Ticket, flags: int) -> None:
        """Add ``flags`` to the next step's exchange. All ranks see them there and act at the same boundary.

        Raises:
            Refused: the worker is not, or no longer, in that generation.
        """
        with self._change:
            if ticket != self._ticket or self._phase not in (WorkerPhase.FORMING, WorkerPhase.TRAINING, WorkerPhase.SAVING):
                raise Refused(f"{self._worker} is {self._phase} in {self._ticket}: it takes no request for {ticket}")
            self._asked |= flags

    @ray.method(concurrency_group="control")
    def fence(self, ticket: Ticket) -> None:
        """Refuse orders up to ``ticket``, and leave its generation if the worker is in it, so that a wait for an unreachable rank ends.
        Resumption uses the copies, so an interrupted step is not half committed."""
        with self._change:
            self._fenced = max(self._fenced, ticket)
            if self._ticket <= ticket:
                for lines in self._lines:
                    lines.cut()

    @ray.method(concurrency_group="lifeline")
    def lifeline(self, call: int) -> None:
        """Block until a later call, so that only the newest controller holds one. Fails within milliseconds if the process dies."""
        with self._change:
            self._lifeline = call
            self._change.notify_all()
            # No time limit: the call ends with the process or with the next call.
            self._change.wait_for(lambda: self._lifeline != call)

    # ---------------------------------------------------------------------------------------------------- training thread

    def _live(self) -> None:
        self._heartbeat = Heartbeat()
        try:
            info = self._warm_up()
            self._make_blank()  # imports what the model's factory needs, so that other ranks do not wait for it
        except BaseException as error:
            with self._change:
                self._warm_error = f"worker {self._worker} cannot start: {type(error).__name__}: {' '.join(str(error).split())}"
                self._change.notify_all()
            return
        with self._change:
            self._info, self._phase = info, WorkerPhase.IDLE
            self._change.notify_all()
        try:
            self._take_orders()
        except BaseException:
            # Otherwise the process would still answer polls, and all ranks would wait for it.
            _log.exception("worker %s exits: an unexpected error ended its training thread", self._worker)
            os._exit(1)

    def _take_orders(self) -> None:
        while True:
            self._make_blank()
            with self._change:
                self._change.wait_for(lambda: self._order is not None)
                order, self._order = self._order, None
                if order is not None and not isinstance(order, Save) and order.ticket <= self._fenced:
                    # A fence came between the order and now. The controller waits until this worker is out of that generation, and it is.
                    self._enter(order.ticket, WorkerPhase.PARKED)
                    self._settle(WorkerPhase.PARKED, WorkerFault(FaultKind.PEER, f"generation {order.ticket} was closed before it began"))
                    continue
            if isinstance(order, Join):
                self._join(order)
            elif isinstance(order, Give):
                self._give(order)
            elif isinstance(order, Save):
                self._save(order)

    def _warm_up(self) -> WorkerInfo:
        """Do the slow work that needs no peer: imports, corpus, device."""
        begin = time.perf_counter()
        for name, value in RECORDER.items():
            os.environ.setdefault(name, value)
        import torch

        from vescale_ray.config import parse_config
        from vescale_ray.data.corpus import load_corpus
        from vescale_ray.workers.network import process_groups
        from vescale_ray.workers.rehearsal import rehearse
        from vescale_ray.workers.resharding.memory_snapshots import Snapshots
        from vescale_ray.workers.saving import Writer

        for module in ("checkpoint", "fsdp", "optim", "workers.resharding.reshard", "workers.trainer"):
            importlib.import_module(f"vescale_ray.{module}")
        config = parse_config(self._config_tree)
        torch.set_num_threads(config.train.threads)
        wanted = config.train.device == "cuda" or (config.train.device == "auto" and config.ray.gpus_per_worker > 0)
        if wanted and not torch.cuda.is_available():
            raise RuntimeError("train.device needs a GPU, but this process sees none: set ray.gpus_per_worker or train.device=cpu")
        device = torch.device("cuda", 0) if wanted else torch.device("cpu")
        if wanted and config.elastic.deterministic:
            # cuBLAS reads this at first use. Otherwise two streams may take its workspace in any order.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if wanted:
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
        self._config: RunConfig = config
        self._device = device
        self._corpus: Corpus = load_corpus(config.data.corpus, config.data.seq_len, config.data.heldout)
        node, host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        choose_interface(host)
        self._snapshots: Snapshots = Snapshots(config.elastic.snapshot_every, pin=wanted, node=node)
        self._writer: Writer = Writer(
            config.checkpoint_root, lambda item: self._publish(item, None, None), read_back=config.checkpoint.keep_verified
        )
        rehearse(config, device)
        process_groups.prepare()
        return WorkerInfo(
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
            address=Door(group_address(host)).address,
        )

    def _join(self, order: Join) -> None:
        from vescale_ray.workers.network import process_groups

        # An unfinished write would be a checkpoint of a generation that is over.
        self._writer.abandon()
        wait_notes.end()  # left over from a failed wait of the last generation
        self._enter(order.ticket, WorkerPhase.FORMING)
        phase, fault, found = WorkerPhase.PARKED, None, None
        try:
            phase = self._generation(order)
        except BaseException as error:
            found = process_groups.trace_of(error)
            # describe() empties the frames, which keep the group's sockets open.
            fault = WorkerFault(_kind(error), process_groups.describe(error))
        with self._without_hurry():
            self._snapshots.copied()
        self._snapshots.let_go()
        with self._change:
            for lines in self._lines:
                lines.let_go()
        closing, self._closing = self._closing, None
        if closing is not None:
            closing.give_up()
        process_groups.dissolve()
        del closing  # may wait for a gloo thread, so drop it after the group, whose closing the other ranks wait for
        if fault is not None:
            assert found is not None
            fault = replace(fault, trace=process_groups.tell(found))
            self._writer.abandon()
            with self._without_hurry():  # the copies may be tens of gigabytes, and are all that is left of lost ranks
                self._snapshots.verify()
        self._settle(phase, fault)

    def _generation(self, order: Join) -> WorkerPhase:
        """Run one generation, from forming its group to leaving it. Returns the phase afterwards."""
        from vescale_ray.workers.messages import RESCALE, STOP
        from vescale_ray.workers.network import process_groups

        clock = time.perf_counter
        seat, config = order.seat, self._config
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        begin = clock()
        lines = self._connected_by()
        process_groups.form(
            seat.store_host,
            seat.store_port,
            seat.prefix,
            seat.rank,
            seat.world,
            backend,
            config.elastic.collective_timeout_s,
            closed=lambda: order.ticket <= self._fenced,
            lines=lines,
        )
        self._cut_if_fenced(lines, order.ticket)
        formed = clock()
        trainer: Trainer | None = None
        try:
            with process_groups.collectives(f"generation {order.ticket}"):
                trainer = self._build(order)
                built = clock()
                moved, read_bytes = self._fill(trainer, order)
                # Ranks may finish loading minutes apart. In a step's collective such a delay would count as a lost rank.
                process_groups.barrier(FILL_SECONDS)
                # The new generation's ranks come first among the participants of the move.
                words = moved.words[: seat.world] if moved is not None else None
                self._snapshots.begin(trainer, order.resume.generation if order.resume is not None else None, words)
                self._publish(
                    Filled(
                        order.ticket,
                        trainer.completed,
                        order.origin,
                        {"form": formed - begin, "build": built - formed, "sync": clock() - built},
                        moved.moved_bytes if moved else 0,
                        moved.lower_bound if moved else 0,
                        read_bytes,
                    ),
                    WorkerPhase.TRAINING,
                    trainer.completed,
                )
                moved = words = None  # megabytes, with a thousand ranks
                if order.origin is not Origin.MEMORY:
                    self._outline(trainer)
                if order.evaluate:
                    self._evaluate(trainer, order.ticket)
                between: dict[str, float] = {}
                while trainer.completed < config.train.steps:
                    record = trainer.step(self._flags(order.ticket), self._settle_copies)
                    if self._closing is not None and self._closing.is_over():
                        self._closing = None
                    usage = replace(trainer.usage, memory={**trainer.usage.memory, "copies": self._snapshots.nbytes})
                    self._publish(Stepped(order.ticket, record, time.time(), between, usage), None, record.step)
                    self._outline(trainer)  # a joiner reports its outline only now; earlier the other ranks would have waited for it
                    # After the last step, and at a stop, the copies stay: the last checkpoint is made from them.
                    rescale = bool(record.flags & RESCALE) and not record.flags & STOP and record.step < config.train.steps
                    with self._without_hurry():
                        before = clock()
                        self._snapshots.after_step(trainer, rescale=rescale)
                        between = {"peer_copy": clock() - before, **self._at_boundary(trainer, record, order)}
                    if record.flags & (STOP | RESCALE):
                        break
                self._settle_copies()
                self._snapshots.park(trainer)
                return WorkerPhase.FINISHED if trainer.completed >= config.train.steps else WorkerPhase.PARKED
        finally:
            if trainer is not None:
                trainer.close()
        raise AssertionError("unreachable")  # for the type checker: the context manager suppresses nothing

    def _outline(self, trainer: Trainer) -> None:
        if self._outlined is None:
            from vescale_ray.workers.resharding.shard_layouts import outline_of, packed

            self._outlined = Outlined(packed(outline_of(trainer)))  # the same at every world size

    def _make_blank(self) -> None:
        """Build the next unsharded model while the controller plans. Later all ranks would wait for it."""
        from vescale_ray.workers.trainer import Blank

        if self._blank is None and self._phase is not WorkerPhase.FINISHED:
            try:
                if self._template is None:
                    began = time.perf_counter()
                    made = Blank(self._config)
                    if time.perf_counter() - began < COPIED_SECONDS:
                        self._blank = made
                        return
                    self._template = made
                try:
                    self._blank = self._template.copied()
                except Exception:  # a model that cannot be copied is built each time
                    self._blank, self._template = self._template, None
            except BaseException:  # the next order that needs the model reports the error; a factory may also call sys.exit()
                _log.debug("worker %s cannot build its model ahead", self._worker, exc_info=True)

    def _settle_copies(self) -> None:
        with self._without_hurry():
            self._snapshots.copied()
        self._snapshots.settle()

    def _without_hurry(self) -> AbstractContextManager[None]:
        return self._heartbeat.without_hurry() if self._heartbeat else nullcontext()

    def _build(self, order: Join) -> Trainer:
        from vescale_ray.workers.trainer import Trainer

        blank, self._blank = self._blank, None
        try:
            trainer = Trainer(
                self._config,
                order.seat.rank,
                order.seat.world,
                order.ticket.generation,
                self._device,
                self._corpus,
                blank,
                filled=order.origin is not Origin.FRESH,
            )
        except ValueError as error:
            raise _BadInput(" ".join(str(error).split())) from None
        if self._heartbeat is not None:
            trainer.beat = self._heartbeat.beat
        return trainer

    def _fill(self, trainer: Trainer, order: Join) -> tuple[ReshardReport | None, int]:
        """Load the new trainer's values. Returns the report of the move, if there was one, and the bytes read from a checkpoint."""
        from vescale_ray import checkpoint
        from vescale_ray.workers.resharding.reshard import restore_from_checkpoint

        if order.origin is Origin.MEMORY:
            return self._move(order, trainer), 0
        read_bytes = 0
        with self._unless_fenced(trainer, order.ticket):
            if order.origin is Origin.FRESH:
                trainer.initialize()
            else:
                try:
                    read_bytes = restore_from_checkpoint(trainer, checkpoint.open(self._config.checkpoint_root, order.commit))
                except (ValueError, checkpoint.CheckpointMismatch) as error:
                    raise _BadInput(" ".join(str(error).split())) from None
        return None, read_bytes

    @contextmanager
    def _unless_fenced(self, trainer: Trainer, ticket: Ticket) -> Iterator[None]:
        """At each heartbeat of the block, leave if the generation is fenced. The block takes minutes and waits for no rank.

        A step's heartbeats are not used for this, since some come after its last collective.
        """
        from vescale_ray.workers.network.process_groups import GroupFailed

        beat = trainer.beat

        def beat_or_leave() -> None:
            beat()
            if ticket <= self._fenced:
                raise GroupFailed(f"generation {ticket} ended while its values were still being loaded")

        trainer.beat = beat_or_leave
        try:
            yield
        finally:
            trainer.beat = beat

    def _move(self, order: Join | Give, trainer: Trainer | None) -> ReshardReport:
        """Take part in the move of shards, as a member (with a trainer) or as a leaver."""
        from vescale_ray.workers.network import process_groups
        from vescale_ray.workers.resharding.reshard import execute

        assert order.resume is not None
        held = self._snapshots.shards(order.resume.generation, order.resume.step)
        seat = order.transfer
        word = b"" if trainer is None else self._snapshots.word(trainer)
        if seat is None:
            return execute(held, trainer, word=word)
        lines = self._connected_by()
        group = process_groups.open_transfer(
            seat.store_host,
            seat.store_port,
            seat.prefix,
            seat.rank,
            seat.world,
            self._config.elastic.collective_timeout_s,
            meet_timeout_s=LEAVER_SECONDS if trainer is None else self._config.elastic.collective_timeout_s,
            closed=lambda: order.ticket <= self._fenced,
            lines=lines,
        )
        self._cut_if_fenced(lines, order.ticket)
        report = execute(held, trainer, group, word=word)
        closing = process_groups.Closing(group, lines, FILL_SECONDS)
        if trainer is None:
            closing.wait()
        else:
            self._closing = closing  # this rank's shards have arrived and are verified, so it does not wait for the others
        return report

    def _connected_by(self) -> Connections:
        """Register and return connections for one more group, which is about to be formed."""
        lines = Connections()
        with self._change:
            self._lines = (*self._lines, lines)
        return lines

    def _cut_if_fenced(self, lines: Connections, ticket: Ticket) -> None:
        """Cut the connections if a fence came while the group was formed; that fence cut only those open by then."""
        with self._change:
            if ticket <= self._fenced:
                lines.cut()

    def _evaluate(self, trainer: Trainer, ticket: Ticket) -> None:
        loss, samples = trainer.evaluate()
        if samples:
            self._publish(Evaluated(ticket, trainer.completed, loss, samples), None, trainer.completed)

    def _at_boundary(self, trainer: Trainer, record: StepRecord, order: Join) -> dict[str, float]:
        """Do what the step's number and flags, equal on all ranks, make due between two steps. Returns its seconds by activity.

        The checkpoint after the last step, or at a stop, is not made here. For it the controller orders the parked workers to save what
        they hold, which survives the loss of one of them.
        """
        from vescale_ray.workers.messages import BUSY, CHECKPOINT
        from vescale_ray.workers.network.process_groups import describe

        step, steps = record.step, self._config.train.steps
        every = self._config.train.eval_every
        took: dict[str, float] = {}
        began = time.perf_counter()
        if self._config.data.eval_samples and (step == steps or (every and step % every == 0)):
            self._evaluate(trainer, order.ticket)
            took["evaluation"] = time.perf_counter() - began
        often = self._config.checkpoint.every
        due = bool(record.flags & CHECKPOINT) or (isinstance(often, int) and often > 0 and step % often == 0)
        if due and step < steps:
            if record.flags & BUSY:
                if trainer.rank == 0:
                    self._publish(Skipped(order.ticket, step), None, None)
                return took
            attempt, began = f"{order.save_prefix}-s{step}", time.perf_counter()
            try:
                staged = self._snapshots.stage(trainer)
            except Exception as error:  # for example no memory for the copy: this loses the checkpoint, but training goes on
                problem = f"the state could not be copied: {describe(error)}"
                world, generation = trainer.world, trainer.generation
                self._publish(SavedShard(order.ticket, attempt, step, generation, trainer.rank, world, None, problem, 0.0), None, None)
                return took
            took["checkpoint"] = time.perf_counter() - began
            self._writer.submit(staged, order.ticket, attempt, took["checkpoint"])
        return took

    def _give(self, order: Give) -> None:
        from vescale_ray.workers.network import process_groups

        self._enter(order.ticket, WorkerPhase.GIVING)
        fault = None
        try:
            self._move(order, None)
        except BaseException as error:
            fault = WorkerFault(_kind(error), process_groups.describe(error))
        process_groups.dissolve()
        self._settle(WorkerPhase.PARKED, fault)

    def _save(self, order: Save) -> None:
        from vescale_ray.workers.network.process_groups import describe

        ticket, held = self._ticket, {}
        missing = f"worker {self._worker} holds no shard of rank {{}} at step {order.resume.step}"
        try:
            held = {shards.rank: shards for shards in self._snapshots.shards(order.resume.generation, order.resume.step)}
        except Exception as error:  # for example no memory for the checksums: this loses the checkpoint, but not the worker
            missing = f"worker {self._worker} cannot verify its copy of rank {{}}: {describe(error)}"
        for rank in order.ranks:
            if rank in held:
                self._write(held[rank], ticket, order.attempt, order.epoch)
            else:
                resume, problem = order.resume, missing.replace("{}", str(rank))
                self._publish(
                    SavedShard(ticket, order.attempt, resume.step, order.epoch, rank, resume.world, None, problem, 0.0), None, None
                )
        with self._change:
            self._phase = self._resting
            self._change.notify_all()

    def _write(self, shards: Shards, ticket: Ticket, attempt: str, epoch: int) -> None:
        """Write one rank's object and publish the vote, or the reason of a failure. Training goes on either way."""
        from vescale_ray.workers.network.process_groups import describe
        from vescale_ray.workers.resharding.reshard import write_checkpoint_shard

        began = time.monotonic()
        vote = problem = None
        try:
            vote = write_checkpoint_shard(shards, self._config.checkpoint_root, attempt, epoch=epoch)
        except Exception as error:
            problem = describe(error)
        text = None if vote is None else vote.to_json()
        seconds = time.monotonic() - began
        self._publish(SavedShard(ticket, attempt, shards.step, epoch, shards.rank, shards.world, text, problem, seconds), None, None)
        if vote is not None:
            self._writer.wrote(vote, ticket, shards.step)

    def _flags(self, ticket: Ticket) -> int:
        from vescale_ray.workers.messages import BUSY
        from vescale_ray.workers.network.process_groups import GroupFailed

        mine = BUSY if self._writer.busy else 0
        with self._change:
            if self._fenced >= ticket:
                raise GroupFailed(f"generation {ticket} was closed by the controller")
            flags, self._asked = self._asked, 0
            return flags | mine

    def _enter(self, ticket: Ticket, phase: WorkerPhase) -> None:
        with self._change:
            if ticket != self._ticket:
                self._ticket, self._fault, self._asked, self._lines = ticket, None, 0, ()
            self._phase = phase
            self._change.notify_all()

    def _settle(self, phase: WorkerPhase, fault: WorkerFault | None) -> None:
        with self._change:
            self._phase, self._fault, self._asked = phase, fault, 0
            self._change.notify_all()

    def _publish(self, item: Item, phase: WorkerPhase | None, completed: int | None) -> None:
        with self._change:
            self._last_item += 1
            self._items.append((self._last_item, item))
            if phase is not None:
                self._phase = phase
            if completed is not None:
                self._completed = completed
            self._change.notify_all()

    def _forget(self, seen: int) -> None:
        """Drop acknowledged items except the newest vote, which a controller that restarts before its commit needs again."""
        votes = [number for number, item in self._items if isinstance(item, SavedShard)]
        last_vote = votes[-1] if votes else 0
        self._items = deque(entry for entry in self._items if entry[0] > seen or entry[0] == last_vote)


class _BadInput(Exception):
    """The user's input is invalid, which only building the generation showed."""


def _kind(error: BaseException) -> FaultKind:
    from vescale_ray.checkpoint import CheckpointError
    from vescale_ray.errors import BadInput
    from vescale_ray.workers.network.process_groups import GroupFailed, is_collective_error

    if isinstance(error, (_BadInput, BadInput)):
        return FaultKind.INPUT
    if isinstance(error, CheckpointError):
        return FaultKind.DATA
    if isinstance(error, GroupFailed) or is_collective_error(error):
        return FaultKind.PEER
    return FaultKind.OWN


def born(pid: int) -> int:
    """The kernel's start time of a process, in clock ticks since boot; 0 if there is no such process."""
    try:
        # The name in parentheses may contain anything, so count from its end: the start time is field 22.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def _memory() -> int:
    from vescale_ray.workers.trainer import resident_bytes

    return resident_bytes()


def actor_class() -> Any:
    """:class:`Worker` as a Ray actor class. ``max_restarts=0``, since a restarted process would be empty but keep the old name."""
    options: Any = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"control": 4, "lifeline": 2}}
    return ray.remote(**options)(Worker)
