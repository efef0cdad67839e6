"""Notes on the collective that each thread waits for, so that a hang can be explained.

A note has the kind, the tensors, the bytes and the ranks. The module also counts collectives by thread, and the seconds spent in those
that are measured nowhere else.

A backend does not record every wait: on gloo, messages between two ranks leave no trace in torch's flight recorder. A waiting thread
therefore leaves a note first. Notes are kept by thread, because several ranks may live in one process. A note costs next to nothing. It
stays if the wait fails, because it is read only for threads that are seen to wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter

_NOTES: dict[int, tuple[str, str, int, int]] = {}
_SPENT: dict[int, dict[str, float]] = {}
_PASSED: dict[int, int] = {}


def begin(kind: str, of: str, nbytes: int, ranks: int) -> None:
    """Note that this thread now waits for a collective of ``kind``, for example an all-gather, ``of`` some parameters."""
    thread = get_ident()
    _NOTES[thread] = (kind, of, nbytes, ranks)
    _PASSED[thread] = _PASSED.get(thread, 0) + 1


def end() -> None:
    """Remove this thread's note."""
    _NOTES.pop(get_ident(), None)


def passed(thread: int) -> int:
    """Return how many collectives ``thread`` has started: a few per unit of a step, so that a slow thread shows progress."""
    return _PASSED.get(thread, 0)


def awaited(thread: int) -> str | None:
    """Return what ``thread`` waits for, in words; None if it left no note."""
    note = _NOTES.get(thread)
    if note is None:
        return None
    kind, of, nbytes, ranks = note
    return f"{kind} of {of} .., {nbytes:,} bytes, {ranks} ranks"


@contextmanager
def counted(kind: str) -> Iterator[None]:
    """Count the seconds inside as this thread's wait in a collective of this ``kind``, unless it fails. Costs about 1 us.

    On an accelerator a collective returns once it is queued on its stream, so this counts next to nothing.
    """
    began, thread = perf_counter(), get_ident()
    _PASSED[thread] = _PASSED.get(thread, 0) + 1
    yield
    spent = _SPENT.setdefault(thread, {})
    spent[kind] = spent.get(kind, 0.0) + perf_counter() - began


def counted_s() -> Mapping[str, float]:
    """Return this thread's seconds in :func:`counted` so far, by kind."""
    return dict(_SPENT.get(get_ident(), ()))
