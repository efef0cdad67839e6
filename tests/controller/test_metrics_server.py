"""The controller's HTTP server, read with Prometheus' own parsers and with plain requests."""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.controller.served_metrics import FULL, Box, get, value
from vescale_ray.controller.failures.budget import Cause
from vescale_ray.controller.http import metrics
from vescale_ray.controller.http.exposition import DEVICE_MEMORY, EXTREMES, MOST_RANKS, QUANTILES, exposition, extremes, quantiles
from vescale_ray.controller.http.metrics import MetricsServer, Scrapes
from vescale_ray.controller.state.snapshot import STATES, Histogram, Snapshot
from vescale_ray.controller.statistics.goodput import Loss


def test_every_figure_of_the_snapshot_is_in_the_scrape(server: MetricsServer) -> None:
    text = get(server, "/metrics")
    expected: list[tuple[str, dict[str, str], float]] = [
        ("vescale_step", {}, 40),
        ("vescale_step_target", {}, 100),
        ("vescale_steps_total", {}, 43),
        ("vescale_tokens_total", {}, 43000),
        ("vescale_tokens_per_second", {}, 1234.5),
        ("vescale_loss", {}, 2.5),
        ("vescale_loss_bpb", {}, 3.6),
        ("vescale_grad_norm", {}, 0.7),
        ("vescale_learning_rate", {}, 1e-3),
        ("vescale_last_step_timestamp_seconds", {}, 1.5e9),
        ("vescale_step_duration_seconds_count", {}, 2),
        ("vescale_step_duration_seconds_sum", {}, 0.5),
        ("vescale_world_size", {}, 3),
        ("vescale_world_size_target", {}, 3),
        ("vescale_world_size_min", {}, 1),
        ("vescale_world_size_max", {}, 6),
        ("vescale_generation", {}, 4),
        ("vescale_rescales_total", {"direction": "shrink", "reason": "failure"}, 1),
        ("vescale_rescales_total", {"direction": "grow", "reason": "manual"}, 2),
        ("vescale_rescale_duration_seconds_bucket", {"le": "1.0"}, 0),
        ("vescale_rescale_duration_seconds_bucket", {"le": "2.5"}, 1),
        ("vescale_rescale_duration_seconds_bucket", {"le": "+Inf"}, 1),
        ("vescale_rescale_phase_seconds_total", {"phase": "sync"}, 1.4),
        ("vescale_replayed_steps_total", {}, 3),
        ("vescale_worker_failures_total", {"reason": "died"}, 1),
        ("vescale_worker_host_rss_bytes", {"rank": "1"}, 200),
        ("vescale_model_flops_utilization_ratio", {}, 0.375),
        ("vescale_phase_seconds_total", {"phase": "comm"}, 2.0),
        ("vescale_nonfinite_steps_total", {}, 2),
        ("vescale_nonfinite_weights_total", {}, 1),
        ("vescale_clipped_steps_total", {}, 5),
        ("vescale_skipped_steps_total", {}, 1),
        ("vescale_draining_workers", {}, 1),
        ("vescale_unprotected_ranks", {}, 2),
        ("vescale_worker_memory_bytes", {"rank": "1", "kind": "parameters"}, 410),
        ("vescale_worker_memory_bytes", {"rank": "1", "kind": "padding"}, 8),
        ("vescale_worker_memory_allocated_bytes", {"rank": "2"}, 9),
        ("vescale_worker_memory_capacity_bytes", {"rank": "0"}, 80),
        ("vescale_data_waiting_tokens", {}, 7000),
        ("vescale_data_read_bytes_total", {}, 123456),
        ("vescale_data_skipped", {"kind": "files"}, 2),
        ("vescale_data_skipped", {"kind": "records"}, 30),
        ("vescale_worker_alloc_retries_total", {"rank": "1"}, 3),
        ("vescale_worker_exposed_communication_seconds_total", {"rank": "0", "op": "all_gather"}, 1.25),
        ("vescale_worker_exposed_communication_seconds_total", {"rank": "1", "op": "step_end"}, 2.5),
        ("vescale_worker_step_duration_seconds", {"rank": "2"}, 0.31),
        ("vescale_worker_heartbeat_timestamp_seconds", {"rank": "1"}, 1.5e9 + 0.25),
        ("vescale_checkpoint_duration_seconds_count", {"op": "load", "stage": "read"}, 2),
        ("vescale_checkpoint_bytes_total", {"op": "load"}, 4000),
        ("vescale_checkpoint_failures_total", {"op": "load"}, 2),
        ("vescale_checkpoint_pending", {}, 1),
        ("vescale_worker_info", {"rank": "2", "worker": "w3", "node": "n1"}, 1),
        ("vescale_worker_slot_seconds", {"rank": "1"}, 0.3),
        ("vescale_worker_slowness_ratio", {"rank": "1"}, 3),
        ("vescale_worker_slots", {"rank": "2"}, 2),
        ("vescale_slots", {}, 6),
        ("vescale_stragglers", {}, 1),
        ("vescale_checkpoint_last_step", {}, 30),
        ("vescale_checkpoint_last_success_timestamp_seconds", {}, 1.4e9),
        ("vescale_checkpoint_bytes_total", {"op": "save"}, 1000),
        ("vescale_checkpoint_failures_total", {"op": "save"}, 0),
        ("vescale_checkpoint_duration_seconds_sum", {"op": "save", "stage": "snapshot"}, 0.05),
        ("vescale_checkpoint_duration_seconds_sum", {"op": "save", "stage": "upload"}, 7.0),
        ("vescale_checkpoint_duration_seconds_count", {"op": "save", "stage": "commit"}, 0),
        ("vescale_run_info", {"model": "llama", "torch": "2.13.0"}, 1),
    ]
    for name, labels, number in expected:
        assert value(text, name, **labels) == pytest.approx(number), (name, labels)


