"""A page of charts as one self-contained HTML file, without scripts or external fonts and addresses; it works offline.

Long runs are thinned out: of the points in one column of the picture, the first, the last, the smallest and the largest stay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from vescale_ray.cli.pages.svg import BAD, GOOD, PALETTE, element, picture, text, upright

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 620, 210, 64, 12, 10, 24
COLUMNS = 400
MOST_SERIES = 12
Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Series:
    """Values over time (seconds since the epoch), in order; None marks a gap."""

    name: str
    points: Points


@dataclass(frozen=True)
class Chart:
    """One chart. ``unit``: ``bytes``, ``s`` or empty; ``steps``: a value holds until the next; ``zero``: the axis begins at 0."""

    title: str
    series: tuple[Series, ...]
    unit: str = ""
    steps: bool = False
    zero: bool = True


@dataclass(frozen=True)
class Mark:
    """A vertical line at a change of the number of workers."""

    at: float
    text: str
    good: bool


@dataclass(frozen=True)
class Page:
    """The content of one HTML page.

    Attributes:
        began: start of the time axis, in seconds since the epoch; earlier points are not drawn.
        facts: names and values at the head of the page.
        goodput: productive and lost seconds, as in run.json.
        events: (time, step, text, pause) of each event.
        since: start of the period that ``goodput`` counts, if that is not ``began``.
    """

    run: str
    source: str
    began: float
    facts: tuple[tuple[str, str], ...]
    charts: tuple[Chart, ...]
    marks: tuple[Mark, ...] = ()
    goodput: Mapping[str, Any] | None = None
    events: tuple[tuple[float, int | None, str, float | None], ...] = ()
    since: str = ""


def render(page: Page) -> str:
    """Return the page as HTML."""
    times = [at for chart in page.charts for series in chart.series for at, _ in series.points]
    span = (page.began, max(times, default=page.began))
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in page.facts)
    figures = "".join(_figure(chart, page.marks, span) for chart in page.charts)
    rows = "".join(
        f"<tr><td>{_clock(at - span[0])}</td><td>{'' if step is None else escape(str(step))}</td><td>{escape(what)}</td>"
        f"<td>{'' if pause is None else f'{pause:.2f} s'}</td></tr>"
        for at, step, what, pause in page.events
    )
    story = f"<h2>What happened</h2><table><tr><th>time</th><th>step</th><th>event</th><th>pause</th></tr>{rows}</table>" if rows else ""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(page.run)} - vescale-ray</title>'
    told = f"vescale-ray, from {escape(page.source)}, {date(time.time())}."
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body><h1>{escape(page.run)}</h1>'
        f'<p class="from">{told} Times count from {date(page.began)}; vertical lines: the workers have changed.</p>'
        f"<dl>{facts}</dl>{_goodput(page.goodput, page.since)}<main>{figures}</main>{story}</body></html>\n"
    )


_STYLE = (
    ":root{--ink:#1d2733;--dim:#66707c;--line:#d9dee5;--back:#fff;--card:#f6f8fa}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e3e8ee;--dim:#98a3b0;--line:#39424e;--back:#14181d;--card:#1c2229}}"
    "body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--back);margin:24px auto;max-width:1300px;padding:0 16px}"
    "h1{margin:0}h2{font-size:15px;margin:22px 0 6px}.from{color:var(--dim);margin:2px 0 14px}"
    "dl{display:flex;flex-wrap:wrap;gap:8px 28px;margin:0 0 12px}dt{color:var(--dim);font-size:12px}dd{margin:0;font-size:17px}"
    "main{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:14px;margin-top:14px}"
    "figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:6px;padding:10px 12px}"
    "figcaption{font-weight:600}.legend{color:var(--dim);font-size:12px}"
    ".legend span{white-space:nowrap}.legend i{display:inline-block;width:10px;height:3px;margin:0 4px 3px 10px}"
    "svg{width:100%;height:auto;display:block}svg text{fill:var(--dim);font-size:11px}.grid{stroke:var(--line)}"
    ".bar{display:flex;height:22px;border-radius:4px;overflow:hidden}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:2px 16px 2px 0;vertical-align:top}"
    "th,td:first-child,td:nth-child(2),td:last-child{color:var(--dim);white-space:nowrap}tr{border-bottom:1px solid var(--line)}"
)


def _figure(chart: Chart, marks: Sequence[Mark], span: tuple[float, float]) -> str:
    values = [value for series in chart.series for _, value in series.points if value is not None]
    head = f"<figure><figcaption>{escape(chart.title)}</figcaption>"
    if not values:
        return head + '<p class="legend">no data</p></figure>'
    scale = _scale(chart.unit, max(values))
    marked = [tick * scale for tick in ticks((0.0 if chart.zero and min(values) >= 0 else min(values)) / scale, max(values) / scale)]
    low, high = marked[0], marked[-1]
    begin, length = span[0], max(span[1] - span[0], 1e-9)

    def x(at: float) -> float:
        return LEFT + (at - begin) / length * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts: list[str] = []
    for tick in marked:
        parts.append(element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick)))
        parts.append(text(LEFT - 6, y(tick) + 4, _figure_of(tick, chart.unit, high), "end"))
    for i in range(5):
        at = begin + length * i / 4
        parts.append(text(x(at), HEIGHT - 6, _clock(at - begin), "start" if i == 0 else "end" if i == 4 else "middle"))
    for mark in marks:
        if span[0] <= mark.at <= span[1]:
            colour = GOOD if mark.good else BAD
            parts.append(upright(x(mark.at), TOP, HEIGHT - BOTTOM, mark.text, stroke=colour, stroke_dasharray="3 3"))
    for index, series in enumerate(chart.series):
        d = _path(thinned(series.points, span, COLUMNS), x, y, chart.steps)
        parts.append(element("path", series.name, d=d, fill="none", stroke=PALETTE[index % len(PALETTE)], stroke_width=1.6))
    colours = [PALETTE[i % len(PALETTE)] for i in range(len(chart.series))]
    names = " ".join(f'<span><i style="background:{c}"></i>{escape(s.name)}</span>' for c, s in zip(colours, chart.series, strict=True))
    drawn = picture(WIDTH, HEIGHT, chart.title, parts)
    return f'{head}{drawn}<div class="legend">{names if len(chart.series) > 1 else ""}</div></figure>'


def thinned(points: Points, span: tuple[float, float], columns: int) -> list[tuple[float, float | None]]:
    """Keep at most four points of each of ``columns`` parts of ``span``: first, smallest, largest, last. Gaps (None) stay."""
    if len(points) <= 2 * columns:
        return list(points)
    width = max(span[1] - span[0], 1e-9) / columns
    found: list[tuple[float, float | None]] = []
    column: list[tuple[float, float]] = []
    number = None

    def flush() -> None:
        if column:
            kept = {column[0], column[-1], min(column, key=lambda p: p[1]), max(column, key=lambda p: p[1])}
            found.extend(sorted(kept))
            column.clear()

    for at, value in points:
        here = int((at - span[0]) / width)
        if here != number:
            flush()
            number = here
        if value is None:
            flush()
            if found and found[-1][1] is not None:
                found.append((at, None))
        else:
            column.append((at, value))
    flush()
    return found


def _path(points: Points, x: Callable[[float], float], y: Callable[[float], float], steps: bool) -> str:
    parts: list[str] = []
    pen = False
    for at, value in points:
        if value is None:
            pen = False
            continue
        if pen and steps:
            parts.append(f"H{x(at):.1f}V{y(value):.1f}")
        else:
            parts.append(f"{'L' if pen else 'M'}{x(at):.1f} {y(value):.1f}")
        pen = True
    # A single point is a line of no length, so draw a short one.
    return "".join(parts) + ("h2" if len(parts) == 1 else "")


def _goodput(goodput: Mapping[str, Any] | None, since: str) -> str:
    if not goodput:
        return ""
    others = [colour for colour in PALETTE if colour != GOOD]
    shares = [("steps that count", float(goodput["productive"]), GOOD)]
    lost = sorted(goodput["lost"].items(), key=lambda item: -item[1])
    shares += [(str(cause).replace("_", " "), float(seconds), others[i % len(others)]) for i, (cause, seconds) in enumerate(lost)]
    whole = sum(seconds for _, seconds, _ in shares)
    if whole <= 0:
        return ""
    bar, names = "", ""
    for name, seconds, colour in shares:
        share = seconds / whole
        bar += f'<div style="width:{share:.3%};background:{colour}" title="{escape(name)}: {seconds:.1f} s"></div>'
        names += f'<span><i style="background:{colour}"></i>{escape(name)} {seconds:,.1f} s ({share:.1%})</span> '
    heading = "Where the time went" + (f", {escape(since)}" if since else "")
    return f'<h2>{heading}</h2><div class="bar">{bar}</div><div class="legend">{names}</div>'


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that enclose both."""
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = (0.0, high) if high > 1e-300 else (low - 1.0, high + 1.0)  # smaller numbers can't be divided
    rough = (high - low) / 4
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


