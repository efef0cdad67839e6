"""Report of a run from its folder alone: a count of the samples, a short table, and a picture.

No live process is needed, so the report also works long after the run. It reads the files that ``runfolder`` describes. matplotlib is
imported only to draw, and the checkpoint code only to verify.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vescale_ray.config import RunConfig, load_config
from vescale_ray.config.given import CORPUS
from vescale_ray.errors import BadInput, one_line
from vescale_ray.reporting.event_words import count_words, describe_event, set_words
from vescale_ray.runfolder import Record, RunFolder, RunFolderError, committed

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Commit
    from vescale_ray.data.dataset import SampleOrder

GUESSING_BPB = 8.0
LONG_METRICS, LONG_SAMPLES = 256 << 20, 64 << 20
"""Largest files, in bytes, that the driver on the head node still reads when a run ends. This takes some seconds and 200 MB; the files
of a month-long run have gigabytes."""
MOST_EVENTS, MOST_PROCESSES = 40, 16
"""Maximum number of events and processes in the table; events.jsonl has the rest."""


@dataclass(frozen=True)
class Accounting:
    """Comparison of the consumed samples with those that were due.

    Attributes:
        due: number of samples that ``steps`` steps must consume.
        lost: number of samples due and not consumed.
        repeated: number of samples consumed more often than due.
        replayed_steps: number of steps that a rollback undid and that were executed again; their first use does not count.
    """

    due: int
    lost: int
    repeated: int
    replayed_steps: int

    @property
    def exact(self) -> bool:
        return self.lost == 0 and self.repeated == 0


def accounting(run: RunFolder | str | Path, stream: SampleOrder, global_batch: int, steps: int) -> Accounting:
    """Compare the ids of committed lines in samples.jsonl with positions ``[0, steps * global_batch)`` of the stream, as multisets.

    Takes about 40 bytes of memory for each id in the file.

    Raises:
        ValueError: ``global_batch`` is below 1, or ``steps`` is negative.
    """
    if global_batch < 1 or steps < 0:
        raise ValueError(f"global_batch = {global_batch}, steps = {steps}: give a batch of at least 1 and no negative number of steps")
    folder = _folder(run)
    written = [{"step": line["step"], "ids": np.asarray(line["ids"], dtype=np.int64)} for line in folder.each_samples()]
    lines = committed(written)
    used = [line["ids"] for line in lines if line["step"] < steps]
    consumed = np.concatenate(used) if used else np.zeros(0, dtype=np.int64)
    due = stream.ids(0, steps * global_batch)
    # One histogram over all ids that occur on either side.
    ids, place = np.unique(np.concatenate([due, consumed]), return_inverse=True)
    surplus = np.bincount(place[len(due) :], minlength=len(ids)) - np.bincount(place[: len(due)], minlength=len(ids))
    return Accounting(len(due), int(-surplus[surplus < 0].sum()), int(surplus[surplus > 0].sum()), len(written) - len(lines))


@dataclass(frozen=True)
class Summary:
    """The figures of the table. None means that the run has not got that far, or does not measure the figure.

    Attributes:
        goodput: ``productive`` seconds of the run's last start, and seconds ``lost`` by cause, as in run.json.
        tokens_per_second: tokens of the committed steps over the seconds of those steps.
        heldout: held-out loss of each evaluation, in order, with its step: in bits per byte if they are known for all, else in nats per
            token.
        heldout_unit: unit of these losses.
        sets: figures of each evaluation set in the first and in the last evaluation, by name.
        events: the events in order: seconds since the run started, step, text, and the seconds without training (None: none).
        processes: worker processes ever started: id and process id of each, by id.
        left_out: parts of the report that were left out because the files are too large; usually empty.
        checkpoint: path of the newest checkpoint.
        checkpoint_problems: problems that its verification found; empty if there are none.
    """

    run: str
    state: str
    error: str | None
    steps: int
    steps_done: int
    loss_first: float | None
    loss_last: float | None
    heldout: tuple[tuple[int, float], ...]
    tokens: int
    tokens_per_second: float | None
    events: tuple[tuple[float, int | None, str, float | None], ...]
    processes: tuple[tuple[str, int], ...]
    accounting: Accounting | None
    goodput: Mapping[str, Any] | None
    checkpoint: str | None
    checkpoint_problems: tuple[str, ...]
    left_out: str = ""
    heldout_unit: str = "bits per byte"
    sets: Mapping[str, tuple[Record, Record]] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        """True if no sample was lost or repeated, and the checkpoint is verified."""
        return (self.accounting is None or self.accounting.exact) and not self.checkpoint_problems


def summarize(run: RunFolder | str | Path) -> Summary:
    """Summarize the run's folder.

    Raises:
        RunFolderError: the folder is not a run's.
    """
    folder = _folder(run)
    if not folder.config_path.is_file():
        raise RunFolderError(f"{folder.path}: holds no config.yaml; give the folder of a run")
    config = load_config(folder.config_path)
    state = folder.read_state() or {}
    metrics, left_out = _lines_to_sum_up(folder)
    events = folder.read_events()
    done = int(metrics[-1]["step"]) if metrics else 0
    seconds = [float(line["step_seconds"]) for line in metrics if line.get("step_seconds") is not None]
    trained = len(seconds) * config.tokens_per_step
    count = None
    if folder.size_of("samples.jsonl") > LONG_SAMPLES:
        left_out.append(f"samples.jsonl ({_gigabytes(folder, 'samples.jsonl')}) was not compared with what was due")
    elif done and not folder.size_of("samples.jsonl"):
        left_out.append("there is no samples.jsonl to compare with what was due")
    elif done * config.global_batch > LONG_SAMPLES // 8:  # the file was cut short; counting takes as long as for a long one
        left_out.append(f"samples.jsonl was not compared with the {done * config.global_batch:,} samples that were due")
    elif done and str(config.data.corpus).startswith(CORPUS):
        left_out.append("samples.jsonl was not compared with what was due: the data set was given to vescale_ray.train()")
    elif done:
        try:
            count = accounting(folder, _stream(config), config.global_batch, done)
        except (BadInput, OSError) as error:
            left_out.append(f"samples.jsonl was not compared with what was due: {one_line(error)}")
    checkpoint, problems = _verify(config)
    evaluations = [e for e in events if e["event"] == "evaluation" and e.get("samples") and e.get("loss") is not None]
    key = "bpb" if all(e.get("bpb") is not None for e in evaluations) else "loss"
    return Summary(
        run=config.run.name,
        state=str(state.get("state", "UNKNOWN")),
        error=state.get("error"),
        steps=config.train.steps,
        steps_done=done,
        loss_first=metrics[0].get("loss") if metrics else None,
        loss_last=metrics[-1].get("loss") if metrics else None,
        heldout=tuple((int(e.get("step") or 0), float(e[key])) for e in evaluations),
        heldout_unit="bits per byte" if key == "bpb" else "nats per token",
        tokens=done * config.tokens_per_step,
        tokens_per_second=trained / sum(seconds) if sum(seconds) > 0 and not _is_long(folder) else None,
        events=tuple(_timeline(events)),
        processes=_processes(events),
        accounting=count,
        goodput=state.get("goodput"),
        checkpoint=checkpoint,
        checkpoint_problems=problems,
        left_out="; ".join(left_out),
        sets=_sets(events),
    )


def goodput_line(goodput: Mapping[str, Any]) -> str:
    """Return one line on the use of the run's time: the productive share, and the four largest losses."""
    lost = sorted(goodput["lost"].items(), key=lambda item: -item[1])
    shown = [f"{str(cause).replace('_', ' ')} {seconds:.1f} s" for cause, seconds in lost if seconds >= 0.05]
    rest = f", {len(shown) - 4} more" if len(shown) > 4 else ""
    whole = float(goodput["productive"]) + sum(seconds for _, seconds in lost)
    share = f"{goodput['productive'] / whole:.1%}" if whole > 0 else "none"
    return f"{share} of {whole:.1f} s in steps that count" + (f"; lost: {', '.join(shown[:4])}{rest}" if shown else "")


