"""The layers of the package: which part may import which, read from the sources, imports inside functions included."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.packaging.sources import MAPPED, PRODUCT, ROOT, SOURCES, module_of, nodes

# Layers from bottom to top. A part may import its own layer and those below it.
LAYERS: list[set[str]] = [
    {"version", "errors", "geometry", "block_grid", "compat", "gloo", "communication"},
    {"planner"},
    {"dtensor", "dbuffer", "quantization", "emulation", "lasting", "runfolder"},
    {
        "fsdp",
        "models",
        "expert_parallel",
        "data",
        "config",
        "lr_schedule",
        "checkpoint",
        "state_dict",
        "state_loading",
    },
    {"optim"},
    {"reporting", "k8s"},
    {"workers"},
    {"controller"},
    {"cli", "deploy"},
]
DATA_ONLY = {"configs"}
RANK = {part: height for height, parts in enumerate(LAYERS) for part in parts}
MAY_IMPORT_RAY = {"controller", "workers"}
TORCH_FREE = {
    "geometry",
    "block_grid",
    "errors",
    "config",
    "lr_schedule",
    "runfolder",
    "reporting",
    "lasting",
    "deploy",
    "cli",
    "k8s",
}


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Every module that the file imports, by its full name, and whether the import is at module level."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    inner = path.relative_to(ROOT).with_suffix("").parts
    package = inner[:-1] if inner[0] == "vescale_ray" else ("vescale_ray", *inner[:-1])
    lazy = {
        id(child)
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.walk(node)
        if isinstance(child, ast.Import | ast.ImportFrom)
    }
    for node in nodes(path):
        top = id(node) not in lazy
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, top
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join((*package[: len(package) - node.level + 1], *([node.module] if node.module else [])))
                if node.level
                else str(node.module)
            )
            if base == "vescale_ray":
                for alias in node.names:
                    yield f"vescale_ray.{alias.name}", top
            else:
                yield base, top


def test_every_part_has_its_place_in_the_layers() -> None:
    assert {part for part, _ in SOURCES} - DATA_ONLY == set(RANK) & {part for part, _ in SOURCES}


def test_a_part_imports_only_what_lies_below_it() -> None:
    for part, path in SOURCES:
        for name, _ in imports(path):
            words = name.split(".")
            if words[0] != "vescale_ray" or len(words) == 1:
                continue
            other = PUBLIC.get(words[1], words[1])
            if other in ("__version__",):
                continue
            assert part not in DATA_ONLY, f"{path}: imports {name}"
            assert RANK[other] <= RANK[part], f"{path}: {part} imports {name}, which lies above it"


PUBLIC = {
    "Block": "geometry",
    "RaggedShard": "dtensor",
    "RaggedDTensor": "dtensor",
    "DBuffer": "dbuffer",
    "fully_shard": "fsdp",
    "train": "controller",
}


def test_only_controller_and_workers_import_ray() -> None:
    for part, path in SOURCES:
        used = {name for name, _ in imports(path) if name.split(".")[0] == "ray"}
        assert not used or part in MAY_IMPORT_RAY, f"{path}: imports {sorted(used)}"
        if part == "workers":
            assert not used or path.name == "worker.py", f"{path}: of workers/ only worker.py may import Ray"


def test_command_line_imports_torch_only_inside_functions() -> None:
    for part, path in SOURCES:
        if part in TORCH_FREE:
            assert not [name for name, top in imports(path) if top and name.split(".")[0] in ("torch", "ray", "matplotlib")], path


def test_our_packages_are_imported_only_through_vescale_ray() -> None:
    for _, path in SOURCES:
        assert not [name for name, _ in imports(path) if name.split(".")[0] in MAPPED], path


POLICIES = (
    "transitions.generation",
    "transitions.recovery",
    "transitions.run_begin",
    "transitions.run_end",
    "failures.failure_detector",
    "scaling.scaling",
    "scaling.autoscaling",
    "failures.budget",
    "failures.connectivity",
    "failures.exit_deadlines",
    "failures.hang",
    "policy",
    "scaling.capacity",
    "failures.straggler",
)
MECHANISMS = {
    "ray",
    *(
        f"vescale_ray.controller.{name}"
        for name in (
            "worker_group.worker_group",
            "commands",
            "state.journal",
            "scaling.nodes",
            "worker_group.supervisor",
            "state.run_log",
            "bounded_io",
        )
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_of_the_controller_reaches_no_mechanism(policy: str) -> None:
    """Indirect imports count, since a test of the policy loads them too."""
    files = {module_of(path): path for _, path in SOURCES}
    seen, pending = set[str](), [f"vescale_ray.controller.{policy}"]
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            path = files.get(name) or files.get(name.rpartition(".")[0])
            pending += [one for one, _ in imports(path)] if path and name.startswith("vescale_ray.controller.") else []
    assert not {name for name in seen if name in MECHANISMS or name.startswith("ray.")}


def test_controller_writes_no_field_of_another_object() -> None:
    """Only an object's own methods change it. ``local_ray`` replaces functions of Ray's modules."""
    found = []
    for path in (path for part, path in SOURCES if part == "controller"):
        for node in nodes(path):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            fields = [one for target in targets if target is not None for one in ast.walk(target) if isinstance(one, ast.Attribute)]
            stores = [one for one in fields if isinstance(one.ctx, ast.Store) and ast.unparse(one.value) not in ("self", "cls")]
            found += [f"{path.relative_to(ROOT)}:{one.lineno}: {ast.unparse(one)}" for one in stores if path.name != "local_ray.py"]
    assert not found


def test_every_dependency_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for name, extra in project["optional-dependencies"].items() if name != "dev" for one in extra]
    wanted = {re.split(r"[\[<>=]", one)[0].lower() for one in (*project["dependencies"], *extras)}
    used = {name.split(".")[0] for _, path in SOURCES for name, _ in imports(path)}
    imported = {one.lower().replace("_", "-") for name, those in packages_distributions().items() if name in used for one in those}
    assert wanted <= imported, wanted - imported


def test_the_models_and_the_data_know_nothing_of_sharding() -> None:
    for part, path in SOURCES:
        if part in ("models", "data"):
            ours = {name for name, _ in imports(path) if name.startswith("vescale_ray.")}
            sections = {"vescale_ray.config.data_section", "vescale_ray.config.model_section"}
            assert ours <= {"vescale_ray.errors", "vescale_ray.models", "vescale_ray.data", *sections} | {
                n for n in ours if n.startswith(f"vescale_ray.{part}")
            }


def test_every_package_has_a_docstring() -> None:
    for path in (path for path in PRODUCT if path.name == "__init__.py"):
        module = nodes(path)[0]
        docstring = ast.get_docstring(module) if isinstance(module, ast.Module) else None
        assert docstring and len(docstring) > 80, path


def test_the_controller_answers_before_torch_is_imported() -> None:
    """Late imports of torch halve the time until a restarted controller answers (docs/fault-tolerance.md).

    The test follows the module-level imports through all modules of the project.
    """
    files = {module_of(path): path for _, path in SOURCES}
    waiting, seen = ["vescale_ray.controller.controller", "vescale_ray.controller.worker_group.supervisor"], set()
    while waiting:
        module = waiting.pop()
        if module in seen or module not in files:
            continue
        seen.add(module)
        for name, top in imports(files[module]):
            if top:
                assert name.split(".")[0] not in ("torch", "pyarrow", "matplotlib", "s3fs"), f"{module} imports {name}"
                # "from a.b import c" may mean the module a.b.c or a name in a.b.
                waiting += [name, name.rpartition(".")[0]]
    assert "vescale_ray.data.loss_units" in seen and "vescale_ray.workers.messages" in seen