def test_counters_are_exported_as_0_before_they_count(server: MetricsServer, box: Box) -> None:
    """Prometheus' increase() misses what a series has counted before its first sample."""
    box.snapshot = Snapshot(run="r1", state="PENDING")
    text = get(server, "/metrics")
    for cause in Loss:
        assert value(text, "vescale_badput_seconds_total", cause=str(cause)) == 0
    for failure in Cause:
        assert value(text, "vescale_failures_total", cause=str(failure)) == 0
    for direction, reason in (("grow", "manual"), ("shrink", "failure"), ("replace", "straggler"), ("shrink", "drain"), ("grow", "growth")):
        assert value(text, "vescale_rescales_total", direction=direction, reason=reason) == 0
    assert value(text, "vescale_worker_failures_total", reason="killed") == value(text, "vescale_worker_failures_total", reason="died") == 0
    for name, phase in (("vescale_rescale_phase_seconds_total", "detect"), ("vescale_phase_seconds_total", "comm")):
        assert value(text, name, phase=phase) == 0
    for op in ("save", "load"):
        assert value(text, "vescale_checkpoint_failures_total", op=op) == value(text, "vescale_checkpoint_bytes_total", op=op) == 0
    assert not [family.name for family in parse_text(text) if not family.samples and family.name != "vescale_failures_in_a_row"]


def test_restarted_controller_is_scraped_only_after_its_replay(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """If counters were 0 for one scrape, the next one would show the whole run as an increase."""
    monkeypatch.setattr(metrics, "KNOWN_S", 0.1)
    known = threading.Event()
    server = MetricsServer("127.0.0.1", 0, lambda: box.snapshot, None, "secret", known)
    try:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            get(server, "/metrics")
        assert json.loads(get(server, "/status"))["step"] == 40, "people are answered all the same"
        monkeypatch.setattr(metrics, "KNOWN_S", 10.0)
        threading.Timer(0.2, known.set).start()
        assert value(get(server, "/metrics"), "vescale_steps_total") == 43, "one that comes a little early waits"
    finally:
        server.close()


def test_only_a_recurring_scraper_is_expected_again() -> None:
    def after(*visits: float, now: float) -> float:
        scrapes = Scrapes()
        for at in visits:
            scrapes.came(at)
        return scrapes.final_scrape(now)[0]

    assert after(now=100.0) == 0, "nobody comes"
    assert after(100.0, now=101.0) == 0, "somebody came once"
    assert after(100.0, 110.0, now=114.0) == pytest.approx(6.0 + 5.5), "half an interval may go wrong"
    assert after(100.0, 110.0, now=131.0) == 0, "who has stayed away is not waited for"
    assert after(100.0, 100.1, 110.0, 110.1, now=112.0) == pytest.approx(110.1 + 1.5 * 9.9 + 0.5 - 112), "two that look alike"


def test_both_scrapers_of_a_pair_are_awaited_but_no_manual_one() -> None:
    """The second scraper of a pair comes a moment after the first. That moment must not be taken for the scrape interval."""
    scrapes = Scrapes()
    for at in (100.0, 110.0, 120.0):
        scrapes.came(at, "a Prometheus")
        scrapes.came(at + 0.1, "b Prometheus")
    scrapes.came(121.0, "c curl")
    due, all_came = scrapes.final_scrape(122.0)
    assert due == pytest.approx(120.1 + 15.5 - 122) and all_came == 0
    scrapes.came(123.0, "c curl")
    assert scrapes.final_scrape(123.0)[1] == 0
    scrapes.came(130.0, "a Prometheus")
    assert scrapes.final_scrape(130.05)[1] == 0
    scrapes.came(130.1, "b Prometheus")
    assert scrapes.final_scrape(130.2)[1] == 1


def test_scrapers_are_told_apart_and_their_number_is_bounded(server: MetricsServer) -> None:
    for agent in ("one", "two", "one"):
        urllib.request.urlopen(urllib.request.Request(f"{server.url()}/metrics", headers={"User-Agent": agent}), timeout=10).read()
    deadline = time.monotonic() + 10
    while len(server.scrapes._visits) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)  # a scrape is counted when its response was written
    assert {client.split()[1] for client in server.scrapes._visits} == {"one", "two"}
    for number in range(1000):
        server.scrapes.came(float(number), f"client {number}")
    assert len(server.scrapes._visits) == metrics.MOST_CONNECTIONS


