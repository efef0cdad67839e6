"""The page of a run, for ``vescale-ray dash``: throughput, memory, loss, workers, use of time, and events.

The data come from the run's folder (:func:`from_folder`), or from a Prometheus that has scraped the run (:func:`from_prometheus`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vescale_ray.cli.pages import prometheus
from vescale_ray.cli.pages.run_page import COLUMNS, Chart, Mark, Page, Points, Series, few
from vescale_ray.errors import BadInput, one_line
from vescale_ray.reporting.event_words import describe_event
from vescale_ray.runfolder import Record, RunFolder, RunFolderError

WAITING = "Waiting for other ranks, % of a step"
KINDS = "Memory by kind, largest rank"
UTILISATION = "Model FLOPs utilisation, %"
MOST_HOURS = 87_600
LONG_BYTES = 32 << 20
"""Bytes of a run's lines above which they are thinned out while they are read."""
DRAWN = ("loss", "tokens_per_second", "world", "step_seconds", "grad_norm", "model_flops_utilization")
"""Keys of the single-valued figures of each line."""


def from_folder(run: RunFolder | str | Path) -> Page:
    """Build the page from the run's files.

    Raises:
        RunFolderError: the folder is not a run's, or its files are damaged.
        BadInput: no step and no event has happened yet.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    try:
        return _told(folder)
    except BadInput:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        said = f"{type(error).__name__}: {one_line(error)}"
        raise RunFolderError(f"{folder.path}: its files are not as a run writes them ({said}); they were changed from outside") from error


def _told(folder: RunFolder) -> Page:
    state, events = folder.read_state() or {}, folder.read_events()
    lines = _lines(folder)
    if not lines and not events:
        raise BadInput(f"{folder.path}: nothing has happened yet, there is nothing to show")
    last = lines[-1] if lines else {}  # A run that failed before its first step still has events.

    def of(key: str) -> Points:
        return [(float(line["time"]), _number(line.get(key))) for line in lines]

    ranks = sorted({rank for line in lines for rank in (line.get("memory") or {})}, key=int)
    memory = [
        Series(f"rank {rank}", [(float(line["time"]), _number((line.get("memory") or {}).get(rank))) for line in lines]) for rank in ranks
    ]
    evaluations = [e for e in events if e["event"] == "evaluation"]
    heldout = [(float(e["time"]), _number(e.get("loss"))) for e in evaluations if e.get("samples")]
    by_set = [{"time": e["time"], "loss": {name: one.get("loss") for name, one in e["sets"].items()}} for e in evaluations if e.get("sets")]
    sets = _by_name(by_set, "loss", lambda line: 1.0)
    loss = (Series("training", of("loss")), *((Series("held-out", heldout),) if heldout else ()))
    charts = (
        Chart("Tokens per second (of each step)", (Series("tokens/s", of("tokens_per_second")),)),
        Chart("Resident memory by rank", few(memory), "bytes"),
        Chart("Loss, nats per token", loss, zero=False),
        *([Chart("Loss of evaluation sets, nats per token", sets, zero=False)] if sets else []),
        Chart("Workers", (Series("workers", of("world")),), steps=True),
        Chart("Step time", (Series("seconds", of("step_seconds")),), "s"),
        Chart("Gradient norm", (Series("norm", of("grad_norm")),)),
        Chart(WAITING, _by_name(lines, "waited_seconds", _per_step)),
        Chart(KINDS, _by_name(lines, "memory_kinds", lambda line: 1.0), "bytes"),
        Chart(UTILISATION, (Series("utilisation", [(at, _times(value, 100.0)) for at, value in of("model_flops_utilization")]),)),
    )
    marks = tuple(
        Mark(float(e["time"]), f"{e.get('from')} → {e.get('to')} workers: {e.get('reason')}", e.get("direction") != "shrink")
        for e in events
        if e["event"] == "rescaled"
    )
    told = [(e, describe_event(e)) for e in events]
    story = tuple((float(e["time"]), e.get("step"), words[0], words[1]) for e, words in told if words is not None)
    facts = [
        ("state", str(state.get("state", "unknown"))),
        ("step", f"{int(last.get('step') or state.get('step') or 0):,} of {_counted(state.get('steps'))}"),
        ("tokens", f"{int(last.get('tokens') or 0):,}"),
        ("workers", str(last.get("world") or state.get("world") or 0)),
        ("rescales", str(len(marks))),
        ("checkpoint", str(state["checkpoint"]) if state.get("checkpoint") else "none"),
    ]
    if state.get("error"):
        facts.append(("error", one_line(state["error"])))
    began = min([float(one["time"]) for one in (*lines[:1], *events[:1])])
    name = str(state.get("run") or folder.path.name)
    starts = sum(e["event"] == "run_started" for e in events)
    since = f"since the last of {starts} starts" if starts > 1 else ""
    goodput = state.get("goodput")
    if goodput:
        lost = {str(cause): float(seconds) for cause, seconds in goodput["lost"].items()}
        goodput = {"productive": float(goodput["productive"]), "lost": lost}
    return Page(name, str(folder.path), began, tuple(facts), _known(charts) if lines else (), marks, goodput, story, since)


def _lines(folder: RunFolder) -> list[Record]:
    """Return the lines that have a time; a long run's lines are thinned out to those that change the pictures."""
    timed = (line for line in folder.each_metrics() if line.get("time") is not None)
    end = (folder.last_metrics() or {}).get("time")
    return list(timed if folder.size_of("metrics.jsonl") < LONG_BYTES or end is None else telling(timed, float(end)))


