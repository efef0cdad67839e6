"""The text of the error that an invalid storage raises.

Torch keeps the text in the storage. Its CUDA builds have a private function that sets it; its CPU builds have none, and none of them can
set the text alone. This module writes it where torch reads it: a pointer in ``StorageImpl``, right behind the one to the storage's Python
object, to a ``StorageExtraMeta`` (``c10/core/StorageImpl.h``), which is one ``std::optional<std::string>``. Torch deletes both with the
storage, so their memory comes from the C++ library's own allocation function. A storage that is not laid out like this keeps torch's text.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch

_WORDS = 12
"""Machine words of a ``StorageImpl`` that are searched for the pointer to its Python object."""


def set_text(storage: torch.UntypedStorage, text: str) -> None:
    """Let operations on ``storage`` raise ``RuntimeError(text)`` while it is invalid. The first call for a storage counts."""
    new, index = _allocate(), _index()
    if new is None or index is None:
        return
    slot = ctypes.c_uint64.from_address(storage._cdata + index * 8)
    if slot.value == 0:
        slot.value = _extra_meta(new, text.encode())


def _extra_meta(new: Callable[[int], int], text: bytes) -> int:
    """Return the address of a new ``StorageExtraMeta``. libstdc++ lays it out as five words: address, length and capacity of the text, one
    that long texts do not use, and whether there is a text."""
    characters = new(len(text) + 1)
    ctypes.memmove(characters, text + b"\0", len(text) + 1)
    address = new(40)
    (ctypes.c_uint64 * 5).from_address(address)[:] = [characters, len(text), len(text), 0, 1]
    return address


@cache
def _index() -> int | None:
    """Return the word of a ``StorageImpl`` that points to its ``StorageExtraMeta``; None if this torch has another layout."""
    probe = torch.zeros(16).untyped_storage()
    words = (ctypes.c_uint64 * _WORDS).from_address(probe._cdata)
    found = [index for index, word in enumerate(words) if word & ~7 == id(probe)]  # the lowest bits may hold flags
    return found[0] + 1 if len(found) == 1 and found[0] + 1 < _WORDS and words[found[0] + 1] == 0 else None


@cache
def _allocate() -> Callable[[int], int] | None:
    """Return ``operator new``, or None where torch's strings are not those of libstdc++."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        new = ctypes.CDLL("libstdc++.so.6")["_Znwm"]
    except (OSError, AttributeError):
        return None
    new.argtypes, new.restype = [ctypes.c_size_t], ctypes.c_void_p
    return new  # type: ignore[no-any-return]
