"""What the Prometheus operator refuses of monitors and rules, or leaves out without a word; and what Grafana's sidecar would not find."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

Tree = Mapping[str, Any]
OURS = "vescale-metrics"
GRAFANAS_LABEL = "grafana_dashboard"
SEVERITIES = ("page", "ticket", "info")
LABELS = ("cause", "op", "rank", "run", "state")
"""Of the run's own series: alerts choose or join by them."""
STATES = ("PENDING", "STARTING", "RUNNING", "RESCALING", "CHECKPOINTING", "STOPPING", "DONE", "FAILED")
LONGEST_FOR_S = 3600
TOLD_APART_BY = ("namespace", "run")
LONGEST_S = 60
"""Between two looks at a run: what some rules ask of the last minute would be empty."""
_LABEL = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_METRIC = re.compile(r"[A-Za-z_:][\w:]*", re.ASCII)
_ASKED = re.compile(r"\bvescale[\w:]*", re.ASCII)
_RATIOS = re.compile(r"\bvescale[\w:]*ratio\w*\s*[<>]=?\s*(\d+(?:\.\d+)?)", re.ASCII)
_ONE = re.compile(r'(?<!\w)(?:cluster|namespace|run)\s*=~?\s*"[^"]*"')
_GROUPS = re.compile(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)")
_WINDOWS = re.compile(r"\[(\w+)\]", re.ASCII)
_STATES = re.compile(r"\bvescale_run_state\s*\{[^}]*\bstate\s*(?:=~|!~|!=|=)\s*[\"']([^\"']*)[\"']")
_SUFFIX = re.compile(r"_(?:bucket|count|sum|total)$")
_TOLD = re.compile(r"\$labels\.(\w+)", re.ASCII)
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}
_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|`[^`]*`")
_PAIRS = {")": "(", "]": "[", "}": "{"}


def monitor_problems(document: Tree) -> Iterator[str]:
    """One sentence for each mistake in a PodMonitor, a PrometheusRule or a ConfigMap that holds a dashboard."""
    what = f"{document['kind']} {document['metadata']['name']}"
    checks = {"PodMonitor": _monitor, "PrometheusRule": _rules, "ConfigMap": _dashboards}
    if document["kind"] in checks:
        yield from (f"{what}: {problem}" for problem in checks[document["kind"]](document))


def watched_problems(documents: Sequence[Tree]) -> Iterator[str]:
    """One sentence for what the documents say of each other: a Prometheus chooses all that it reads by one label."""
    watching = [one for one in documents if one["kind"] in ("PodMonitor", "PrometheusRule")]
    labels = [dict(one["metadata"].get("labels") or {}) for one in watching]
    if any(one != labels[0] for one in labels):
        yield "PodMonitors and PrometheusRule have different labels: a Prometheus that chooses by one of them leaves the others out"
    monitors = [one for one in watching if one["kind"] == "PodMonitor"]
    if monitors and not any(end.get("port") == OURS for one in monitors for end in one["spec"]["podMetricsEndpoints"]):
        yield f"no PodMonitor scrapes the port {OURS}: the run's own figures would be missing"
    rules = [rule for one in watching if one["kind"] == "PrometheusRule" for group in one["spec"]["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    asked = {name for rule in rules for name in _ASKED.findall(_QUOTED.sub("", rule["expr"]))}
    for name in sorted(one for one in asked - recorded if ":" in one):
        yield f"a rule asks for {name}, which none records: it would be silent for ever"
    for one in monitors:
        for end in one["spec"]["podMetricsEndpoints"]:
            for step in end.get("metricRelabelings") or () if end.get("port") == OURS else ():
                lost = sorted(name for name in (*asked, *LABELS) if _loses(step, name))
                if lost:
                    yield f"PodMonitor {one['metadata']['name']}: {OURS}: metricRelabelings take away {lost[0]}, which alerts ask for"


def _loses(step: Tree, name: str) -> bool:
    """Whether a step of relabelling takes away the series, or the label, of this name."""
    action, label = str(step.get("action", "replace")).lower(), name in LABELS
    if action not in (("labeldrop", "labelkeep") if label else ("drop", "keep")) or not (label or step.get("sourceLabels") == ["__name__"]):
        return False
    try:
        return bool(re.fullmatch(step.get("regex", "(.*)"), name)) == action.endswith("drop")
    except re.error:
        return False  # told of elsewhere


def seconds(duration: str) -> float:
    """What Prometheus takes ``1m30s`` for."""
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)(ms|[smhdwy])", duration))


def _monitor(document: Tree) -> Iterator[str]:
    ends = document["spec"]["podMetricsEndpoints"]
    if (document["spec"].get("namespaceSelector") or {}).get("any"):
        yield "namespaceSelector any: runs of other namespaces, which have monitors of their own, would be counted twice"
    if not ends:
        yield "it has no endpoint"
    ports = [end["port"] for end in ends]
    for port in sorted({port for port in ports if ports.count(port) > 1}):
        yield f"the port {port} is scraped twice"
    for end in ends:
        if end.get("path", "/metrics") != "/metrics":
            yield f"{end['port']}: the path {end['path']} is none of Ray's nor ours: leave it out"
        if "interval" in end and seconds(end.get("scrapeTimeout", "0s")) > seconds(end["interval"]):
            yield f"{end['port']}: scrapeTimeout {end['scrapeTimeout']} is longer than the interval {end['interval']}"
        if seconds(end.get("interval", "30s")) > LONGEST_S:
            yield f"{end['port']}: an interval of {end['interval']} is too long: the alerts look back {LONGEST_S} s"
        if end["port"] == OURS and not end.get("honorLabels"):
            yield f"{OURS}: without honorLabels the pod that is scraped takes the place of the pod that a rank is in"
        for one in (*(end.get("relabelings") or ()), *(end.get("metricRelabelings") or ())):
            names = [*(one.get("sourceLabels") or ()), *([one["targetLabel"]] if "targetLabel" in one else ())]
            for name in names:
                if name in TOLD_APART_BY and name == one.get("targetLabel"):
                    yield f"{end['port']}: a relabelling to {name}, by which alerts tell runs apart: choose another targetLabel"
                if not _LABEL.fullmatch(name):
                    yield f"{end['port']}: {name} is no label's name: letters, digits and '_'"
            try:
                re.compile(one.get("regex", ""))
            except re.error:
                yield f"{end['port']}: {one['regex']} is no regular expression"


def _rules(document: Tree) -> Iterator[str]:
    groups = document["spec"]["groups"]
    names = [group["name"] for group in groups]
    if not any(group["rules"] for group in groups):
        yield "it has no rule"
    alerts = [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]
    for kind, all_of in (("group", names), ("alert", alerts)):
        for name in sorted({name for name in all_of if all_of.count(name) > 1}):
            yield f"the {kind} {name} is there twice"
    for group in groups:
        if seconds(group.get("interval", "30s")) > LONGEST_S:
            yield f"the group {group['name']}: an interval of {group['interval']} is too long: its alerts look back {LONGEST_S} s"
    for rule in (rule for group in groups for rule in group["rules"]):
        name = rule.get("alert", rule.get("record"))
        if bool(rule.get("alert")) == bool(rule.get("record")):
            yield f"{name}: a rule has either alert or record"
        elif "record" in rule:
            if not _METRIC.fullmatch(rule["record"]):
                yield f"{name}: a series has letters, digits, '_' and ':' in its name"
            for field in sorted({"for", "annotations"} & rule.keys()):
                yield f"{name}: a rule that records takes no {field}"
        else:
            yield from (f"{name}: {problem}" for problem in _alert(rule))
        for label in sorted({"cluster", *TOLD_APART_BY} & (rule.get("labels") or {}).keys()):
            yield f"{name}: its label {label} takes the place of the series' own, which tells whose alert it is"
        for labels in _GROUPS.findall(rule["expr"]):
            if [one.strip() for one in labels.split(",")][:3] != ["cluster", "namespace", "run"]:
                yield f"{name}: ({labels}) takes several runs for one: name cluster, namespace, run first"
        for window in _WINDOWS.findall(rule["expr"]):
            if seconds(window) < LONGEST_S:
                yield f"{name}: in [{window}] there may be no two samples: give {LONGEST_S}s or more"
        if found := _ONE.search(rule["expr"]):
            yield f"{name}: its expr is for {found[0]} alone, and silent for all others"
        if not rule["expr"].strip():
            yield f"{name}: its expr is empty"
        for series in sorted({one for one in _ASKED.findall(_QUOTED.sub("", rule["expr"])) if ":" not in one}):
            if _SUFFIX.sub("", series) not in _series():
                near = difflib.get_close_matches(series, _series(), n=1)
                yield f"{name}: it asks for {series}, which no run has: it would be silent" + (f"; did you mean {near[0]}?" if near else "")
        for state in sorted({one for states in _STATES.findall(rule["expr"]) for one in states.split("|")}):
            if state.isidentifier() and state not in STATES:
                yield f"{name}: it asks for the state {state}, which no run is in: it must be one of {', '.join(STATES)}"
        if any(float(bound) > 1 for bound in _RATIOS.findall(rule["expr"])):
            yield f"{name}: its expr compares a ratio, from 0 to 1, with more than 1"
        if not _balanced(rule["expr"]):
            yield f"{name}: the brackets or quotes of its expr don't close"
        for label in rule.get("labels") or {}:
            if not _LABEL.fullmatch(label):
                yield f"{name}: {label} is no label's name: letters, digits and '_'"


@functools.cache
def _series() -> frozenset[str]:
    """Names of all that a run tells, without the parts that Prometheus adds: each is in a panel or a rule of ours, but for one."""
    shipped = files("vescale_ray.deploy")
    texts = [(shipped / path).read_text(encoding="utf-8") for path in ("alerts.yml", "grafana/vescale.json")]
    return frozenset({"vescale_steps", *(_SUFFIX.sub("", name) for text in texts for name in _ASKED.findall(text) if ":" not in name)})


def _alert(rule: Tree) -> Iterator[str]:
    severity = (rule.get("labels") or {}).get("severity")
    if severity not in SEVERITIES:
        yield f"its severity is {severity}: it must be one of {', '.join(SEVERITIES)}, by which alerts are sent on"
    if seconds(rule.get("for", "0s")) > LONGEST_FOR_S:
        yield f"it waits {rule['for']} before it tells anybody: more than an hour"
    notes = rule.get("annotations") or {}
    for key in ("summary", "description", "runbook_url"):
        if not notes.get(key):
            yield f"it has no {key}"
    for label in sorted(
        {one for text in notes.values() for one in _TOLD.findall(str(text))} - {*LABELS, *TOLD_APART_BY, "cluster", "kind"}
    ):
        yield f"it tells of the label {label}, which no series of a run has"
    url = str(notes.get("runbook_url", ""))
    if url and not (url.startswith("http") and url.endswith(f"#{rule['alert'].lower()}")):
        yield f"its runbook_url {url} is no address of its own in the runbooks"
    for key, text in notes.items():
        if not re.fullmatch(r"(?:[^{]|\{(?!\{)|\{\{(?:(?!\{\{|\}\}).)*\}\})*", text, re.DOTALL) or "}}" in re.sub(r"\{\{.*?\}\}", "", text):
            yield f"the braces of its {key} don't close"


def _balanced(text: str) -> bool:
    bare, open_ones = _QUOTED.sub("", text), []
    for letter in bare:
        if letter in _PAIRS.values():
            open_ones.append(letter)
        elif letter in _PAIRS and (not open_ones or open_ones.pop() != _PAIRS[letter]):
            return False
    return not open_ones and not {'"', "'", "`"} & set(bare)


def _dashboards(document: Tree) -> Iterator[str]:
    boards = {key: text for key, text in (document.get("data") or {}).items() if key.endswith(".json")}
    if not boards and GRAFANAS_LABEL in (document["metadata"].get("labels") or {}):
        yield f"it has the label {GRAFANAS_LABEL}, and holds no dashboard"
    if boards and (document["metadata"].get("labels") or {}).get(GRAFANAS_LABEL) != "1":
        yield f'it holds a dashboard, and has no label {GRAFANAS_LABEL}: "1", by which Grafana\'s sidecar finds it'
    for key, text in boards.items():
        try:
            json.loads(text)
        except ValueError:
            yield f"{key} is not valid JSON"
