"""The dashboard drawn without Grafana: what is asked, how it is laid out, and what is said where there is nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_dashboard import PANELS
from vescale_ray.deploy import draw
from vescale_ray.deploy.panels import DrawError, Span, value_text

BOARD = json.loads(draw.DASHBOARD.read_text())
SPAN = Span.of(1000.0, 1600.0, 15.0)
HOSTILE = '<script>alert("x")</script>'


class Answers:
    """In the place of Prometheus: each query that contains a key gets its series, every other none; and what was asked."""

    def __init__(self, **series: list[tuple[dict[str, str], dict[float, float]]]) -> None:
        self.series, self.asked = series, []  # type: ignore[var-annotated]

    def __call__(self, path: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.asked.append((path, dict(parameters)))
        found = next((series for key, series in self.series.items() if key in parameters["query"]), [])
        if path == "query":
            return [{"metric": labels, "value": [max(values), str(values[max(values)])]} for labels, values in found]
        return [{"metric": labels, "values": [[at, str(value)] for at, value in values.items()]} for labels, values in found]


def board(*titles: str) -> dict[str, Any]:
    return {**BOARD, "panels": [panel for panel in draw.unfolded(BOARD) if panel["title"] in titles]}


class Text(HTMLParser):
    """All text of a page, and its elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags = [], []  # type: ignore[var-annotated]
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_every_panel_of_our_dashboard_can_be_drawn_and_one_without_data_says_so() -> None:
    shown = draw.draw(BOARD, Answers(), SPAN)
    titles = [panel["title"] for panel in PANELS if panel["type"] != "row"]
    assert list(shown.empty) == titles and shown.html.count("No data") == len(titles)
    values = {1000.0: 1.0, 1015.0: 2.0}
    series = [({"run": "r", "rank": "0", "__name__": "vescale_x"}, values)]
    everywhere = Answers(vescale=series, DCGM=series)
    assert draw.draw(BOARD, everywhere, SPAN).empty == ()


def test_the_run_is_found_by_the_variable_s_own_query_and_goes_literally_into_the_others() -> None:
    ask = Answers(vescale_run_info=[({"__name__": "vescale_run_info", "run": "a.b+1", "host": "x"}, {1600.0: 1.0})])
    draw.draw(board("Loss"), ask, SPAN)
    (_, first), *others = ask.asked
    assert first["query"] == 'last_over_time(vescale_run_info{cluster=~".*", namespace=~".*"}[600s])' and first["time"] == 1600.0
    assert all(r'run=~"a\\.b\\+1"' in parameters["query"] for _, parameters in others) and others


def test_rates_look_at_four_scrapes_and_no_variable_is_left_in_a_query() -> None:
    ask = Answers()
    draw.draw(BOARD, ask, SPAN, ["r"])
    queries = [parameters["query"] for _, parameters in ask.asked]
    assert not [query for query in queries if "$" in query] and len(queries) > 60
    assert any("[60s]" in query for query in queries) and SPAN.interval == 15.0
    long = Span.of(0.0, 30 * 86400.0, 15.0)
    assert (long.interval, long.rate_interval) == (8640.0, 8655.0)


def test_layers_of_a_stacked_panel_lie_on_each_other_and_a_gap_breaks_a_line() -> None:
    values = {1000.0 + 15 * i: 0.25 for i in range(5)} | {1300.0 + 15 * i: 0.25 for i in range(5)}
    ask = Answers(phase_seconds=[({"run": "r", "phase": "comm"}, values), ({"run": "r", "phase": "data"}, values)])
    page = draw.draw(board("Where a step's time goes"), ask, SPAN).html
    areas = re.findall(r'<path d="([^"]*)" fill="(#\w+)"', page)
    assert [colour for _, colour in areas] == ["#73bf69", "#73bf69", "#f2cc0c", "#f2cc0c"], "two pieces each"
    tops = [float(re.match(r"M[\d.]+ ([\d.]+)", d)[1]) for d, _ in areas]  # type: ignore[index]
    ticks = [(float(label), float(y) - 4) for y, label in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)%<', page)]
    (low, floor), (high, ceiling) = ticks[0], ticks[-1]
    shares = [low + (floor - top) / (floor - ceiling) * (high - low) for top in tops]
    assert shares == pytest.approx([25.0, 25.0, 50.0, 50.0], abs=0.2)


def test_a_state_is_told_by_its_name_and_a_table_has_the_columns_that_the_panel_names() -> None:
    state = [({"run": "r"}, {1000.0: 1.0, 1015.0: 2.0, 1030.0: 2.0})]
    page = draw.draw(board("State"), Answers(vescale_run_state=state), SPAN).html
    assert page.count(">RUNNING<") >= 1 and "#73bf69" in page
    rank = {"run": "r", "rank": "3", "worker": "w7", "node": "n", "instance": "gone", "job": "gone", "__name__": "vescale_worker_info"}
    text = Text(draw.draw(board("Ranks"), Answers(vescale_worker_info=[(rank, {1600.0: 1.0})]), SPAN).html).text
    assert text[-9:-1] == ["run", "rank", "worker", "node", "r", "3", "w7", "n"] and "gone" not in text


def test_labels_of_strangers_are_text() -> None:
    series = [({"run": HOSTILE, "rank": HOSTILE, "cause": HOSTILE}, {1000.0: 1.0, 1015.0: 3.0})]
    page = draw.draw(BOARD, Answers(vescale=series), SPAN, [HOSTILE]).html
    assert "script" not in Text(page).tags and any(HOSTILE in text for text in Text(page).text)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "s", "0 s"),
        (0.0125, "s", "12.5 ms"),
        (90.0, "s", "1.5 min"),
        (200_000.0, "s", "2.31 days"),
        (1536.0, "bytes", "1.5 KiB"),
        (80.0 * 2**30, "bytes", "80 GiB"),
        (0.404, "percentunit", "40.4%"),
        (1_250_000.0, "short", "1.25 Mil"),
        (-3.5, "short", "-3.5"),
        (73.0, "none", "73"),
        (3.0 * 2**20, "binBps", "3 MiB/s"),
        (5600.0, "watt", "5.6 kW"),
        (1.98e9, "hertz", "1.98 GHz"),
        (64.0, "celsius", "64 °C"),
    ],
)
def test_values_are_shown_in_their_unit(value: float, unit: str, text: str) -> None:
    assert value_text(value, unit) == text


def test_what_can_not_be_drawn_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DrawError, match=r"panel 'Loss' has type 'canvas': only timeseries, stat"):
        draw.draw({**BOARD, "panels": [{**board("Loss")["panels"][0], "type": "canvas"}]}, Answers(), SPAN)

    def refuse(path: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "vescale_loss" in parameters["query"]:
            raise DrawError("refused")
        return []

    with pytest.raises(DrawError, match="panel 'Loss': refused"):
        draw.draw(board("Loss"), refuse, SPAN)
    out = str(tmp_path / "page.html")
    assert draw.main(["--prometheus", "http://127.0.0.1:1", "--out", out]) == 2
    assert "http://127.0.0.1:1 does not answer as a Prometheus does" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        draw.main(["--prometheus", "http://127.0.0.1:1", "--out", out, "--hours", "nan"])
    assert "give numbers above 0" in capsys.readouterr().err
    assert not Path(out).exists()


def test_without_a_browser_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DrawError, match="install one of chromium"):
        draw.picture(tmp_path / "page.html", tmp_path / "page.png", 100)