def test_the_run_is_in_exactly_one_state(server: MetricsServer, box: Box) -> None:
    for state in STATES:
        box.snapshot = replace(FULL, state=state)
        text = get(server, "/metrics")
        assert [one for one in STATES if value(text, "vescale_run_state", state=one) == 1] == [state]


def test_openmetrics_scrape_is_valid_without_created_series(server: MetricsServer) -> None:
    text = get(server, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in parse_openmetrics(text)}
    assert text.endswith("# EOF\n") and "_created" not in text
    assert families["vescale_tokens"].type == "counter"
    assert families["vescale_rescale_duration_seconds"].type == "histogram"
    assert all(family.documentation for family in families.values())


def test_names_and_labels_follow_the_rules(server: MetricsServer) -> None:
    for family in parse_text(get(server, "/metrics")):
        assert family.name.startswith("vescale_")
        assert not any(unit in family.name for unit in ("_ms", "percent", "_mb", "_gib"))
        for sample in family.samples:
            assert set(sample.labels) - {"run", "state", "le", "direction", "reason", "phase", "op", "stage", "cause", "kind", "rank"} <= {
                "worker",
                "node",
                "model",
                "torch",
            }
            assert ("rank" in sample.labels) == (family.name.startswith("vescale_worker_") and family.name != "vescale_worker_failures")


SERIES = 25
"""Number of series of a rank that has everything: a GPU, Muon, past moves of shards."""


NUMBERS_S = 0.0025
"""CPU time for the formatting of 20 times 1,024 numbers at full speed, in seconds."""


def many(count: int) -> Snapshot:
    ranks = range(count)
    whole: dict[str, Any] = {name: {r: 3 * r for r in ranks} for name in ("memory", "slots", "alloc_retries")}
    pace = {name: {r: 0.125 * r for r in ranks} for name in ("slot_seconds", "slowness", "rank_step_seconds", "heard")}
    kinds = {name: {r: (1 << 30) + r for r in ranks} for name in ("parameters", "gradients", "optimizer", "padding", "buffers", "copies")}
    device = {name: {r: (7 << 30) + r for r in ranks} for name in ("allocated", "reserved", "peak_allocated", "capacity")}
    ops = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "peer_copy", "step_end", "reshard")
    waited = {op: {r: r / 64 for r in ranks} for op in ops}
    workers = {r: {"worker": f'w\\{r}"', "node": f"n{r // 8}", "pod": f"p%{r}", "device": "cuda:0"} for r in ranks}
    figures = {**whole, **pace, "memory_kinds": kinds, "device_memory": device, "waited": waited, "workers": workers}
    return replace(FULL, run='r"1%', **figures)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_a_large_run_shows_extreme_ranks_and_quantiles(accept: str) -> None:
    snapshot = many(1024)
    body, _ = exposition(snapshot, accept)
    read = parse_openmetrics if accept else parse_text
    found = {(s.name, *sorted(s.labels.items())): s.value for family in read(body.decode()) for s in family.samples}
    heard = sorted(snapshot.heard.values())
    shown = [value for (name, *_), value in found.items() if name == "vescale_worker_heartbeat_timestamp_seconds"]
    assert sorted(shown) == pytest.approx([*heard[:EXTREMES], *heard[-EXTREMES:]], abs=1e-3)
    for quantile in QUANTILES:
        labels = [("quantile", str(quantile)), ("run", snapshot.run)]
        told = found["vescale_worker_heartbeat_timestamp_seconds_quantile", *labels]
        assert told == pytest.approx(np.quantile(heard, quantile), abs=1e-3)
    others = ("vescale_worker_info",)
    ranks = {dict(labels)["rank"] for name, *labels in found if "rank" in dict(labels) and name not in others}
    kinds = [{dict(labels)["rank"] for name, *labels in found if name == f"vescale_worker_memory_{kind}_bytes"} for kind in DEVICE_MEMORY]
    assert all(shown == kinds[0] and len(shown) >= 2 * EXTREMES for shown in kinds), "the alert on memory joins them"
    assert ranks == {dict(labels)["rank"] for name, *labels in found if name == "vescale_worker_info"}, "joins find the worker of each"
    assert body.count(b',rank="') + body.count(b'{rank="') < SERIES * 4 * EXTREMES + 1024


