"""Waits for messages between the ranks of a gloo group; another thread can end them.

If a peer dies in the middle of a message, gloo closes the connection but does not wake the waiting thread
(``Pair::signalException`` in ``gloo/transport/tcp/pair.cc`` skips operations in progress). The wait then lasts until the group's
timeout. Breaking the connections does not help, and a wait with a shorter limit breaks the group when the limit passes.

``abort()`` of the message's ``Work`` ends such a wait. torch has it in C++ (``ProcessGroupGloo::RecvWork::abort``, virtual in
``c10d::Work``), but not in Python. This module calls it by its symbol, on a pointer from pybind11's conduit
(``_pybind11_conduit_v1_``, meant for such use between extension modules). If either is missing (another platform or compiler),
a wait lasts until the group's timeout.

A wait in one of gloo's own collectives usually ends when a connection breaks, but not if its send is in progress. All waits for
point-to-point messages in this package therefore use :func:`wait`. When a worker learns from its controller that a peer is gone, and
the group's connections are broken, it calls :func:`give_up`.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

_lock = threading.Lock()
_given_up = 0
_under_way: dict[int, Any] = {}


class Waited(RuntimeError):
    """A wait that :func:`give_up` ended. It is a RuntimeError, as gloo's own error for a lost peer."""


def mark() -> int:
    """Return the current time mark for :func:`wait`. Take it when messages are posted: :func:`give_up` ends waits of earlier marks."""
    return _given_up


def bound(group: Any) -> timedelta:
    """Return the timeout of the collectives of a gloo group, either of ``torch.distributed`` or a backend object.

    A wait without a limit would use the timeout that the group was made with. ``set_timeout()`` does not change that one
    (``ProcessGroupGloo::setTimeout`` leaves the contexts alone, and ``RecvWork::wait`` uses theirs).
    """
    import torch  # imported here, because a worker's control threads answer before torch is loaded
    import torch.distributed as dist

    backend = group._get_backend(torch.device("cpu")) if isinstance(group, dist.ProcessGroup) else group
    limit: timedelta = backend.options._timeout
    return limit


def wait(work: Any, since: int, limit: timedelta) -> None:
    """Wait for a message that was posted at mark ``since``, at most for ``limit`` (see :func:`bound`).

    Raises:
        Waited: :func:`give_up` was called since then.
        RuntimeError: from gloo: the peer is gone, or the timeout has passed.
    """
    with _lock:
        if since != _given_up:
            raise Waited(_TEXT)
        _under_way[id(work)] = work
    try:
        # False means aborted. Other backends document no return value for a message.
        arrived = work.wait(limit)
    finally:
        with _lock:
            _under_way.pop(id(work), None)
    if arrived is False or since != _given_up:
        raise Waited(_TEXT)


_TEXT = "gloo: a message to or from a peer was given up: its connections were broken because a rank is gone"


def give_up() -> int:
    """End every present and future :func:`wait` of this process for messages posted so far; return how many waits were woken.

    Call it only if these groups are no longer needed and their connections are broken, because later arrivals are lost. Any thread may
    call it.
    """
    global _given_up
    with _lock:
        _given_up += 1
        return sum(_abort(work) for work in _under_way.values())


def _abort(work: Any) -> bool:
    """Wake the thread that waits for this message; return False if it is not a gloo message, or the symbols are missing."""
    symbols = _symbols()
    if symbols is None:
        return False
    pointer = symbols.pointer(work)
    # The address in an object's first word identifies its dynamic type; a Work of another kind is left alone.
    abort = symbols.aborts.get(ctypes.c_void_p.from_address(pointer).value or 0) if pointer else None
    if abort is None:
        return False
    abort(pointer)
    return True


class _Symbols:
    """The symbols of torch's libraries that aborting needs."""

    def __init__(self, library: ctypes.CDLL, platform: bytes) -> None:
        self._platform = platform
        kinds = (f"N4c10d16ProcessGroupGloo{kind}" for kind in ("8RecvWork", "8SendWork"))
        self.aborts: dict[int, Any] = {}
        for kind in kinds:
            abort = getattr(library, f"_Z{kind}5abortEv")
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            # An object points past the first two words of its virtual table: offset to top, and type information.
            self.aborts[_address(library, f"_ZTV{kind}E") + 2 * ctypes.sizeof(ctypes.c_void_p)] = abort
        new = ctypes.pythonapi.PyCapsule_New
        new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
        self._name_of = ctypes.pythonapi.PyCapsule_GetName
        self._name_of.argtypes, self._name_of.restype = [ctypes.py_object], ctypes.c_char_p
        self._pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        self._pointer_of.argtypes, self._pointer_of.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
        self._wanted = new(_address(library, "_ZTIN4c10d4WorkE"), _TYPE_INFO, None)

    def pointer(self, work: Any) -> int:
        """Return the address of the ``c10d::Work`` behind ``work``, valid while that lives; 0 if there is none."""
        capsule = work._pybind11_conduit_v1_(self._platform, self._wanted, b"raw_pointer_ephemeral")
        return 0 if capsule is None else self._pointer_of(capsule, self._name_of(capsule)) or 0


_TYPE_INFO = b"St9type_info"
"""``typeid(std::type_info).name()``, which the conduit expects as its capsule's name. A capsule does not copy it, so it is kept."""


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, name))


@cache
def _symbols() -> _Symbols | None:
    if not sys.platform.startswith("linux"):
        return None
    import torch  # imported here, because a worker's control threads answer before torch is loaded

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        platform = f"system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_{int(torch.compiled_with_cxx11_abi())}"
        symbols = _Symbols(library, platform.encode())
        # A Work that is not a gloo message shows whether the conduit works as expected.
        return symbols if symbols.pointer(torch.distributed.Work()) else None
    except (OSError, AttributeError, ValueError, TypeError, RuntimeError):
        return None
