"""Alerts fire when they must and at no other time, by Prometheus' own tool.

They use only metrics that exist, and name existing runbooks.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from vescale_ray.cli import app
from vescale_ray.config import RunConfig
from vescale_ray.controller.http.exposition import DEVICE_MEMORY, families
from vescale_ray.controller.protocol import RunState
from vescale_ray.controller.state.snapshot import Snapshot
from vescale_ray.errors import BadInput
from vescale_ray.k8s import Options, documents
from vescale_ray.k8s.options import RUNBOOKS as PLACE

ROOT = Path(__file__).resolve().parents[2]
RULES = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
GPU_RULES = yaml.safe_load((ROOT / "deploy" / "alerts-gpu.yml").read_text())["groups"]
"""Rules about dcgm-exporter's series, which belong to no run."""
RENDERED = {rule["alert"] for group in RULES for rule in group["rules"] if "alert" in rule}
ALERTS = {rule["alert"]: rule for group in (*RULES, *GPU_RULES) for rule in group["rules"] if "alert" in rule}
RECORDED = {rule["record"] for group in RULES for rule in group["rules"] if "record" in rule}
RUNBOOKS = (ROOT / "docs" / "how-to" / "runbooks.md").read_text()


def cases(path: Path) -> dict[str, Any]:
    """The content of a file of cases in promtool's format.

    Our files give an alert that ``fires`` by its summary, which begins with the run, or by its summary and labels. The rest is the rule's.
    A case without ``alertname`` is one in which no alert fires.
    """

    def expected(rule: dict[str, Any], given: str | dict[str, str]) -> dict[str, Any]:
        labels = {"summary": given, "run": given.partition(":")[0]} if isinstance(given, str) else dict(given)
        return {"exp_annotations": rule["annotations"] | {"summary": labels.pop("summary")}, "exp_labels": rule["labels"] | labels}

    content: dict[str, Any] = yaml.safe_load(path.read_text())
    content["rule_files"] = [str((path.parent / name).resolve()) for name in content["rule_files"]]
    for test in content["tests"]:
        test["alert_rule_test"] = [
            {
                "eval_time": case["eval_time"],
                "alertname": name,
                "exp_alerts": [expected(ALERTS[name], given) for given in case.get("fires", ())],
            }
            for case in test.get("alert_rule_test", ())
            for name in ([case["alertname"]] if "alertname" in case else RENDERED)
        ]
    return content


