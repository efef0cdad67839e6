"""What the documents say exists does: links, commands, metrics, files of a run."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import click
import pytest

from tests.deploy.test_alerts import full_snapshot
from vescale_ray.cli import cli
from vescale_ray.controller.exposition import families
from vescale_ray.controller.snapshot import DRIVER_ONLY, Snapshot
from vescale_ray.runfolder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing, missing


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_path_in_code_style_exists(page: Path) -> None:
    folders = "vescale_ray|controller|workers|checkpoint|deploy|tests|benchmarks"
    paths = re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text(encoding="utf-8"))
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_command_exists(page: Path) -> None:
    for line in re.findall(r"(?:^|`|-- )vescale-ray ([a-z0-9]+(?: [a-z]+(?:-[a-z]+)*)?)", page.read_text(encoding="utf-8"), re.MULTILINE):
        command, _, second = line.partition(" ")
        assert command in cli.commands, line
        group = cli.commands[command]
        if isinstance(group, click.Group) and second:
            assert second in group.commands, line


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"make ([a-z-]+)`", page.read_text(encoding="utf-8"))) <= targets


def exported() -> set[str]:
    """Names of all families, as Prometheus shows them."""
    suffix = {"counter": "_total", "info": "_info"}
    return {family.name + suffix.get(family.type, "") for family in families(full_snapshot())}


def test_the_documents_name_every_metric_and_no_other() -> None:
    documented: set[str] = set()
    for row in re.findall(r"^\| (`vescale_[^|]*)\|", (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8"), re.MULTILINE):
        first = ""
        for name in re.findall(r"`(\w+)(?:\{[^}]*\})?`", row):
            # `vescale_world_size`, `_target`: the rest of the name of a member of the same family
            stem = first if not first.startswith("vescale_checkpoint") else "vescale_checkpoint"
            documented.add(name if name.startswith("vescale_") else stem + name)
            first = first or name
    assert documented == exported()


def test_every_figure_of_the_snapshot_has_a_use() -> None:
    source = (ROOT / "controller" / "exposition.py").read_text(encoding="utf-8")
    only_status = {"started", "checkpoint_path", "checkpoint_interval_text", "error"}
    known = only_status | DRIVER_ONLY
    unused = [field.name for field in fields(Snapshot) if f"s.{field.name}" not in source and field.name not in known]
    assert not unused


def test_the_documents_name_every_file_of_a_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    run = RunFolder(tmp_path).create()
    run.append_metrics({"step": 1})
    run.append_event({"event": "x"})
    run.append_samples(0, 1, [1])
    run.write_state({})
    run.write_control("u", "t")
    run.write_discovery("u")
    run.write_config("")
    run.claim().close()
    names = {path.name for path in tmp_path.iterdir()} | {run.curve_path.name, f"{run.checkpoints.name}/"}
    named = set(re.findall(r"^\| `([a-z_]+\.[a-z]+|lock|checkpoints/)`", text, re.MULTILINE))
    assert named == names | {"controller.json"}
