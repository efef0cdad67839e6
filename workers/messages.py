"""What the controller and a worker say to each other: frozen values, small, picklable. No Ray, no torch at import.

Every order carries a :class:`Ticket`. A worker takes an order only if its ticket is newer than all before, so that nothing
that belongs to an older generation can start, stop or write anything; every report and item says which ticket it is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vescale_ray.workers.holdings import Holding, Resume
    from vescale_ray.workers.pace import View

STOP, RESCALE, CHECKPOINT = 1, 2, 4
"""Names for the flag bits that a controller asks for; ``Trainer.step`` only ORs them over the ranks."""
BUSY = 8
"""The flag bit of a rank that has no room for another checkpoint: then none begins one at the boundary that follows."""


@dataclass(frozen=True, order=True)
class Ticket:
    """``generation`` goes up with every new set of workers and every new try, and is never used twice; ``attempt`` counts the
    tries in a row since the last completed step, from 1."""

    generation: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.attempt}"


NO_TICKET = Ticket(0, 0)
"""Of a worker that has not been in any generation."""


class Phase(StrEnum):
    """What a worker's training thread does.

    ======== ===================================================================== ======================
    WARMING  imports, reads the corpus, makes its CUDA context                     then IDLE
    IDLE     has never been in a generation                                        an order is expected
    FORMING  meets the others, builds its trainer, fills it                        then TRAINING or PARKED
    TRAINING steps and evaluates                                                   then PARKED or FINISHED
    SAVING   parked, writes a checkpoint of what it holds                          then what it was before
    PARKED   out of its group, which is destroyed; holds what it holds             an order is expected
    FINISHED as PARKED, after the last step of the run                             an order is expected
    GIVING   a leaver gives its shards to those that stay                          then PARKED
    ======== ===================================================================== ======================
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
    """Where a generation's state comes from."""

    FRESH = "fresh"
    CHECKPOINT = "checkpoint"
    MEMORY = "memory"


class FaultKind(StrEnum):
    """Whose fault it is that a generation ended before its time."""

    PEER = "peer"
    """A collective failed: another worker is gone, hung or slow."""
    OWN = "own"
    """This worker raised: a bug, out of memory."""
    DATA = "data"
    """The checkpoint that it was told to read is damaged: an older one may do."""
    INPUT = "input"
    """What the person gave can't be used: trying again would not help."""


@dataclass(frozen=True)
class Fault:
    """Why a worker left its generation; ``text`` is one line, ``trace`` the traceback."""

    kind: FaultKind
    text: str
    trace: str = ""


@dataclass(frozen=True)
class WorkerInfo:
    """Who a warm worker is. ``born``: the kernel's start time of the process, so that a process id that is used again is noticed; ``pod``:
    name of its host, which in Kubernetes is its pod's."""

    worker: str
    pid: int
    born: int
    node: str
    host: str
    device: str
    warm_seconds: float
    pod: str = ""
    stacks: int = -1
    """File descriptor of the process through which its stacks can be had (``pulse.offer_stacks``)."""
    thread: int = 0
    """The system's number of its training thread."""
    address: str = ""
    """``host:port`` of its door, on the network of its process groups (:mod:`vescale_ray.workers.reach`); empty: it has none."""


@dataclass(frozen=True)
class Seat:
    """A place in a process group: where the store is, under which prefix they meet, and as whom."""

    store_host: str
    store_port: int
    prefix: str
    rank: int
    world: int


