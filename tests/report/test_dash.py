"""The page of a run is complete, harmless HTML with the figures of the run's files, both from the folder and from a Prometheus."""

from __future__ import annotations

import json
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import itemgetter
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from vescale_ray.cli import app
from vescale_ray.cli.pages import dash
from vescale_ray.cli.pages.run_page import Chart, Mark, Page, Series, few, render, thinned
from vescale_ray.errors import BadInput
from vescale_ray.runfolder import Record, RunFolder, RunFolderError

BEGAN = 1_700_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of ten steps. A worker is lost after five, and one step is repeated; a reason contains ``<``."""
    run = RunFolder(tmp_path / "r").create()
    (tmp_path / "r" / "config.yaml").write_text("run: {name: r}\n")
    run.append_event({"time": BEGAN, "event": "run_started", "generation": 0, "step": 0})
    for i, step in enumerate([1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]):
        memory = {str(r): (300 + r) << 20 for r in range(3 if i < 5 else 2)}
        values = {"loss": None if i == 2 else 4.0 - i / 10, "tokens": step * 64, "tokens_per_second": 100.0 + i}
        more = {"world": len(memory), "generation": 1 + (i >= 5), "grad_norm": 1.0, "step_seconds": 0.5, "memory": memory}
        more |= {"waited_seconds": {"all_gather": 0.05, "step_end": 0.1}, "memory_kinds": {"parameters": 8 << 20}}
        more |= {"model_flops_utilization": 0.25 if i else None}
        run.append_metrics({"step": step, "time": BEGAN + 3 + i, "lr": 1e-3, **values, **more})
    about = {"from": 3, "to": 2, "direction": "shrink", "reason": "<script>alert(1)</script>", "pause_seconds": 1.5, "steps_replayed": 1}
    run.append_event({"time": BEGAN + 8, "event": "rescaled", "generation": 2, "step": 5, "source": "peer", "phases": {}, **about})
    goodput = {"productive": 5.0, "lost": {"startup": 2.0, "failure": 3.0}}
    run.write_state({"run": "r", "state": "DONE", "steps": 10, "started": BEGAN, "goodput": goodput, "error": "a & b"})
    return run


def drawing(text: str) -> list[ET.Element]:
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_page_is_self_contained_and_runs_no_script(folder: RunFolder) -> None:
    text = render(dash.from_folder(folder))
    assert not re.search(r"(?i)<script|<link|<img|@import|url\(|src=|href=|javascript:|http", text)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "a &amp; b" in text
    assert len(drawing(text)) == 9, "every picture is well-formed XML"


def test_page_escapes_markup_and_control_characters_of_files(folder: RunFolder) -> None:
    """The cases include a step that is no number, and an error with a file name that is not text."""
    folder.append_event({"time": BEGAN + 9, "event": "warning", "step": "<script>alert(1)</script>", "text": "<img src=x>"})
    about = {"from": "<b>", "to": "</title>", "direction": "grow", "reason": "no file b\udcff", "source": "peer"}
    folder.append_event({"time": BEGAN + 9, "event": "rescaled", "step": 5, **about})
    folder.write_state({"run": "</title><script>", "state": "<i>", "error": "\x1b[31mno file a\udcff"})
    done = CliRunner().invoke(app.cli, ["dash", str(folder.path)], standalone_mode=False, catch_exceptions=False)
    text = (folder.path / "dash.html").read_text(encoding="utf-8")
    assert done.exit_code == 0 and not re.search(r"(?i)<script|<img|<b>|<i>", text) and "\x1b" not in text
    assert "<title>&lt;/title&gt;&lt;script&gt; - vescale-ray</title>" in text and len(drawing(text)) == 9
    assert "\\x1b[31mno file a\\udcff" in text and "no file b\\udcff" in text


def test_page_shows_the_figures_of_the_runs_lines(folder: RunFolder) -> None:
    page = dash.from_folder(folder)
    charts = {chart.title: chart for chart in page.charts}
    assert list(charts)[:2] == ["Tokens per second (of each step)", "Resident memory by rank"], "throughput and memory first"
    assert [value for _, value in charts["Loss, nats per token"].series[0].points][1:4] == [3.9, None, 3.7]
    assert [series.name for series in charts["Resident memory by rank"].series] == ["rank 0", "rank 1", "rank 2"]
    assert charts["Resident memory by rank"].series[2].points[-1] == (BEGAN + 13, None), "a rank that is gone has no line"
    waiting = {series.name: series.points for series in charts["Waiting for other ranks, % of a step"].series}
    assert [round(value or 0, 9) for _, value in waiting["all_gather"]] == [10.0] * 11 and waiting["step_end"][0] == (BEGAN + 3, 20.0)
    assert charts["Memory by kind, largest rank"].series[0].points[0] == (BEGAN + 3, 8 << 20)
    assert [value for _, value in charts["Model FLOPs utilisation, %"].series[0].points] == [None] + [25.0] * 10
    assert page.marks == (Mark(BEGAN + 8, "3 → 2 workers: <script>alert(1)</script>", False),)
    text = render(page)
    assert "steps that count 5.0 s (50.0%)" in text and "failure 3.0 s (30.0%)" in text
    assert "10 of 10" in text and "1.50 s" in text and ">0:00:08<" in text
    assert "400 MiB" in text, "round numbers of MiB"


def test_waiting_share_divides_by_the_steps_it_was_waited_in(tmp_path: Path) -> None:
    """When the first rank reports a step, the others have reported only the step before, which may have taken ten times as long."""
    run = RunFolder(tmp_path / "r").create()
    run.append_metrics({"step": 1, "time": BEGAN, "step_seconds": 0.1, "waited_seconds": {"all_gather": 0.6}, "waited_of_seconds": 0.8})
    (waiting,) = [chart for chart in dash.from_folder(run).charts if chart.title.startswith("Waiting")]
    assert [value for _, value in waiting.series[0].points] == [pytest.approx(75.0)]


def test_run_failed_before_step_1_has_a_page_with_the_reason(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "r").create()
    run.append_event({"time": BEGAN, "event": "run_started", "generation": 0, "step": 0})
    run.append_event({"time": BEGAN + 9, "event": "worker_lost", "generation": 0, "step": 0, "worker": "w0", "reason": "no memory"})
    goodput = {"productive": 0.0, "lost": {"startup": 12.0}}
    run.write_state({"run": "r", "state": "FAILED", "step": 0, "steps": 10, "error": "workers do not start", "goodput": goodput})
    page = dash.from_folder(run)
    assert not page.charts and dict(page.facts)["step"] == "0 of 10" and dict(page.facts)["workers"] == "0"
    text = render(page)
    assert "workers do not start" in text and "worker w0 lost: no memory" in text and "startup 12.0 s (100.0%)" in text


def test_a_run_of_one_step_without_a_loss_has_a_page(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "r").create()
    figures = {"loss": float("nan"), "tokens_per_second": 5.0, "world": 1, "memory": {"0": 1}}
    run.append_metrics({"step": 1, "time": BEGAN, **figures})
    text = render(dash.from_folder(run))
    assert ">no data<" in text and "nan" not in text and all(len(svg) for svg in drawing(text))


@pytest.mark.parametrize(
    ("state", "line", "event"),
    [
        ({"goodput": {"lost": 7}}, {}, {}),
        ({"goodput": [1]}, {}, {}),
        ({}, {"world": "three"}, {}),
        ({}, {"memory": {"zero": 5}}, {}),
        ({}, {}, {"event": "rescaled", "pause_seconds": "x"}),
    ],
)
def test_files_of_foreign_form_are_refused_in_one_sentence(
    state: dict[str, Any], line: dict[str, Any], event: dict[str, Any], tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "r").create()
    run.append_metrics({"step": 1, "time": BEGAN, "tokens_per_second": 1.0, "world": 1})
    run.append_metrics({"step": 2})
    run.write_state({"run": "r", "state": "DONE", "goodput": {"productive": 1.0, "lost": {}}})
    assert render(dash.from_folder(run)), "a line without a time is left out"
    run.write_state({"run": "r", "state": "DONE", **state})
    run.append_metrics({"step": 3, "time": BEGAN + 1, **line})
    if event:
        run.append_event({"time": BEGAN, "generation": 1, "step": 1, **event})
    with pytest.raises(RunFolderError, match=r"its files are not as a run writes them \(\w+Error: .*changed from outside"):
        dash.from_folder(run)


def test_time_accounts_of_a_restarted_run_name_the_last_start(folder: RunFolder) -> None:
    assert "<h2>Where the time went</h2>" in render(dash.from_folder(folder))
    folder.append_event({"time": BEGAN + 86400, "event": "run_started", "generation": 3, "step": 10})
    assert "<h2>Where the time went, since the last of 2 starts</h2>" in render(dash.from_folder(folder))


def test_chart_line_goes_through_its_values_and_breaks_at_gaps() -> None:
    chart = Chart("t", (Series("a", [(0.0, 0.0), (5.0, 10.0), (10.0, None), (10.0, 5.0)]),))
    (svg,) = drawing(render(Page("r", "s", 0.0, (), (chart,))))
    (path,) = [one for one in svg.iter() if one.tag == "path"]
    points = [tuple(map(float, xy.split())) for xy in re.split("[ML]", path.attrib["d"])[1:]]
    left, right, top, bottom = 64.0, 608.0, 10.0, 186.0
    assert points == [(left, bottom), ((left + right) / 2, top), (right, (top + bottom) / 2)]
    assert path.attrib["d"].count("M") == 2, "nothing is drawn over a gap"


def test_charts_without_data_in_a_run_are_left_out(folder: RunFolder, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "older").create()
    (other.path / "config.yaml").write_text("run: {name: older}\n")
    for line in folder.read_all_metrics():
        other.append_metrics({k: v for k, v in line.items() if k not in ("waited_seconds", "memory_kinds", "model_flops_utilization")})
    assert len(dash.from_folder(other).charts) == 6 and len(dash.from_folder(folder).charts) == 9


def test_long_run_is_thinned_in_memory_with_all_extremes_kept(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the head's pod, a page that takes as much memory as the file would end the run."""
    random = Random(7)
    keys = ("loss", "tokens_per_second", "world", "step_seconds", "grad_norm", "model_flops_utilization")
    lines: list[Record] = [{"step": i, "time": float(i)} for i in range(9000)]
    for line in lines:
        line |= {key: random.choice([None, random.random()]) for key in keys}
        line["memory"] = {str(rank): random.randrange(1000) for rank in range(3)}
    kept = list(dash.telling(iter(lines), 8999.0))
    assert len(kept) <= 401 * (2 + 2 * 8) and [line["step"] for line in kept] == sorted({line["step"] for line in kept})

    def told(some: list[Record], of: Callable[[Record], float | None], column: int) -> tuple[float, float] | None:
        found = [value for line in some if int(line["time"] / 8999.0 * 400) == column and (value := of(line)) is not None]
        return (min(found), max(found)) if found else None

    drawn: list[Callable[[Record], float | None]] = [itemgetter(key) for key in keys]
    for of in (*drawn, lambda line: sum(line["memory"].values())):
        assert all(told(kept, of, column) == told(lines, of, column) for column in range(0, 401, 7))
    whole = dash.from_folder(folder)
    monkeypatch.setattr(dash, "LONG_BYTES", 0)
    assert dash.from_folder(folder) == whole, "of a few lines all are shown"


