"""Folders, modules and functions of the product are short enough to read at once."""

from __future__ import annotations

import ast
from collections import Counter

from tests.packaging.sources import PRODUCT, ROOT, nodes

MODULE_LINES, FUNCTION_LINES, FOLDER_MODULES = 500, 60, 13


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = function.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if is_text else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_no_module_is_longer_than_500_lines() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in PRODUCT}
    assert len(lengths) > 300
    assert not {path: lines for path, lines in lengths.items() if lines > MODULE_LINES}


def test_no_folder_has_more_than_13_modules() -> None:
    counts = Counter(path.parent.relative_to(ROOT) for path in PRODUCT if path.name != "__init__.py")
    assert len(counts) > 40
    assert not {folder: count for folder, count in counts.items() if count > FOLDER_MODULES}


def test_no_function_is_longer_than_60_lines() -> None:
    functions = [
        (path.relative_to(ROOT), node)
        for path in PRODUCT
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(functions) > 2000
    assert not [(path, node.name, lines) for path, node in functions if (lines := body_lines(node)) > FUNCTION_LINES]
