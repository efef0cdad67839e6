"""The one base class that separates "what you gave is wrong" from "something failed": the CLI exits with 2 for it, else with 1."""

from __future__ import annotations


class BadInput(ValueError):
    """A value, file, folder or port that the person gave can't be used. The message is one line: what, its value, the remedy."""


class BadArgument(ValueError, AssertionError):
    """An argument that does not fit, where torch's function of the same name raises an ``AssertionError``: caught by either name."""