values = st.one_of(st.none(), st.floats(-1e6, 1e6))


@given(st.lists(values, max_size=300), st.integers(1, 20))
def test_thinning_out_keeps_the_extremes_the_ends_and_the_order(numbers: list[float | None], columns: int) -> None:
    points = [(float(i), value) for i, value in enumerate(numbers)]
    kept = thinned(points, (0.0, float(max(1, len(points) - 1))), columns)
    shown, there = ([value for _, value in some if value is not None] for some in (kept, points))
    assert [at for at, _ in kept] == sorted(at for at, _ in kept) and set(kept) <= set(points) | {(at, None) for at, _ in points}
    assert len([v for v in numbers if v is None]) > 0 or len(kept) <= max(2 * columns, 4 * (columns + 1))
    if there:
        assert (min(shown), max(shown), shown[0], shown[-1]) == (min(there), max(there), there[0], there[-1])


@given(st.lists(st.lists(values, min_size=1, max_size=5), max_size=8))
@example([[5e-324], [1e-310, 2e-310]])
def test_any_values_render_as_well_formed_charts(rows: list[list[float | None]]) -> None:
    charts = tuple(Chart(f"c{i}", (Series("s", [(float(j), v) for j, v in enumerate(row)]),), "bytes") for i, row in enumerate(rows))
    assert len(drawing(render(Page("r", "s", 0.0, (), charts)))) == sum(any(v is not None for v in row) for row in rows)


