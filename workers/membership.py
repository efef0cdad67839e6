"""A member's part in one generation: form the group, build and fill a trainer, step, leave. Does not import Ray.

The training thread alone runs this code. When the group breaks, the worker dissolves it at once, because the other survivors wait for its
sockets to close (``process_groups``). The controller decides whether the worker goes on, with which others, and from which step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vescale_ray import checkpoint
from vescale_ray.communication import wait_notes
from vescale_ray.data.loading_figures import take_errors
from vescale_ray.errors import BadInput, one_line
from vescale_ray.workers.building.model_building import Blank
from vescale_ray.workers.building.model_factory import Beating
from vescale_ray.workers.messages import (
    BUSY,
    CHECKPOINT,
    RESCALE,
    STOP,
    Evaluated,
    Filled,
    Happened,
    Join,
    Noticed,
    Origin,
    Outlined,
    SavedShard,
    Stepped,
    WorkerPhase,
)
from vescale_ray.workers.monitoring.profiling import WRITE_S
from vescale_ray.workers.network import process_groups
from vescale_ray.workers.network.process_groups import Closing, GroupFailed
from vescale_ray.workers.network.rank_mesh import RankMeshes, rank_meshes
from vescale_ray.workers.resharding.reshard import restore_from_checkpoint
from vescale_ray.workers.resharding.shard_layouts import outline_of, packed
from vescale_ray.workers.resharding.shard_move import FILL_SECONDS, move
from vescale_ray.workers.trainer import Trainer
from vescale_ray.workers.worker_fault import fault_of

if TYPE_CHECKING:
    import torch

    from vescale_ray.config import RunConfig
    from vescale_ray.data.dataset import Dataset
    from vescale_ray.workers.building.model_building import NextModel
    from vescale_ray.workers.messages import StepRecord
    from vescale_ray.workers.monitoring.heartbeat import Heartbeat
    from vescale_ray.workers.monitoring.profiling import StepProfiler
    from vescale_ray.workers.resharding.memory_snapshots import Snapshots
    from vescale_ray.workers.resharding.reshard import ReshardReport
    from vescale_ray.workers.saving import Writer
    from vescale_ray.workers.steps.completing import Completer
    from vescale_ray.workers.worker_state import WorkerState


@dataclass(frozen=True)
class Resources:
    """Objects of a warm worker process that outlive its generations.

    Attributes:
        heartbeat: heartbeat of the training thread.
        next_model: builder of the next generation's unsharded model.
        eval_sets: evaluation sets by name.
    """

    config: RunConfig
    device: torch.device
    dataset: Dataset
    snapshots: Snapshots
    writer: Writer
    heartbeat: Heartbeat
    next_model: NextModel
    eval_sets: Mapping[str, Dataset]
    profiler: StepProfiler
    completer: Completer


class Membership:
    """A worker's membership in one generation. :meth:`run` does everything.

    Args:
        order: the generation, and this worker's seat in it.
        resources: what the worker has for all generations.
        state: receives phases and items, and tells of fences and requested flags.
    """

    def __init__(self, order: Join, resources: Resources, state: WorkerState) -> None:
        self._order, self._resources, self._state = order, resources, state
        self._config, self._snapshots, self._heartbeat = resources.config, resources.snapshots, resources.heartbeat
        self._closing: Closing | None = None
        """Barrier of the move that this generation began with, until every rank has passed it."""

    def run(self) -> None:
        """Join the generation, train, and leave. Never raises: the state gets the reason of an early end."""
        state, snapshots, writer = self._state, self._snapshots, self._resources.writer
        # An unfinished write would be a checkpoint of a generation that is over.
        writer.abandon()
        wait_notes.end()  # left over from a failed wait of the last generation
        state.enter(self._order.ticket, WorkerPhase.FORMING)
        phase, fault, found = WorkerPhase.PARKED, None, None
        try:
            phase = self.train()
        except BaseException as error:
            found = process_groups.trace_of(error)
            fault = fault_of(error)
        with self._heartbeat.long_work():
            snapshots.copied()
        snapshots.abandon()
        state.abandon_connections()
        closing, self._closing = self._closing, None
        if closing is not None:
            closing.give_up()
        process_groups.dissolve()
        del closing  # may wait for a gloo thread, so drop it after the group, whose closing the other ranks wait for
        if fault is not None:
            assert found is not None
            fault = replace(fault, trace=process_groups.tell(found))
            writer.abandon()
            with self._heartbeat.long_work():  # the copies may be tens of gigabytes, and are all that is left of lost ranks
                snapshots.verify()
        state.settle(phase, fault)

    def train(self) -> WorkerPhase:
        """Train from forming the group to the last step or a stop, and park the shards. Returns the phase afterwards.

        Raises:
            GroupFailed, BadInput, CheckpointError, ..: the generation ended early. The group is still there.
        """
        begin = time.perf_counter()
        meshes = self._form()
        formed = time.perf_counter()
        trainer: Trainer | None = None
        try:
            with process_groups.collectives(f"generation {self._order.ticket}"):
                trainer = self._build(meshes)
                del meshes
                self._fill_all(trainer, {"form": formed - begin, "build": time.perf_counter() - formed})
                if self._order.origin is not Origin.MEMORY:
                    self._outline(trainer)
                if self._order.evaluate:
                    self._evaluate(trainer)
                self._step_on(trainer)
                self.settle_copies()
                self._snapshots.park(trainer)
                self._resources.profiler.finish(WRITE_S)
            return WorkerPhase.FINISHED if trainer.completed >= self._config.train.steps else WorkerPhase.PARKED
        finally:
            if trainer is not None:
                trainer.close()

    def fill(self, trainer: Trainer) -> tuple[ReshardReport | None, int]:
        """Load the new trainer's values. Return the report of the move, if shards were moved, and the bytes read from a checkpoint."""
        order, moved, read_bytes = self._order, None, 0
        if order.origin is Origin.MEMORY:
            moved, self._closing = move(order, trainer, self._snapshots, self._state, self._config.elastic.collective_timeout_s)
        with self._unless_fenced(trainer):
            if order.origin is Origin.FRESH:
                trainer.initialize()
                return None, 0
            if order.origin is Origin.CHECKPOINT:
                try:
                    read_bytes = restore_from_checkpoint(trainer, checkpoint.open(self._config.checkpoint_root, order.commit))
                except (ValueError, checkpoint.CheckpointMismatch) as error:
                    raise BadInput(one_line(error)) from None
            trainer.load_base()
        return moved, read_bytes

    def between_steps(self, trainer: Trainer, record: StepRecord) -> dict[str, float]:
        """Do what the step's number and flags, equal on all ranks, make due between two steps. Returns its seconds by activity.

        The checkpoint after the last step, or at a stop, is not made here. For it the controller orders the parked workers to save what
        they hold, which survives the loss of one of them.
        """
        step, steps = record.step, self._config.train.steps
        every = self._config.train.eval_every
        took: dict[str, float] = {}
        began = time.perf_counter()
        completer = self._resources.completer
        if completer.is_due(step):
            made = completer.complete(trainer)
            if trainer.rank == 0:
                self._state.publish(Happened(self._order.ticket, "completions", {"step": step, "completions": made}))
            took["evaluation"] = time.perf_counter() - began
        if self._config.data.eval_samples and (step == steps or (every and step % every == 0)):
            self._evaluate(trainer)
            took["evaluation"] = time.perf_counter() - began
        often = self._config.checkpoint.every
        due = bool(record.flags & CHECKPOINT) or (isinstance(often, int) and often > 0 and step % often == 0)
        if due and step < steps:
            if record.flags & BUSY:
                if trainer.rank == 0:
                    about = {"step": step, "reason": "some rank still writes the ones before"}
                    self._state.publish(Happened(self._order.ticket, "checkpoint_skipped", about))
            else:
                self._stage(trainer, step, took)
        return took

    def settle_copies(self) -> None:
        """Wait for the last copy, here and at the buddy. This rank's own copy may take longer than a step; a buddy may not."""
        with self._heartbeat.long_work():
            self._snapshots.copied()
        self._snapshots.settle()

    def _form(self) -> RankMeshes:
        order, seat, device = self._order, self._order.seat, self._resources.device.type
        timeout_s = self._config.elastic.collective_timeout_s
        with self._state.connecting(order.ticket) as connections:
            process_groups.form(
                seat.store_host,
                seat.store_port,
                seat.prefix,
                seat.rank,
                seat.world,
                "nccl" if device == "cuda" else "gloo",
                timeout_s,
                closed=lambda: self._state.is_fenced(order.ticket),
                lines=connections,
            )
            return rank_meshes(self._config.grid(seat.world), device, timeout_s, connections)

    def _build(self, meshes: RankMeshes) -> Trainer:
        resources, order = self._resources, self._order
        try:
            blank = resources.next_model.take()
            if blank is None:
                with Beating(self._heartbeat.beat):  # a factory may take minutes
                    blank = Blank(self._config)
            trainer = Trainer(
                self._config,
                order.seat.rank,
                order.seat.world,
                order.ticket.generation,
                resources.device,
                resources.dataset,
                blank,
                filled=order.origin is not Origin.FRESH,
                eval_sets=resources.eval_sets,
                meshes=meshes,
            )
        except ValueError as error:
            raise BadInput(one_line(error)) from None
        trainer.beat = self._heartbeat.beat
        return trainer

    def _fill_all(self, trainer: Trainer, phases: Mapping[str, float]) -> None:
        """Fill the trainers of all ranks, take the first copies, and report it. ``phases``: seconds of the phases before."""
        order, began = self._order, time.perf_counter()
        moved, read_bytes = self.fill(trainer)
        trainer.read_ahead()  # while the other ranks load
        # Ranks may finish loading minutes apart. In a step's collective such a delay would count as a lost rank.
        process_groups.barrier(FILL_SECONDS)
        # The new generation's ranks come first among the participants of the move.
        words = moved.words[: order.seat.world] if moved is not None else None
        self._snapshots.begin(trainer, order.resume.generation if order.resume is not None else None, words)
        self._state.publish(
            Filled(
                order.ticket,
                trainer.completed,
                order.origin,
                {**phases, "sync": time.perf_counter() - began},
                moved.moved_bytes if moved else 0,
                moved.lower_bound if moved else 0,
                read_bytes,
            ),
            WorkerPhase.TRAINING,
            trainer.completed,
        )

    @contextmanager
    def _unless_fenced(self, trainer: Trainer) -> Iterator[None]:
        """At each heartbeat of the block, leave if the generation is fenced. The block takes minutes and waits for no rank.

        A step's heartbeats are not used for this, since some come after its last collective.
        """
        beat = trainer.beat

        def beat_or_leave() -> None:
            beat()
            if self._state.is_fenced(self._order.ticket):
                raise GroupFailed(f"generation {self._order.ticket} ended while its values were still being loaded")

        trainer.beat = beat_or_leave
        try:
            yield
        finally:
            trainer.beat = beat

    def _step_on(self, trainer: Trainer) -> None:
        """Step until the run ends or the flags of a step tell all ranks to stop."""
        config, profiler, between = self._config, self._resources.profiler, dict[str, float]()
        while trainer.completed < config.train.steps:
            with profiler.step(trainer.completed + 1, trainer.rank, self._order.ticket):
                record = trainer.step(self._flags(), self.settle_copies)
            if self._closing is not None and self._closing.is_over():
                self._closing = None
            usage = replace(trainer.usage, memory={**trainer.usage.memory, "copies": self._snapshots.nbytes})
            self._state.publish(Stepped(self._order.ticket, record, time.time(), between, usage), completed=record.step)
            for problem in (*trainer.take_problems(), *take_errors(trainer.dataset)):
                self._state.publish(Noticed(self._order.ticket, problem))
            self._outline(trainer)  # a joiner reports its outline only now; earlier the other ranks would have waited for it
            # After the last step, and at a stop, the copies stay: the last checkpoint is made from them.
            rescale = bool(record.flags & RESCALE) and not record.flags & STOP and record.step < config.train.steps
            with self._heartbeat.long_work():
                before = time.perf_counter()
                self._snapshots.after_step(trainer, rescale=rescale)
                between = {"peer_copy": time.perf_counter() - before, **self.between_steps(trainer, record)}
            if record.flags & (STOP | RESCALE):
                profiler.end()
                break

    def _flags(self) -> int:
        """Return this rank's flags for the next step."""
        mine = BUSY if self._resources.writer.busy else 0
        if self._state.is_fenced(self._order.ticket):
            raise GroupFailed(f"generation {self._order.ticket} was closed by the controller")
        return self._state.take_flags() | mine

    def _outline(self, trainer: Trainer) -> None:
        if self._state.outlined is None:
            self._state.outline(Outlined(packed(outline_of(trainer))))  # the same at every world size

    def _evaluate(self, trainer: Trainer) -> None:
        loss, samples = trainer.evaluate()
        sets = trainer.evaluate_sets()
        if samples or sets:
            self._state.publish(Evaluated(self._order.ticket, trainer.completed, loss, samples, sets), completed=trainer.completed)

    def _stage(self, trainer: Trainer, step: int, took: dict[str, float]) -> None:
        """Begin to write a checkpoint of this rank's shard, or publish why it failed. Adds the seconds of the copy to ``took``. Of the
        replicas of a shard, only one writes it."""
        ticket, attempt, began = self._order.ticket, f"{self._order.save_prefix}-s{step}", time.perf_counter()
        grid, shard = trainer.grid, trainer.grid.shard_of(trainer.rank)
        if grid.writer_of(shard) != trainer.rank:
            return
        try:
            staged = self._snapshots.stage(trainer)
        except Exception as error:  # for example no memory for the copy: this loses the checkpoint, but training goes on
            problem = f"the state could not be copied: {process_groups.describe(error)}"
            self._state.publish(SavedShard(ticket, attempt, step, trainer.generation, shard, grid.shards, None, problem, 0.0))
        else:
            took["checkpoint"] = time.perf_counter() - began
            self._resources.writer.submit(staged, ticket, attempt, took["checkpoint"])
