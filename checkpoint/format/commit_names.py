"""Names of commits and of attempts at a save."""

from __future__ import annotations

import re

ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_COMMIT = re.compile(r"e([0-9]{4,18})-s([0-9]{12,18})")


def commit_name(epoch: int, step: int) -> str:
    return f"e{epoch:04d}-s{step:012d}"


def parse_commit_name(name: str) -> tuple[int, int] | None:
    """Return ``(epoch, step)``, the order of commits; ``None`` if ``name`` is not a commit's name."""
    match = _COMMIT.fullmatch(name)
    if match is None:
        return None
    epoch, step = int(match[1]), int(match[2])
    return (epoch, step) if commit_name(epoch, step) == name else None


def check_attempt(attempt: str) -> str:
    if not ATTEMPT.fullmatch(attempt):
        raise ValueError(f"attempt {attempt!r} is not an identifier of letters, digits, '-' and '_' (use new_attempt())")
    return attempt
