"""Checks of user arguments before anything is done. An error names the value and the remedy."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch

MOST = 10**18 - 1
"""Largest step or epoch: 18 digits, which readers in other languages can hold."""


def whole(what: str, value: Any, least: int = 0, remedy: str = "") -> int:
    """Return ``value`` as an int; numpy integers are accepted. Raises ValueError for any other value or type."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= MOST:
        shown = value if isinstance(value, int) and not isinstance(value, bool) else repr(value)
        raise ValueError(f"{what} is {shown}; {remedy or f'give a whole number from {least} on'}")
    return number


def nbytes(what: str, value: Any) -> None:
    """Check a number of bytes. Raises ValueError unless it is a whole number above 0."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise ValueError(f"{what} is {value!r}; give a whole number of bytes")


def seconds(what: str, value: Any) -> None:
    """Check a time limit. Raises ValueError unless it is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{what} is {value!r}; give seconds above 0")


def order(step: Any, epoch: Any) -> tuple[int, int | None]:
    """Check step and epoch. Raises ValueError."""
    return (
        whole("step", step, remedy="give the number of completed steps"),
        None if epoch is None else whole("epoch", epoch, remedy="give the incarnation of the run, from 0 on, or none"),
    )


def of_type(what: str, value: Any, kind: type | tuple[type, ...], remedy: str) -> None:
    """Check a value's type. Raises ValueError."""
    if not isinstance(value, kind):
        raise ValueError(f"{what} is a {type(value).__name__}; {remedy}")


def state_of(state: Any) -> None:
    """Check a state. Raises ValueError unless it is ``{text: entry}``."""
    of_type("the state", state, Mapping, 'give its parts by name, for example {"model": model, "optimizer": optimizer}')
    for key in state:
        of_type(f"the state's key {key!r}", key, str, "give text")


def device_of(device: torch.device | str | None) -> torch.device | None:
    """Return the device. Raises ValueError if it is invalid."""
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}; give 'cpu', 'cuda' or 'cuda:0', for example") from None