CASES = {name: cases(ROOT / "tests" / "deploy" / name) for name in ("alerts_test.yml", "alerts_hours_test.yml", "alerts_gpu_test.yml")}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_promtool_accepts_the_rules_and_their_tests_pass(tmp_path: Path) -> None:
    for name, content in CASES.items():
        (tmp_path / name).write_text(yaml.safe_dump(content))
    for arguments in (("check", "rules", "deploy/alerts.yml", "deploy/alerts-gpu.yml"), ("test", "rules", *map(str, tmp_path.iterdir()))):
        done = subprocess.run(["promtool", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_firing_and_a_silent_case(alert: str) -> None:
    tests = [test for content in CASES.values() for test in content["tests"]]
    fires = {bool(case["exp_alerts"]) for test in tests for case in test["alert_rule_test"] if case["alertname"] == alert}
    assert fires == {True, False}


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_summary_severity_and_runbook(alert: str) -> None:
    rule = ALERTS[alert]
    assert alert.startswith("Vescale") and rule["labels"]["severity"] in ("page", "ticket", "info")
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert ("$labels.run" if alert in RENDERED else "$labels.gpu") in notes["summary"]
    page, _, anchor = notes["runbook_url"].partition("#")
    assert page == PLACE, "one address, that one command replaces"
    # GitHub and other Markdown renderers make a heading's anchor in lower case.
    assert anchor == alert.lower() and f"\n## {alert}\n" in RUNBOOKS


def test_runbooks_option_sets_the_link_of_every_alert() -> None:
    wanted = "https://wiki.corp.example/ml/runbooks.md"

    def links(options: Options) -> set[str]:
        (rules,) = [one["spec"] for one in documents(RunConfig(), options, "monitor") if one["kind"] == "PrometheusRule"]
        return {rule["annotations"]["runbook_url"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}

    assert links(Options(runbooks=wanted)) == {f"{wanted}#{alert.lower()}" for alert in RENDERED}
    assert links(Options()) == {f"{PLACE}#{alert.lower()}" for alert in RENDERED}
    for wrong in ("docs/how-to/runbooks.md", "https://x/runbooks.md#there", "https://", "ftp://x/y"):
        with pytest.raises(BadInput, match="--runbooks .*: give the URL of docs/how-to/runbooks.md"):
            documents(RunConfig(), Options(runbooks=wrong), "monitor")
    command = re.search(r"sed -i 's\|(.*?)\|", (ROOT / "deploy" / "alerts.yml").read_text())
    assert command and command[1] == PLACE


def known() -> set[str]:
    """Names of all series that a run can have."""
    names = set()
    for family in families(full_snapshot()):
        names |= {sample.name for sample in family.samples}
        if family.type == "counter":
            names.add(f"{family.name}_total")
        if family.type == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def full_snapshot() -> Snapshot:
    return Snapshot(
        run="r",
        state="RUNNING",
        loss=1.0,
        bpb=1.0,
        evaluations={"heldout": {"loss": 1.0, "perplexity": 2.7, "bpb": 1.4, "samples": 8}},
        tokens_per_second=1.0,
        grad_norm=1.0,
        learning_rate=1.0,
        last_step_time=1.0,
        checkpoint_step=1,
        checkpoint_time=1.0,
        checkpoint_stall=0.1,
        checkpoint_interval=60.0,
        failures_in_a_row={"crash": 0},
        flops_utilization=0.5,
        phase_seconds={"data": 1.0},
        memory={0: 1},
        memory_kinds={"parameters": {0: 1}},
        device_memory={kind: {0: 1} for kind in DEVICE_MEMORY},
        data_waiting_tokens=1,
        alloc_retries={0: 0},
        waited={"all_gather": {0: 1.0}},
        rank_step_seconds={0: 1.0},
        heard={0: 1.0},
        slot_seconds={0: 1.0},
        slowness={0: 1.0},
        slots={0: 1},
        workers={0: {"worker": "w", "node": "n"}},
    )


@pytest.mark.parametrize("rule", [rule for group in RULES for rule in group["rules"]], ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_rule_asks_for_series_that_exist(rule: dict[str, Any]) -> None:
    asked = set(re.findall(r"\bvescale[a-z0-9_:]*", rule["expr"]))
    assert asked and asked <= known() | RECORDED


@pytest.mark.parametrize("rule", [rule for group in RULES for rule in group["rules"]], ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_rule_asks_for_states_that_exist(rule: dict[str, Any]) -> None:
    asked = re.findall(r'\bstate\s*(?:=~|!~|!=|=)\s*"([^"]*)"', rule["expr"])
    assert {state for states in asked for state in states.split("|")} <= set(RunState)


@pytest.mark.parametrize("rule", [rule for group in RULES for rule in group["rules"]], ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_rule_groups_by_cluster_namespace_and_run(rule: dict[str, Any]) -> None:
    for labels in re.findall(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)", rule["expr"]):
        assert labels.startswith("cluster, namespace, run"), labels


def test_runbooks_name_existing_alerts_keys_and_commands() -> None:
    assert set(re.findall(r"^## (\w+)$", RUNBOOKS, re.MULTILINE)) == set(ALERTS)
    sections = RunConfig.model_fields
    for section, key in set(re.findall(r"`(\w+)\.(\w+)(?:: ?[\w ]+)?`", RUNBOOKS)):
        if section in sections:
            model: Any = sections[section].annotation
            assert key in model.model_fields, f"{section}.{key}"
    for command, sub in set(re.findall(r"vescale-ray (\w+)(?: (\w+))?", RUNBOOKS)):
        found = app.cli.get_command(None, command)  # type: ignore[arg-type]
        assert found is not None, command
        if command == "ckpt":
            assert found.get_command(None, sub) is not None, sub  # type: ignore[attr-defined]
    assert known() >= set(re.findall(r"`(vescale_\w+)`", RUNBOOKS))


def test_every_runbook_command_parses() -> None:
    commands = set(re.findall(r"`(vescale-ray [a-z][^`\n]*)`", RUNBOOKS))
    assert len(commands) > 8
    for text in commands:
        command: click.Command = app.cli
        words = re.sub(r"\b(N|STEP)\b", "2", text).split()[1:]
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        command.make_context(text, words)