def table(run: RunFolder | str | Path, summary: Summary | None = None) -> str:
    """Return the short table that ends a run: about 20 lines of plain text, and at most :data:`MOST_EVENTS` lines of events."""
    folder = _folder(run)
    s = summary or summarize(folder)
    rows = [("run", f"{s.run}: {s.state}, {s.steps_done} of {s.steps} steps, {s.tokens:,} tokens")]
    if s.error:
        rows.append(("error", one_line(s.error)))
    if s.loss_first is not None and s.loss_last is not None:
        rows.append(("training loss", f"{s.loss_first:.3f} -> {s.loss_last:.3f} nats per token"))
    if s.heldout:
        first, last = s.heldout[0], s.heldout[-1]
        change = f"{first[1]:.3f}" if first == last else f"{first[1]:.3f} -> {last[1]:.3f}"
        guess = f" (guessing: {GUESSING_BPB:.0f})" if s.heldout_unit == "bits per byte" else ""
        rows.append(("held-out text", f"{change} {s.heldout_unit}{guess}"))
    for name, (begin, end) in s.sets.items():
        rows.append((f"evaluation {name}", set_words(begin) if begin is end else f"{set_words(begin)} -> {set_words(end)}"))
    if s.tokens_per_second is not None:
        rows.append(("speed", f"{s.tokens_per_second:,.0f} tokens/s while training"))
    if s.goodput:
        rows.append(("time", goodput_line(s.goodput)))
    named = [f"{worker} (pid {pid})" for worker, pid in s.processes[-MOST_PROCESSES:]]
    if len(named) < len(s.processes):
        named.insert(0, "..")
    rows.append(("worker processes", f"{len(s.processes)} started: " + ", ".join(named)))
    if len(s.events) > MOST_EVENTS:
        rows.append(("earlier events", f"{len(s.events) - MOST_EVENTS}, in {folder.path}/events.jsonl"))
    for index, (elapsed, step, what, pause) in enumerate(s.events[-MOST_EVENTS:]):
        at = f"step {step}" if step is not None else ""
        paused = f"  paused {pause:.2f} s" if pause is not None else ""
        rows.append(("events" if index == 0 else "", f"{elapsed:7.1f} s  {at:<10}{what}{paused}"))
    if s.accounting is not None:
        a = s.accounting
        replayed = f" ({count_words(a.replayed_steps)} replayed)" if a.replayed_steps else ""
        rows.append(("samples", f"lost {a.lost}, repeated {a.repeated}, of {a.due:,} due{replayed}"))
    if s.left_out:
        rows.append(("left out", s.left_out))
    if s.checkpoint:
        verdict = "verified, every checksum right" if not s.checkpoint_problems else "DAMAGED: " + "; ".join(s.checkpoint_problems[:3])
        rows.append(("checkpoint", f"{s.checkpoint}: {verdict}"))
    if folder.curve_path.is_file():
        rows.append(("picture", str(folder.curve_path)))
    rows.append(("folder", str(folder.path)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def draw(run: RunFolder | str | Path) -> Path:
    """Draw loss and world size over steps, with the events marked, into ``curve.png``; return its path.

    Raises:
        RunFolderError: there is no step to draw, or there are too many, which ``vescale-ray dash`` draws.
        ModuleNotFoundError: matplotlib is not installed (``pip install 'vescale-ray[plots]'``).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    folder = _folder(run)
    if _is_long(folder):
        size = _gigabytes(folder, "metrics.jsonl")
        raise RunFolderError(f"{folder.path}: metrics.jsonl has {size}; vescale-ray dash {folder.path} can draw it")
    written = [_few(line) for line in folder.each_metrics()]
    metrics, events = committed(written), folder.read_events()
    if not metrics:
        raise RunFolderError(f"{folder.path}: holds no completed step, there is nothing to draw")
    steps = [line["step"] for line in metrics]
    losses = [float("nan") if line.get("loss") is None else line["loss"] for line in metrics]

    # pyplot would keep the figure in a module, and choose a window system.
    figure = Figure(figsize=(9.6, 5.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    blue, grey, red, green = "#1f5fa8", "#9aa3ad", "#c0392b", "#2e8b57"
    for lines in _undone(written):
        top.plot([line["step"] for line in lines], [line.get("loss") for line in lines], color=grey, lw=1, zorder=1)
    top.plot(steps, losses, color=blue, lw=1.4, label="training loss, nats per byte", zorder=2)
    evaluations = [e for e in events if e["event"] == "evaluation" and e.get("loss") is not None]
    if evaluations:
        at, values = [e.get("step") or 0 for e in evaluations], [e["loss"] for e in evaluations]
        top.plot(at, values, "D", color=green, ms=6, label="held-out loss", zorder=3)
    bottom.step(steps, [line.get("world") for line in metrics], where="post", color=blue, lw=1.8)
    bottom.set_ylim(0, max(int(line.get("world") or 0) for line in metrics) + 0.7)
    bottom.yaxis.set_major_locator(MaxNLocator(integer=True))
    for index, event in enumerate(e for e in events if e["event"] == "rescaled"):
        colour = red if event.get("direction") == "shrink" else green
        for axes in (top, bottom):
            axes.axvline(event["step"], color=colour, lw=1, ls="--", zorder=1)
        text = f"{event.get('from')} → {event.get('to')}: {event.get('reason')}\n{float(event.get('pause_seconds') or 0):.2f} s pause"
        top.annotate(
            text,
            xy=(event["step"], 0.97 - 0.13 * (index % 3)),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            color=colour,
            fontsize=8,
            va="top",
        )
    top.set_ylabel("loss")
    top.legend(loc="upper right", frameon=False, fontsize=9)
    top.set_title(f"{folder.path.name}: {steps[-1]} steps", fontsize=11)
    bottom.set_ylabel("workers")
    bottom.set_xlabel("optimizer step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    temporary = folder.path / ".curve.png"
    figure.savefig(temporary, format="png")
    temporary.replace(folder.curve_path)
    return folder.curve_path


# ---------------------------------------------------------------------------------------------------------------- helpers


def _folder(run: RunFolder | str | Path) -> RunFolder:
    return run if isinstance(run, RunFolder) else RunFolder(run)


def _is_long(folder: RunFolder) -> bool:
    return folder.size_of("metrics.jsonl") > LONG_METRICS


def _gigabytes(folder: RunFolder, name: str) -> str:
    return f"{folder.size_of(name) / 1e9:.1f} GB"


def _few(line: Record) -> Record:
    """Return the fields of a step's line that a report needs, without the figures of each rank."""
    return {key: line.get(key) for key in ("step", "loss", "world", "step_seconds")}


def _lines_to_sum_up(folder: RunFolder) -> tuple[list[Record], list[str]]:
    """Return the committed lines and the omissions. For a long file, return only the first and the last line."""
    if not _is_long(folder):
        return committed([_few(line) for line in folder.each_metrics()]), []
    ends = [_few(line) for line in (next(folder.each_metrics(), None), folder.last_metrics()) if line is not None]
    return ends, [f"metrics.jsonl ({_gigabytes(folder, 'metrics.jsonl')}) was not read: vescale-ray dash {folder.path} shows it"]


def _sets(events: Sequence[Record]) -> dict[str, tuple[Record, Record]]:
    """Return the first and the last figures of each evaluation set, by name."""
    found: dict[str, tuple[Record, Record]] = {}
    for event in events:
        for name, figures in ((event.get("sets") or {}) if event["event"] == "evaluation" else {}).items():
            found[name] = (found[name][0] if name in found else figures, figures)
    return found


def _processes(events: Sequence[Record]) -> tuple[tuple[str, int], ...]:
    """Return the worker processes by numeric id: w9 comes before w10."""
    found = [(str(e["worker"]), int(e["pid"])) for e in events if e["event"] == "worker_started" and e.get("pid")]
    return tuple(sorted(found, key=lambda one: (len(one[0]), one)))


def _stream(config: RunConfig) -> SampleOrder:
    """Return the order of the run's samples.

    Raises:
        BadInput, OSError: the data is no longer that of the newest checkpoint, or can't be read.
    """
    from vescale_ray import checkpoint
    from vescale_ray.data.dataset import check_same_data
    from vescale_ray.data.dataset_loading import load_dataset

    dataset = load_dataset(config.data)
    for commit in reversed(_commits(config)):
        with suppress(checkpoint.CheckpointError):
            check_same_data(dataset, checkpoint.open(config.checkpoint_root, commit.name).meta.get("stream") or {})
            break
    return dataset.order(config.run.seed)


def _commits(config: RunConfig) -> Sequence[Commit]:
    root = config.checkpoint_root
    if "://" not in root and not Path(root).is_dir():
        return ()
    from vescale_ray import checkpoint

    return checkpoint.ls(root)


def _verify(config: RunConfig) -> tuple[str | None, tuple[str, ...]]:
    from vescale_ray import checkpoint

    root, commits = config.checkpoint_root, _commits(config)
    if not commits:
        return None, ()
    # Verify the newest checkpoint even if it can't be loaded, so that damage shows. Loading would fall back to the one before.
    report = checkpoint.verify(root, commits[-1])
    return str(commits[-1].path), tuple(str(problem) for problem in report.problems)


def _undone(lines: Sequence[Record]) -> Iterator[list[Record]]:
    """Yield the stretches of steps that a rollback undid."""
    kept: list[Record] = []
    for line in lines:
        stretch: list[Record] = []
        while kept and kept[-1]["step"] >= line["step"]:
            stretch.append(kept.pop())
        if stretch:
            yield stretch[::-1]
        kept.append(line)


def _timeline(events: Sequence[Record]) -> Iterator[tuple[float, int | None, str, float | None]]:
    begin = float(events[0]["time"]) if events else 0.0
    for event in events:
        # Workers and evaluations have separate rows in the table; completions are many.
        words = None if event["event"] in ("worker_started", "evaluation", "completions") else describe_event(event)
        if words is not None:
            yield float(event["time"]) - begin, event.get("step"), *words
