"""The Grafana dashboard, generated from the tables in ``rows.py`` and ``infrastructure.py``:
``python -m vescale_ray.deploy.dashboard > deploy/grafana/vescale.json``.

The output is Grafana's classic JSON model, schema 42 (``@grafana/schema`` 13). It uses stable panel types only, and every panel has a
description and a unit. There are four variables: data source, run, and, for runs of one name in several places, namespace and cluster. The
run list includes ended runs within the time range; ``label_values`` would offer live series alone. Rescales are annotations on every panel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from vescale_ray.deploy.infrastructure import INFRASTRUCTURE
from vescale_ray.deploy.panel import RUN, Panel
from vescale_ray.deploy.rows import ROWS

SCHEMA = 42
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    number = y = 0
    for title, members, collapsed in (*((title, members, False) for title, members in ROWS), (*INFRASTRUCTURE, True)):
        number += 1
        row = {"id": number, "type": "row", "title": title, "collapsed": collapsed, "gridPos": _at(0, y, COLUMNS, 1), "panels": []}
        panels.append(row)
        # Grafana keeps the panels of a collapsed row inside the row.
        among: Any = row["panels"] if collapsed else panels
        x, y, tallest = 0, y + 1, 0
        for panel in members:
            number += 1
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            among.append(_panel(number, panel, _at(x, y, panel.width, panel.height)))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return {
        "title": "vescale-ray",
        "uid": "vescale-ray",
        "description": "Training runs of vescale-ray: throughput, memory, loss, joining and leaving workers, and use of time.",
        "tags": ["vescale-ray", "training"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "fiscalYearStartMonth": 0,
        "links": [],
        "templating": {"list": _variables()},
        "annotations": {"list": _annotations()},
        "panels": panels,
    }


def _at(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _panel(number: int, panel: Panel, at: dict[str, int]) -> dict[str, Any]:
    legend: dict[str, Any] = {"displayMode": "list", "placement": "bottom", "calcs": []}
    kinds: dict[str, dict[str, Any]] = {
        "timeseries": {
            "legend": {**legend, "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "stat": {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area",
            "textMode": "auto",
            "justifyMode": "auto",
            "orientation": "auto",
        },
        "bargauge": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}},
        "state-timeline": {"showValue": "auto", "rowHeight": 0.8, "legend": {**legend, "showLegend": False}},
        "table": {"showHeader": True, "cellHeight": "sm"},
    }
    lines: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never", "spanNulls": False, **panel.custom}
    if panel.kind != "timeseries":
        lines = {}
    shown: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": at,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": expr,
                "legendFormat": legend,
                "range": not panel.instant,
                "instant": panel.instant,
                **({"format": "table"} if panel.kind == "table" else {}),
            }
            for i, (expr, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": lines, **panel.values}, "overrides": []},
        "options": {**kinds[panel.kind], **panel.options},
    }
    if panel.kind == "table":
        target = ("instance", "job", "container", "endpoint", "ray_io_cluster")  # labels of the scrape target
        hidden = dict.fromkeys(("Time", "Value", "__name__", *target), True)
        first = ("run", "cluster", "namespace", "rank", "worker", "node", "pod", "device", "version", "torch", "ray")
        order = {name: i for i, name in enumerate(first)}
        shown["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden, "indexByName": order}}]
    return shown


def _variables() -> list[dict[str, Any]]:
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {"text": "", "value": ""},
            "hide": 0,
            "refresh": 1,
            "regex": "",
        },
        _variable("cluster", "Cluster"),
        _variable("namespace", "Namespace", "cluster"),
        _variable("run", "Run", "cluster", "namespace"),
    ]


def _variable(name: str, label: str, *among: str) -> dict[str, Any]:
    """A variable whose choices are the values of one label of the runs that match the variables ``among``. By default it selects all runs,
    including runs without the label."""
    chosen = ", ".join(f'{one}=~"${one}"' for one in among)
    # label_values() offers live series alone; this query offers those of the shown time.
    runs = f"query_result(last_over_time(vescale_run_info{{{chosen}}}[$__range]))"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": runs, "refId": name},
        "regex": f'/[{{,]{name}="([^"]+)"/',
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        # Without a current value some Grafana versions drop the variable, and others choose the empty text if there are no choices.
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _annotations() -> list[dict[str, Any]]:
    return [
        {
            "name": "Rescales",
            "datasource": SOURCE,
            "enable": True,
            "hide": False,
            "iconColor": "#ff9830",
            "target": {"refId": "rescales", "expr": f"changes(vescale_generation{{{RUN}}}[$__rate_interval]) > 0"},
            "titleFormat": "{{run}}: workers changed",
        }
    ]


def main() -> None:
    json.dump(dashboard(), sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