def telling(lines: Iterator[Record], end: float) -> Iterator[Record]:
    """Yield the lines that are visible in pictures up to the time ``end``.

    Each column of the pictures keeps its first and last line, and those with the smallest and largest value of each figure. Mappings, such
    as memory and waiting, count by the sum of their values. Only a few lines of one column are in memory at a time.
    """
    begin: float | None = None
    number, kept, extremes = 0, dict[int, Record](), list[tuple[float, int, float, int] | None]()
    for index, line in enumerate(lines):
        at = float(line["time"])
        begin = at if begin is None else begin
        here = int((at - begin) / max(end - begin, 1e-9) * COLUMNS)
        if here != number or not kept:
            yield from kept.values()
            number, kept, extremes = here, {index: line}, [None] * (len(DRAWN) + 2)
        values = [*(_number(line.get(key)) for key in DRAWN), _sum(line.get("memory")), _sum(line.get("waited_seconds"))]
        for place, value in enumerate(values):
            if value is not None:
                low, low_at, high, high_at = extremes[place] or (value, index, value, index)
                extremes[place] = (min(low, value), index if value < low else low_at, max(high, value), index if value > high else high_at)
        kept[index] = line
        seen = {next(iter(kept)), index, *(one for found in extremes if found for one in (found[1], found[3]))}
        if len(kept) > len(seen):
            kept = {one: kept[one] for one in sorted(seen)}
    yield from kept.values()


def _sum(by: Mapping[str, Any] | None) -> float | None:
    return sum(map(float, by.values())) if by else None


