"""The running forward of a schedule: the units it has entered, compared with the last forward, and whether it still runs.

Torch calls no hook when an exception that is not an ``Exception`` ends a module's forward, for example ``KeyboardInterrupt`` in a notebook.
The running forward therefore keeps the frame of the outermost module's call, and asks whether it still executes.
"""

from __future__ import annotations

import inspect
import weakref
from types import FrameType
from typing import Generic, TypeVar

import torch
from torch import nn

U = TypeVar("U")
_CALLS = nn.Module.__call__.__code__.co_filename


class ForwardOrder(Generic[U]):
    """The order in which forwards enter their units. The next units of a forward that repeats the last one are known."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, bool], list[weakref.ref[U]]] = {}
        """Units in the order of the last forward, by the outermost unit and whether that forward made a graph."""
        self._key = (0, False)
        self._entered: list[weakref.ref[U]] = []
        self._repeats = False
        """True if the running forward has followed the order of the last one so far."""
        self._frame: FrameType | None = None
        """The frame of the outermost module's call; None outside a forward, and if a hook was called by hand."""

    def begin(self, root: U) -> None:
        """Begin a forward whose outermost unit is ``root``."""
        self._key, self._entered, self._repeats = (id(root), torch.is_grad_enabled()), [], True
        self._frame = _module_call()
        self.enter(root)

    def enter(self, unit: U) -> None:
        """Record that the forward enters ``unit``."""
        known, position = self._last.get(self._key, []), len(self._entered)
        self._repeats = self._repeats and position < len(known) and known[position]() is unit
        self._entered.append(weakref.ref(unit))

    def following(self, most: int) -> list[U | None] | None:
        """Return the next units of the last forward, at most ``most``; None for those that are gone, and None if this forward differs."""
        position = len(self._entered)
        return [ref() for ref in self._last.get(self._key, [])[position : position + most]] if self._repeats else None

    def finish(self) -> None:
        """End the forward; the next one is compared with it."""
        self._last[self._key] = self._entered
        self._frame = None

    def drop(self) -> None:
        """End a forward that did not finish."""
        self._entered, self._repeats, self._frame = [], False, None

    def forget(self) -> None:
        """Drop the running forward, and those that it would be compared with."""
        self.drop()
        self._last.clear()

    def is_interrupted(self) -> bool:
        """Return whether the outermost module's call has ended without its hooks, in any thread. Costs about 1 us."""
        if self._frame is None:
            return False
        try:
            self._frame.clear()  # drops the variables of a call that has ended, and raises if it still executes
        except RuntimeError:
            return False
        return True


def _module_call() -> FrameType | None:
    """Return the frame of the module call whose hook runs: the outermost frame of torch's module file among the innermost such frames."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != _CALLS:
        frame = frame.f_back
    while frame is not None and frame.f_back is not None and frame.f_back.f_code.co_filename == _CALLS:
        frame = frame.f_back
    return frame
