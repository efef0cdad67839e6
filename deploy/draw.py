"""Render a Grafana dashboard without Grafana: ``python -m vescale_ray.deploy.draw --prometheus URL --out page.html --png picture.png``.

The module reads the dashboard JSON as Grafana does (``deploy/grafana/vescale.json``: schema 42, with our panel types, options and
variables). It sends each panel's queries to a Prometheus, and lays the panels out on the same grid of 24 columns. So it shows the
operator's view without a Grafana, and names each panel without data. ``$run`` comes from the variable's own query, as in Grafana;
``$__interval``, ``$__rate_interval`` and ``$__range`` follow Grafana's rules. The output is one HTML file without scripts; headless
Chromium makes the picture.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from vescale_ray import prometheus as client
from vescale_ray.deploy.panels import KINDS, DrawError, Line, Span
from vescale_ray.errors import BadInput
from vescale_ray.page import date

DASHBOARD = Path(__file__).resolve().parent / "grafana" / "vescale.json"
WIDTH, COLUMNS, ROW, GAP, TITLE = 1680, 24, 38, 8, 28
"""Width of the page in pixels; number of columns; pixels of a grid row, of the gap between panels, and of a panel's title."""
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")

Ask = Callable[[str, Mapping[str, Any]], list[dict[str, Any]]]
"""Function that sends a request to Prometheus's HTTP interface, such as
``ask("query_range", {"query": .., "start": .., "end": .., "step": ..})``, and returns its result."""


@dataclass(frozen=True)
class Drawn:
    """The page, its height in pixels, and the titles of panels without data."""

    html: str
    height: int
    empty: tuple[str, ...]


def draw(dashboard: Mapping[str, Any], ask: Ask, span: Span, runs: Sequence[str] = ()) -> Drawn:
    """Render the page of ``dashboard``.

    Args:
        runs: names that ``$run`` stands for; by default all that the variable's own query finds.

    Raises:
        DrawError: ``ask`` fails or a panel's type is unknown; the message has the panel's title.
    """
    others = {f"${one['name']}": one["allValue"] for one in dashboard["templating"]["list"] if one["type"] == "query"}
    chosen = list(runs) or _runs(dashboard, ask, span, others)
    variables = {
        **others,
        "$__rate_interval": _seconds(span.rate_interval),
        "$__interval": _seconds(span.interval),
        "$__range": _seconds(span.end - span.begin),
        "$run": "|".join(re.escape(run) for run in chosen).replace("\\", "\\\\") or ".*",
    }

    def lines_of(panel: Mapping[str, Any]) -> list[Line]:
        found = []
        for target in panel.get("targets", ()):
            try:
                found += _lines(target, ask, span, variables)
            except DrawError as error:
                raise DrawError(f"panel {panel['title']!r}: {error}") from None
        return found

    marks = [at for annotation in dashboard["annotations"]["list"] for at in _marks(annotation, ask, span, variables)]
    parts, empty, height = [], [], 0
    for panel in unfolded(dashboard):
        place = panel["gridPos"]
        left, top = round(place["x"] * WIDTH / COLUMNS), place["y"] * ROW
        wide, high = round(place["w"] * WIDTH / COLUMNS) - GAP, place["h"] * ROW - GAP
        height = max(height, top + high)
        style = f"left:{left}px;top:{top}px;width:{wide}px;height:{high}px"
        title = escape(panel["title"])
        if panel["type"] == "row":
            parts.append(f'<h2 style="{style}">{title}</h2>')
            continue
        if panel["type"] not in KINDS:
            raise DrawError(f"panel {panel['title']!r} has type {panel['type']!r}: only {', '.join(KINDS)} can be drawn")
        lines = lines_of(panel)
        if lines:
            body = KINDS[panel["type"]](panel, lines, span, wide - 2 * GAP, high - TITLE - GAP, marks)
        else:
            empty.append(panel["title"])
            body = '<p class="none">No data</p>'
        parts.append(f'<section style="{style}" title="{escape(panel.get("description", ""))}"><h3>{title}</h3>{body}</section>')
    head = f'<meta charset="utf-8"><title>{escape(dashboard["title"])}</title><style>{_STYLE}</style>'
    shown = f"{date(span.begin)} to {date(span.end)}, {escape(', '.join(chosen) or 'no run')}"
    body = f'<h1>{escape(dashboard["title"])} <small>{shown}</small></h1><main style="height:{height}px">{"".join(parts)}</main>'
    html = f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'
    return Drawn(html, height + 80, tuple(empty))


