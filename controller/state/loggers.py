"""Loggers of a run's figures beside metrics.jsonl: TensorBoard's event files, and Weights & Biases.

One thread writes to all of them. A logger that fails is given up with one warning, and neither training nor the control loop waits for one.
"""

from __future__ import annotations

import json
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vescale_ray.config import RunConfig
from vescale_ray.controller.statistics.run_stats import evaluated_sets
from vescale_ray.errors import one_line

MOST_WAITING = 10_000
"""Maximum number of entries that wait for slow loggers. Beyond that, new ones are left out."""
FLUSH_S = 5.0
"""Pause between two flushes."""
_LARGEST = 3.4028234e38
"""Largest number of 32 bits, in which TensorBoard keeps figures."""
_NOT_FIGURES = frozenset({"step", "time", "seq", "generation", "lost_until", "samples"})


class Logger(Protocol):
    """Writer of figures, used in the loggers' thread only."""

    def write(self, entry: LoggedFigures) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class LoggedFigures:
    """Figures of the state after ``step`` steps, by their tags.

    Attributes:
        undone: first step whose earlier figures are void, because this start repeats it. Only the first entry of a start uses it.
        when: seconds since the epoch.
    """

    step: int
    undone: int
    when: float
    figures: Mapping[str, float]
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts for people, by their tags."""


class Loggers:
    """The loggers of a run. The control loop's thread calls the methods.

    Args:
        folder: folder of the run.
        run_id: this start of the run.
        before: steps that an earlier start had completed.
    """

    def __init__(self, config: RunConfig, folder: Path, run_id: str, before: int) -> None:
        self._makers: dict[str, Callable[[], Logger]] = {}
        if config.metrics.tensorboard:
            self._makers["metrics.tensorboard"] = lambda: TensorBoard(folder / "tensorboard")
        if config.metrics.wandb is not None:
            self._makers["metrics.wandb"] = lambda: WeightsAndBiases(config, folder, run_id, before)
        self._open: dict[str, Logger] = {}
        self._entries: queue.Queue[LoggedFigures | None] = queue.Queue(MOST_WAITING)
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._full = False
        self._thread: threading.Thread | None = None

    def step(self, line: Mapping[str, Any]) -> None:
        """Log the line of a step that this start of the run does for the first time."""
        step = int(line["step"])
        figures = {f"train/{name}": value for name, value in _figures(line)}
        for group in ("phase_seconds", "data"):
            figures |= {f"{group}/{name}": value for name, value in _figures(line.get(group) or {})}
        self._put(LoggedFigures(step, step, float(line["time"]), figures))

    def evaluation(self, event: Mapping[str, Any]) -> None:
        """Log an evaluation of the held-out samples and of each set."""
        step = int(event["step"])
        figures = {f"eval/{name}_{key}": value for name, one in evaluated_sets(event).items() for key, value in _figures(one)}
        self._put(LoggedFigures(step, step + 1 if step else 0, float(event["time"]), figures))

    def completions(self, event: Mapping[str, Any]) -> None:
        """Log the completions of ``train.completions``, each with its prompt."""
        step = int(event["step"])
        texts = {f"completions/{number}": f"{one['prompt']}{one['text']}" for number, one in enumerate(event["completions"])}
        self._put(LoggedFigures(step, step + 1, float(event["time"]), {}, texts))

    def problems(self) -> Iterator[str]:
        """Yield the warnings that are new."""
        while not self._problems.empty():
            yield self._problems.get()

    def close(self, wait_s: float) -> None:
        """Write what waits and close the loggers, for at most ``wait_s`` seconds."""
        if self._thread is None:
            return
        deadline = time.monotonic() + wait_s
        with suppress(queue.Full):
            self._entries.put(None, timeout=wait_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._tell(f"not done {wait_s:g} s after the end of the run; the newest figures are not logged")

    def _put(self, entry: LoggedFigures) -> None:
        if not self._makers:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._log, name="vescale-loggers", daemon=True)
            self._thread.start()
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            if not self._full:
                self._full = True
                self._tell("too slow; training goes on, and some figures are not logged")

    def _tell(self, problem: str) -> None:
        self._problems.put(f"{' and '.join(self._makers)}: {problem}")

    def _log(self) -> None:
        for name, make in self._makers.items():
            self._attempt(name, lambda name, make: self._open.update({name: make()}), name, make)
        flushed = time.monotonic()
        while True:
            entry: LoggedFigures | None
            with suppress(queue.Empty):
                if (entry := self._entries.get(timeout=FLUSH_S)) is None:
                    break
                self._each("write", entry)
            if time.monotonic() - flushed >= FLUSH_S:
                flushed = time.monotonic()
                self._each("flush")
        self._each("close")

    def _each(self, method: str, *arguments: Any) -> None:
        for name, logger in tuple(self._open.items()):
            self._attempt(name, getattr(logger, method), *arguments)

    def _attempt(self, name: str, call: Callable[..., object], *arguments: Any) -> None:
        """Call a logger. If it fails, do not use it any more."""
        try:
            call(*arguments)
        except Exception as error:
            self._open.pop(name, None)
            why = one_line(error) or type(error).__name__
            self._problems.put(f"{name}: no more figures are logged ({why}); training goes on, and metrics.jsonl has all of them")


def _figures(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a line by their names."""
    for name, value in line.items():
        if name not in _NOT_FIGURES and isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


class TensorBoard:
    """Event files in ``folder``. Of steps that an earlier start had done, TensorBoard shows the newest figures."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._file = EventFileWriter(str(folder))
        self._begun = False

    def write(self, entry: LoggedFigures) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        if not self._begun:
            self._begun = True
            # TensorBoard forgets the figures of this step and later steps that were written before.
            self._file.add_event(Event(wall_time=entry.when, step=entry.undone, session_log=SessionLog(status=SessionLog.START)))
        values = [Summary.Value(tag=tag, simple_value=max(-_LARGEST, min(_LARGEST, value))) for tag, value in entry.figures.items()]
        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        for tag, text in entry.texts.items():
            values.append(Summary.Value(tag=tag, metadata=kind, tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()])))
        self._file.add_event(Event(wall_time=entry.when, step=entry.step, summary=Summary(value=values)))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WeightsAndBiases:
    """A run of W&B, which a resumed run continues. Of steps that an earlier start had done, it keeps the first figures: W&B takes no lower
    step than its newest.

    The run's id is in ``wandb/vescale.json``. A start with ``checkpoint.resume = never`` has a new one.
    """

    def __init__(self, config: RunConfig, folder: Path, run_id: str, before: int) -> None:
        import wandb

        about = config.metrics.wandb
        assert about is not None
        path = folder / "wandb" / "vescale.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        continues = known.get("run_id") == run_id or (known and config.checkpoint.resume != "never")
        known = {"id": known["id"] if continues else secrets.token_hex(4), "run_id": run_id}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known))
        self._newest = before + 1 if continues and before else 0
        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=about.project,
            entity=about.entity,
            name=about.name or config.run.name,
            mode=about.mode,
            id=known["id"],
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True),
        )

    def write(self, entry: LoggedFigures) -> None:
        if entry.step >= self._newest:
            self._newest = entry.step
            self._run.log({**entry.figures, **entry.texts}, step=entry.step)

    def flush(self) -> None:
        """Nothing to do: W&B writes by itself."""

    def close(self) -> None:
        self._run.finish()
        self._teardown()