@pytest.mark.parametrize("world", [MOST_RANKS, 1024])
def test_a_scrape_takes_little_cpu(world: int) -> None:
    """CPU time excludes other processes that take the cores. They still slow a core down, by its caches and its clock."""
    snapshot, took, pace = many(world), [], []
    numbers, room = tuple(i + 0.015625 for i in range(1024)), b"%.6f " * 1024
    for _ in range(7):
        began = time.process_time()
        body, _ = exposition(snapshot, "")
        took.append(time.process_time() - began)
        began = time.process_time()
        for _ in range(20):
            _ = room % numbers
        pace.append(time.process_time() - began)
    if world == MOST_RANKS:
        assert body.count(b'rank="') == SERIES * world, "each rank is shown"
    slowed = max(1.0, min(pace) / NUMBERS_S)
    print(f"\n{world} ranks: {min(took) * 1e3:.1f} ms of CPU, {len(body) / 1e6:.2f} MB, machine {slowed:.2f} times as slow", end="")
    assert min(took) < (0.050 if world > MOST_RANKS else 0.100) * slowed


def test_a_rank_that_left_is_gone_from_the_next_scrape(server: MetricsServer, box: Box) -> None:
    assert {s.labels["rank"] for f in parse_text(get(server, "/metrics")) for s in f.samples if "rank" in s.labels} == {"0", "1", "2"}
    pace: dict[str, Any] = {"slot_seconds": {0: 0.1, 1: 0.2}, "slowness": {}, "slots": {0: 3, 1: 3}}
    pace |= {"memory_kinds": {}, "device_memory": {}, "alloc_retries": {}, "rank_step_seconds": {}, "heard": {}}
    pace["waited"] = {op: {0: by[0], 1: by[1]} for op, by in FULL.waited.items()}
    box.snapshot = replace(FULL, world=2, memory={0: 100, 1: 250}, workers={0: {"worker": "w0", "node": "n0"}}, **pace)
    text = get(server, "/metrics")
    assert {s.labels["rank"] for f in parse_text(text) for s in f.samples if "rank" in s.labels} == {"0", "1"}
    assert value(text, "vescale_worker_host_rss_bytes", rank="1") == 250


def test_unknown_figure_is_left_out_and_a_nan_loss_is_shown(server: MetricsServer, box: Box) -> None:
    box.snapshot = Snapshot(run="r1", state="STARTING")
    text = get(server, "/metrics")
    assert not any(name in text for name in ("vescale_loss", "vescale_grad_norm", "vescale_checkpoint_last_step", "last_step_timestamp"))
    assert value(text, "vescale_world_size") == 0
    box.snapshot = replace(FULL, loss=math.nan)
    assert math.isnan(value(get(server, "/metrics"), "vescale_loss"))


def test_a_label_may_hold_any_character(server: MetricsServer, box: Box) -> None:
    box.snapshot = replace(FULL, worker_failures={'a "quoted"\nreason\\': 1})
    assert value(get(server, "/metrics"), "vescale_worker_failures_total", reason='a "quoted"\nreason\\') == 1


def test_the_status_is_the_snapshot_as_json(server: MetricsServer, box: Box) -> None:
    box.snapshot = replace(FULL, loss=math.nan)
    status = json.loads(get(server, "/status"), parse_constant=lambda name: pytest.fail(name))
    assert (status["run"], status["step"], status["loss"], status["world"]) == ("r1", 40, None, 3)
    assert status["memory"] == {"0": 100, "1": 200, "2": 300}
    assert status["rescales"] == {"shrink/failure": 1, "grow/manual": 2}
    assert status["rescale_seconds"] == {"count": 1, "sum": 1.5}


def test_histogram_buckets_are_cumulative_and_bounds_inclusive() -> None:
    histogram = Histogram().observe(0.01).observe(0.0100001).observe(1000).observe(math.nan)
    buckets = dict(histogram.buckets())
    assert (buckets["0.01"], buckets["0.025"], buckets["300.0"], buckets["+Inf"], histogram.count) == (1, 2, 2, 3, 3)
    assert Histogram().count == 0


def test_ranks_without_a_number_are_no_extremes_and_no_quantiles() -> None:
    values = {rank: float(rank) for rank in range(1000)} | dict.fromkeys(range(1000, 1100), math.nan)
    assert quantiles(values) == pytest.approx({str(q): q * 999 for q in QUANTILES})
    assert list(extremes(values)) == [*range(EXTREMES), *range(1000 - EXTREMES, 1000)]
    nothing = dict.fromkeys(values, math.nan)
    assert extremes({**nothing, 7: 1.0}) == {7: 1.0}
    assert not extremes(nothing) and not quantiles(nothing)
