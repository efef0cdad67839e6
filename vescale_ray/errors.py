"""Base classes of errors that the user's input causes. The CLI exits with 2 for BadInput, and with 1 for other errors."""

from __future__ import annotations


class BadInput(ValueError):
    """A value, file, folder or port from the user can't be used. The message is one line: the item, its value, the remedy."""


class BadArgument(ValueError, AssertionError):
    """An invalid argument. It is also an ``AssertionError``, because torch's function of the same name raises one."""
