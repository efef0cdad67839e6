"""The live terminal view of a run: ``vescale-ray top``. Without a terminal, it prints one picture."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vescale_ray.cli import client
from vescale_ray.errors import BadInput, one_line
from vescale_ray.reporting.event_words import describe_event, loss_words
from vescale_ray.reporting.report import goodput_line
from vescale_ray.runfolder import Record, RunFolder, RunFolderError

EVENTS = 8
RANKS = 32
"""Number of rows of ranks if there is no terminal."""
COLUMNS = {"rank": 4, "worker": 6, "node": 12, "memory": 10, "slots": 5, "own time for a slot": 8, "slowness": 8}
"""Columns of the ranks' table, and the characters that each needs, besides 4 between two."""
DISPENSABLE = ("node", "slots", "worker", "memory")
"""Columns that a narrow terminal leaves out, the first one first."""
COLOURS = {"RUNNING": "green", "DONE": "green", "FAILED": "red", "RESCALING": "yellow", "STOPPING": "yellow"}


def show(folder: RunFolder, interval_s: float, console: Console, *, once: bool) -> str:
    """Draw the run until it ends (or is no longer reachable); return the final message.

    Args:
        interval_s: seconds between two updates.
        once: draw once and return; implied if ``console`` is not a terminal.

    Raises:
        client.RunNotAlive: the run is not alive.
        RunFolderError: the status is not one of this version of vescale-ray.
    """
    try:
        return _show(folder, interval_s, console, once)
    except BadInput:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        said = f"{type(error).__name__}: {one_line(error)}"
        raise RunFolderError(
            f"{folder.path}: its status can't be shown ({said}); is it a run of another version of vescale-ray?"
        ) from error


def _show(folder: RunFolder, interval_s: float, console: Console, once: bool) -> str:
    tail, recent = folder.tail_events(), deque[Record](maxlen=200)
    status = client.request(folder, "status", timeout_s=3)
    recent.extend(tail.read())
    if once or not console.is_terminal:
        console.print(picture(status, recent, time.time(), EVENTS, width=console.width))
        return ""
    with Live(picture(status, recent, time.time(), EVENTS, width=console.width), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval_s)
            recent.extend(tail.read())
            note = ""
            try:
                status = client.request(folder, "status", timeout_s=3)
            except client.RunNotAlive as end:
                if not end.again:
                    return str(end)
                note = str(end)
            except client.CommandRefused as end:
                return str(end)
            world = int(status.get("world") or 0)
            ranks = min(world, max(4, console.height - 20 - EVENTS))
            rows = max(3, console.height - 20 - ranks)
            live.update(picture(status, recent, time.time(), rows, ranks, note, console.width), refresh=True)


def picture(
    status: Mapping[str, Any],
    events: Sequence[Record] | deque[Record],
    now: float,
    rows: int,
    ranks: int = RANKS,
    note: str = "",
    width: int = 120,
) -> RenderableType:
    """Return one picture of the run: ``note``, its head, ``ranks`` of its ranks (slow ones first), its newest ``rows`` events.

    If the terminal has fewer than ``width`` columns, the ranks' table leaves out columns.
    """
    parts: list[RenderableType] = [Text(note, "yellow"), _head(status, now), _ranks(status, ranks, width)]
    if not note:
        del parts[0]
    story = [(e, words) for e in events if (words := describe_event(e)) is not None][-rows:]
    if story:
        table = Table.grid(padding=(0, 2))
        for event, (what, pause) in story:
            ago = f"{_span(now - float(event['time']))} ago"
            step = "" if event.get("step") is None else f"step {event['step']}"
            table.add_row(Text(ago, "dim"), Text(step), Text(what + ("" if pause is None else f", paused {pause:.2f} s")))
        parts.append(Panel(table, title="events", title_align="left"))
    return Group(*parts)