@dataclass(frozen=True)
class Join:
    """Order: form the generation, get the state, train until the end of the run or until told to leave.

    Attributes:
        seat: in the generation's group.
        transfer: in the group that moves shards, when others than its members must give some; ranks as in ``seat``.
        commit: name of the checkpoint to read, for ``Origin.CHECKPOINT``.
        resume: what the workers hold and start from, for ``Origin.MEMORY``.
        evaluate: evaluate before the first step.
        save_prefix: of the identifiers under which periodic checkpoints are written; the same on every rank.
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
    """Order to a worker that is not in the new generation: give the shards of ``resume`` that it holds."""

    ticket: Ticket
    transfer: Seat
    resume: Resume


@dataclass(frozen=True)
class Save:
    """Order: write held shards of the old ``ranks`` of the state ``resume`` as the checkpoint ``attempt``."""

    ticket: Ticket
    resume: Resume
    ranks: tuple[int, ...]
    attempt: str
    epoch: int


Order = Join | Give | Save


@dataclass(frozen=True)
class Usage:
    """What a step took of one worker. Only for those who watch; small, since every worker tells of every step.

    Attributes:
        waited: seconds of the step for which its training thread stood still for other ranks, by what it waited for: ``all_gather``,
            ``reduce_scatter``, ``all_reduce``, ``all_to_all`` (Muon's), ``peer_copy`` (the exchange of copies that began after the step
            before), ``step_end`` (where every rank waits for the slowest).
        phases: all seconds of the step, by what they went into: ``data``, ``forward_backward``, ``comm`` (the sum of ``waited``),
            ``optimizer``, ``other``.
        memory: bytes by kind: of ``fsdp.held_bytes``, ``optimizer`` (states) and ``copies`` (of shards, for peers and checkpoints).
        device_memory: bytes of the accelerator, by kind: ``allocated``, ``reserved``, ``peak_allocated``, ``capacity``. Empty on the CPU.
        alloc_retries: times that the accelerator's allocator had to give memory back and try again.
        token_flops: floating-point operations of the model for a token, forward and backward; 0: not known.
        peak_flops: most operations that this worker's device does in a second; None: not known.
    """

    waited: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    device_memory: Mapping[str, int] = field(default_factory=dict)
    alloc_retries: int = 0
    token_flops: int = 0
    peak_flops: float | None = None


@dataclass(frozen=True)
class StepRecord:
    """What one step did, over all ranks. Every rank has the same record but for its own seconds, so that any survivor can account for it.

    Attributes:
        index: 0-based step; ``step`` is the number of completed steps after it.
        loss: mean negative log-likelihood per token, nats, over the global batch.
        tokens: tokens of the global batch.
        ids: sample ids that were fed, in slot order.
        grad_norm: norm of the whole gradient before clipping.
        seconds: wall time of the step on this rank.
        flags: OR of the ranks' flags.
        clipped: the gradient was larger than ``train.grad_clip``, and scaled.
        skipped: the optimizer did not take the step, since gradients were not finite.
        rank_seconds: per rank, from the step's start until its gradients were complete, which they are on all at about the same time.
        memory: resident bytes of each rank's process.
        slot_seconds: per rank, its own time for a slot, without waiting for others; 0 where that is not measured (on an accelerator).
        pace: who is slow, and how the slots of the next step are spread.
        alone_seconds: of this rank's ``seconds`` those before the last rank had begun the step. The first step of a generation is begun by
            each rank as soon as it has its state. (By each rank's own time from its begin to the norm, which all have at once: hosts'
            clocks may differ.)
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
    rank_seconds: tuple[float, ...]
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
    """A step was completed at ``ended`` (seconds since the epoch, this worker's clock).

    ``between``: seconds that this worker spent between the step before and this one, by what (``goodput.Loss``).
    """

    ticket: Ticket
    record: StepRecord
    ended: float
    between: Mapping[str, float] = field(default_factory=dict)
    usage: Usage = Usage()


@dataclass(frozen=True)
class Outlined:
    """Answer of a worker: what the layouts at every world size follow from; None where they don't follow from anything but themselves.
    ``outline``: pickled, for ``Layouts.take``."""

    outline: bytes | None


@dataclass(frozen=True)
class Evaluated:
    """Held-out loss in nats per token after ``step`` steps."""

    ticket: Ticket
    step: int
    loss: float
    samples: int


@dataclass(frozen=True)
class Filled:
    """The generation has its state, of ``step``: seconds of each phase on this worker, and bytes that changed workers.

    ``lower_bound``: bytes that no plan could have spared; ``read_bytes``: that this worker has read of a checkpoint.
    """

    ticket: Ticket
    step: int
    origin: Origin
    phases: Mapping[str, float]
    moved_bytes: int = 0
    lower_bound: int = 0
    read_bytes: int = 0


@dataclass(frozen=True)
class Saved:
    """This worker's part (old rank ``rank`` of ``world``) of checkpoint ``attempt``: its vote as JSON, or why there is none.

    ``seconds``: since the state was copied, or the writing of a held one began (hosts' clocks may differ by days); ``stall_s``: how long
    training waited for the copy.
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
    """What this worker had written and voted for, of checkpoint ``attempt``, is not what can be read back."""

    ticket: Ticket
    attempt: str
    step: int
    problem: str


@dataclass(frozen=True)
class Skipped:
    """The checkpoint of ``step`` was due and not begun: some rank still writes the ones before."""

    ticket: Ticket
    step: int


Item = Stepped | Evaluated | Filled | Saved | Damaged | Skipped


@dataclass(frozen=True)
class Report:
    """A worker's answer to a poll.

    Attributes:
        items: (number, item) in order, those after the number that the poll named; they are kept until a later poll names theirs.
        held: what it could resume from; final only once it is parked.
        fault: why it left the generation of ``ticket``; None while it is in it, and when it left as it was told to.
        beats: of the training thread so far; several in every step.
        starved_s: seconds so far for which it could have run, and others had the processors.
        where: its innermost frames; ``waiting``: for other ranks, in a collective (``pulse.where``).
        unhurried: it does, or compiles, what may take longer than any step.
        writing: beside all this it writes its part of a checkpoint.
    """

    worker: str
    ticket: Ticket
    phase: Phase
    completed: int
    items: tuple[tuple[int, Item], ...]
    held: tuple[Holding, ...]
    fault: Fault | None
    memory: int
    beats: int = 0
    where: str = ""
    waiting: bool = False
    unhurried: bool = False
    starved_s: float = 0.0
    writing: bool = False

    @property
    def out(self) -> bool:
        """Whether it has no group any more and waits for an order."""
        return self.phase in (Phase.PARKED, Phase.FINISHED, Phase.IDLE)
