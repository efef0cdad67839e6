"""A dashboard panel as a value, and PromQL fragments that several panels share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RUN = 'cluster=~"$cluster", namespace=~"$namespace", run=~"$run"'
EACH = "cluster, namespace, run"
"""Labels that identify a run, as in the alerts: runs of one name may be in two namespaces, or in two clusters of one data source. Series
without these labels count as equal in them. ``instance`` and ``pod`` are not included, since a restarted run has new ones."""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        queries: PromQL and legend of each query.
        unit: Grafana's name of the unit.
        kind: Grafana's panel type.
        width, height: size in the grid of 24 columns.
        options: options of the panel type. ``custom``: line style. ``values``: further defaults of the values.
        instant: whether to query only the newest value.
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
    """Instant query of the current value. For an ended run, which has none, it gives the last value of the shown time."""
    return f"({name}{{{RUN}}} or (last_over_time({name}{{{RUN}}}[$__range]) unless on ({EACH}) {name}{{{RUN}}}))"


FEW = 8
"""Number of ranks with a line of their own in a panel; more lines would be unreadable."""


def few(shown: str, by: str, pick: str = "topk") -> str:
    """``shown`` restricted to the :data:`FEW` ranks that stand out by ``by`` over ``$__range``. They are chosen once for the shown time. A
    plain ``topk`` chooses anew at each point, which draws fragments of many ranks' lines."""
    return f"{shown} and on ({EACH}, rank) {pick} by ({EACH}) ({FEW}, max by ({EACH}, rank) ({by}))"


def highest(name: str) -> str:
    """A series by rank, restricted to the ranks with the highest values in the shown time."""
    return few(f"{name}{{{RUN}}}", f"max_over_time({name}{{{RUN}}}[$__range] @ end())")


def median(name: str) -> str:
    """The median of a series over all ranks. A run that does not show all ranks has a series of its own for it."""
    return f'max by ({EACH}) ({name}_quantile{{{RUN}, quantile="0.5"}}) or quantile by ({EACH}) (0.5, {name}{{{RUN}}})'
