"""The product's source files, and their parsed contents."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAPPED = ("controller", "workers", "checkpoint", "deploy")
"""Folders that lie beside ``vescale_ray``, and are subpackages of it."""
PRODUCT = sorted(path for folder in ("vescale_ray", *MAPPED) for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file; the first is its module."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "vescale_ray" else ("vescale_ray", *parts)).removesuffix(".__init__")


def _parts() -> Iterator[tuple[str, Path]]:
    for path in PRODUCT:
        inner = path.relative_to(ROOT).parts
        part = inner[1] if inner[0] == "vescale_ray" else inner[0]
        if part != "__init__.py":
            yield part.removesuffix(".py"), path


SOURCES = list(_parts())
"""Each file with its part: the folder or the module right below the package."""
