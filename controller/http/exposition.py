"""A snapshot as Prometheus' text or OpenMetrics.

The families are made anew from an immutable snapshot for each scrape. So a rank that left the snapshot is gone from the next scrape. Names
follow Prometheus' rules: base units, ``_total`` for counters, labels ``run`` and small enums, and ``rank`` on per-worker families alone.

If a run has more than :data:`MOST_RANKS` ranks, a per-worker family shows only those with the lowest and the highest values. A second
family (``.._quantile``) has quantiles over all ranks. So a page stays small, and ``min`` and ``max`` over ranks stay right.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.state.snapshot import (
    DIRECTIONS,
    LOST,
    REASONS,
    RESCALE_PHASES,
    STAGES,
    STATES,
    STEP_PHASES,
    Histogram,
    Snapshot,
)
from vescale_ray.controller.statistics.goodput import Loss

MOST_RANKS = 256
"""Maximum number of ranks for which a per-worker family has one series each."""
EXTREMES = 8
"""In a larger run, the number of ranks shown with the lowest values, and with the highest."""
QUANTILES = (0.5, 0.9, 0.99)

DEVICE_MEMORY = {
    "allocated": "Memory of the rank's accelerator that tensors hold.",
    "reserved": "Memory of the rank's accelerator that its allocator holds.",
    "peak_allocated": "Most memory of the rank's accelerator that tensors have held.",
    "capacity": "Memory that the rank's accelerator has.",
}
"""Kinds of device memory. Each has a metric family of its own."""


class _Given:
    """The part of a registry that prometheus_client's encoders use."""

    def __init__(self, members: Iterable[Metric]) -> None:
        self._members = members

    def collect(self) -> Iterable[Metric]:
        return self._members


def exposition(snapshot: Snapshot, accept: str) -> tuple[bytes, str]:
    """Return the snapshot as Prometheus' text or OpenMetrics, as the HTTP header ``accept`` asks, and the content type."""
    encode, content_type = choose_encoder(accept)
    return encode(_Given(families(snapshot))), content_type  # type: ignore[arg-type]


def extremes(values: Mapping[int, float]) -> Mapping[int, float]:
    """Return the values of the ranks that are shown. A rank without a number is neither low nor high."""
    if len(values) <= MOST_RANKS:
        return values
    ranks = np.fromiter(values, dtype=np.int64, count=len(values))
    of = np.fromiter(values.values(), dtype=np.float64, count=len(values))
    ranks, of = ranks[~np.isnan(of)], of[~np.isnan(of)]
    if len(of) > 2 * EXTREMES:
        order = np.argpartition(of, (EXTREMES, len(of) - EXTREMES - 1))
        ranks = ranks[np.concatenate([order[:EXTREMES], order[-EXTREMES:]])]
    return {rank: values[rank] for rank in sorted(ranks.tolist())}


def _any_extreme(kinds: Mapping[str, Mapping[int, float]]) -> list[int]:
    """Return the ranks that any of ``kinds`` shows."""
    return sorted({rank for values in kinds.values() for rank in extremes(values)})


def quantiles(values: Mapping[int, float]) -> dict[str, float]:
    """Return the quantiles over all ranks whose value is a number; empty if each rank is shown, or no value is a number."""
    if len(values) <= MOST_RANKS or all(map(math.isnan, values.values())):
        return {}
    found = np.nanquantile(np.fromiter(values.values(), dtype=np.float64, count=len(values)), QUANTILES)
    return {str(quantile): float(value) for quantile, value in zip(QUANTILES, found, strict=True)}


def _from_zero(known: Iterable[str], values: Mapping[str, float]) -> dict[tuple[str], float]:
    """Return counts by their one label, with a 0 for each ``known`` label without a count.

    If a series first appeared with its first count, ``increase()`` would miss that count."""
    return {(str(name),): seconds for name, seconds in {**dict.fromkeys(known, 0), **values}.items()}


