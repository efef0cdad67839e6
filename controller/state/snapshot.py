"""The snapshot of a run: the immutable value that the metrics, the status and ``vescale-ray top`` are made from."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any

from vescale_ray.runfolder import plain

STATES = ("PENDING", "STARTING", "RUNNING", "RESCALING", "CHECKPOINTING", "STOPPING", "DONE", "FAILED")
SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_BOUNDS = (*(str(bound) for bound in SECONDS_BUCKETS), "+Inf")
DIRECTIONS = ("grow", "shrink", "replace")
REASONS = ("failure", "manual", "replacement", "drain", "straggler", "growth")
"""Reasons of a rescale (``rescales.Rescale``)."""
RESCALE_PHASES = ("detect", "fence", "plan", "form", "build", "sync")
STEP_PHASES = ("data", "forward_backward", "comm", "optimizer", "other", "checkpoint")
LOST = ("killed", "died")
"""Ways in which workers are lost."""
STAGES = ("snapshot", "upload", "commit")
"""Stages of writing a checkpoint: training waits for the copy, the workers write, the controller commits."""

DRIVER_ONLY = frozenset({"control_url", "warnings", "processes", "record"})
"""Fields of the snapshot that ``/status`` leaves out."""


@dataclass(frozen=True)
class Histogram:
    """Counts of observed seconds per bucket; a value: :meth:`observe` gives the next one."""

    counts: tuple[int, ...] = (0,) * (len(SECONDS_BUCKETS) + 1)
    sum: float = 0.0

    def observe(self, seconds: float) -> Histogram:
        """Return this histogram with one more observation. An observation that is not finite is left out."""
        if not math.isfinite(seconds):
            return self
        place = bisect_left(SECONDS_BUCKETS, seconds)
        counts = tuple(count + (index == place) for index, count in enumerate(self.counts))
        return replace(self, counts=counts, sum=self.sum + max(0.0, seconds))

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts as Prometheus wants them."""
        return list(zip(_BOUNDS, map(float, accumulate(self.counts)), strict=True))

    def to_json(self) -> dict[str, float]:
        return {"count": self.count, "sum": self.sum}


