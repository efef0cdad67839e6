"""Private names of torch are used only in ``vescale_ray/compat``. If the installed torch lacks some, one sentence says so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.packaging.sources import PRODUCT, ROOT, nodes
from vescale_ray import compat

COMPAT = ROOT / "vescale_ray" / "compat"
THEMES = sorted(COMPAT.glob("*.py"))
OTHERS = [path for path in PRODUCT if path.parent != COMPAT]
# Pickles name the classes and functions that wrote them. This reader compares the names and imports none.
FILE_FORMATS = {"checkpoint/bridges/dcp_index.py"}
# Names of Python, pybind11, s3fs and transformers, not of torch.
NOT_TORCHS = {"_exit", "_current_frames", "_getframe", "_pybind11_conduit_v1_", "_call_s3", "_init_weights"}


def private(name: str) -> bool:
    return any(word.startswith("_") and not word.endswith("__") and word != "_" for word in name.split("."))


def chain(node: ast.AST) -> str:
    """``a.b.c`` of nested attributes; empty for other nodes."""
    if isinstance(node, ast.Name):
        return node.id
    base = chain(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""


def torch_names(tree: Iterable[ast.AST]) -> dict[str, str]:
    """A file's imports from torch, by their names in the file."""
    found = {}
    for node in tree:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch" and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def private_names_in(tree: Sequence[ast.AST]) -> Iterator[str]:
    """Private names of torch that a file imports, reaches through its imports, or holds as text of a path."""
    known = torch_names(tree)
    for node in tree:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
            for alias in node.names:
                if (module + alias.name).split(".")[0] == "torch" and private(module + alias.name):
                    yield module + alias.name
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            root, _, rest = chain(node).partition(".")
            full = f"{known[root]}.{rest}" if root in known else ""
            if private(full) and not full.startswith("torch.ops."):
                yield full
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"torch([.:]\w+)+", node.value):
            if private(node.value.replace(":", ".")):
                yield node.value


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch._dynamo", ["torch._dynamo"]),
        ("import torch\ntorch._foreach_norm([])", ["torch._foreach_norm"]),
        ("def f():\n    from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("from torch.optim.optimizer import _hooks as hooks", ["torch.optim.optimizer._hooks"]),
        ("import torch.distributed as dist\ndist.x._world", ["torch.distributed.x._world"]),
        ("import importlib\nimportlib.import_module('torch._dynamo')", ["torch._dynamo"]),
        ("import torch\ntorch.ops.aten._unsafe_view, torch.__version__, torch.add", []),
        ("from .torch import _mine", []),
    ],
)
def test_the_search_for_private_names_finds_each_kind(source: str, expected: list[str]) -> None:
    assert list(private_names_in(list(ast.walk(ast.parse(source))))) == expected


def listed() -> set[str]:
    return {name for path in THEMES for name in compat.names_of(path)}


def test_private_names_of_torch_are_in_compat_alone() -> None:
    known = {name for name in listed() if name.split(".")[-2][0].isupper()}  # attributes of classes are used on the objects themselves
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in OTHERS
        if path.relative_to(ROOT).as_posix() not in FILE_FORMATS
        for name in private_names_in(nodes(path))
        if name not in known
    }
    assert not found, "import them in vescale_ray/compat, with the reason, and from there"


def test_compat_lists_private_attributes_of_torchs_objects() -> None:
    """An attribute with an underscore is torch's if the product reads it from an object and defines it nowhere."""
    used: dict[str, str] = {}
    defined: set[str] = set()
    for path in OTHERS:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and private(node.attr):
                if isinstance(node.ctx, ast.Store):
                    defined.add(node.attr)
                elif not chain(node).startswith("torch.ops."):
                    used[node.attr] = f"{path.relative_to(ROOT)}:{node.lineno}"
    known = {name.rpartition(".")[2] for name in listed()}
    assert not {f"{where}: {name}" for name, where in used.items() if name not in defined | known | NOT_TORCHS}