def test_thousand_ranks_shrink_to_the_largest_and_smallest() -> None:
    series = [Series(f"rank {r}", [(0.0, float(r)), (1.0, None if r == 0 else 5.0 * r)]) for r in range(1000)]
    assert few(series) == (Series("largest of 1000", [(0.0, 999.0), (1.0, 4995.0)]), Series("smallest", [(0.0, 0.0), (1.0, 5.0)]))


class _Prometheus(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        asked = parse_qs(urlparse(self.path).query)["query"][0]
        result: list[dict[str, object]] = []
        if "vescale_world_size{" in asked and '"there"' in asked:  # known before the first step
            result = [{"metric": {}, "values": [[BEGAN - 60, "0"], [BEGAN, "2"], [BEGAN + 60, "3"]]}]
        elif "vescale_run_info" in asked:
            result = [{"metric": {"run": "there"}, "value": [1, "1"]}]
        elif '"two"' in asked and "namespace=" not in asked:
            result = [{"metric": {"namespace": namespace}, "values": [[BEGAN, "2"]]} for namespace in "yx"]
        elif '"there"' in asked or '"two", namespace="x"' in asked:
            labels = {"run": "there", "rank": "0", "cause": "startup", "direction": "grow", "reason": "manual"}
            result = [{"metric": labels, "values": [[BEGAN, "2"], [BEGAN + 60, "NaN" if "loss" in asked else "3"]]}]
        body = json.dumps({"status": "success", "data": {"result": result}}).encode()
        self.send_response(200 if "refuse" not in self.path else 400)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def prometheus() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Prometheus)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_page_from_prometheus_has_the_charts_of_the_folders_page(prometheus: str, folder: RunFolder, tmp_path: Path) -> None:
    """tests/controller/test_prometheus.py queries a real Prometheus."""
    page = dash.from_prometheus(prometheus, "there", 2.0)
    titles = [re.sub(", mean of .*", "", chart.title) for chart in page.charts]
    assert titles == [chart.title for chart in dash.from_folder(folder).charts]
    known = Mark(BEGAN + 60, "grow (manual), 3 workers", True)
    assert page.marks == (known,) and dict(page.facts)["rescales"] == "1", "the first workers are none, nor what was before the shown time"
    lines = [x for svg in drawing(render(page)) for x in re.findall(r"[MLH]([\d.-]+)", str(ET.tostring(svg)))]
    assert min(map(float, lines)) >= 64.0, "nothing is drawn left of the axis"
    assert page.goodput == {"productive": 3.0, "lost": {"startup": 3.0}}
    out = tmp_path / "p.html"
    done = CliRunner().invoke(app.cli, ["dash", "--prometheus", prometheus, "--run", "there", "--out", str(out)])
    assert done.exit_code == 0 and len(drawing(out.read_text())) == 9
    several = ["dash", "--prometheus", prometheus, "--run", "two", "--out", str(out)]
    assert app.main(several) == 2
    assert CliRunner().invoke(app.cli, [*several, "--namespace", "x"]).exit_code == 0


