"""Panels rendered as Grafana draws them, for :mod:`vescale_ray.deploy.draw`: HTML and SVG from one panel's JSON and its series."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from vescale_ray.page import date, ticks

MOST_POINTS = 300
COLOURS = "#73bf69 #f2cc0c #5794f2 #ff9830 #f2495c #b877d9 #8ab8ff #ffa6b0 #96d98d #ffee52 #c0d8ff #ffb357".split()


class DrawError(Exception):
    """Prometheus does not answer or refuses a query, or no browser is installed. The message is one line."""


@dataclass(frozen=True)
class Span:
    """The shown time. ``begin`` and ``end`` are seconds since the epoch; ``interval`` and ``rate_interval`` are seconds."""

    begin: float
    end: float
    interval: float
    rate_interval: float

    @classmethod
    def of(cls, begin: float, end: float, scrape_s: float) -> Span:
        """The span by Grafana's rules: at most :data:`MOST_POINTS` steps, none shorter than the scrape interval; rates cover 4 scrapes."""
        interval = max((end - begin) / MOST_POINTS, scrape_s)
        return cls(begin, end, interval, max(interval + scrape_s, 4 * scrape_s))


@dataclass(frozen=True)
class Line:
    """One series of a panel: legend, labels, values over time."""

    name: str
    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        return self.points[-1][1]


_THOUSANDS = {
    "short": ("", " K", " Mil", " Bil", " Tri"),
    "watt": (" W", " kW", " MW", " GW", " TW"),
    "hertz": (" Hz", " kHz", " MHz", " GHz", " THz"),
}


def value_text(value: float, unit: str) -> str:
    """A value as text in one of Grafana's units: ``s``, ``bytes`` and ``binBps`` (powers of 1024), ``percentunit``, ``short``, ``watt`` and
    ``hertz`` (powers of 1000), ``celsius``, ``none``."""
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s":
        if value and abs(value) < 1:
            return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g} µs"
        size, name = next(((size, name) for size, name in ((86400, "days"), (3600, "h"), (60, "min")) if abs(value) >= size), (1, "s"))
        return f"{value / size:.3g} {name}"
    if unit in ("bytes", "binBps"):
        power = max(0, min(5, int(math.log(abs(value), 1024)))) if abs(value) >= 1 else 0
        return f"{value / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}" + ("/s" if unit == "binBps" else "")
    if unit in _THOUSANDS:
        power = max(0, min(4, int(math.log10(abs(value)) / 3))) if abs(value) >= 1 else 0
        return f"{value / 1000**power:.3g}{_THOUSANDS[unit][power]}"
    if unit == "celsius":
        return f"{value:.3g} °C"
    return f"{value:.6g}"