@dataclass(frozen=True)
class Snapshot:
    """The run at one moment. A field that is None or empty is not known (yet), and is not exported.

    Attributes:
        productive_seconds: seconds in steps that count; ``lost_seconds``: all other time since ``started``, by cause (``goodput.Loss``).
        step: completed steps; falls back when a rollback undoes some.
        steps: steps of the whole run.
        steps_executed: steps ever executed, replayed ones included: never falls.
        tokens: tokens ever trained on, replayed ones included: never falls.
        flops_utilization: the model's operations of the last step, as a share of the operations that all devices could have done.
        phase_seconds: seconds of steps by phase (``messages.Usage``), and of ``checkpoint``.
        nonfinite_steps: steps with a loss or a gradient norm that is not finite; ``clipped_steps``: steps with a gradient that was scaled;
            ``skipped_steps``: steps that the optimizer did not take because gradients were not finite.
        loss: loss of the last step, in nats per token; ``bpb``: the same in bits per byte of text, if those are known.
        evaluations: ``loss``, ``perplexity`` and ``bpb`` of each set in the newest evaluation, by name.
        world_target, world_min, world_max: workers wanted, and the bounds.
        draining: members whose node is about to go.
        unprotected: ranks without a copy of their shards on another node. The loss of their node would lose all steps since the checkpoint.
        spares, spares_target: warm workers beside those that train; how many are wanted.
        places_wanted: places asked of Ray's autoscaler.
        rescales: count by (direction, reason).
        rescale_phase_seconds: seconds spent in each phase of the rescales.
        worker_failures: count by reason.
        nonfinite_weights: generations that ended because a weight that is gathered in FP8 held Inf or NaN.
        failures: number of failures by cause (``budget.Cause``); ``failures_in_a_row``: failures since the last new step.
        memory: resident bytes of each rank's process.
        workers: labels of each rank's worker: ``worker``, ``node``, ``pod``, ``device``.
        waited: seconds for which each rank has waited for others, by cause (``messages.Usage``). ``reshard`` is the whole time of its moves
            of shards to new generations.
        memory_kinds: bytes of each rank, by kind (``messages.Usage``); ``device_memory``: bytes of its accelerator.
        data_waiting_tokens: fewest tokens that a rank has in memory; ``data_read_bytes``: bytes of tokens that all workers have read;
            ``data_skipped``: most ``files`` and ``records`` that a rank leaves out because they are damaged.
        alloc_retries: times that the allocator of each rank's accelerator had to give memory back and try again.
        rank_step_seconds: seconds of the last step that each rank has reported.
        heard: when each rank has last answered; seconds since the epoch.
        slot_seconds: each rank's own seconds per slot in the last step; ``slowness``: its recent time relative to the usual rank's;
            ``slots``: number of slots that it does in the next step.
        stragglers: workers that are slow: ``rank``, ``factor``, ``since_step``, ``node``.
        checkpoint_step, checkpoint_path: step and path of the newest committed checkpoint, also from an earlier start of the run;
            ``checkpoint_time``: when it was committed, if this start of the run has done so.
        checkpoint_bytes: bytes ever written in committed checkpoints; ``checkpoint_read_bytes``: bytes read from checkpoints.
        checkpoint_failures: checkpoints that could not be written or committed; ``checkpoint_load_failures``: generations that could not
            read theirs.
        checkpoint_stages: seconds of committed checkpoints, by stage (``snapshot``, ``upload``, ``commit``).
        checkpoint_loads: seconds of reading a checkpoint at the beginning of a generation; ``checkpoints_pending``: checkpoints under way.
        checkpoint_stall: seconds that training waited for the copy of the newest checkpoint.
        checkpoint_interval: seconds between checkpoints, with ``checkpoint.every: auto``; ``_text``: the same with the reason.
        control_url: address of the HTTP server; ``warnings``: the run's, each once; ``processes``: (process id, start time, node) of
            every worker that was ever warm; ``record``: content of run.json. These are for the driver; ``/status`` leaves them out.
    """

    run: str
    state: str
    step: int = 0
    steps: int = 0
    steps_executed: int = 0
    tokens: int = 0
    loss: float | None = None
    bpb: float | None = None
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tokens_per_second: float | None = None
    flops_utilization: float | None = None
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    nonfinite_steps: int = 0
    clipped_steps: int = 0
    skipped_steps: int = 0
    grad_norm: float | None = None
    learning_rate: float | None = None
    world: int = 0
    world_target: int = 0
    world_min: int = 0
    world_max: int = 0
    draining: int = 0
    unprotected: int = 0
    spares: int = 0
    spares_target: int = 0
    places_wanted: int = 0
    generation: int = 0
    started: float | None = None
    productive_seconds: float = 0.0
    lost_seconds: Mapping[str, float] = field(default_factory=dict)
    last_step_time: float | None = None
    step_seconds: Histogram = Histogram()
    rescales: Mapping[tuple[str, str], int] = field(default_factory=dict)
    rescale_seconds: Histogram = Histogram()
    rescale_phase_seconds: Mapping[str, float] = field(default_factory=dict)
    replayed_steps: int = 0
    worker_failures: Mapping[str, int] = field(default_factory=dict)
    nonfinite_weights: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    failures_in_a_row: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[int, int] = field(default_factory=dict)
    memory_kinds: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    device_memory: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    data_waiting_tokens: int | None = None
    data_read_bytes: int = 0
    data_skipped: Mapping[str, int] = field(default_factory=dict)
    alloc_retries: Mapping[int, int] = field(default_factory=dict)
    waited: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    rank_step_seconds: Mapping[int, float] = field(default_factory=dict)
    heard: Mapping[int, float] = field(default_factory=dict)
    workers: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    slot_seconds: Mapping[int, float] = field(default_factory=dict)
    slowness: Mapping[int, float] = field(default_factory=dict)
    slots: Mapping[int, int] = field(default_factory=dict)
    stragglers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    checkpoint_step: int | None = None
    checkpoint_time: float | None = None
    checkpoint_path: str | None = None
    checkpoint_bytes: int = 0
    checkpoint_read_bytes: int = 0
    checkpoint_failures: int = 0
    checkpoint_load_failures: int = 0
    checkpoint_stages: Mapping[str, Histogram] = field(default_factory=dict)
    checkpoint_loads: Histogram = Histogram()
    checkpoints_pending: int = 0
    checkpoint_stall: float | None = None
    checkpoint_interval: float | None = None
    checkpoint_interval_text: str | None = None
    error: str | None = None
    info: Mapping[str, str] = field(default_factory=dict)
    control_url: str | None = None
    warnings: tuple[str, ...] = ()
    processes: tuple[tuple[int, int, str], ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as plain JSON values; pairs become ``direction/reason``, figures that are not finite become null."""
        # asdict would copy every dictionary
        tree = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in DRIVER_ONLY}
        tree["rescales"] = {f"{direction}/{reason}": count for (direction, reason), count in self.rescales.items()}
        for name in ("step_seconds", "rescale_seconds", "checkpoint_loads"):
            tree[name] = getattr(self, name).to_json()
        tree["checkpoint_stages"] = {stage: histogram.to_json() for stage, histogram in self.checkpoint_stages.items()}
        return plain(tree)
