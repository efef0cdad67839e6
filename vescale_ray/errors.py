"""Base classes of errors that the user's input causes. The CLI exits with 2 for BadInput, and with 1 for other errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class BadInput(ValueError):
    """A value, file, folder or port from the user can't be used. The message is one line: the item, its value, the remedy."""


class BadArgument(ValueError, AssertionError):
    """An invalid argument. It is also an ``AssertionError``, because torch's function of the same name raises one."""


def one_line(said: object) -> str:
    """Return a text, or an error's message, on one line without control characters: errors and names come from outside."""
    words = " ".join(str(said).split())
    return words if words.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)


@contextmanager
def noted(text: str) -> Iterator[None]:
    """Add ``text`` as a note to an error of the user's code that the block calls."""
    try:
        yield
    except Exception as error:
        error.add_note(text)
        raise
