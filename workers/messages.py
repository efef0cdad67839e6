"""Messages between the controller and a worker: frozen, small, picklable values. Importing this module imports neither Ray nor torch.

Every order carries a :class:`Ticket`. A worker takes an order only if its ticket is newer than all earlier ones. Therefore an order of an
older generation cannot start, stop or write anything. Every report and item names its ticket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vescale_ray.workers.monitoring.pace import View
    from vescale_ray.workers.resharding.held_state import HeldState, Resume

STOP, RESCALE, CHECKPOINT = 1, 2, 4
"""Flag bits that a controller requests. ``Trainer.step`` only ORs them over the ranks."""
BUSY = 8
"""Flag bit of a rank that cannot stage another checkpoint. If any rank sets it, no checkpoint begins at the next boundary."""


@dataclass(frozen=True, order=True)
class Ticket:
    """Identifies one attempt to form a generation.

    Attributes:
        generation: goes up with every new set of workers and every new attempt; never reused.
        attempt: number of attempts since the last completed step, from 1.
    """

    generation: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.attempt}"


NO_TICKET = Ticket(0, 0)
"""Ticket of a worker that has not been in any generation."""


class WorkerPhase(StrEnum):
    """State of a worker's training thread.

    ======== ===================================================== =======================
    WARMING  imports, opens the data set, creates its CUDA context   then IDLE
    IDLE     has never been in a generation                        waits for an order
    FORMING  joins its group, builds its trainer, loads its state  then TRAINING or PARKED
    TRAINING steps and evaluates                                   then PARKED or FINISHED
    SAVING   parked, writes a checkpoint of what it holds          then the phase before
    PARKED   out of its group, which is destroyed; keeps shards    waits for an order
    FINISHED as PARKED, after the last step of the run             waits for an order
    GIVING   sends its shards to the ranks that stay, as a leaver  then PARKED
    ======== ===================================================== =======================
    """

    WARMING = "warming"
    IDLE = "idle"
    FORMING = "forming"
    TRAINING = "training"
    SAVING = "saving"
    PARKED = "parked"
    FINISHED = "finished"
    GIVING = "giving"


class Origin(StrEnum):
    """Source of a generation's state."""

    FRESH = "fresh"
    CHECKPOINT = "checkpoint"
    MEMORY = "memory"


class FaultKind(StrEnum):
    """Cause of a generation's early end."""

    PEER = "peer"
    """A collective failed: another worker is gone, hung or slow."""
    OWN = "own"
    """This worker raised an exception, such as a bug or lack of memory."""
    DATA = "data"
    """The checkpoint to read is damaged; an older one may work."""
    INPUT = "input"
    """The user's input is invalid, so another attempt would fail too."""
    NUMBERS = "numbers"
    """A weight that is gathered in FP8 holds Inf or NaN, and so do the states from which another attempt would begin."""


@dataclass(frozen=True)
class WorkerFault:
    """Reason why a worker left its generation. ``text`` is one line, ``trace`` the traceback."""

    kind: FaultKind
    text: str
    trace: str = ""


@dataclass(frozen=True)
class WorkerInfo:
    """Identity of a warm worker.

    Attributes:
        born: the kernel's start time of the process, which tells it from a later process with the same id.
        pod: host name of the worker; in Kubernetes, its pod's name.
        devices: the GPUs that Ray gave it, as in ``CUDA_VISIBLE_DEVICES``; empty without GPUs.
    """

    worker: str
    pid: int
    born: int
    node: str
    host: str
    device: str
    warm_seconds: float
    pod: str = ""
    stacks: int = -1
    """File descriptor from which another process reads this worker's stacks (``heartbeat.offer_stacks``); -1 if there is none."""
    thread: int = 0
    """Operating system's id of the training thread."""
    address: str = ""
    """``host:port`` of the worker's probe port, on the network of its process groups (:mod:`vescale_ray.workers.network.reachability`);
    empty if it has none."""
    devices: str = ""


@dataclass(frozen=True)
class Seat:
    """One rank's place in a process group: the store's address, the store prefix, the rank and the world size."""

    store_host: str
    store_port: int
    prefix: str
    rank: int
    world: int


