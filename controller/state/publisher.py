"""The outputs for other threads and processes: the snapshot, and run.json."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any

from vescale_ray.config import RunConfig
from vescale_ray.controller.failures.budget import Budget
from vescale_ray.controller.protocol import FINAL, RunState
from vescale_ray.controller.state.run_log import RunLog
from vescale_ray.controller.state.snapshot import Snapshot
from vescale_ray.controller.statistics.goodput import Goodput
from vescale_ray.version import __version__
from vescale_ray.workers.messages import StepRecord, WorkerInfo
from vescale_ray.workers.resharding.buddies import unprotected

RECORD_GAP_S = 1.0
"""Pause between two writes of run.json while only the step changes."""
HEARD_S = 0.5
"""A worker's news reaches the controller within this time. The time of a step that has begun since must not be published as lost."""


@dataclass(frozen=True)
class Observed:
    """Observations of one round of the control loop that no event holds.

    Attributes:
        target: workers wanted.
        budget: the run's failure budget, and its used part.
        spares: warm workers beside those that train or are to join; ``places_wanted``: places asked of Ray's autoscaler.
        draining: members on nodes that are about to go.
        saves_pending: checkpoints under way.
        figures: statistics that the members report of themselves (``worker_stats``); ``newest``: record of the newest step.
        over: the run is over, and there are no workers any more.
    """

    target: int
    budget: Budget
    spares: int = 0
    places_wanted: int = 0
    draining: int = 0
    saves_pending: int = 0
    figures: Mapping[str, Any] = field(default_factory=dict)
    newest: StepRecord | None = None
    over: bool = False


class Publisher:
    """Makes snapshots in the controller's thread. Other threads read :attr:`snapshot`, which is immutable, and nothing else of the run.

    Args:
        epoch: how often the controller was started.
        ray_session: name of the Ray session, as Ray's own metrics have it; empty: not known.
    """

    def __init__(self, log: RunLog, config: RunConfig, driver_pid: int, epoch: int, seen: Observed, ray_session: str = "") -> None:
        self._log, self._config, self._pid, self.seen = log, config, driver_pid, seen
        self._url: str | None = None
        model = config.model.factory or config.model.kind
        self._info = {"run_id": log.run_id, "controller_epoch": str(epoch), "model": model, **versions()}
        if ray_session:
            self._info["ray_session"] = ray_session
        self._known: tuple[object, int] = ((), 0)
        """Members, and number of known workers, from which the next three fields were computed. They are computed again if these change,
        since that takes milliseconds for thousands of workers."""
        self._about: Mapping[int, Mapping[str, str]] = {}
        self._processes: tuple[tuple[int, int, str], ...] = ()
        self._unprotected = 0
        self._written = 0.0
        self.snapshot: Snapshot
        self.publish()

    def serve_at(self, url: str) -> None:
        """Publish the address at which the HTTP server listens."""
        self._url = url
        self.publish()

    def publish(self, seen: Observed | None = None) -> None:
        """Make the next snapshot; without ``seen``, from the last observations."""
        self.seen = seen = seen or self.seen
        stats, config = self._log.stats, self._config
        goodput = self._log.tell_goodput(time.time() - HEARD_S)
        self._follow_members()
        self.snapshot = Snapshot(
            run=config.run.name,
            state=str(stats.state),
            step=stats.step,
            steps=config.train.steps,
            tokens=stats.steps.executed * config.tokens_per_step,
            draining=seen.draining,
            unprotected=self._unprotected,
            world=len(stats.members),
            world_target=seen.target,
            world_min=config.elastic.min_workers,
            world_max=config.max_workers,
            spares=seen.spares,
            spares_target=config.elastic.spares,
            places_wanted=seen.places_wanted,
            generation=stats.generation,
            started=stats.started,
            productive_seconds=goodput.productive,
            lost_seconds=goodput.lost,
            replayed_steps=stats.rescales.replayed + stats.steps.replayed,
            worker_failures=dict(stats.failures),
            nonfinite_weights=stats.nonfinite_weights,
            **seen.budget.figures(),
            workers={} if seen.over else self._about,
            stragglers=self._stragglers(seen.newest),
            checkpoints_pending=seen.saves_pending,
            evaluations=stats.newest_evaluation,
            **stats.steps.figures(),
            **stats.rescales.figures(),
            **stats.checkpoints.figures(),
            **_paces(seen.newest),
            **({**seen.figures, "memory": {}} if seen.over else seen.figures),
            error=stats.error,
            info=self._info,
            control_url=self._url,
            warnings=self._log.journal.warnings,
            processes=self._processes,
            record=self._record(goodput),
        )

    def _follow_members(self) -> None:
        """Update the fields that depend on the members and workers, if these have changed."""
        members, known = self._log.stats.members, self._log.stats.workers
        if self._known != (members, len(known)):
            self._known = members, len(known)
            self._about = {rank: _labels(known[worker]) for rank, worker in enumerate(members) if worker in known}
            self._processes = tuple((info.pid, info.born, info.node) for info in known.values())
            nodes = [known[worker].node if worker in known else "" for worker in members]
            self._unprotected = unprotected(nodes, self._config.grid(len(nodes)), copies=self._config.elastic.snapshot_every > 0)

    def _stragglers(self, newest: StepRecord | None) -> Mapping[str, Mapping[str, Any]]:
        """Return the workers that are slow now, with their present rank and factor."""
        stats = self._log.stats
        if not stats.stragglers:
            return {}
        factors = newest.pace.factors if newest is not None and newest.pace is not None else ()
        now = {w: {"rank": rank, "factor": factor} for rank, (w, factor) in enumerate(zip(stats.members, factors, strict=False))}
        return {worker: {**about, **now.get(worker, {})} for worker, about in stats.stragglers.items()}

    def write_record(self, *, now: bool = False) -> None:
        """Write run.json, if it is time or ``now``. The driver writes the final one, when nothing is left of the run."""
        if now or time.monotonic() - self._written >= RECORD_GAP_S:
            self._written = time.monotonic()
            self._log.journal.state(self.snapshot.record)

    def _record(self, goodput: Goodput) -> dict[str, Any]:
        """Return the content of run.json."""
        stats = self._log.stats
        return {
            "run": self._config.run.name,
            "state": str(RunState.STOPPING if stats.state in FINAL else stats.state),
            "step": stats.step,
            "steps": self._config.train.steps,
            "world": len(stats.members),
            "generation": stats.generation,
            "control_url": self._url,
            "metrics_url": f"{self._url}/metrics" if self._url else None,
            "started": stats.started,
            "finished": None,
            "goodput": goodput.to_json(),
            "error": stats.error,
            "warning": "; ".join(self._log.journal.warnings) or None,
            "checkpoint": stats.checkpoints.path,
            "pid": self._pid,
        }


def _labels(info: WorkerInfo) -> Mapping[str, str]:
    return {"worker": info.worker, "node": info.node, "pod": info.pod, "device": info.device}


def _paces(record: StepRecord | None) -> dict[str, Any]:
    """Return the fields of the snapshot on how fast the ranks of this generation are."""
    if record is None or record.pace is None:
        return {}
    return {
        "slot_seconds": {rank: seconds for rank, seconds in enumerate(record.slot_seconds) if seconds > 0},
        "slowness": dict(enumerate(record.pace.factors)),
        "slots": dict(enumerate(record.pace.shares)),
    }


@cache
def versions() -> dict[str, str]:
    """Versions on which a run's result may depend. Does not import torch, which takes seconds."""
    found = {"version": __version__}
    for name in ("torch", "ray"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
