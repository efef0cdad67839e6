"""Every private name of torch that vescale-ray uses, in one folder with the reason for each, and the check of torch's version.

``core`` needs torch alone, ``distributed`` process groups, ``tensor`` DTensor, ``fsdp`` torch's ``fully_shard``, and ``checkpoint`` DCP.
``optional`` holds names that a torch release may lack. A module imports only the file that it needs, since each import costs time.

Private names change without notice. ``make test-torch`` was run for the range below. This file imports no torch, since
``import vescale_ray`` and the command line read it.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from pathlib import Path

RELEASES = ("2.13", "2.14", "2.15")
"""The supported minor releases of torch, without gaps; ``pyproject.toml`` has the same range."""

SUPPORTED = f"torch {RELEASES[0]} to {RELEASES[-1]}"


def check_version() -> None:
    """Refuse a torch outside the supported range, without importing it. Without torch it passes: status and reports need none.

    Raises:
        ImportError: one sentence with the version and the remedy.
    """
    version = installed_version()
    release = installed_release()
    if release and "{}.{}".format(*release) not in RELEASES:
        raise ImportError(f"vescale-ray supports {SUPPORTED}, but torch {version} is installed: {_remedy()}")


def installed_release() -> tuple[int, ...]:
    """Return ``(2, 15)`` for version 2.15.1; empty if the version is unknown."""
    found = re.match(r"(\d+)\.(\d+)", installed_version() or "")
    return (int(found[1]), int(found[2])) if found else ()


def installed_version() -> str | None:
    """Return the version of the torch that an import would load; None if there is none, or its version is unknown."""
    if "torch" in sys.modules:
        return getattr(sys.modules["torch"], "__version__", None)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else None


@contextmanager
def private_names() -> Iterator[None]:
    """A block in which a file of this folder imports private names. If one is missing, the error lists all that are missing.

    Raises:
        ImportError: one sentence with torch's version, the missing names and the supported range.
    """
    try:
        yield
    except (ImportError, AttributeError):
        if "torch" not in sys.modules:  # torch is not installed or does not load
            raise
        missing = sorted({name for path in Path(__file__).parent.glob("*.py") for name in names_of(path) if not _exists(name)})
        if not missing:
            raise
        raise ImportError(
            f"torch {installed_version()} lacks {', '.join(missing)}, which vescale-ray needs (it supports {SUPPORTED}): {_remedy()}"
        ) from None


def need(owner: str, *attributes: str) -> None:
    """Check that the class ``owner`` has these private attributes, which the package uses on its objects."""
    for attribute in attributes:
        if not _exists(f"{owner}.{attribute}"):
            raise AttributeError(f"{owner}.{attribute}")


def names_of(path: Path) -> Iterator[str]:
    """Yield the full names that a file's :func:`private_names` blocks import or :func:`need`, read from its source."""
    import ast  # imported here: the command line loads this file, and needs ast only for an error

    blocks = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.With)]
    for statement in (statement for block in blocks for statement in block.body):
        if isinstance(statement, ast.ImportFrom):
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
        elif isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            owner, *attributes = (ast.literal_eval(argument) for argument in statement.value.args)
            yield from (f"{owner}.{attribute}" for attribute in attributes)


def _exists(name: str) -> bool:
    """Return whether torch has ``name``: a module, an attribute of a module or class, or an annotation of a class."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        try:
            module = import_module(".".join(words[:end]))
        except ImportError:
            continue
        try:
            owner = reduce(getattr, words[end:-1], module)
        except AttributeError:
            return False
        # Look in the class's own __dict__: access to __annotations__ would create one on a class without it.
        annotated = any(words[-1] in base.__dict__.get("__annotations__", ()) for base in getattr(owner, "__mro__", ()))
        return end == len(words) or annotated or hasattr(owner, words[-1])
    return False


def _remedy() -> str:
    return f"pip install 'torch=={RELEASES[-1]}.*'"