@dataclass(frozen=True)
class Join:
    """Order: form the generation, load the state, and train until the run ends or the worker is told to leave.

    Attributes:
        seat: place in the generation's group.
        transfer: place in the transfer group, if workers outside the generation must give shards; numbered as in ``seat``.
        commit: name of the checkpoint to read, for ``Origin.CHECKPOINT``.
        resume: state that the workers hold and resume from, for ``Origin.MEMORY``.
        evaluate: whether to evaluate before the first step.
        save_prefix: prefix of the ids of periodic checkpoints; the same on every rank.
    """

    ticket: Ticket
    seat: Seat
    origin: Origin
    save_prefix: str
    transfer: Seat | None = None
    commit: str | None = None
    resume: Resume | None = None
    evaluate: bool = False


@dataclass(frozen=True)
class Give:
    """Order to a worker outside the new generation: give the shards of ``resume`` that it holds."""

    ticket: Ticket
    transfer: Seat
    resume: Resume


@dataclass(frozen=True)
class Save:
    """Order: write the held shards of the old ranks ``ranks`` of the state ``resume`` as checkpoint attempt ``attempt``."""

    ticket: Ticket
    resume: Resume
    ranks: tuple[int, ...]
    attempt: str
    epoch: int


Order = Join | Give | Save


@dataclass(frozen=True)
class Usage:
    """Time and memory that one worker used in a step. Monitoring alone reads it. It is small, since every worker sends one per step.

    Attributes:
        waited: seconds for which the training thread waited for other ranks, by cause: ``all_gather``, ``reduce_scatter``, ``all_reduce``,
            ``all_to_all`` (of Muon), ``peer_copy`` (exchange of the copies of the step before), ``step_end`` (the step's last collective).
        phases: all seconds of the step, by activity: ``data``, ``forward_backward``, ``comm`` (the sum of ``waited``), ``optimizer``,
            ``other``.
        memory: bytes by kind: the kinds of ``fsdp.held_bytes``, ``optimizer`` (states) and ``copies`` (of shards, for peers and
            checkpoints).
        device_memory: bytes of the accelerator by kind: ``allocated``, ``reserved``, ``peak_allocated``, ``capacity``. Empty on the CPU.
        alloc_retries: times that the accelerator's allocator freed its cache and tried again.
        token_flops: floating-point operations of the model per token, forward and backward; 0 if unknown.
        peak_flops: peak operations per second of this worker's device; None if unknown.
        loading: figures of the reading of data (:func:`vescale_ray.data.loading_figures.figures_of`).
    """

    waited: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    device_memory: Mapping[str, int] = field(default_factory=dict)
    alloc_retries: int = 0
    token_flops: int = 0
    peak_flops: float | None = None
    loading: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRecord:
    """Result of one step over all ranks. Only ``seconds`` and ``alone_seconds`` differ between ranks, so that any survivor can report the
    step.

    Attributes:
        index: 0-based step; ``step`` is the number of completed steps after it.
        loss: mean negative log-likelihood per target, nats, over the global batch; 0 if no target counts.
        tokens: tokens of the global batch.
        ids: ids of the samples, in slot order.
        grad_norm: norm of the whole gradient before clipping.
        seconds: wall time of the step on this rank.
        flags: OR of the ranks' flags.
        clipped: whether the gradient was larger than ``train.grad_clip`` and was scaled.
        skipped: whether the optimizer skipped the step because gradients were not finite.
        memory: resident bytes of each rank's process.
        slot_seconds: per rank, mean seconds of its own per slot, without waits for others; 0 where it is not measured (on an accelerator).
        pace: which ranks are slow, and how many slots each rank has in the next step.
        alone_seconds: part of this rank's ``seconds`` before the last rank began the step. In a generation's first step each rank begins as
            soon as it has its state. Hosts' clocks may differ. So the value compares the ranks' times from their own begin to the gradient
            norm, which all ranks reach together.
    """

    index: int
    loss: float
    tokens: int
    ids: tuple[int, ...]
    grad_norm: float
    lr: float
    seconds: float
    flags: int
    world: int
    generation: int
    memory: tuple[int, ...]
    slot_seconds: tuple[float, ...] = ()
    pace: View | None = None
    clipped: bool = False
    skipped: bool = False
    alone_seconds: float = 0.0

    @property
    def step(self) -> int:
        return self.index + 1