_BYTES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def _scale(unit: str, largest: float) -> int:
    """Return the size of the displayed unit; round numbers of MiB are not round numbers of bytes."""
    return next((size for _, size in _BYTES if unit == "bytes" and abs(largest) >= size), 1)


def _figure_of(value: float, unit: str, largest: float) -> str:
    if unit == "bytes":
        scale = _scale(unit, largest)
        return f"{value / scale:.4g} {next(name for name, size in _BYTES if size == scale)}"
    text = f"{value / 1e6:.4g}M" if abs(largest) >= 1e7 else f"{value / 1e3:.4g}k" if abs(largest) >= 1e4 else f"{value:.4g}"
    return f"{text} {unit}" if unit else text


def date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _clock(seconds: float) -> str:
    if seconds < 0:
        return f"-{_clock(-seconds)}"
    days, rest = divmod(round(seconds), 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days} d {text}" if days else text


def few(series: Sequence[Series]) -> tuple[Series, ...]:
    """Return all series if they can be told apart, else the largest and the smallest value at each time."""
    if len(series) <= MOST_SERIES:
        return tuple(series)
    at: dict[float, list[float]] = {}
    for one in series:
        for when, value in one.points:
            if value is not None:
                at.setdefault(when, []).append(value)
    ends: Iterable[tuple[str, Callable[[list[float]], float]]] = ((f"largest of {len(series)}", max), ("smallest", min))
    return tuple(Series(name, [(when, pick(values)) for when, values in sorted(at.items())]) for name, pick in ends)