def _head(s: Mapping[str, Any], now: float) -> RenderableType:
    state = str(s.get("state"))
    step, steps = int(s.get("step") or 0), int(s.get("steps") or 0)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_row("state", Text(state, COLOURS.get(state, "cyan")))
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=max(1, steps), completed=step, width=30), f"{step:,} of {steps:,}")
    grid.add_row("step", bar)
    speed = s.get("tokens_per_second")
    grid.add_row("loss", f"{loss_words(s, 4)}, gradient norm {_shown(s.get('grad_norm'))}, learning rate {_shown(s.get('learning_rate'))}")
    mean = s.get("step_seconds") or {}
    took = f", {mean['sum'] / mean['count']:.3g} s a step" if mean.get("count") else ""
    last = s.get("last_step_time")
    used = s.get("flops_utilization")
    used = "" if used is None else f", {used:.1%} of the devices' peak"
    grid.add_row("speed", f"{speed or 0:,.0f} tokens/s{used}{took}" + (f", last step {_span(now - float(last))} ago" if last else ""))
    waiting = _waiting(s)
    if waiting:
        grid.add_row("waiting", waiting)
    memory = _memory(s)
    if memory:
        grid.add_row("memory", memory)
    spares = f", {s.get('spares')} of {s['spares_target']} spares" if s.get("spares_target") else ""
    bounds = f"{s.get('world')} of {s.get('world_target')} wanted ({s.get('world_min')} to {s.get('world_max')}){spares}"
    changes = f"{sum((s.get('rescales') or {}).values())} rescales, {s.get('replayed_steps') or 0} steps replayed"
    grid.add_row("workers", f"{bounds}, generation {s.get('generation')}, {changes}")
    if s.get("productive_seconds") is not None:
        grid.add_row("time", goodput_line({"productive": s["productive_seconds"], "lost": s.get("lost_seconds") or {}}))
    saved = s.get("checkpoint_time")
    kept = "none yet" if s.get("checkpoint_step") is None else f"step {s['checkpoint_step']}"
    kept += f", {_span(now - float(saved))} ago" if saved else ""
    failed = s.get("checkpoint_failures") or 0
    grid.add_row("checkpoint", kept + (f", {failed} failed" if failed else ""))
    if s.get("error"):
        grid.add_row("error", Text(one_line(s["error"]), "red"))
    return Panel(grid, title=f"vescale-ray: {s.get('run')}", title_align="left")


def _waiting(s: Mapping[str, Any]) -> str:
    """Return the share of step time spent waiting for other ranks, with the largest kinds of waits; empty if unknown."""
    phases = {name: seconds for name, seconds in (s.get("phase_seconds") or {}).items() if name != "checkpoint"}
    whole = sum(phases.values())
    ops = {op: sum(by.values()) for op, by in (s.get("waited") or {}).items() if op != "reshard"}
    waited = sum(ops.values())
    if not whole or not waited:
        return ""
    most = sorted(ops.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{op.replace('_', ' ')} {seconds / waited:.0%}" for op, seconds in most if seconds)
    return f"{phases.get('comm', 0.0) / whole:.1%} of the steps' time for other ranks; of that {shares}"


def _memory(s: Mapping[str, Any]) -> str:
    """Return the uses of the fullest rank's memory, and the used part of a GPU's memory."""
    kinds = {kind: max(by.values()) for kind, by in (s.get("memory_kinds") or {}).items() if by}
    largest = sorted(kinds.items(), key=lambda item: -item[1])
    parts = [f"{kind} {nbytes / (1 << 20):,.0f} MiB" for kind, nbytes in largest if nbytes >= 1 << 20]
    device = s.get("device_memory") or {}
    if device.get("capacity") and device.get("peak_allocated"):
        rank = max(device["peak_allocated"], key=lambda r: device["peak_allocated"][r])
        parts.append(f"GPU {device['peak_allocated'][rank] / (1 << 30):,.1f} of {device['capacity'][rank] / (1 << 30):,.1f} GiB")
    return ", ".join(parts)


def _ranks(s: Mapping[str, Any], most: int, width: int) -> RenderableType:
    room, columns = width - 4, dict(COLUMNS)
    for name in DISPENSABLE:
        if sum(columns.values()) + 4 * len(columns) > room:
            del columns[name]
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name in ("rank", "worker", "node") else "right", no_wrap=name == "rank")
    of = {name: s.get(name) or {} for name in ("workers", "memory", "slots", "slot_seconds", "slowness")}
    slow = {str(one.get("rank")) for one in (s.get("stragglers") or {}).values()}
    everyone = sorted(set(of["workers"]) | set(of["memory"]), key=int)
    # If there are many, show the slow ones, then those that take longest.
    first = sorted(everyone, key=lambda rank: (rank not in slow, -(of["slowness"].get(rank) or 0.0)))[:most]
    for rank in sorted(first, key=int):
        who, memory, seconds = of["workers"].get(rank, {}), of["memory"].get(rank), of["slot_seconds"].get(rank)
        cells: dict[str, RenderableType] = {
            "rank": str(rank),
            "worker": Text(str(who.get("worker", "-"))),  # Text prevents rich from reading markup
            "node": Text(str(who.get("node", "-"))[:12]),
            "memory": "-" if memory is None else f"{memory / (1 << 20):,.0f} MiB",
            "slots": str(of["slots"].get(rank, "-")),
            "own time for a slot": "-" if seconds is None else f"{seconds:.4f} s",
            "slowness": _shown(of["slowness"].get(rank)),
        }
        table.add_row(*(cells[name] for name in columns), style="red" if rank in slow else "")
    left = len(everyone) - len(first)
    return Panel(table, title="ranks" + (f", the slowest {len(first)}; {left:,} more" if left else ""), title_align="left")


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}"


def _span(seconds: float) -> str:
    """Return a duration in its two largest units."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole // 60 % 60} min" if whole < 172800 else f"{whole // 86400} d {whole // 3600 % 24} h"
