"""Progress display of a run: a live line on a terminal, one plain line per interval anywhere else.

A separate thread reads the run's folder, so the display is the same wherever the controller lives, and can't hold up the run. In a
job's log a bar would be noise; scripts can read one line per interval.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, TextIO

from vescale_ray.reporting.event_words import describe_event, loss_words
from vescale_ray.runfolder import Record, RunFolder

POLL_S = 0.1


class Progress:
    """Display of the metrics and events that ``folder`` receives during the ``with`` block."""

    def __init__(self, folder: RunFolder, steps: int, interval_s: float, out: TextIO | None = None) -> None:
        self._metrics = folder.tail_metrics(skip_old=True)
        self._events = folder.tail_events(skip_old=True)
        self._steps = steps
        self._interval_s = interval_s
        self._out = out or sys.stdout
        self._stop = threading.Event()
        self._begin = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="vescale-progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        view: _Lines | _Live = _Live(self._out, self._steps) if self._out.isatty() else _Lines(self._out, self._steps, self._interval_s)
        try:
            with view:
                last = False
                while True:
                    try:
                        self._show_new(view)
                    except BrokenPipeError:
                        raise
                    except OSError:
                        pass  # A full disk under the log, or an unavailable folder, may recover.
                    if last:
                        return
                    last = self._stop.wait(POLL_S)  # one more pass shows the lines written just before the end
        except (OSError, ValueError):
            return  # the output is closed; the run continues

    def _show_new(self, view: _Lines | _Live) -> None:
        for event in self._events.read():
            words = describe_event(event)
            if words is not None:
                pause = f", paused {words[1]:.2f} s" if words[1] is not None else ""
                # A resumed run begins with step 0 as well, until its state is loaded.
                at = f"step {event['step']}: " if event.get("step") else ""
                view.event(f"[{time.monotonic() - self._begin:6.1f} s] {at}{words[0]}{pause}")
        lines = self._metrics.read()
        if lines:
            view.metrics(lines[-1])


def step_line(line: Record, steps: int) -> str:
    """Return one step as a few words."""
    loss = f"loss {loss_words(line)}"
    speed = float(line.get("tokens_per_second") or 0)
    return f"step {line['step']:>{len(str(steps))}}/{steps}  {loss}  {speed:,.0f} tokens/s  {line.get('world')} workers"


class _Lines:
    """Plain output: one line per interval, and each event at once."""

    def __init__(self, out: TextIO, steps: int, interval_s: float) -> None:
        self._out, self._steps, self._interval_s = out, steps, interval_s
        self._due = 0.0
        self._pending: Record | None = None

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._pending is not None:
            self._print(step_line(self._pending, self._steps))

    def event(self, text: str) -> None:
        self._print(text)

    def metrics(self, line: Record) -> None:
        self._pending = line
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval_s
            self._print(step_line(line, self._steps))
            self._pending = None

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class _Live:
    """Terminal output: a bar that is redrawn in place, with events scrolling above it."""

    def __init__(self, out: TextIO, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Bar(*columns, console=Console(file=out), refresh_per_second=5)
        self._steps = steps
        self._task = self._bar.add_task("starting", total=steps)

    def __enter__(self) -> _Live:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def event(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def metrics(self, line: Record) -> None:
        self._bar.update(self._task, completed=line["step"], description=step_line(line, self._steps))
