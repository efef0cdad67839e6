"""Waits for messages between the ranks of a gloo group, which another thread can end.

When a peer dies while a message to or from it is half way, gloo closes the connection but tells nobody who waits for that message
(``Pair::signalException`` in ``gloo/transport/tcp/pair.cc`` passes over the operations that are under way): the wait ends with the
group's time limit. Breaking the connections changes nothing about it, and a wait with a limit of its own breaks the group when it runs
out. What ends such a wait is ``abort()`` of the message's ``Work``, which torch has in C++ (``ProcessGroupGloo::RecvWork::abort``, virtual
in ``c10d::Work``) and does not offer to Python. It is called here by its symbol, on a pointer that pybind11's conduit gives out
(``_pybind11_conduit_v1_``, meant for such use between extension modules). Where one of the two is missing (another platform or
compiler) :func:`can_end` says so, and a wait ends with the group's time limit.

Who waits in one of gloo's own collectives is told of a broken connection mostly, but not where its send is half way.

So everything of ours that waits for point-to-point messages does it by :func:`wait`, and whoever learns that a peer is gone (a worker, from
its controller) calls :func:`give_up` once the group's connections are broken.
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
    """A wait that was ended by :func:`give_up`; of the same kind as what gloo itself raises when a peer is gone."""


def mark() -> int:
    """The present; for :func:`wait`. Take it when messages are posted: those of before a :func:`give_up` are not waited for after it."""
    return _given_up


def bound(group: Any) -> timedelta:
    """The time limit of the collectives of a gloo group, be it one that ``torch.distributed`` knows or a back end of its own.

    A message that is waited for without a limit has another one, that which the group was made with: ``set_timeout()`` does not reach it
    (``ProcessGroupGloo::setTimeout`` leaves the contexts alone, and ``RecvWork::wait`` takes theirs).
    """
    import torch  # here: a worker's control threads answer before it is there
    import torch.distributed as dist

    backend = group._get_backend(torch.device("cpu")) if isinstance(group, dist.ProcessGroup) else group
    limit: timedelta = backend.options._timeout
    return limit


def wait(work: Any, since: int, limit: timedelta) -> None:
    """Wait for a message that was posted at ``since``, no longer than its group's time limit (:func:`bound`).

    Raises:
        Waited: :func:`give_up` was called since then.
        RuntimeError: of gloo: the peer is gone, or the time limit is over.
    """
    with _lock:
        if since != _given_up:
            raise Waited(_TEXT)
        _under_way[id(work)] = work
    try:
        # False: aborted. (What other back ends return for a message is not said.)
        arrived = work.wait(limit)
    finally:
        with _lock:
            _under_way.pop(id(work), None)
    if arrived is False or since != _given_up:
        raise Waited(_TEXT)


_TEXT = "gloo: a message to or from a peer was given up: its connections were broken because a rank is gone"


def give_up() -> int:
    """End every :func:`wait` of this process, now and to come, for messages that were posted so far; how many were under way.

    Only when nothing of these groups is wanted any more and their connections are broken: what arrives afterwards is lost. May be called
    from any thread.
    """
    global _given_up
    with _lock:
        _given_up += 1
        return sum(_abort(work) for work in _under_way.values())


def can_end() -> bool:
    """Whether :func:`give_up` can wake a wait that is under way."""
    return _symbols() is not None


def _abort(work: Any) -> bool:
    """Wake whoever waits for this message; False if it is none of gloo's, or can't be done here."""
    symbols = _symbols()
    if symbols is None:
        return False
    pointer = symbols.pointer(work)
    # The dynamic type is told by the address in an object's first word: a Work of another kind is left alone.
    abort = symbols.aborts.get(ctypes.c_void_p.from_address(pointer).value or 0) if pointer else None
    if abort is None:
        return False
    abort(pointer)
    return True


class _Symbols:
    """What is needed of torch's libraries."""

    def __init__(self, library: ctypes.CDLL, platform: bytes) -> None:
        self._platform = platform
        kinds = (f"N4c10d16ProcessGroupGloo{kind}" for kind in ("8RecvWork", "8SendWork"))
        self.aborts: dict[int, Any] = {}
        for kind in kinds:
            abort = getattr(library, f"_Z{kind}5abortEv")
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            # An object points behind its table's two leading words: offset to top, and type information.
            self.aborts[_address(library, f"_ZTV{kind}E") + 2 * ctypes.sizeof(ctypes.c_void_p)] = abort
        new = ctypes.pythonapi.PyCapsule_New
        new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
        self._name_of = ctypes.pythonapi.PyCapsule_GetName
        self._name_of.argtypes, self._name_of.restype = [ctypes.py_object], ctypes.c_char_p
        self._pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        self._pointer_of.argtypes, self._pointer_of.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
        self._wanted = new(_address(library, "_ZTIN4c10d4WorkE"), _TYPE_INFO, None)

    def pointer(self, work: Any) -> int:
        """The ``c10d::Work`` behind ``work``, good while that lives; 0 if it is none."""
        capsule = work._pybind11_conduit_v1_(self._platform, self._wanted, b"raw_pointer_ephemeral")
        return 0 if capsule is None else self._pointer_of(capsule, self._name_of(capsule)) or 0


_TYPE_INFO = b"St9type_info"
"""``typeid(std::type_info).name()``, which the conduit expects as its capsule's name. Kept: a capsule does not copy it."""


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, name))


@cache
def _symbols() -> _Symbols | None:
    if not sys.platform.startswith("linux"):
        return None
    import torch  # here: a worker's control threads answer before it is there

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        platform = f"system_libstdcpp_gxx_abi_1xxx_use_cxx11_abi_{int(torch.compiled_with_cxx11_abi())}"
        symbols = _Symbols(library, platform.encode())
        # One that is no gloo message shows whether the conduit is as expected.
        return symbols if symbols.pointer(torch.distributed.Work()) else None
    except (OSError, AttributeError, ValueError, TypeError, RuntimeError):
        return None