def from_prometheus(url: str, run: str, hours: float, where: Mapping[str, str] | None = None) -> Page:
    """Build the page from a Prometheus's data on ``run`` in the last ``hours``.

    Args:
        where: values of the labels ``cluster`` and ``namespace`` that select one of several runs with one name.

    Raises:
        BadInput: the Prometheus does not answer, refuses, has no data on the run, or has several runs of that name.
    """
    if not 0 < hours <= MOST_HOURS:
        raise BadInput(f"--hours {hours:g}: give hours above 0, and at most {MOST_HOURS:,} (ten years)")
    chosen = _selector({"run": run, **(where or {})})
    """A restarted run has another address; ``max by`` joins the data of both addresses into one line."""
    now = time.time()
    begin, end = _span(url, run, hours, where or {})
    step = max(1.0, (end - begin) / COLUMNS)
    window = f"{math.ceil(max(4 * step, 60))}s"

    def ask(expr: str, name: str) -> tuple[Series, ...]:
        query = {"query": expr.replace("{}", chosen), "start": begin, "end": end, "step": step}
        found = prometheus.ask(url, "query_range", query)["result"]
        values = [(one["metric"], [(float(at), _number(value)) for at, value in one["values"]]) for one in found]
        return tuple(Series(name.format_map(_Labels(labels)) or "value", points) for labels, points in values)

    def latest(name: str) -> float:
        """Return the last known value, even if the run ended between two query points."""
        return _last(ask(f"max(last_over_time({name}{{}}[{window}]))", ""))

    throughput = ask("max(vescale_tokens_per_second{})", "tokens/s")
    world = ask("max(vescale_world_size{})", "workers")
    exposed, within = "vescale_worker_exposed_communication_seconds", f'{chosen[:-1]}, op!="reshard"'
    # A run that does not show all ranks has their median instead.
    usual = f'max by (op) (rate({exposed}_quantile{within}, quantile="0.5"}}[{window}]))'
    waited = f"({usual} or avg by (op) (rate({exposed}_total{within}}}[{window}])))"
    took, steps = (f"sum(rate(vescale_step_duration_seconds_{part}{{}}[{window}]))" for part in ("sum", "count"))
    charts = (
        Chart("Tokens per second (of each step)", throughput),
        Chart("Resident memory by rank", few(ask("max by (rank) (vescale_worker_host_rss_bytes{})", "rank {rank}")), "bytes"),
        Chart("Loss, nats per token", ask("max(vescale_loss{})", "training"), zero=False),
        Chart("Workers", (*world, *ask("max(vescale_world_size_target{})", "wanted")), steps=True),
        Chart(f"Step time, mean of {window}", ask(f"{took} / {steps}", "seconds"), "s"),
        Chart("Gradient norm", ask("max(vescale_grad_norm{})", "norm")),
        Chart(WAITING, ask(f"100 * {waited} / on () group_left {took}", "{op}")),
        Chart(KINDS, ask("max by (kind) (vescale_worker_memory_bytes{})", "{kind}"), "bytes"),
        Chart(UTILISATION, ask("100 * max(vescale_model_flops_utilization_ratio{})", "utilisation")),
    )
    ran = ask("max(vescale_goodput_seconds_total{}) + sum(max by (cause) (vescale_badput_seconds_total{}))", "seconds")
    older = any(at - (seconds or 0.0) < now - 3600 * hours for one in ran for at, seconds in one.points[:1])
    counted = ask("max by (direction, reason) (vescale_rescales_total{})", "{direction} ({reason})")
    marks, rescales = _rescales(counted, world, older)
    lost = ask(f"max by (cause) (last_over_time(vescale_badput_seconds_total{{}}[{window}])) > 0", "{cause}")
    goodput = {"productive": latest("vescale_goodput_seconds_total"), "lost": {one.name: _last((one,)) for one in lost}}
    facts = (
        ("step", f"{latest('vescale_step'):,.0f} of {latest('vescale_step_target'):,.0f}"),
        ("tokens", f"{latest('vescale_tokens_total'):,.0f}"),
        ("workers", f"{_last(world):g}"),
        ("rescales", f"{rescales:g}"),
    )
    began = min((at for chart in charts for series in chart.series for at, _ in series.points), default=begin)
    return Page(run, f"{url}, the last {hours:g} hours", began, facts, _known(charts), marks, goodput)


def _span(url: str, run: str, hours: float, where: Mapping[str, str]) -> tuple[float, float]:
    """Return the time of the run's data in the last ``hours``.

    Raises:
        BadInput: there is no data on the run, or there are several runs of that name.
    """
    begin, end, places = _when(url, _selector({"run": run, **where}), hours)
    if begin == end:
        elsewhere = _when(url, _selector({"run": run}), hours)[2] if where else []
        if elsewhere:
            raise BadInput(f"{url} has no data of run {run!r} there in the last {hours:g} hours, but with {'; with '.join(elsewhere)}")
        runs = prometheus.ask(url, "query", {"query": "last_over_time(vescale_run_info[30d])"})["result"]
        known = sorted({one["metric"].get("run", "") for one in runs})
        asked = "".join(f", {label} {value!r}," for label, value in where.items())
        raise BadInput(
            f"{url} has no data of run {run!r}{asked} in the last {hours:g} hours; it knows {', '.join(known) or 'no run at all'}"
        )
    if len(places) > 1:
        raise BadInput(f"{url} knows {len(places)} runs named {run!r}: with {'; with '.join(places)}. Name one")
    return begin, end