def test_every_name_in_compat_is_used() -> None:
    imported: dict[str, set[str]] = defaultdict(set)
    attributes: set[str] = set()
    for path in PRODUCT:
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vescale_ray.compat."):
                imported[str(node.module).rpartition(".")[2]] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute):
                attributes.add(node.attr)
            elif isinstance(node, ast.Constant) and path not in THEMES:
                attributes.add(str(node.value))  # getattr(parameter, "_post_accumulate_grad_hooks", None)
    for path in THEMES:
        here = {node.id for node in nodes(path) if isinstance(node, ast.Name)}
        module = nodes(path)[0]
        assert isinstance(module, ast.Module)
        for block in (node for node in module.body if isinstance(node, ast.With)):
            for statement in block.body:
                if isinstance(statement, ast.ImportFrom):
                    names = {alias.asname or alias.name for alias in statement.names}
                    assert names <= imported[path.stem] | here, path
                elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                    needed = {ast.literal_eval(argument) for argument in statement.value.args[1:]}
                    assert needed <= attributes, (path, needed - attributes)


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    start = f"import sys; sys.path[:0] = {[str(one) for one in path]!r}\n"
    return subprocess.run([sys.executable, "-c", start + code], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("version", ["2.2.0", "2.12.1", "2.16.0a0+git12ab34c"])
def test_a_torch_out_of_range_is_refused_before_it_is_imported(tmp_path: Path, version: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    (tmp_path / "torch" / "version.py").write_text(f"__all__ = ['__version__']\n__version__ = '{version}'\n")
    done = run("import vescale_ray", tmp_path)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        f"ImportError: vescale-ray supports torch 2.13 to 2.15, but torch {version} is installed: pip install 'torch==2.15.*'"
    )


@pytest.mark.parametrize("version", ["2.13.0", "2.14.1+cu130", "2.15.0a0+git12ab34c", "", None])
def test_a_torch_in_range_or_none_at_all_passes(monkeypatch, version: str | None) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: version)
    compat.check_version()


def test_version_check_reads_the_torch_that_an_import_gives(monkeypatch) -> None:
    import torch

    assert compat.installed_version() == torch.__version__
    monkeypatch.delitem(sys.modules, "torch")
    assert compat.installed_version() == torch.__version__, "read from its file"


@pytest.fixture(scope="module")
def imports() -> subprocess.CompletedProcess[str]:
    """One interpreter imports some themes and prints what they import needlessly, then imports the package from a torch with fewer names.

    Names of three themes are removed: a function, a class's method, a module's class.
    """
    spared = {"optional": "torch", "core": "torch.distributed.tensor", "distributed": "torch.distributed.tensor", "tensor": "torch._dynamo"}
    return run(
        "from importlib import import_module\n"
        f"for theme, module in {spared!r}.items():\n"
        "    import_module('vescale_ray.compat.' + theme)\n"
        "    print(theme, module in sys.modules)\n"
        "for name in [name for name in sys.modules if name.startswith('vescale_ray')]: del sys.modules[name]\n"
        "import torch, torch.distributed.tensor as t, torch.distributed.checkpoint._nested_dict as n\n"
        "del torch._C._current_graph_task_id, n.flatten_state_dict, t.DTensor._stable_hash_for_caching\n"
        "from vescale_ray import fully_shard\n"
    )


def test_a_theme_imports_no_more_of_torch_than_it_needs(imports: subprocess.CompletedProcess[str]) -> None:
    assert imports.stdout.split() == ["optional", "False", "core", "False", "distributed", "False", "tensor", "False"], imports.stderr


def test_missing_private_names_are_all_listed_in_one_sentence(imports: subprocess.CompletedProcess[str]) -> None:
    """The first import names all of them."""
    assert imports.returncode == 1
    found = re.fullmatch(
        r"ImportError: torch (\S+) lacks (.*), which vescale-ray needs \(it supports torch 2.13 to 2.15\): pip install 'torch==2.15.\*'",
        imports.stderr.splitlines()[-1],
    )
    assert found and found[2].split(", ") == [
        "torch._C._current_graph_task_id",
        "torch.distributed.checkpoint._nested_dict.flatten_state_dict",
        "torch.distributed.tensor.DTensor._stable_hash_for_caching",
    ]
    assert "During handling" not in imports.stderr


@pytest.mark.parametrize("code", ["from vescale_ray import fully_shard", "import vescale_ray.compat.core"])
def test_a_torch_that_does_not_load_keeps_its_own_error(tmp_path: Path, code: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    done = run(code, tmp_path)
    assert done.stderr.splitlines()[-1] == "ImportError: libcudart.so.13: cannot open shared object file"


def test_torch_range_agrees_in_pyproject_and_docs() -> None:
    oldest, newest = compat.RELEASES[0], compat.RELEASES[-1]
    after = f"{newest.split('.')[0]}.{int(newest.split('.')[1]) + 1}"
    assert f'"torch>={oldest},<{after}",' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert [int(release.split(".")[1]) for release in compat.RELEASES] == list(range(int(oldest[2:]), int(newest[2:]) + 1))
    for page in ("README.md", "docs/reference/compatibility.md"):
        assert f"torch {', '.join(compat.RELEASES[:-1])} and {newest}" in (ROOT / page).read_text(encoding="utf-8"), page
