"""One panel of the dashboard as a value, and what several of them ask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RUN = 'cluster=~"$cluster", namespace=~"$namespace", run=~"$run"'
EACH = "cluster, namespace, run"
"""What tells runs apart, as in the alerts: two of one name may be in two namespaces, or in two clusters that one data source knows. Series
without these labels are alike in them; ``instance`` and ``pod`` are no part of it, since a run that is started again has others."""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        queries: PromQL and legend of each.
        unit: Grafana's name of the unit.
        kind: Grafana's panel type.
        width, height: in the grid of 24 columns.
        options: of the panel type; ``custom``: how lines are drawn; ``values``: further defaults of the values.
        instant: only the newest value is asked for.
    """

    title: str
    description: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    options: dict[str, Any] = field(default_factory=dict)
    custom: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    instant: bool = False


def stat(title: str, description: str, expr: str, unit: str = "short", **more: Any) -> Panel:
    return Panel(title, description, ((expr, "{{run}}"),), unit, "stat", width=4, height=4, **more)


STATES = ("PENDING", "STARTING", "RUNNING", "RESCALING", "CHECKPOINTING", "STOPPING", "DONE", "FAILED")
COLOURS = ("#8e8e8e", "#5794f2", "#73bf69", "#ff9830", "#b877d9", "#fade2a", "#37872d", "#e02f44")
STATE = " + ignoring (state) ".join(f'{i} * vescale_run_state{{{RUN}, state="{state}"}}' for i, state in enumerate(STATES))
STATE_MAP = [{"type": "value", "options": {str(i): {"text": s, "color": COLOURS[i], "index": i} for i, s in enumerate(STATES)}}]
STACKED = {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 60, "lineWidth": 0}
STEPS = {"lineInterpolation": "stepAfter"}
RATE = "$__rate_interval"


def newest(name: str) -> str:
    """Of an instant query: what there is now, and of runs that have ended, which have nothing now, the last of the shown time."""
    return f"({name}{{{RUN}}} or (last_over_time({name}{{{RUN}}}[$__range]) unless on ({EACH}) {name}{{{RUN}}}))"


FEW = 8
"""So many ranks have a line of their own in a panel: a thousand lines tell nobody anything."""


def few(shown: str, by: str, pick: str = "topk") -> str:
    """Of what is shown by rank, the lines of the ranks that stand out. They are chosen once for the whole shown time, by ``by`` over
    ``$__range``: what ``topk`` chooses anew at each point are pieces of lines, of more and more ranks."""
    return f"{shown} and on ({EACH}, rank) {pick} by ({EACH}) ({FEW}, max by ({EACH}, rank) ({by}))"


def highest(name: str) -> str:
    """Of a series by rank, the ranks that had the highest values in the shown time."""
    return few(f"{name}{{{RUN}}}", f"max_over_time({name}{{{RUN}}}[$__range] @ end())")


def median(expr: str) -> str:
    """Of all ranks."""
    return f"quantile by ({EACH}) (0.5, {expr})"