@dataclass(frozen=True)
class Stepped:
    """A completed step.

    Attributes:
        ended: when the step ended, in seconds since the epoch, by this worker's clock.
        between: seconds that this worker spent between the step before and this one, by cause (``goodput.Loss``).
    """

    ticket: Ticket
    record: StepRecord
    ended: float
    between: Mapping[str, float] = field(default_factory=dict)
    usage: Usage = Usage()


@dataclass(frozen=True)
class Outlined:
    """A worker's answer about its layouts. ``outline`` is pickled, for ``Layouts.take``; None if the layouts cannot be planned
    elsewhere."""

    outline: bytes | None


@dataclass(frozen=True)
class Evaluated:
    """Held-out loss in nats per token after ``step`` steps. ``sets``: loss, samples and bits per byte of each evaluation set."""

    ticket: Ticket
    step: int
    loss: float
    samples: int
    sets: Mapping[str, tuple[float, int, float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Filled:
    """The generation has loaded the state of ``step``.

    Attributes:
        phases: seconds of each phase on this worker.
        moved_bytes: bytes that moved between workers.
        lower_bound: bytes that any plan would have to move.
        read_bytes: bytes that this worker read from a checkpoint.
    """

    ticket: Ticket
    step: int
    origin: Origin
    phases: Mapping[str, float]
    moved_bytes: int = 0
    lower_bound: int = 0
    read_bytes: int = 0


@dataclass(frozen=True)
class SavedShard:
    """Result of this worker's part (old rank ``rank`` of ``world``) of checkpoint ``attempt``.

    Attributes:
        vote: description of the written object, as JSON; None if the write failed.
        error: reason of the failure; None if the write succeeded.
        seconds: time since the state was copied, or since the write of a held state began. It is a duration, since hosts' clocks may
            differ.
        stall_s: seconds that training waited for the copy.
    """

    ticket: Ticket
    attempt: str
    step: int
    epoch: int
    rank: int
    world: int
    vote: str | None
    error: str | None
    seconds: float
    stall_s: float = 0.0


@dataclass(frozen=True)
class Damaged:
    """An object of checkpoint ``attempt`` that this worker wrote and voted for cannot be read back as written."""

    ticket: Ticket
    attempt: str
    step: int
    problem: str


@dataclass(frozen=True)
class Happened:
    """An event for events.jsonl, with its fields."""

    ticket: Ticket
    event: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Noticed:
    """A problem that does not stop training. Other workers may report it in the same words."""

    ticket: Ticket
    text: str


Item = Stepped | Evaluated | Filled | SavedShard | Damaged | Happened | Noticed


@dataclass(frozen=True)
class WorkerReport:
    """A worker's answer to a poll.

    Attributes:
        items: (number, item) in order, after the number that the poll named. The worker keeps them until a later poll acknowledges them.
        held: states that it can resume from; final only once it is parked.
        fault: why it left the generation of ``ticket``; None while it is in it, or if it left as ordered.
        beats: heartbeats of the training thread so far; several per step.
        starved_s: seconds so far in which the thread was runnable but had no processor.
        where: the training thread's innermost frames. ``waiting``: whether it waits for other ranks in a collective (``heartbeat.where``).
        in_long_work: whether it compiles, or does other work that may take longer than any step.
        writing: whether it is also writing its part of a checkpoint.
    """

    worker: str
    ticket: Ticket
    phase: WorkerPhase
    completed: int
    items: tuple[tuple[int, Item], ...]
    held: tuple[HeldState, ...]
    fault: WorkerFault | None
    memory: int
    beats: int = 0
    where: str = ""
    waiting: bool = False
    in_long_work: bool = False
    starved_s: float = 0.0
    writing: bool = False

    @property
    def out(self) -> bool:
        """True if the worker has no process group and waits for an order."""
        return self.phase in (WorkerPhase.PARKED, WorkerPhase.FINISHED, WorkerPhase.IDLE)