def unfolded(dashboard: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All panels and rows of the dashboard, those in collapsed rows included."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def prometheus(url: str) -> Ask:
    """A function that sends requests to the Prometheus at ``url``."""

    def ask(path: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = client.ask(url, path, parameters)["result"]
        except BadInput as error:
            raise DrawError(str(error)) from None
        return found

    return ask


def picture(page: Path, out: Path, height: int, timeout_s: float = 120.0) -> None:
    """Let headless Chromium draw ``page`` to the file ``out``.

    Raises:
        DrawError: no Chromium is installed, or it fails.
    """
    browser = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if browser is None:
        raise DrawError(f"no browser to draw with: install one of {', '.join(CHROMIUM)}, or leave --png out and open {page}")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH + 32},{height}"]
    try:
        done = subprocess.run(
            [*command, f"--screenshot={out.resolve()}", page.resolve().as_uri()],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DrawError(f"{browser} did not draw {page} within {timeout_s:g} s") from None
    if done.returncode or not out.is_file():
        raise DrawError(f"{browser} could not draw {page}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")


# -- queries -----------------------------------------------------------------------------------------------------------


def _runs(dashboard: Mapping[str, Any], ask: Ask, span: Span, others: Mapping[str, str]) -> list[str]:
    """Names that Grafana would offer for ``$run``: matches of the variable's regular expression in the answers of its
    ``query_result(..)``."""
    variable = next(one for one in dashboard["templating"]["list"] if one["name"] == "run")
    query = re.fullmatch(r"query_result\((.*)\)", variable["query"]["query"])
    assert query is not None, "the variable's query is a query_result(..)"
    expr = query[1].replace("$__range", _seconds(span.end - span.begin))
    for name, value in others.items():
        expr = expr.replace(name, value)
    pattern = re.compile(variable["regex"].strip("/"))
    found = set()
    for one in ask("query", {"query": expr, "time": span.end}):
        labels = ",".join(f'{name}="{value}"' for name, value in one["metric"].items() if name != "__name__")
        if match := pattern.search(f"{one['metric'].get('__name__', '')}{{{labels}}} {one['value'][1]} {one['value'][0]}"):
            found.add(match[1])
    return sorted(found)


def _lines(target: Mapping[str, Any], ask: Ask, span: Span, variables: Mapping[str, str]) -> list[Line]:
    expr = target["expr"]
    for name, value in variables.items():
        expr = expr.replace(name, value)
    if target.get("instant"):
        answers = [(one["metric"], [one["value"]]) for one in ask("query", {"query": expr, "time": span.end})]
    else:
        when = {"start": span.begin, "end": span.end, "step": span.interval}
        answers = [(one["metric"], one["values"]) for one in ask("query_range", {"query": expr, **when})]
    found = []
    for labels, values in answers:
        points = tuple((float(at), float(value)) for at, value in values if math.isfinite(float(value)))
        if points:
            name = re.sub(r"{{\s*(\w+)\s*}}", lambda m, labels=labels: labels.get(m[1], ""), target.get("legendFormat", ""))  # type: ignore[misc]
            found.append(Line(name, labels, points))
    return found


def _marks(annotation: Mapping[str, Any], ask: Ask, span: Span, variables: Mapping[str, str]) -> list[float]:
    """Start times of the intervals in which an annotation's query has values."""
    if not annotation.get("enable"):
        return []
    found = []
    for line in _lines({**annotation["target"], "instant": False}, ask, span, variables):
        times = [at for at, _ in line.points]
        found += [at for before, at in zip([-math.inf, *times], times, strict=False) if at - before > 1.5 * span.interval]
    return found


_STYLE = (
    "body{margin:8px 16px;background:#111217;color:#ccccdc;font:13px/1.4 Inter,system-ui,sans-serif}h1{font-size:20px;margin:6px 0 12px}"
    "small{color:#8e8e9a;font-weight:400;font-size:13px}main{position:relative}h2,section{position:absolute;margin:0;box-sizing:border-box}"
    "h2{font-size:15px}section{background:#181b1f;border:1px solid #2c3235;border-radius:3px;padding:0 8px;overflow:hidden}"
    "h3{font-size:13px;margin:0;line-height:28px;font-weight:500}svg text{fill:#9fa7b3;font-size:11px}svg text.in{fill:#111217}"
    ".grid{stroke:#2c3235}.legend{font-size:11px;max-height:36px;overflow:hidden}.legend span{margin-right:12px;white-space:nowrap}"
    ".legend i{display:inline-block;width:12px;height:4px;border-radius:2px;margin:0 5px 2px 0}.none{text-align:center;color:#8e8e9a}"
    ".stat{display:flex;gap:8px;font-size:28px;font-weight:500;text-align:center;justify-content:space-around}"
    ".stat small,.stat svg{display:block;margin:auto}.cut{overflow:hidden}table{border-collapse:collapse;width:100%;font-size:12px}"
    "td,th{text-align:left;padding:3px 8px;border-bottom:1px solid #2c3235;white-space:nowrap}"
)


def _seconds(value: float) -> str:
    return f"{max(1, math.ceil(value))}s"


def _when(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dashboard", type=Path, default=DASHBOARD, help="the dashboard's JSON (default: ours)")
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--run", action="append", default=[], help="show only this run; may be repeated")
    parser.add_argument("--hours", type=float, default=6.0, help="hours to show (default: 6)")
    parser.add_argument("--end", type=_when, default=None, help="end: seconds since the epoch, or 2026-11-22T14:00 (default: now)")
    parser.add_argument("--scrape", type=float, default=15.0, help="the data source's scrape interval in seconds (default: 15)")
    parser.add_argument("--out", type=Path, required=True, help="the page to write")
    parser.add_argument("--png", type=Path, default=None, help="also write a picture of it, with headless Chromium")
    options = parser.parse_args(arguments)
    if not (options.hours > 0 and options.scrape > 0 and math.isfinite(options.hours + options.scrape)):
        parser.error(f"--hours {options.hours:g} and --scrape {options.scrape:g}: give numbers above 0")
    end = time.time() if options.end is None else options.end
    try:
        drawn = draw(
            json.loads(options.dashboard.read_text()),
            prometheus(options.prometheus),
            Span.of(end - options.hours * 3600, end, options.scrape),
            options.run,
        )
        options.out.write_text(drawn.html, encoding="utf-8")
        if options.png is not None:
            picture(options.out, options.png, drawn.height)
    except (DrawError, OSError, ValueError) as error:
        print(f"draw: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: no data in {', '.join(drawn.empty) or 'no panel'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
