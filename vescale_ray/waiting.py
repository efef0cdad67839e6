"""What each thread waits for in a collective, for whoever asks why nothing goes on: its kind, of what, how many bytes, how many ranks.

A back end can't always tell: messages between two ranks leave no trace in torch's flight recorder on gloo. So whoever waits says so
first. By thread, since several ranks may live in one process; a note is two assignments and stays when the wait fails: it is read only of
threads that are seen to wait.
"""

from __future__ import annotations

from threading import get_ident

_NOTES: dict[int, tuple[str, str, int, int]] = {}


def begin(kind: str, of: str, nbytes: int, ranks: int) -> None:
    """This thread waits now: for an all-gather, say, ``of`` some parameters."""
    _NOTES[get_ident()] = (kind, of, nbytes, ranks)


def end() -> None:
    """It does not any more."""
    _NOTES.pop(get_ident(), None)


def awaited(thread: int) -> str | None:
    """What ``thread`` waits for, in words; None: it has not said."""
    note = _NOTES.get(thread)
    if note is None:
        return None
    kind, of, nbytes, ranks = note
    return f"{kind} of {of} .., {nbytes:,} bytes, {ranks} ranks"