class _Families:
    """Makes the metric families of one run.

    Attributes:
        shown: ranks that have a series.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self.shown: set[int] = set()

    def gauge(self, name: str, text: str, value: float | None) -> Iterator[Metric]:
        if value is not None:
            family = GaugeMetricFamily(name, text, labels=["run"])
            family.add_metric([self._run], float(value))
            yield family

    def gauge_by(self, key: str, name: str, text: str, values: Mapping[str, float | None]) -> Iterator[Metric]:
        """Yield values by one label. A value that is None is left out."""
        family = GaugeMetricFamily(name, text, labels=["run", key])
        for label, value in sorted(values.items()):
            if value is not None:
                family.add_metric([self._run, label], float(value))
        if family.samples:
            yield family

    def counter(self, name: str, text: str, value: float) -> Iterator[Metric]:
        family = CounterMetricFamily(name, text, labels=["run"])
        family.add_metric([self._run], float(value))
        yield family

    def counters(self, name: str, text: str, keys: Sequence[str], values: Mapping[Any, float]) -> Iterator[Metric]:
        family = CounterMetricFamily(name, text, labels=["run", *keys])
        for key, value in sorted(values.items()):
            family.add_metric([self._run, *key], float(value))
        yield family

    def histogram(self, name: str, text: str, value: Histogram) -> Iterator[Metric]:
        family = HistogramMetricFamily(name, text, labels=["run"])
        family.add_metric([self._run], buckets=value.buckets(), sum_value=value.sum)
        yield family

    def by_rank(
        self, name: str, text: str, values: Mapping[int, float], decimals: int, kind: str = "gauge", ranks: Collection[int] | None = None
    ) -> Iterator[Metric]:
        return self.by_rank_and("", name, text, {"": values} if values else {}, decimals, kind, ranks)

    def by_rank_and(
        self,
        key: str,
        name: str,
        text: str,
        values: Mapping[str, Mapping[int, float]],
        decimals: int,
        kind: str = "gauge",
        ranks: Collection[int] | None = None,
    ) -> Iterator[Metric]:
        """Yield ``values`` by rank, for each value of the label ``key``. ``ranks``: those to show; None: as :func:`extremes`."""
        if not values:
            return
        keys = [key] if key else []
        family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, text, labels=["run", "rank", *keys])
        spread = GaugeMetricFamily(
            f"{name}_quantile", f"{text} Quantiles over all ranks of a large run.", labels=["run", "quantile", *keys]
        )
        for what, of in values.items():
            there = extremes(of) if ranks is None else {rank: of[rank] for rank in ranks if rank in of}
            self.shown.update(there if len(there) <= MOST_RANKS else ())
            for rank, value in there.items():
                family.add_metric([self._run, str(rank), what][: 2 + len(keys)], round(value, decimals))
            for quantile, value in quantiles(of).items():
                spread.add_metric([self._run, quantile, what][: 2 + len(keys)], round(value, decimals))
        yield family
        if spread.samples:
            yield spread


def families(s: Snapshot) -> Iterator[Metric]:
    """Yield every metric family that the snapshot has values for."""
    of = _Families(s.run)
    for part in (_of_run, _of_steps, _of_world, _of_failures, _of_ranks, _of_checkpoints):
        yield from part(s, of)


def _of_run(s: Snapshot, of: _Families) -> Iterator[Metric]:
    info = InfoMetricFamily("vescale_run", "What the run is.", labels=["run"])
    info.add_metric([s.run], {key: str(value) for key, value in s.info.items()})
    yield info
    build = InfoMetricFamily("vescale_build", "The versions that it runs on.", labels=["run"])
    build.add_metric([s.run], {key: str(s.info[key]) for key in ("version", "torch", "ray") if key in s.info})
    yield build
    # Not a StateSet family: its label would have to be called vescale_run_state, which reads badly in every query.
    state = GaugeMetricFamily("vescale_run_state", "1 for the state that the run is in.", labels=["run", "state"])
    for one in dict.fromkeys((*STATES, s.state)):
        state.add_metric([s.run, one], float(one == s.state))
    yield state


def _of_steps(s: Snapshot, of: _Families) -> Iterator[Metric]:
    yield from of.gauge("vescale_step", "Completed optimizer steps; falls when steps are replayed.", s.step)
    yield from of.gauge("vescale_step_target", "Optimizer steps of the whole run.", s.steps)
    yield from of.counter("vescale_steps", "Optimizer steps executed, replayed ones included.", s.steps_executed)
    yield from of.counter("vescale_tokens", "Tokens trained on, replayed ones included.", s.tokens)
    yield from of.gauge("vescale_tokens_per_second", "Tokens per second in the last step, all workers together.", s.tokens_per_second)
    text = "Floating-point operations of the model in the last step, as a part of what all devices could have done."
    yield from of.gauge("vescale_model_flops_utilization_ratio", text, s.flops_utilization)
    yield from of.gauge("vescale_last_step_timestamp_seconds", "When the last step was completed.", s.last_step_time)
    yield from of.histogram("vescale_step_duration_seconds", "Wall time of one optimizer step.", s.step_seconds)
    yield from of.gauge("vescale_loss", "Training loss of the last step, nats per token.", s.loss)
    yield from of.gauge("vescale_loss_bpb", "Training loss of the last step, bits per byte.", s.bpb)
    text = "the newest evaluation of each set; heldout: of the held-out part of the training data."
    for name, unit in (("loss", "Loss, nats per token, in"), ("perplexity", "Perplexity of"), ("bpb", "Loss, bits per byte of text, in")):
        yield from of.gauge_by("set", f"vescale_eval_{name}", f"{unit} {text}", {one: s.evaluations[one][name] for one in s.evaluations})
    yield from of.gauge("vescale_grad_norm", "Norm of the gradient of the last step, before clipping.", s.grad_norm)
    yield from of.gauge("vescale_learning_rate", "Learning rate of the last step.", s.learning_rate)
    yield from of.counter("vescale_nonfinite_steps", "Steps with a loss or a gradient norm that is not a finite number.", s.nonfinite_steps)
    yield from of.counter("vescale_clipped_steps", "Steps with a gradient that was clipped.", s.clipped_steps)
    text = "Steps that the optimizer did not take, because gradients were not finite."
    yield from of.counter("vescale_skipped_steps", text, s.skipped_steps)
    text = "Tokens in memory for the current and the next steps, on the rank with the fewest."
    yield from of.gauge("vescale_data_waiting_tokens", text, s.data_waiting_tokens)
    yield from of.counter("vescale_data_read_bytes", "Bytes of tokens in memory that all workers have ever read.", s.data_read_bytes)
    text = "Data that is left out because it is damaged, on the rank that leaves out the most."
    yield from of.gauge_by("kind", "vescale_data_skipped", text, {kind: s.data_skipped.get(kind, 0) for kind in ("files", "records")})
    spent = _from_zero(STEP_PHASES, s.phase_seconds)
    text = "Seconds of steps of one rank, by what they went into; and of copies for checkpoints."
    yield from of.counters("vescale_phase_seconds", text, ("phase",), spent)


def _of_world(s: Snapshot, of: _Families) -> Iterator[Metric]:
    yield from of.gauge("vescale_world_size", "Workers of the newest generation: those that train, or last did.", s.world)
    yield from of.gauge("vescale_world_size_target", "Workers that are wanted.", s.world_target)
    yield from of.gauge("vescale_world_size_min", "Fewest workers that still train.", s.world_min)
    yield from of.gauge("vescale_world_size_max", "Most workers.", s.world_max)
    yield from of.gauge("vescale_unprotected_ranks", "Ranks that have no copy of their shards on another node.", s.unprotected)
    yield from of.gauge("vescale_draining_workers", "Workers that train on a node that is about to go.", s.draining)
    yield from of.gauge("vescale_spares", "Warm workers beside those that train.", s.spares)
    yield from of.gauge("vescale_spares_target", "Spares that are wanted.", s.spares_target)
    yield from of.gauge("vescale_places_wanted", "Places for workers that Ray's autoscaler is shown as wanted.", s.places_wanted)
    yield from of.gauge("vescale_generation", "Number of the set of workers; goes up at every rescale.", s.generation)
    rescales = {**dict.fromkeys(product(DIRECTIONS, REASONS), 0), **s.rescales}
    yield from of.counters("vescale_rescales", "Rescales that were completed.", ("direction", "reason"), rescales)
    yield from of.histogram(
        "vescale_rescale_duration_seconds", "Time without training, from the event to the next step.", s.rescale_seconds
    )
    phases = _from_zero(RESCALE_PHASES, s.rescale_phase_seconds)
    yield from of.counters("vescale_rescale_phase_seconds", "Seconds that rescales spent in each phase.", ("phase",), phases)
    yield from of.counter("vescale_replayed_steps", "Steps that were executed again after a rollback.", s.replayed_steps)
    text = "Generations that ended because a weight gathered in FP8 held Inf or NaN."
    yield from of.counter("vescale_nonfinite_weights", text, s.nonfinite_weights)
    failures = _from_zero(LOST, s.worker_failures)
    yield from of.counters("vescale_worker_failures", "Workers that were lost.", ("reason",), failures)


def _of_failures(s: Snapshot, of: _Families) -> Iterator[Metric]:
    causes = _from_zero(Cause, s.failures)
    yield from of.counters("vescale_failures", "Recoveries, and restarts of the controller, by cause.", ("cause",), causes)
    row = GaugeMetricFamily("vescale_failures_in_a_row", "Recoveries since the last new step.", labels=["run", "kind"])
    for kind, count in sorted(s.failures_in_a_row.items()):
        row.add_metric([s.run, kind], float(count))
    yield row

    yield from of.counter("vescale_goodput_seconds", "Seconds spent in steps that count.", s.productive_seconds)
    lost = _from_zero(Loss, s.lost_seconds)
    yield from of.counters("vescale_badput_seconds", "All other seconds since the run began, by what they were lost to.", ("cause",), lost)


def _of_ranks(s: Snapshot, of: _Families) -> Iterator[Metric]:
    yield from of.by_rank("vescale_worker_host_rss_bytes", "Resident memory of the worker's process.", s.memory, 0)
    text = "What the run has allocated on the rank, by kind: what it is for."
    # An alert and a panel divide one kind by another, rank by rank. So all kinds show the same ranks.
    yield from of.by_rank_and("kind", "vescale_worker_memory_bytes", text, s.memory_kinds, 0, ranks=_any_extreme(s.memory_kinds))
    full = _any_extreme(s.device_memory)
    for kind, text in DEVICE_MEMORY.items():
        yield from of.by_rank(f"vescale_worker_memory_{kind}_bytes", text, s.device_memory.get(kind, {}), 0, ranks=full)
    text = "Times that the allocator of the rank's accelerator had to give memory back and try again."
    yield from of.by_rank("vescale_worker_alloc_retries", text, s.alloc_retries, 0, "counter")
    text = "Seconds for which the rank's training thread stood still for others, by what it waited for; reshard: outside of steps."
    yield from of.by_rank_and("op", "vescale_worker_exposed_communication_seconds", text, s.waited, 6, "counter")
    yield from of.by_rank("vescale_worker_step_duration_seconds", "Wall time of the rank's last step.", s.rank_step_seconds, 6)
    text = "The rank's own time for a slot in the last step, without waiting."
    yield from of.by_rank("vescale_worker_slot_seconds", text, s.slot_seconds, 6)
    text = "The rank's own time for a slot, relative to the usual rank's."
    yield from of.by_rank("vescale_worker_slowness_ratio", text, s.slowness, 4)
    yield from of.by_rank("vescale_worker_slots", "Slots of the global batch that the rank does.", s.slots, 0)
    yield from of.gauge("vescale_slots", "Slots of the global batch, of all ranks together.", sum(s.slots.values()) or None)
    yield from of.by_rank("vescale_worker_heartbeat_timestamp_seconds", "When the rank has last answered.", s.heard, 3)
    yield from of.gauge("vescale_stragglers", "Workers that have been slower than the others for long.", len(s.stragglers))
    if s.workers:
        info = InfoMetricFamily("vescale_worker", "Which worker holds the rank, and on which node.", labels=["run", "rank"])
        for rank in sorted(s.workers if len(s.workers) <= MOST_RANKS else of.shown.intersection(s.workers)):
            info.add_metric([s.run, str(rank)], dict(s.workers[rank]))
        yield info


def _of_checkpoints(s: Snapshot, of: _Families) -> Iterator[Metric]:
    yield from of.gauge("vescale_checkpoint_last_step", "Step of the newest committed checkpoint.", s.checkpoint_step)
    yield from of.gauge("vescale_checkpoint_last_success_timestamp_seconds", "When the newest checkpoint was committed.", s.checkpoint_time)
    moved = {("save",): s.checkpoint_bytes, ("load",): s.checkpoint_read_bytes}
    yield from of.counters("vescale_checkpoint_bytes", "Bytes of committed checkpoints, and bytes read of checkpoints.", ("op",), moved)
    failed = {("save",): s.checkpoint_failures, ("load",): s.checkpoint_load_failures}
    text = "Checkpoints that could not be written or committed, and times that workers could not take up theirs."
    yield from of.counters("vescale_checkpoint_failures", text, ("op",), failed)
    text = "Time that a checkpoint took, by stage: training waits for the copy (snapshot), workers write (upload), commit; or read it."
    family = HistogramMetricFamily("vescale_checkpoint_duration_seconds", text, labels=["run", "op", "stage"])
    stages = [("save", stage, s.checkpoint_stages.get(stage, Histogram())) for stage in STAGES]
    for op, stage, taken in (*stages, ("load", "read", s.checkpoint_loads)):
        family.add_metric([s.run, op, stage], buckets=taken.buckets(), sum_value=taken.sum)
    yield family
    yield from of.gauge("vescale_checkpoint_pending", "Checkpoints that are being written or committed.", s.checkpoints_pending)
    yield from of.gauge(
        "vescale_checkpoint_stall_seconds", "How long training waited for the newest checkpoint's copy.", s.checkpoint_stall
    )
    yield from of.gauge("vescale_checkpoint_interval_seconds", "Time between checkpoints that was chosen.", s.checkpoint_interval)
