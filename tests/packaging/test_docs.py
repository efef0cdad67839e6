"""The links, commands, metrics and run files that the documents mention exist."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import click
import pytest

from tests.deploy.test_alerts import full_snapshot
from tests.packaging.sources import PRODUCT, ROOT, nodes
from vescale_ray.cli.app import cli
from vescale_ray.controller.http.exposition import families
from vescale_ray.controller.state.snapshot import DRIVER_ONLY, Snapshot
from vescale_ray.runfolder import RunFolder

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


def prose(text: str) -> str:
    """The text without its code blocks, which contain no links or headings."""
    return re.sub(r"^( *)```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them: lower case, without punctuation, spaces as dashes, repeated ones numbered."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.+?) *$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
        if found[name]:
            found[f"{name}-{found[name]}"] = 0
    return set(found)


def broken(page: Path) -> list[str]:
    """Relative links of a page to missing files or headings."""
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", prose(page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target.read_text(encoding="utf-8")))):
            missing.append(link)
    return missing


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert not broken(page)


@pytest.mark.parametrize(
    ("link", "works"),
    [
        ("[a](other.md)", True),
        ("[a](other.md#two-words)", True),
        ("[a](#here-its-code)", True),
        ("[a](https://nowhere.example/x.md#y)", True),
        ("`[a](none.md)` in code is a link, too", False),
        ("[a](none.md)", False),
        ("[a](other.md#three-words)", False),
        ("[a](other.md#in-code)", False),
        ("[a](#there)", False),
        ("![a](none.png)", False),
    ],
)
def test_a_broken_link_is_found(link: str, works: bool, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Two words\n\n```\n# In code\n```\n")
    (tmp_path / "page.md").write_text(f"## Here: it's `code`\n\n{link}\n")
    assert (broken(tmp_path / "page.md") == []) is works


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]} - {"README.md", "reference/generated/op-coverage.md"}
    assert not {page for page in pages if f"]({page})" not in index}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_path_in_code_style_exists(page: Path) -> None:
    folders = "vescale_ray|controller|workers|checkpoint|deploy|tests|benchmarks"
    paths = re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text(encoding="utf-8"))
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_no_page_has_the_marks_of_an_unfinished_merge(page: Path) -> None:
    assert not re.search(r"^(<{7} |={7}$|>{7} )", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_exists(page: Path) -> None:
    for line in re.findall(r"(?:^|`|-- )vescale-ray ([a-z0-9]+(?: [a-z]+(?:-[a-z]+)*)?)", page.read_text(encoding="utf-8"), re.MULTILINE):
        command, _, second = line.partition(" ")
        assert command in cli.commands, line
        group = cli.commands[command]
        if isinstance(group, click.Group) and second:
            assert second in group.commands, line


def test_every_make_target_named_in_the_docs_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"make ([a-z-]+)`", page.read_text(encoding="utf-8"))) <= targets


def exported() -> set[str]:
    """Names of all metric families, as Prometheus shows them."""
    suffix = {"counter": "_total", "info": "_info"}
    return {family.name + suffix.get(family.type, "") for family in families(full_snapshot())}


def test_docs_name_exactly_the_exported_metrics() -> None:
    documented: set[str] = set()
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (`vescale_[^|]*)\|", page, re.MULTILINE):
        first = ""
        for name in re.findall(r"`(\w+)(?:\{[^}]*\})?`", row):
            # `vescale_world_size`, `_target`: the rest of the name of a member of the same family
            stem = first if not first.startswith("vescale_checkpoint") else "vescale_checkpoint"
            documented.add(name if name.startswith("vescale_") else stem + name)
            first = first or name
    assert documented == exported()


def test_every_snapshot_field_is_exported_or_listed() -> None:
    source = (ROOT / "controller" / "http" / "exposition.py").read_text(encoding="utf-8")
    only_status = {"started", "checkpoint_path", "checkpoint_interval_text", "error"}
    known = only_status | DRIVER_ONLY
    unused = [field.name for field in fields(Snapshot) if f"s.{field.name}" not in source and field.name not in known]
    assert not unused


def test_the_documents_name_every_file_of_a_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "reference" / "run-folder.md").read_text(encoding="utf-8")
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


def test_test_names_have_at_most_60_characters() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > 60
    ]
    assert not found


def test_results_are_named_by_benchmark_and_machine() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    machines = "|".join(letter.lower() for letter in re.findall(r"^\| ([A-Z]) \| 2 cores", page, re.MULTILINE))
    scripts = "|".join(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    named = re.compile(rf"(?:{scripts})(?:_[a-z0-9]+)?_(?:{machines})\.json|gpu_h200\.json|plan_padding\.(?:json|png|txt)")
    assert not [path.name for path in (ROOT / "benchmarks" / "results").iterdir() if not named.fullmatch(path.name)]


def test_every_extra_named_for_pip_exists() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    texts = {path: path.read_text(encoding="utf-8") for path in (*PAGES, *PRODUCT, ROOT / "deploy" / "Dockerfile")}
    named = {
        (path, extra)
        for path, text in texts.items()
        for those in re.findall(r"(?:vescale-ray|\.whl\))\[([\w,]+)\]", text)
        for extra in those.split(",")
    }
    assert len(named) > 8
    assert not {(path.relative_to(ROOT).as_posix(), extra) for path, extra in named if extra not in extras}
