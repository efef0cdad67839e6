"""The Grafana dashboard asks for series that exist, and fits Grafana's own schema."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.controller.test_metrics_server import many
from tests.deploy.test_alerts import RULES, full_snapshot, known
from vescale_ray.cli.pages import dash
from vescale_ray.controller.http.exposition import MOST_RANKS, families
from vescale_ray.controller.state.snapshot import STATES
from vescale_ray.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "deploy" / "grafana" / "vescale.json").read_text()
BOARD: dict[str, Any] = json.loads(TEXT)
WHOLE = [one for panel in BOARD["panels"] for one in (panel, *panel.get("panels", ()))]
"""All panels and rows, with those in collapsed rows."""
PANELS = [panel for panel in WHOLE if panel["type"] != "row"]
UNITS = {"s", "bytes", "binBps", "percentunit", "short", "none", "watt", "celsius", "hertz"}
DCGM = set("GPU_UTIL FB_USED FB_FREE POWER_USAGE GPU_TEMP SM_CLOCK XID_ERRORS".split())
"""Fields from the documentation of NVIDIA's dcgm-exporter.

Their units are percent, MiB, MiB, W, degrees Celsius and MHz; the last field is the code of the last error.
"""
NODE_MODULES = ROOT / "build" / "grafana" / "node_modules"


def expressions() -> dict[str, str]:
    """Every query of the dashboard, by panel and reference."""
    found = {f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]}
    return found | {f"annotation {note['name']}": note["target"]["expr"] for note in BOARD["annotations"]["list"]}


def filled(expr: str, run: str, rate: str, span: str) -> str:
    """The query with Grafana's variables filled in, for all clusters and namespaces."""
    values = {"$cluster": ".*", "$namespace": ".*", "$run": run, "$__rate_interval": rate, "$__range": span, "$__interval": rate}
    for name, value in values.items():
        expr = expr.replace(name, value)
    return expr


def test_dashboard_fits_a_configmap() -> None:
    assert len(TEXT) < 1 << 20, "a ConfigMap holds no more"


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in WHOLE}) == len(WHOLE)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in WHOLE)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_has_a_description_and_a_grafana_unit(panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 10 and panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["type"] in ("timeseries", "stat", "bargauge", "state-timeline", "table"), "graph and the like are gone from Grafana"
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    seconds = any("_seconds" in target["expr"] and "rate(" not in target["expr"] for target in panel["targets"])
    if seconds and all("timestamp" not in t["expr"] or "time()" in t["expr"] for t in panel["targets"]):
        assert panel["fieldConfig"]["defaults"]["unit"] in ("s", "percentunit"), "seconds are shown as seconds"


def test_throughput_and_memory_lead_and_all_states_have_names() -> None:
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert rows[:3] == ["Overview", "Throughput", "Memory"]
    mappings = [one for panel in PANELS for one in panel["fieldConfig"]["defaults"].get("mappings", ()) if len(one["options"]) > 2]
    assert mappings and all([state["text"] for state in one["options"].values()] == list(STATES) for one in mappings)


def test_queries_use_existing_series_and_every_series_is_used() -> None:
    asked = set()
    of_large_runs = {family.name for family in families(many(MOST_RANKS + 1)) if family.name.endswith("_quantile")}
    for where, expr in expressions().items():
        names = set(re.findall(r"\bvescale_\w+", expr)) - of_large_runs
        others = set(re.findall(r"\bDCGM_FI_DEV_(\w+)", expr))
        assert (names or others) and names <= known() and others <= DCGM, (where, names - known(), others - DCGM)
        assert expr.count('run=~"$run"') == len(re.findall(r"\bvescale_\w+", expr)), f"{where}: not of the chosen runs alone"
        asked |= names
    for group in RULES:
        for rule in group["rules"]:
            asked |= set(re.findall(r"\bvescale_\w+", rule["expr"]))
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) if "duration_seconds_" in name else name for name in asked}
    wanted = {re.sub(r"_(bucket|sum|count)$", "", name) if "duration_seconds_" in name else name for name in known()}
    assert wanted - shown <= {"vescale_run_info", "vescale_steps_total", "vescale_loss_bpb", "vescale_eval_perplexity", "vescale_eval_bpb"}


def test_ray_queries_use_exported_series_of_the_runs_cluster() -> None:
    """The oracle is Ray's own table; tests/controller/test_prometheus.py queries a real Ray."""
    agent = pytest.importorskip("ray.dashboard.modules.reporter.reporter_agent")
    exported = {f"ray_{name}" for name in agent.METRICS_GAUGES}
    asked = {where: set(re.findall(r"\bray_(?:node|cluster)_\w+", expr)) for where, expr in expressions().items()}
    assert len({name for names in asked.values() for name in names}) >= 8
    for where, names in asked.items():
        assert names <= exported, (where, names - exported)
        assert not names or expressions()[where].count("and on (SessionName)") == 1, where
    (folded,) = [panel for panel in BOARD["panels"] if panel["type"] == "row" and panel["collapsed"]]
    assert folded is BOARD["panels"][-1] and len(folded["panels"]) >= 10
    for panel in folded["panels"]:
        assert "Needs Ray's own metrics" in panel["description"] or "dcgm-exporter" in panel["description"]


