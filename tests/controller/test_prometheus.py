"""A real Prometheus scrapes a real run that loses a worker, is rescaled and saves. Every query of the dashboard then has an answer."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from tests.controller.runs import carry_out, tiny, until
from tests.controller.test_runs_on_ray import no_secret_is_told
from tests.deploy.test_alerts import RULES
from tests.deploy.test_dashboard import PANELS, expressions, filled
from vescale_ray.cli import client
from vescale_ray.cli.pages import dash
from vescale_ray.cli.pages.run_page import render
from vescale_ray.controller.driver.driver import ScheduledAction as Act
from vescale_ray.runfolder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
ACCELERATORS = r"vescale_worker_(memory_(allocated|peak_allocated|reserved|capacity)_bytes|alloc_retries_total)|ray_node_gpus|DCGM_FI_DEV"
"""Metrics that a run on CPUs does not have."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_here"),
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed: apt-get install prometheus"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    """A real Prometheus on a port of its own, with ``deploy/prometheus.yml`` made faster. ``run``: the folder of the run that it
    scrapes."""

    def __init__(self, folder: Path, run: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
        config["rule_files"] = [str(ROOT / "deploy" / "alerts.yml")]
        ours, rays = config["scrape_configs"]
        config["scrape_configs"] = [ours, rays]
        (discovery,) = ours["file_sd_configs"]
        discovery["files"] = [str(run / Path(discovery["files"][0]).name)]
        discovery["refresh_interval"] = "500ms"
        # Without a dashboard, Ray does not write the discovery file that deploy/prometheus.yml names. Its nodes are scraped all the same.
        del rays["file_sd_configs"]
        rays["static_configs"] = [{"targets": [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{self.port}"], stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                self._get("/-/ready")
                return
            except OSError:
                assert self._process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
                time.sleep(0.1)

    def ask(self, path: str, **parameters: str) -> Any:
        answer = json.loads(self._get(f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
        assert answer["status"] == "success", answer
        return answer["data"]

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as reply:
            content: bytes = reply.read()
        return content

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self.send(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    (tmp_path / "prometheus").mkdir()
    prometheus = Prometheus(tmp_path / "prometheus", tmp_path / "scraped")
    try:
        yield prometheus
    finally:
        prometheus.close()


@pytest.mark.fault("S10")
def test_every_dashboard_query_has_an_answer_for_a_real_run(tmp_path: Path, prometheus: Prometheus) -> None:
    settings: dict[str, Any] = {"checkpoint_every": "auto", "checkpoint_auto_min_s": 0.5, "checkpoint_auto_max_s": 2.0, "train_steps": 5000}
    settings["data_corpus"] = [str(tmp_path / "text.txt")]  # a list is read in blocks
    settings["metrics_peak_flops"] = 1e9
    config = tiny(tmp_path, "scraped", **settings)
    folder = RunFolder(config.run_folder)
    seen: dict[str, Any] = {"lint": None, "asked": False, "since": None, "stopped_at": None, "went_on_to": None}

    def watch(status: Mapping[str, Any]) -> None:
        if "shrink/failure" in status["rescales"] and not seen["asked"]:
            seen["asked"] = True
            client.request(folder, "rescale", {"workers": 3})
        if "grow/manual" not in status["rescales"] or status["state"] != "RUNNING":
            return
        seen["since"] = seen["since"] or time.monotonic()
        if seen["lint"] is None:
            control = folder.read_control() or {}
            with urllib.request.urlopen(f"{control['url']}/metrics", timeout=10) as reply:
                text = reply.read()
            with urllib.request.urlopen(f"{control['url']}/status", timeout=10) as reply:
                seen["served"] = [text.decode(), reply.read().decode(), control["token"]]
            seen["lint"] = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30, check=False)
        running_s = time.monotonic() - seen["since"]
        if running_s > 4 and seen["stopped_at"] is None:
            prometheus.send(signal.SIGSTOP)  # a scraper may stand still in the middle of a scrape
            seen["stopped_at"] = status["step"]
        stopped_at = seen["stopped_at"]
        far = running_s > 30 or (running_s > 6 and status["step"] >= (stopped_at or 0) + 10)
        if stopped_at is not None and seen["went_on_to"] is None and far:
            seen["went_on_to"] = status["step"]
            prometheus.send(signal.SIGCONT)
        if running_s > 10 and seen["went_on_to"] is not None:
            client.request(folder, "stop", {})

    began = time.time()
    finished = carry_out(config, Act(15, "kill", 1), watch=watch)
    assert finished.result.state == "STOPPED" and not finished.result.warnings, finished.result
    assert seen["went_on_to"] - seen["stopped_at"] >= 10, "training does not wait for Prometheus"
    assert seen["lint"].returncode == 0 and not seen["lint"].stdout + seen["lint"].stderr, seen["lint"]
    ended = time.time()
    gone = "Prometheus forgets the run's address"
    until(lambda: [one["labels"]["job"] for one in prometheus.ask("targets")["activeTargets"]] == ["ray"], 10, gone)
    span = f"{int(ended - began) + 5}s"
    when = {"start": str(began), "end": str(ended), "step": "1s"}
    for where, expr in expressions().items():
        if re.search(ACCELERATORS, expr):
            told = json.dumps([panel for panel in PANELS if where.startswith(panel["title"])])
            assert re.search("ccelerator|Empty without GPUs|Empty without NVIDIA", told), "says that it is empty here"
            continue
        asked = filled(expr, "scraped", "4s", span)
        found = prometheus.ask("query_range", query=asked, **when)["result"]
        values = [float(value) for series in found for _, value in series["values"]]
        assert [value for value in values if value == value], f"{where}: {asked}"
    runs = prometheus.ask("query", query=f"last_over_time(vescale_run_info[{span}])", time=str(ended))["result"]
    assert [one["metric"]["run"] for one in runs] == ["scraped"], "a run that has ended is still offered"
    done = prometheus.ask("query", query=f'max_over_time(vescale_run_state{{state="DONE"}}[{span}])', time=str(ended))["result"]
    assert [one["value"][1] for one in done] == ["1"], "Prometheus was let come once more, and has seen it end"
    nodes = prometheus.ask("query", query=f"last_over_time(ray_node_cpu_count[{span}])", time=str(ended))["result"]
    assert {one["metric"]["SessionName"] for one in nodes} == {runs[0]["metric"]["ray_session"]}, "by which the run's nodes are found"
    # The productive and lost seconds of the last scrape add up to the time of that scrape.
    both = "vescale_goodput_seconds_total + on (run) sum by (run) (vescale_badput_seconds_total)"
    told = prometheus.ask("query_range", query=both, **when)
    started = (folder.read_state() or {})["started"]
    at, seconds = told["result"][0]["values"][-1]
    assert abs(float(seconds) - (at - started)) < 1.5, "but for the step under way, and the age of the scrape"
    page = dash.from_prometheus(f"http://127.0.0.1:{prometheus.port}", "scraped", 0.1)
    assert all(value is not None for chart in page.charts for series in chart.series for _, value in series.points[-1:])
    assert all(chart.series for chart in page.charts) and page.goodput and len(page.marks) >= 2 and "<svg" in render(page)
    failed = {rule["name"]: rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"] if rule["health"] == "err"}
    assert not failed and sum(len(group["rules"]) for group in RULES) == 24
    no_secret_is_told(folder, seen["served"])
