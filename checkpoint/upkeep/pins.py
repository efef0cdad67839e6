"""Pins: checkpoints that stay although no retention rule keeps them."""

from __future__ import annotations

import re

from ..commits import Commit
from ..errors import NoCheckpoint
from ..format.commit_names import parse_commit_name
from ..stores.opening import store_of
from ..stores.store import KeyExists, Root

_PIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


def pin(root: Root, commit: str | Commit, name: str) -> None:
    """Keep a checkpoint until :func:`unpin`, even if no retention rule keeps it. Several pins with different names may hold one checkpoint.

    Args:
        name: name of the pin: letters, digits, ``_`` and ``-``. Pinning again under a name changes nothing.

    Raises:
        ValueError: the name is invalid. NoCheckpoint: the commit does not exist (any more).
    """
    store = store_of(root)
    key = _pin_key(commit, name)
    target = key.split("/")[1]
    if store.size(f"commits/{target}.json") is None:
        raise NoCheckpoint(f"no checkpoint {target} in {store.describe()} to pin")
    try:
        store.put(key, b"{}\n")
    except KeyExists:
        pass
    if store.size(f"commits/{target}.json") is None:
        store.delete(key)
        raise NoCheckpoint(f"checkpoint {target} in {store.describe()} was deleted by a collection while it was being pinned")


def unpin(root: Root, commit: str | Commit, name: str) -> bool:
    """Remove a pin; ``False`` if there is none of that name. The next collection that finds no rule for the checkpoint deletes it."""
    return store_of(root).delete(_pin_key(commit, name))


def pins(root: Root) -> dict[str, tuple[str, ...]]:
    """Return all pins: ``{commit name: (pin, ..)}``."""
    found: dict[str, list[str]] = {}
    for entry in store_of(root).list("pins/"):
        _, commit, name = (*entry.key.split("/"), "", "")[:3]
        found.setdefault(commit, []).append(name.removesuffix(".json"))
    return {commit: tuple(names) for commit, names in found.items()}


def _pin_key(commit: str | Commit, name: str) -> str:
    text = commit.name if isinstance(commit, Commit) else commit
    if not isinstance(text, str) or parse_commit_name(text) is None:
        raise ValueError(f"{text!r} is not a name of a checkpoint; they look like e0007-s000000012000")
    if not isinstance(name, str) or not _PIN_NAME.fullmatch(name):
        raise ValueError(f"{name!r} can't be a pin's name: give 1 to 128 letters, digits, '_' and '-', not beginning with '_' or '-'")
    return f"pins/{text}/{name}.json"
