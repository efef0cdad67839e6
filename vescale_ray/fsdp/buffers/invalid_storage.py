"""Storages that raise on access: memory that was given back must not be read, and reading it must not end the process.

Torch checks a flag of a storage before it hands out the data pointer, in every operation on every device. Its CUDA builds have a private
function that sets the flag; its CPU builds have none. The flag is one byte between two others that every build can set from Python. This
module locates the byte with these two, and checks its effect on a storage of its own before it relies on it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from vescale_ray.compat.core import (
    construct_storage_from_data_pointer,
    set_throw_on_mutable_data_ptr,
    set_warn_deprecated_on_mutable_data_ptr,
)
from vescale_ray.fsdp.buffers.storage_text import set_text

_STORAGE_BYTES = 96
"""Bytes of torch's ``StorageImpl`` that are searched for the flags."""


class Guard:
    """Makes a storage invalid and valid again. While it is invalid, torch operations that read or write it raise ``RuntimeError``.

    Args:
        nbytes: the size that the storage has while it is invalid. An operation that makes a view of a smaller one raises another error.
        because: a method that gives the error's text. :meth:`validate` calls it once, for the first time that the storage becomes invalid
            again. None, or on a system other than Linux: torch's text, "Cannot access data pointer of Storage that is invalid".
    """

    __slots__ = ("_aside", "_because", "_storage", "_watched", "valid")

    def __init__(self, storage: torch.UntypedStorage, nbytes: int, because: weakref.WeakMethod[Callable[[], str]] | None = None) -> None:
        self._storage, self._aside, self._because, self.valid = storage, _invalid_storage(nbytes, storage.device), because, True
        self._watched = storage.resizable() or _make_resizable(storage)

    @property
    def exported(self) -> bool:
        """True if a NumPy array shares the storage. Its memory must stay then, since NumPy reads it without asking torch."""
        return self._watched and not (self._storage if self.valid else self._aside).resizable()

    def invalidate(self) -> None:
        """Let torch refuse every read and write until :meth:`validate`. The memory stays where it is."""
        if self.valid:
            self._storage._swap_data_ptr_(self._aside)  # type: ignore[attr-defined]
            self.valid = False

    def validate(self) -> None:
        """Undo :meth:`invalidate`.

        Raises:
            RuntimeError: torch has replaced the memory by shared memory.
        """
        if not self.valid:
            self._storage._swap_data_ptr_(self._aside)  # type: ignore[attr-defined]
            self.valid = True
            if self._storage.device.type == "cpu" and self._storage.is_shared():
                raise RuntimeError(
                    "gathered parameters were put in shared memory (by share_memory_() or a queue of torch.multiprocessing), so they can't "
                    "be gathered again: share a clone() of a gathered parameter, or a sharded one's full_tensor(); build the model anew"
                )
            because = None if self._because is None else self._because()
            if because is not None:
                set_text(self._storage, because())
            self._because = None


def _invalid_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage of ``nbytes`` bytes without memory, which torch refuses to read or write."""
    storage: Any = construct_storage_from_data_pointer(0, device, nbytes)
    for offset in _flag_offsets():
        ctypes.c_uint8.from_address(storage._cdata + offset).value = 1
    invalid: torch.UntypedStorage = storage
    return invalid


def _make_resizable(storage: torch.UntypedStorage) -> bool:
    """Set the flag that torch clears when a tensor becomes a NumPy array. Returns False if this torch has another layout."""
    offsets = _changed_by(torch.Tensor.numpy)
    if len(offsets) == 1:
        ctypes.c_uint8.from_address(storage._cdata + max(offsets)).value = 1
    return storage.resizable()


@cache
def _flag_offsets() -> tuple[int, int]:
    """Return the offsets of the flags "check before access" and "raise on access" in torch's ``StorageImpl``.

    Raises:
        RuntimeError: this torch has another layout.
    """
    checked_and_mutable = _changed_by(set_throw_on_mutable_data_ptr)
    checked_and_deprecated = _changed_by(set_warn_deprecated_on_mutable_data_ptr)
    checked = checked_and_mutable & checked_and_deprecated
    mutable, deprecated = checked_and_mutable - checked, checked_and_deprecated - checked
    if len(checked) == len(mutable) == len(deprecated) == 1 and max(deprecated) == max(mutable) + 2:
        offsets = max(checked), max(mutable) + 1
        probe = torch.zeros(16)
        address = probe.untyped_storage()._cdata
        if all(ctypes.c_uint8.from_address(address + offset).value == 0 for offset in offsets):
            for offset in offsets:
                ctypes.c_uint8.from_address(address + offset).value = 1
            try:
                probe.sum()
            except RuntimeError:
                return offsets
    raise RuntimeError(f"torch {torch.__version__} lacks the storage flags that vescale_ray needs: install a torch that the README names")


@cache
def _changed_by(setter: object) -> set[int]:
    """Return the offsets of the bytes of a storage that ``setter`` changes."""
    probe = torch.zeros(16)
    snapshot = (ctypes.c_uint8 * _STORAGE_BYTES).from_address(probe.untyped_storage()._cdata)
    before = bytes(snapshot)
    setter(probe)  # type: ignore[operator]
    return {offset for offset, old in enumerate(before) if snapshot[offset] != old}


def resharded_text(unit: str, fqns: Sequence[str]) -> str:
    """Return the error of an operation that reads or writes parameters of a unit while they are resharded."""
    names = ", ".join(fqns[:8]) + (f" and {len(fqns) - 8} more" if len(fqns) > 8 else "")
    return (
        f"the parameters of unit {unit or 'the root'!r} ({names}) are resharded, but one of them was read. Another module's "
        f"forward uses it, it was taken from the module in the middle of a step, or a tensor computed with it was kept outside of the "
        f"unit: call the module itself, take parameters after backward, return the tensor from its forward or keep it as an attribute "
        f"there, or set reshard_after_forward=False"
    )