def _defaults(panel: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    defaults = panel["fieldConfig"]["defaults"]
    return defaults.get("unit", "short"), defaults


def _mapped(defaults: Mapping[str, Any], value: float) -> tuple[str, str] | None:
    """Text and colour that the panel maps the value to, if any."""
    for mapping in defaults.get("mappings", ()):
        hit = mapping["options"].get(f"{value:g}") if mapping["type"] == "value" else None
        if hit:
            return hit["text"], hit.get("color", COLOURS[0])
    return None


def _timeseries(panel: Mapping[str, Any], lines: list[Line], span: Span, wide: int, high: int, marks: Sequence[float]) -> str:
    unit, defaults = _defaults(panel)
    custom = defaults.get("custom", {})
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    steps = custom.get("lineInterpolation") == "stepAfter"
    legend = 36 if len(lines) > 4 else 20
    left, bottom, plot = 74, 18, high - legend - 18
    floors: dict[float, float] = {}
    shapes: list[list[tuple[float, float, float]]] = []  # at, from, to
    for line in lines:
        shape = []
        for at, value in line.points:
            floor = floors.get(at, 0.0) if stacked else 0.0
            shape.append((at, floor, floor + value))
            if stacked:
                floors[at] = floor + value
        shapes.append(shape)
    tops = [top for shape in shapes for _, _, top in shape]
    low, high_value = (min(0.0, *tops) if stacked else min(tops)), max(tops)
    marked = ticks(low, high_value, 2 if unit in ("bytes", "binBps") else 10)
    low, high_value = marked[0], marked[-1]

    def x(at: float) -> float:
        return left + (at - span.begin) / (span.end - span.begin) * (wide - left - 6)

    def y(value: float) -> float:
        return 6 + (high_value - value) / (high_value - low) * (plot - 6)

    parts = [f'<svg width="{wide}" height="{high - legend}">']
    for tick in marked:
        parts.append(f'<line class="grid" x1="{left}" x2="{wide - 6}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{escape(value_text(tick, unit))}</text>')
    for i in range(5):
        at = span.begin + (span.end - span.begin) * i / 4
        anchor = "start" if i == 0 else "end" if i == 4 else "middle"
        parts.append(f'<text x="{x(at):.1f}" y="{plot + bottom - 4}" text-anchor="{anchor}">{_clock(at)}</text>')
    for at in marks:
        parts.append(f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="6" y2="{plot}" stroke="#ff9830" stroke-dasharray="4 3"/>')
    for index, shape in enumerate(shapes):
        colour = COLOURS[index % len(COLOURS)]
        for piece in _pieces(shape, span.interval, bool(custom.get("spanNulls"))):
            upper = _path([(x(at), y(top)) for at, _, top in piece], steps)
            if custom.get("lineWidth", 1):
                parts.append(f'<path d="M{upper}" fill="none" stroke="{colour}" stroke-width="{custom.get("lineWidth", 1) + 0.4}"/>')
            if custom.get("fillOpacity"):
                base = [(x(at), y(max(floor, low))) for at, floor, _ in reversed(piece)]
                opacity = custom["fillOpacity"] / 100
                parts.append(f'<path d="M{upper}L{_path(base, False)}Z" fill="{colour}" fill-opacity="{opacity}" stroke="none"/>')
    return f"{''.join(parts)}</svg>{_legend(lines)}"


def _pieces(shape: list[tuple[float, float, float]], interval: float, span_nulls: bool) -> list[list[tuple[float, float, float]]]:
    """The line in pieces, broken at gaps longer than a step, unless the panel spans gaps."""
    pieces: list[list[tuple[float, float, float]]] = []
    for point in shape:
        if pieces and (span_nulls or point[0] - pieces[-1][-1][0] <= 1.5 * interval):
            pieces[-1].append(point)
        else:
            pieces.append([point])
    return pieces


def _path(points: list[tuple[float, float]], steps: bool) -> str:
    text = f"{points[0][0]:.1f} {points[0][1]:.1f}"
    if len(points) == 1:
        return text + "h2"
    return text + "".join(f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}" for x, y in points[1:])


def _legend(lines: Sequence[Line]) -> str:
    names = "".join(
        f'<span><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{escape(line.name or "value")}</span>' for i, line in enumerate(lines)
    )
    return f'<div class="legend">{names}</div>'


def _stat(panel: Mapping[str, Any], lines: list[Line], span: Span, wide: int, high: int, marks: Sequence[float]) -> str:
    unit, defaults = _defaults(panel)
    each = []
    for line in lines:
        text, colour = _mapped(defaults, line.last) or (value_text(line.last, unit), COLOURS[0])
        name = f"<small>{escape(line.name)}</small>" if len(lines) > 1 else ""
        each.append(f'<div style="color:{colour}">{name}{escape(text)}{_spark(panel, line, span, wide // len(lines), colour)}</div>')
    return f'<div class="stat" style="height:{high}px">{"".join(each)}</div>'


def _spark(panel: Mapping[str, Any], line: Line, span: Span, wide: int, colour: str) -> str:
    values = [value for _, value in line.points]
    if panel["options"].get("graphMode") != "area" or len(values) < 2:
        return ""
    low, high = min(values), max(values)
    points = [
        ((at - span.begin) / (span.end - span.begin) * wide, 26 - 24 * ((value - low) / (high - low) if high > low else 0.5))
        for at, value in line.points
    ]
    closed = f"M{_path(points, False)}V28H{points[0][0]:.1f}Z"
    return f'<svg width="{wide}" height="28"><path d="{closed}" fill="{colour}" fill-opacity=".25" stroke="{colour}"/></svg>'


def _bargauge(panel: Mapping[str, Any], lines: list[Line], span: Span, wide: int, high: int, marks: Sequence[float]) -> str:
    unit, _ = _defaults(panel)
    most = max(max(abs(line.last) for line in lines), 1e-300)
    rows = "".join(
        f'<tr><td>{escape(line.name)}</td><td style="width:50%"><div style="width:{100 * abs(line.last) / most:.1f}%;'
        f'background:{COLOURS[0]}">&nbsp;</div></td><td>{escape(value_text(line.last, unit))}</td></tr>'
        for line in sorted(lines, key=lambda line: -line.last)
    )
    return f'<div class="cut" style="height:{high}px"><table>{rows}</table></div>'


def _table(panel: Mapping[str, Any], lines: list[Line], span: Span, wide: int, high: int, marks: Sequence[float]) -> str:
    columns = dict.fromkeys(["Time", *(name for line in lines for name in line.labels), "Value"])
    for transformation in panel.get("transformations", ()):
        if transformation["id"] != "organize":
            raise DrawError(f"panel {panel['title']!r} has the transformation {transformation['id']!r}: only 'organize' can be drawn")
        options = transformation["options"]
        kept = [name for name in columns if not options.get("excludeByName", {}).get(name)]
        columns = dict.fromkeys(sorted(kept, key=lambda name: options.get("indexByName", {}).get(name, len(kept))))
    unit, _ = _defaults(panel)
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    rows = ""
    for line in lines:
        cells = {**line.labels, "Time": date(line.points[-1][0]), "Value": value_text(line.last, unit)}
        filled = "".join(f"<td>{escape(cells.get(name, ''))}</td>" for name in columns)
        rows += f"<tr>{filled}</tr>"
    return f'<div class="cut" style="height:{high}px"><table><tr>{head}</tr>{rows}</table></div>'


def _state_timeline(panel: Mapping[str, Any], lines: list[Line], span: Span, wide: int, high: int, marks: Sequence[float]) -> str:
    _, defaults = _defaults(panel)
    left, each = 140, (high - 18) / len(lines)
    parts = [f'<svg width="{wide}" height="{high}">']

    def x(at: float) -> float:
        return left + (at - span.begin) / (span.end - span.begin) * (wide - left - 6)

    for index, line in enumerate(lines):
        top, tall = index * each, each * panel["options"].get("rowHeight", 0.9)
        parts.append(f'<text x="{left - 8}" y="{top + tall / 2 + 4:.1f}" text-anchor="end">{escape(line.name)}</text>')
        begin = 0
        for i, (at, value) in enumerate(line.points):
            after = line.points[i + 1] if i + 1 < len(line.points) else None
            if after is not None and after[1] == value and after[0] - at <= 1.5 * span.interval:
                continue
            end = min(at + span.interval, span.end) if after is None or after[0] - at > 1.5 * span.interval else after[0]
            text, colour = _mapped(defaults, value) or (f"{value:g}", COLOURS[0])
            start, length = x(line.points[begin][0]), x(end) - x(line.points[begin][0])
            parts.append(f'<rect x="{start:.1f}" y="{top:.1f}" width="{max(length, 1):.1f}" height="{tall:.1f}" fill="{colour}"/>')
            if length > 9 * len(text):
                parts.append(f'<text class="in" x="{start + 6:.1f}" y="{top + tall / 2 + 4:.1f}">{escape(text)}</text>')
            begin = i + 1
    for i in range(5):
        at = span.begin + (span.end - span.begin) * i / 4
        anchor = "start" if i == 0 else "end" if i == 4 else "middle"
        parts.append(f'<text x="{x(at):.1f}" y="{high - 4}" text-anchor="{anchor}">{_clock(at)}</text>')
    return f"{''.join(parts)}</svg>"


Draw = Callable[[Mapping[str, Any], list[Line], Span, int, int, Sequence[float]], str]
KINDS: dict[str, Draw] = {
    "timeseries": _timeseries,
    "stat": _stat,
    "bargauge": _bargauge,
    "table": _table,
    "state-timeline": _state_timeline,
}


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