@pytest.mark.parametrize("began", [0.0, 40_000.0, 86_290.0])
def test_prometheus_page_shows_all_of_a_short_run_long_ago(began: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 s within the last 24 hours, scraped every 10 s.

    A point every 216 s would mostly miss them. The oracle is Prometheus' own rule.
    """
    now = time.time()
    first = now - 86_400 + began
    told = {first + 10 * i: float(i + 1) for i in range(11)}

    def ask(url: str, what: str, query: dict[str, Any]) -> dict[str, Any]:
        assert (query["end"] - query["start"]) / query["step"] < 11_000, "Prometheus refuses more"
        window = re.search(r"\[(\d+)s\]", query["query"])
        back = float(window[1]) if window and "over_time" in query["query"] else 10.0  # otherwise stale values are gone
        values = []
        for i in range(int((query["end"] - query["start"]) / query["step"] + 1e-6) + 1):
            at = query["start"] + i * query["step"]
            seen = [value for when, value in told.items() if at - back < when <= at]
            values += [[at, str(seen[-1])]] if seen else []
        return {"result": [{"metric": {}, "values": values}] if values else []}

    monkeypatch.setattr(dash.prometheus, "ask", ask)
    page = dash.from_prometheus("http://x", "r", 24.0)
    points = page.charts[0].series[0].points
    assert {value for _, value in points} == set(told.values()) and dict(page.facts)["step"] == "11 of 11"


@pytest.mark.parametrize(("age", "before"), [(30.0, 1), (7200.0, 0)], ids=["young", "older than what is shown"])
def test_rescale_undone_before_the_next_point_is_marked(age: float, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is lost before the first scrape, and another is lost and replaced between two scrapes.

    The run is then started again and grows twice.
    """
    begin = time.time() - 600
    shrink, grow = {"direction": "shrink", "reason": "failure"}, {"direction": "grow", "reason": "replacement"}

    def ask(url: str, what: str, query: dict[str, Any]) -> dict[str, Any]:
        def over(*values: float, **labels: str) -> dict[str, Any]:
            return {"metric": labels, "values": [[begin + 10 * i, str(value)] for i, value in enumerate(values)]}

        if "vescale_rescales_total" in query["query"]:
            return {"result": [over(1, 1, 2, 2, 0, **shrink), over(0, 0, 1, 1, 2, **grow)]}
        if "max(vescale_goodput_seconds_total" in query["query"] and "badput" in query["query"]:
            return {"result": [over(age, age + 10)]}
        return {"result": [over(2, 2, 2, 2, 4)]}

    monkeypatch.setattr(dash.prometheus, "ask", ask)
    page = dash.from_prometheus("http://x", "r", 1.0)
    first = Mark(begin, "shrink (failure), 2 workers", False)
    swift = Mark(begin + 20, "shrink (failure), grow (replacement), 2 workers", False)
    again = Mark(begin + 40, "grow (replacement), 4 workers", True)
    assert page.marks == (first, swift, again)[1 - before :] and dict(page.facts)["rescales"] == str(before + 3)


def test_wrong_dash_calls_are_refused(prometheus: str, tmp_path: Path, folder: RunFolder) -> None:
    with pytest.raises(BadInput, match="has no data of run 'other' in the last 1 hours; it knows there"):
        dash.from_prometheus(prometheus, "other", 1.0)
    with pytest.raises(BadInput, match="has no data of run 'other', namespace 'y', in the last 1 hours; it knows there"):
        dash.from_prometheus(prometheus, "other", 1.0, {"namespace": "y"})
    with pytest.raises(
        BadInput, match="knows 2 runs named 'two': with --cluster '' --namespace 'x'; with --cluster '' --namespace 'y'. Name"
    ):
        dash.from_prometheus(prometheus, "two", 1.0)
    with pytest.raises(BadInput, match="has no data of run 'two' there in the last 1 hours, but with --cluster '' --namespace 'x'; with"):
        dash.from_prometheus(prometheus, "two", 1.0, {"namespace": "y", "cluster": "z"})
    with pytest.raises(BadInput, match="refuses the query"):
        dash.from_prometheus(f"{prometheus}/refuse", "there", 1.0)
    with pytest.raises(BadInput, match="no answer"):
        dash.from_prometheus("http://127.0.0.1:9", "there", 1.0)
    with pytest.raises(BadInput, match="^--prometheus: give the address without user and password$"):
        dash.from_prometheus("http://me:hush@127.0.0.1:9", "there", 1.0)
    with pytest.raises(BadInput, match="give the address of a Prometheus"):
        dash.from_prometheus("localhost:9090", "there", 1.0)
    for hours in (0.0, -1.0, float("nan"), float("inf"), 1e9):
        with pytest.raises(BadInput, match="--hours .*: give hours above 0, and at most"):
            dash.from_prometheus(prometheus, "there", hours)
    empty = RunFolder(tmp_path / "empty").create()
    (empty.path / "config.yaml").write_text("run: {name: r}\n")
    with pytest.raises(BadInput, match="nothing has happened yet"):
        dash.from_folder(empty)
    runner = CliRunner()
    for arguments in (["--run", "x"], ["--prometheus", prometheus], [str(folder.path), "--prometheus", prometheus, "--run", "there"]):
        with pytest.raises(BadInput):
            runner.invoke(app.cli, ["dash", *arguments], standalone_mode=False, catch_exceptions=False)
    with pytest.raises(BadInput, match="can't be written"):
        runner.invoke(app.cli, ["dash", str(folder.path), "--out", "/proc/x.html"], standalone_mode=False, catch_exceptions=False)
    with pytest.raises(RunFolderError):
        runner.invoke(app.cli, ["dash", str(tmp_path / "none")], standalone_mode=False, catch_exceptions=False)
