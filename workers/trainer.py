"""One rank's work in one generation: build the sharded model, step, evaluate. Without Ray, and without state that outlives the group.

The batch is cut into *slots*, a fixed number of logical data-parallel positions. The slots are assigned to the ranks, unevenly if need be.
So the global batch, the samples of step ``s`` and each slot's random numbers depend on the step alone, never on the world size::

    slots 0..6, world 3:     rank 0 | slot 0   slot 3   slot 6        three rounds: every rank runs equally many forwards
                             rank 1 | slot 1   slot 4   filler        and backwards, since their collectives must match;
                             rank 2 | slot 2   slot 5   filler        a filler is a minimal input with weight 0

With ``elastic.straggler: relieve`` a slow rank gets fewer slots (:mod:`vescale_ray.workers.monitoring.pace`). Rounds are filled in the same
way::

    slots 0..6, rank 0 slow: rank 0 | slot 0   filler   filler        slots are numbered round by round and, within a
                             rank 1 | slot 1   slot 3   slot 5        round, by rank; samples, losses and deterministic
                             rank 2 | slot 2   slot 4   slot 6        sums follow this order for every assignment

Each round reduces its gradients and adds them to the gradient shards. With ``train.zero_stage: 1`` they add up unsharded instead, and the
last round reduces them. A filler adds zeros. The loss of a slot is divided by the *global* number of targets. So the plain sum over rounds
and ranks is the gradient of the mean, for every assignment.

With ``elastic.deterministic`` every round is reduced at every stage. The sum runs from slot to slot: ((g0 + g1) + g2) + ..., at every world
size. Everything else is bitwise equal anyway, since no operation combines elements of different ranks. The gradient norm is summed exactly,
and a matrix that an optimizer needs whole is whole on one rank.

A step writes parameters and optimizer states only after its last collective. A rank that fails before it still has step ``s``. A rank that
passes it has complete gradients of ``s + 1``. This also holds for Muon, whose optimizer step communicates.

On an accelerator the host enqueues forward, backward and clipping without waiting for the device. It then waits once, in
:meth:`Trainer._fetch`, for the few numbers that the ranks exchange. The exact norm of ``elastic.deterministic`` waits for its sums, too.
With ``train.expert_parallel`` it waits once per layer and pass for the numbers of rows that the ranks exchange.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vescale_ray.communication import wait_notes
from vescale_ray.data.loading_figures import figures_of
from vescale_ray.data.loss_units import bits_per_byte
from vescale_ray.lr_schedule import lr_at
from vescale_ray.models.lora import is_adapter
from vescale_ray.workers.building.initial_values import fill, load_base, seed_of
from vescale_ray.workers.building.model_building import Blank, build_model, build_sharded, communicates
from vescale_ray.workers.building.unit_forward import kept_results
from vescale_ray.workers.messages import StepRecord, Usage
from vescale_ray.workers.monitoring.meter import Meter
from vescale_ray.workers.monitoring.pace import Pace, deal
from vescale_ray.workers.network.rank_mesh import RankMeshes, rank_meshes
from vescale_ray.workers.resharding.shards import Views, formats_of
from vescale_ray.workers.steps.batch_losses import BatchLosses
from vescale_ray.workers.steps.gradient_clipping import clip
from vescale_ray.workers.steps.slot_batches import SlotBatches, targets_in
from vescale_ray.workers.steps.step_exchange import RankStep, Seconds, exchange

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig
    from vescale_ray.data.dataset import Dataset


class Trainer:
    """One rank of one generation, on the default process group.

    The model is built on the meta device, sharded, and given storage and an optimizer whose states all exist. Its values come from
    :meth:`initialize` or :mod:`vescale_ray.workers.resharding.reshard`. :meth:`close` it before the group is dissolved.

    Args:
        config: configuration of the run, the same on every rank.
        rank, world, generation: rank of this worker, and size and number of its generation.
        device: device that computes; it also has the shards, unless ``train.offload`` keeps them in host memory.
        dataset: the samples, the same on every rank.
        blank: unsharded model for this trainer, built ahead; None builds it now.
        filled: whether all values will come from elsewhere, so that optimizer states stay uninitialised. Not with :meth:`initialize`.
        eval_sets: evaluation sets by name, the same on every rank.
        meshes: meshes of the ranks (:func:`vescale_ray.workers.network.rank_mesh.rank_meshes`); None makes them.

    Attributes:
        grid: arrangement of the ranks in replicas and shards.
        completed: number of completed steps, which is also the next step's index.
        model, optimizer: model and optimizer of this rank; the parameters are ``RaggedDTensor``.
        pace: watches the ranks' speed and assigns the slots.
        beat: heartbeat callback; called several times in a step and in an evaluation, and while values are loaded.
        usage: time and memory that the last step took on this rank.
        take_problems: returns the problems of ``train.compile`` since its last call (:meth:`UnitCompiler.take_problems`).
        views: cached views of the model's and the optimizer's tensors, for export.

    Raises:
        ValueError: there are more ranks than slots, no module matches ``model.units``, or the model cannot be trained
            (:func:`vescale_ray.workers.building.model_building.build_model`).
    """

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        world: int,
        generation: int,
        device: torch.device | str,
        dataset: Dataset,
        blank: Blank | None = None,
        *,
        filled: bool = False,
        eval_sets: Mapping[str, Dataset] | None = None,
        meshes: RankMeshes | None = None,
    ) -> None:
        if world > config.train.slots:
            raise ValueError(f"{world} workers for train.slots = {config.train.slots}: use at most as many workers as slots")
        self.config, self.rank, self.world, self.generation = config, rank, world, generation
        self.grid, self.device = config.grid(world), torch.device(device)
        self.dataset, self.eval_sets = dataset, eval_sets or {}
        self.completed = 0
        self._order = dataset.order(config.run.seed)
        torch.set_num_threads(config.train.threads)
        blank = blank or Blank(config)
        self.take_problems = blank.compiler.take_problems
        meshes = meshes or rank_meshes(self.grid, self.device.type)
        self.model, self.optimizer = build_sharded(config, self.device, meshes, blank, filled=filled)
        named = self.model.named_parameters()
        self.parameters = tuple((name, p) for name, p in named if config.model.lora is None or is_adapter(name))
        """Names and sharded parameters of the state, listed once: a rescale needs them several times in its pause."""
        self.base: str | None = None
        """Hash of the weights of ``model.lora``'s frozen base, which is no part of the state."""
        self.formats = formats_of(self.parameters, self.optimizer)
        """Format of the optimizer states, by parameter."""
        self.pace = Pace(config.train.slots, world, relieve=config.elastic.straggler == "relieve")
        self.beat: Callable[[], None] = lambda: None
        self._base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.usage = Usage()
        self.views = Views()
        # A rank without a slot in a round must still call the units, on the smallest input that the model takes. Compiled units would be
        # compiled for that shape, too, in the first step after a rescale; they get the shape of a slot.
        shortest = int(getattr(self.model, "shortest_input", config.data.seq_len))
        filler = (config.train.slot_batch, config.data.seq_len) if config.train.compile else (1, shortest)
        self._filler = (torch.zeros(filler, dtype=torch.int64),) * 2
        self._losses = BatchLosses(config, self.model, dataset, self.device)
        self._meter = Meter(config, self.model, self.optimizer, self.device)
        self._proves = self.device.type == "cuda"
        self._communicates = communicates(self.optimizer)

    @property
    def consumed(self) -> int:
        """Samples consumed so far: the stream's whole state."""
        return self.completed * self.config.train.slots * self.config.train.slot_batch

    @torch.no_grad()
    def initialize(self) -> None:
        """Fill the parameters with the run's initial values, the same at every world size (``initial_values``). Not a collective."""
        fill(self.config, self.model, lambda: build_model(self.config), self.beat)
        self.load_base()

    def load_base(self) -> None:
        """Fill the frozen base of ``model.lora`` (:func:`vescale_ray.workers.building.initial_values.load_base`). Not a collective."""
        self.base = load_base(self.config, self.model, self.base, self.beat)

    def read_ahead(self) -> None:
        """Begin to read the samples of the next steps. Returns at once."""
        self.dataset.read_ahead(self._order, self.consumed)

    def step(self, flags: int = 0, settle: Callable[[], None] | None = None) -> StepRecord:
        """Run one optimizer step on the global batch. ``flags`` (0 <= flags < 2**62) are ORed over the ranks.

        ``settle`` is called after backward, before the last collective. When the step returns, every rank has finished its ``settle``
        (:meth:`vescale_ray.workers.resharding.memory_snapshots.Snapshots.settle`).
        """
        begin = time.perf_counter()
        meter = self._meter
        meter.begin()
        self.read_ahead()
        train, index = self.config.train, self.completed
        tokens = train.slots * train.slot_batch * self.config.data.seq_len
        table = deal(self.pace.view.shares)
        computed = self._compute(index, tokens, table)
        loop = time.perf_counter() - begin
        meter.computed(loop)
        fetched = self._fetch(computed.nlls, clip(self.config, self.model, self.optimizer))
        # the norm is a sum over all ranks, so all ranks are at the same point here, but not after settle
        together = time.perf_counter() - begin
        if settle is not None:
            with wait_notes.counted("peer_copy"):
                settle()
        seconds = Seconds(time.perf_counter() - begin, loop, computed.per_slot_s, together)
        told = exchange(RankStep(flags, fetched.nlls, computed.ids, seconds), table, train.slot_batch)
        self.beat()
        lr = lr_at(index, train)
        for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = lr * (base / self.config.train.lr)
        meter.stepping()
        self.optimizer.step()
        if self._proves and self._communicates:
            self._check(float(self._proof()))
        meter.stepped()
        self.optimizer.zero_grad(set_to_none=True)
        self.completed = index + 1
        record = StepRecord(
            index=index,
            loss=sum(told.nlls) / computed.divisor,
            tokens=tokens,
            ids=told.ids,
            grad_norm=fetched.norm,
            lr=lr,
            seconds=time.perf_counter() - begin,
            flags=told.flags,
            world=self.world,
            generation=self.generation,
            memory=told.memory,
            slot_seconds=told.seconds.per_slot,
            pace=self.pace.stepped(index, told.seconds.per_slot, max(told.seconds.loop), max(told.seconds.whole)),
            clipped=fetched.clipped,
            skipped=meter.skipped,
            alone_seconds=told.seconds.together[self.rank] - min(told.seconds.together),
        )
        self.usage = replace(meter.end(record.seconds), loading=figures_of(self.dataset))
        return record

    def evaluate(self) -> tuple[float, int]:
        """Return the mean nats per token on the held-out samples, and their number; ``(nan, 0)`` if none are held out. Collective.

        It uses the same ``data.eval_samples`` windows, evenly spaced, at every call and world size.
        """
        return self._mean_loss(self.dataset.heldout_batch, self.dataset.heldout_samples)

    def evaluate_sets(self) -> dict[str, tuple[float, int, float | None]]:
        """Return the loss and number of samples of each evaluation set, as :meth:`evaluate`, and bits per byte of its text, if that is
        known."""
        found = {}
        for name, data in self.eval_sets.items():
            loss, samples = self._mean_loss(data.batch, data.num_samples)
            found[name] = loss, samples, bits_per_byte(loss, data.bytes_per_token)
        return found

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block, forwards have no gradients and no dropout. Afterwards the parameters are sharded again. Collective.

        Raises:
            RuntimeError: a collective was aborted.
        """
        from vescale_ray.fsdp import FSDPModule

        self.model.eval()
        with torch.no_grad():
            yield
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without backward leaves the root unsharded
        if self._proves:
            self._check(float(self._proof()))

    def logits(self, tokens: Tensor | None) -> Tensor:
        """Logits of a batch of tokens ``(B, S)``; None: a minimal one, for a rank that only takes part in the collectives."""
        output = self._losses.output(self._filler[0] if tokens is None else tokens)
        return output if isinstance(output, Tensor) else output.logits

    def _mean_loss(self, read: Callable[[Any], tuple[Tensor, Tensor]], available: int) -> tuple[float, int]:
        """Return the mean nats per token on ``data.eval_samples`` of the ``available`` samples of ``read``, and their number."""
        count = min(self.config.data.eval_samples, available)
        if count == 0:
            return float("nan"), 0
        windows = np.arange(count, dtype=np.int64) * available // count
        batch = self.config.train.slot_batch
        mine = [windows[i : i + batch] for i in range(0, count, batch)]
        share = range(self.rank, len(mine), self.world)
        total, counted = torch.zeros(1, dtype=torch.float64, device=self.device), 0
        with self.evaluating():
            for turn in range(-(-len(mine) // self.world)):
                inputs, targets = read(mine[share[turn]]) if turn < len(share) else self._filler
                nll, _ = self._losses(inputs, targets)
                if turn < len(share):
                    total += nll.double()
                    counted += targets_in(targets)
                self.beat()
        sums = torch.tensor([float(total), counted], dtype=torch.float64)
        dist.all_reduce(sums)
        return float(sums[0]) / float(sums[1]) if sums[1] else float("nan"), count

    def close(self) -> None:
        """Release model, optimizer and mesh, so that buffers are freed and a dissolved group's sockets can close. Idempotent."""
        self.__dict__.pop("model", None)
        self.__dict__.pop("parameters", None)
        self.__dict__.pop("optimizer", None)
        self.__dict__.pop("_losses", None)
        self.__dict__.pop("_meter", None)
        self.__dict__.pop("views", None)

    def _compute(self, index: int, tokens: int, table: tuple[tuple[int, ...], ...]) -> _Computed:
        """Run forward and backward of this rank's slots. After it, the gradients are reduced over the ranks.

        Args:
            tokens: tokens of the global batch.
            table: each rank's slots.
        """
        mine, rounds, ordered = table[self.rank], max(map(len, table)), self.config.elastic.deterministic
        nlls: list[Tensor] = []
        own: list[float] = []
        began = time.perf_counter()
        batches = SlotBatches(self.dataset, [self._slot_ids(index, slot) for slot in mine], tokens)
        self._meter.data_s += time.perf_counter() - began
        self.beat()
        batches.agree()
        for turn in range(rounds):
            last = turn == rounds - 1
            self.model.set_requires_gradient_sync(last or ordered)
            self.model.set_is_last_backward(last or ordered)
            is_slot = turn < len(mine)
            self.model.set_contributes(is_slot)
            turned, waited = time.perf_counter(), self._waited_s()
            inputs, targets = batches.batch(turn) if is_slot else self._filler
            self._meter.data_s += time.perf_counter() - turned
            self._seed_generators(seed_of(self.config.run.seed, index, mine[turn] if is_slot else -1))
            nll, trained = self._losses(inputs, targets)
            self.beat()
            with kept_results():
                (trained / batches.divisor if is_slot else trained * 0.0).backward()
            self.beat()
            if is_slot:
                nlls.append(nll.detach())
                own.append(time.perf_counter() - turned - (self._waited_s() - waited))
        # The last round may include the reduction of all gradients, so it is not comparable; skip it if there are other rounds.
        timed = own[: rounds - 1] or own
        fed = [int(i) for ids in batches.ids for i in ids]
        return _Computed(nlls, fed, batches.divisor, sum(timed) / len(timed) if self.device.type == "cpu" else 0.0)

    def _waited_s(self) -> float:
        """Return the seconds that forward and backward have waited for other ranks so far, those of parallel experts included."""
        waited: float = self.model.waited_s
        return waited + wait_notes.counted_s().get("all_to_all", 0.0)

    def _slot_ids(self, index: int, slot: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        train = self.config.train
        return self._order.ids((index * train.slots + slot) * train.slot_batch, train.slot_batch)

    def _seed_generators(self, seed: int) -> None:
        """Seed as ``torch.manual_seed`` does. Without accelerators, that function spends 0.7 ms to find that there is none to seed."""
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _proof(self) -> Tensor:
        """Return the number of ranks, summed up by an all-reduce. Its value shows whether all collectives before it were completed.

        If a fence, or torch after an error, aborts an NCCL collective, its waiters see no error and its output is invalid. A communicator
        runs collectives in order. So if this later all-reduce gives the right sum, no earlier collective was aborted.
        """
        word = torch.ones(1, device=self.device)
        dist.all_reduce(word)
        return word

    def _check(self, ranks: float) -> None:
        """Check the value of :meth:`_proof`.

        Raises:
            RuntimeError: a collective was aborted.
        """
        if ranks != self.world:
            raise RuntimeError(f"NCCL: a collective of step {self.completed + 1} was aborted: {ranks:g} of {self.world} ranks contributed")

    def _fetch(self, nlls: Sequence[Tensor], norms: Sequence[Tensor]) -> _Fetched:
        """Copy the losses of this rank's slots and the gradient norms to the host. No other call of a step waits for the device.

        Raises:
            RuntimeError: a collective of this step was aborted.
        """
        proofs = [self._proof()] if self._proves else []
        values = torch.stack([one.detach().to(self.device).reshape(()).double() for one in (*proofs, *norms, *nlls)]).tolist()
        if proofs:
            self._check(values.pop(0))
        clipped = values[0] > (self.config.train.grad_clip or float("inf"))
        norm = math.hypot(*values[: len(norms)]) if len(norms) > 1 else values[0]
        return _Fetched(tuple(values[len(norms) :]), norm, clipped)


@dataclass(frozen=True)
class _Computed:
    """This rank's slots of a step: their losses and sample ids, the number of targets that divides the losses, and its own mean seconds
    per slot (0 on an accelerator)."""

    nlls: list[Tensor]
    ids: list[int]
    divisor: int
    per_slot_s: float


@dataclass(frozen=True)
class _Fetched:
    """Results of a step that were computed on the device: losses of this rank's slots, the norm of the whole gradient before clipping, and
    whether it was clipped."""

    nlls: tuple[float, ...]
    norm: float
    clipped: bool