def series_of(name: str, labels: Mapping[str, str]) -> str:
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def twice(name: str, labels: Mapping[str, str]) -> list[dict[str, str]]:
    """Series of a run that answered at one address for 20 minutes, and after a restart at another one."""
    values = {"h:1": "1+1x20 stale", "h:2": "_x21 1+1x20"}
    return [{"series": series_of(name, {**labels, "instance": where}), "values": value} for where, value in values.items()]


def refused(queries: list[str], folder: Path) -> str:
    """Errors of Prometheus for ``queries`` on such a run, at a time when ranges have the series of both addresses."""
    series = [one for family in families(full_snapshot()) for s in family.samples for one in twice(s.name, s.labels)]
    asked = [{"expr": expr, "eval_time": "25m", "exp_samples": []} for expr in queries]
    (folder / "test.yml").write_text(yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": asked}]}))
    done = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    told = done.stdout + done.stderr
    assert "exp:" in told or "err" in told, told  # no samples are expected, so every answer is reported
    return "\n".join(line for line in told.splitlines() if "err:" in line)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_restart_at_another_address_stays_one_run_in_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Kubernetes every start has another address. If a query matches both series on one side, the whole range has no answer."""
    board = [filled(expr, ".*", "10m", "1h") for expr in expressions().values()]
    queries = list(board)
    monkeypatch.setattr(dash.prometheus, "ask", lambda url, what, query: queries.append(query["query"]) or {"result": []})
    with pytest.raises(BadInput):
        dash.from_prometheus("http://x", 'a"b\\', 1.0)
    some = [{"metric": {}, "values": [[1, "1"]]}]
    monkeypatch.setattr(dash.prometheus, "ask", lambda url, what, query: queries.append(query["query"]) or {"result": some})
    dash.from_prometheus("http://x", "r", 1.0)
    assert len(queries) > len(board) + 15 and 'vescale_step{run="a\\"b\\\\"}' in "".join(queries)
    assert not refused(queries, tmp_path)
    assert "duplicate series" in refused(["rate(vescale_tokens_total[10m]) / on (run) rate(vescale_steps_total[10m])"], tmp_path)


def answers_of(queries: list[str], series: list[dict[str, str]], folder: Path) -> list[list[str]]:
    """Labels of each query's series after half an hour of ``series``, as promtool writes them."""
    asked = [{"expr": expr, "eval_time": "30m", "exp_samples": [{"labels": "{}", "value": -1}]} for expr in queries]
    (folder / "test.yml").write_text(yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": asked}]}))
    done = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    told = [re.findall(r"{([^}]*)}", line) for line in (done.stdout + done.stderr).splitlines() if "got:" in line]
    assert len(told) == len(queries), done.stdout + done.stderr
    return told


def ranks_of(queries: list[str], series: list[dict[str, str]], folder: Path) -> list[set[int]]:
    """Ranks for which each query has series."""
    told = answers_of([filled(expr, ".*", "4m", "30m") for expr in queries], series, folder)
    return [{int(rank) for line in lines for rank in re.findall(r'rank="(\d+)"', line)} for lines in told]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_per_rank_panels_show_only_outlying_ranks(tmp_path: Path) -> None:
    """A line for each of 1,024 ranks is too many for an operator.

    Of 40 ranks here, 3 is high for a moment and 39 leaves after ten minutes.
    """
    by_rank = {p["title"] + t["refId"]: t["expr"] for p in PANELS for t in p["targets"] if "{{rank}}" in t["legendFormat"]}
    assert len(by_rank) == 7 and {title[-1] for title in by_rank} == {"A"}
    gauges = {name for expr in by_rank.values() for name in re.findall(r"vescale_worker_\w+", expr) if "exposed" not in name}
    waits, heard = "vescale_worker_exposed_communication_seconds_total", "vescale_worker_heartbeat_timestamp_seconds"
    series = [{"series": 'vescale_step_duration_seconds_sum{run="r"}', "values": "0+60x30"}]
    for rank in range(40):
        about, until = f'run="r",rank="{rank}"', 10 if rank == 39 else 30
        values = "5x10 900 5x18" if rank == 3 else f"{rank}x{until}"
        series += [{"series": f"{name}{{{about}}}", "values": values.replace("x", "+0x")} for name in sorted(gauges - {heard})]
        series.append({"series": f'{waits}{{{about},op="all_gather"}}', "values": f"0+{20 + rank}x{until}"})
        series.append({"series": f"{heard}{{{about}}}", "values": "0+60x5 300+0x10 960+60x13" if rank == 21 else f"0+60x{until}"})
    told = dict(zip(by_rank, ranks_of(list(by_rank.values()), series, tmp_path), strict=True))
    least, silent = told.pop("Waiting by rankA"), told.pop("Age of the last answerA")
    assert least == set(range(8)), "whom the others wait for; not who was there for ten minutes"
    assert 21 in silent and len(silent) >= 7
    assert all(ranks == {3, *range(33, 39)} for ranks in told.values()), "and 39, whose line ends with it"


def test_rate_ranges_use_rate_interval_and_not_interval() -> None:
    """Grafana's $__interval may be one scrape interval, over which rates and changes have no value. $__rate_interval has at least four."""
    assert not [where for where, expr in expressions().items() if "[$__interval]" in expr]
    assert "[$__rate_interval]" in expressions()["annotation Rescales"]


def test_instant_queries_cover_runs_that_have_ended() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            if target["instant"]:
                assert re.search(r"last_over_time\(.*\[\$__range\]\)|increase\(", target["expr"]), panel["title"]


def test_variables_are_defined_and_list_ended_runs() -> None:
    defined = {one["name"] for one in BOARD["templating"]["list"]} | {"__rate_interval", "__range", "__interval"}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(BOARD["panels"]) + json.dumps(BOARD["annotations"])))
    assert used <= defined
    (run,) = [one for one in BOARD["templating"]["list"] if one["name"] == "run"]
    assert "last_over_time" in run["query"]["query"]
    told = 'vescale_run_info{exported_run="x",run="r",cluster="c",namespace="n"} 1 1'  # the form in which Grafana searches for the value
    for one in BOARD["templating"]["list"][1:]:
        assert re.findall(one["regex"].strip("/"), told) == [one["name"][0]] and (one["allValue"], one["includeAll"]) == (".*", True)
        assert one["current"]["value"] == ["$__all"], "all of them, also where there is nothing to offer yet"
    assert all("current" in one for one in BOARD["templating"]["list"]), "Grafana's first dashboards of scenes drop a variable without"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_equal_run_names_in_two_namespaces_stay_apart(tmp_path: Path) -> None:
    """The case with one namespace chosen shows that namespace's run alone."""
    series = [
        {"series": series_of(one.name, {**one.labels, "namespace": namespace}), "values": "1+1x30"}
        for family in families(full_snapshot())
        for one in family.samples
        for namespace in ("x", "y")
    ]
    board = {where: expr for where, expr in expressions().items() if "vescale_" in expr and "ray_" not in expr}
    for chosen, each in ((".*", ("x", "y")), ("x", ("x",))):
        asked = [filled(expr.replace("$namespace", chosen), ".*", "4m", "30m") for expr in board.values()]
        for where, lines in zip(board, answers_of(asked, series, tmp_path), strict=True):
            told = [set(re.findall(r'namespace="(\w+)"', line)) for line in lines]
            assert all(len(one) == 1 for one in told), f"{where}: of which run is this? {lines}"
            counted = [sum(namespace in one for one in told) for namespace in each]
            assert not told or set(counted) == {len(told) // len(each)}, f"{where}: {lines}"


def test_tables_keep_cluster_namespace_and_run_columns() -> None:
    hidden = [one["options"]["excludeByName"] for panel in PANELS if panel["type"] == "table" for one in panel["transformations"]]
    assert hidden and not [columns for columns in hidden if {"cluster", "namespace", "run"} & set(columns)]


def test_dashboard_type_checks_against_grafanas_schema() -> None:
    """The check is TypeScript's: keys that Grafana does not know and values of another type are errors."""
    node = shutil.which("node")
    if node is None or not (NODE_MODULES / "@grafana" / "schema").is_dir():
        pytest.skip("make grafana-types fetches TypeScript and @grafana/schema (npm and a network are needed)")
    for harm, accepted in ((lambda board: None, True), (lambda board: board["panels"][1].update(gridpos={}), False)):
        board = json.loads(TEXT)
        harm(board)
        notes = board["annotations"].pop("list")
        # TypeScript accepts no text for an enum. A query's own keys are defined by the data source.
        values = json.dumps(board).replace('"type": "value"', '"type": MappingType.ValueToText')
        (NODE_MODULES.parent / "board.ts").write_text(
            'import { MappingType, type AnnotationQuery, type Dashboard, type DataQuery } from "@grafana/schema";\n'
            "type Note = AnnotationQuery<DataQuery & { expr: string }> & { titleFormat: string };\n"
            f"const notes: Note[] = {json.dumps(notes)};\n"
            f"const board: Dashboard = {values};\nexport const whole: Dashboard = {{ ...board, annotations: {{ list: notes }} }};\n"
        )
        options = "--noEmit --skipLibCheck --strict --moduleResolution bundler --module esnext --target es2022 --lib es2022,dom board.ts"
        command = [node, str(NODE_MODULES / "typescript" / "bin" / "tsc"), *options.split()]
        done = subprocess.run(command, cwd=NODE_MODULES.parent, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode == 0) is accepted, done.stdout
