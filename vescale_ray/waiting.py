"""What each thread waits for in a collective, for whoever asks why nothing goes on: its kind, of what, how many bytes, how many ranks; how
many it has come to; and for how long it has waited so far in those that nothing else counts.

A back end can't always tell: messages between two ranks leave no trace in torch's flight recorder on gloo. So whoever waits says so
first. By thread, since several ranks may live in one process; a note costs next to nothing and stays when the wait fails: it is read
only of threads that are seen to wait.
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
    """This thread waits now: for an all-gather, say, ``of`` some parameters."""
    thread = get_ident()
    _NOTES[thread] = (kind, of, nbytes, ranks)
    _PASSED[thread] = _PASSED.get(thread, 0) + 1


def end() -> None:
    """It does not any more."""
    _NOTES.pop(get_ident(), None)


def passed(thread: int) -> int:
    """How many collectives ``thread`` has come to so far: a few in every unit of a step, so that a thread that is slow is seen to go on."""
    return _PASSED.get(thread, 0)


def awaited(thread: int) -> str | None:
    """What ``thread`` waits for, in words; None: it has not said."""
    note = _NOTES.get(thread)
    if note is None:
        return None
    kind, of, nbytes, ranks = note
    return f"{kind} of {of} .., {nbytes:,} bytes, {ranks} ranks"


@contextmanager
def counted(kind: str) -> Iterator[None]:
    """The seconds inside are time that this thread waits for others, in a collective of this ``kind``. Not those of one that fails. 1 us.

    On an accelerator a collective returns when it is put on its stream: then this counts next to nothing.
    """
    began, thread = perf_counter(), get_ident()
    _PASSED[thread] = _PASSED.get(thread, 0) + 1
    yield
    spent = _SPENT.setdefault(thread, {})
    spent[kind] = spent.get(kind, 0.0) + perf_counter() - began


def counted_s() -> Mapping[str, float]:
    """Seconds of this thread in :func:`counted` so far, by kind."""
    return dict(_SPENT.get(get_ident(), ()))
