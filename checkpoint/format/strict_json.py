"""JSON without ambiguity: what every parser reads as the same values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

_MOST_DEEP = 400
"""Deepest nesting of lists and objects. JSON readers fail a few hundred levels further. Values of a state may be 100 deep, with tags
between their levels."""


def check_meta(meta: Mapping[str, Any], what: str = "meta") -> None:
    """Raises ValueError, naming the first value that strict JSON cannot hold."""
    for path, value in _leaves(meta, what):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path} is {value}, which JSON has no number for; store it as a string")
        if value is not None and type(value) not in (str, bool, int) and not isinstance(value, float):  # numpy.float64 is a float
            raise ValueError(f"{path} is a {type(value).__name__}, which JSON can't hold; give Python's numbers, strings, lists and dicts")


def _leaves(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _MOST_DEEP:
        raise ValueError(f"{path[:80]}.. is nested more than {_MOST_DEEP} deep, or holds itself; give flatter values")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{path} has the key {key!r}; JSON keys are strings")
            yield from _leaves(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", depth + 1)
    else:
        yield path, value


def strict_json(raw: bytes | str) -> Any:
    """Parse unambiguous JSON: no duplicate key (parsers differ in which counts), no NaN, no infinity, no number that overflows to one.

    Raises:
        ValueError: the text is not such JSON. RecursionError: it is nested some thousand levels deep.
    """
    return json.loads(raw, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} occurs twice in one object")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value