def _rescales(counted: Sequence[Series], world: Sequence[Series], older: bool) -> tuple[tuple[Mark, ...], float]:
    """Return the marks of rescales and their number, from the counters. The counters also show a rescale that was undone before the next
    point; ``world`` does not.

    Args:
        counted: rescales since the run's start, one series for each kind, with the kind as its name.
        older: the run began before the time shown, so the first point's count came before it, too.
    """
    risen: dict[float, dict[str, float]] = {}
    first = min((at for one in counted for at, _ in one.points[:1]), default=0.0)
    for one in counted:
        before = 0.0
        for at, value in one.points:
            if value is None:
                continue
            if older and at == first:
                before = value
            more = value if value < before else value - before  # a falling counter means that the run was restarted
            if more:
                risen.setdefault(at, {})[one.name] = more
            before = value
    size = {at: value for one in world for at, value in one.points if value}
    marks = []
    for at, kinds in sorted(risen.items()):
        told = ", ".join(kind if count == 1 else f"{count:g} x {kind}" for kind, count in kinds.items())
        workers = f", {size[at]:g} workers" if at in size else ""
        marks.append(Mark(at, told + workers, not any(kind.startswith("shrink") for kind in kinds)))
    return tuple(marks), sum(sum(kinds.values()) for kinds in risen.values())


def _when(url: str, chosen: str, hours: float) -> tuple[float, float, list[str]]:
    """Return the first and last time with data of a run in the last ``hours``, and the places of runs with that name.

    Equal times mean that there is no data. A place is given as command-line options. Each query point covers the time since the one
    before, so a run that lived between two points is found.
    """
    now = time.time()
    grid = max(1.0, hours * 3600 / COLUMNS)
    every = f"count by (cluster, namespace) (last_over_time(vescale_step{chosen}[{math.ceil(grid)}s]))"
    query = {"query": every, "start": now - hours * 3600, "end": now + grid}
    found = prometheus.ask(url, "query_range", {**query, "step": grid})["result"]
    times = [float(at) for one in found for at, _ in one["values"]]
    labels = [[one["metric"].get(label, "") for label in ("cluster", "namespace")] for one in found]
    places = sorted(f"--cluster {cluster!r} --namespace {namespace!r}" for cluster, namespace in labels)
    return (min(times) - grid, min(max(times), now), places) if times else (now, now, [])


def _selector(labels: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{label}={_quoted(value)}" for label, value in labels.items()) + "}"


def _quoted(text: str) -> str:
    """Return a PromQL string literal."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _known(charts: Sequence[Chart]) -> tuple[Chart, ...]:
    """Return the charts without optional ones that are empty for this run."""
    sometimes = (WAITING, KINDS, UTILISATION)
    return tuple(c for c in charts if c.title not in sometimes or any(v is not None for s in c.series for _, v in s.points))


def _by_name(lines: Sequence[Mapping[str, Any]], key: str, factor: Callable[[Mapping[str, Any]], float]) -> tuple[Series, ...]:
    """Turn the lines' mapping ``key`` into one series for each of its names."""
    names = sorted({name for line in lines for name in (line.get(key) or {})})
    timed = [(float(line["time"]), line.get(key) or {}, factor(line)) for line in lines]
    return tuple(Series(name, [(at, _times(_number(of.get(name)), by)) for at, of, by in timed]) for name in names)


def _per_step(line: Mapping[str, Any]) -> float:
    """Return the factor that turns seconds of waiting into percent. The seconds may cover other steps than this line's."""
    return 100.0 / float(line.get("waited_of_seconds") or line.get("step_seconds") or math.inf)


def _counted(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"


def _times(value: float | None, by: float) -> float | None:
    return None if value is None else value * by


def _last(series: Sequence[Series]) -> float:
    found = [value for one in series for _, value in one.points[-1:] if value is not None]
    return found[-1] if found else 0.0


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


class _Labels(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "?"
