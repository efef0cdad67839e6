"""Fields of a manifest's JSON, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from ..errors import shortened

LIMIT = 1 << 62
"""Numbers of a manifest are smaller."""


class ManifestError(ValueError):
    """The bytes are not a valid manifest. The message says what is wrong in one sentence, and shortens long quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def column_of(raw: Mapping[str, Any], key: str) -> np.ndarray:
    values = list_of(raw, key)
    expect(all(type(v) is int for v in values), f"column {key!r} holds something else than integers")
    return np.array(values, dtype=np.int64)


def count_of(raw: Mapping[str, Any], key: str) -> int:
    return integer(raw.get(key), key)


def integer(value: Any, what: str) -> int:
    expect(type(value) is int and 0 <= value < LIMIT, f"{what} is {value!r}, no non-negative integer")
    return int(value)


def information_of(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key, "")
    expect(isinstance(value, str), f"{key} is not text")
    return str(value)


def text_of(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    expect(isinstance(value, str) and bool(value), f"{key} is {value!r}, no text")
    return str(value)


def list_of(raw: Mapping[str, Any], key: str) -> list[Any]:
    value = raw.get(key)
    expect(isinstance(value, list), f"{key} is not a list")
    return cast(list[Any], value)


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise ManifestError(message)
