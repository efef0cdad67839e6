"""Index of the tests that show each row of the fault tables.

A test names its rows with ``@pytest.mark.fault("W1", ..)``. Print the index as a page::

    python -m tests.packaging.fault_index > docs/reference/generated/fault-tests.md
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLES = ("docs/fault-tolerance.md", "docs/reference/checkpoints.md")
"""Pages with tables whose rows begin with an identifier, such as ``| W1 |``."""
PAGE = ROOT / "docs" / "reference" / "generated" / "fault-tests.md"


def rows() -> dict[str, tuple[str, str]]:
    """Page and fault of each row, by identifier.

    Raises:
        ValueError: two rows have one identifier.
    """
    found: dict[str, tuple[str, str]] = {}
    for page in TABLES:
        for name, fault in re.findall(r"^\| ([A-Z]\d+) \| (.*?) \| ", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE):
            if name in found:
                raise ValueError(f"{page}: two rows are called {name}")
            found[name] = page, fault
    return found


def marked_in(path: Path) -> Iterator[tuple[str, str]]:
    """Identifier and test of each ``fault`` mark of a file."""
    text = path.read_text(encoding="utf-8")
    if "mark.fault" not in text:
        return
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    for argument in mark.args:
                        yield ast.literal_eval(argument), node.name


def tests() -> dict[str, list[str]]:
    """Tests by identifier, as ``path::name``."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for row, name in marked_in(path):
            found.setdefault(row, []).append(f"{path.relative_to(ROOT).as_posix()}::{name}")
    return found


def render() -> str:
    """The page."""
    shown = tests()
    lines = [
        "# Tests by fault",
        "",
        "Each row of a fault table has tests, marked `@pytest.mark.fault(ROW)`. This page is made by",
        "`python -m tests.packaging.fault_index > docs/reference/generated/fault-tests.md`; a test holds it to the code.",
    ]
    for page in TABLES:
        title = (ROOT / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines += ["", f"## {title}", "", "| row | fault | tests |", "|---|---|---|"]
        for row, (of, fault) in rows().items():
            if of == page:
                text = re.sub(r" ?\(?\[[^]]*\]\([^)]*\)\)?", "", fault)
                lines.append(f"| {row} | {text} | {', '.join(f'`{test}`' for test in shown.get(row, ()))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
