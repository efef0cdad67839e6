"""Gloo process groups with one worker thread each.

torch gives a gloo group two worker threads. Both assign the group's ``lastCompletedWorkName``, a ``std::string``, without a lock
(``ProcessGroupGloo::runLoop``). This corrupts the heap about once in a million collectives. With one thread there is no race.
``docs/reference/gloo.md`` has the details, and shows the use in a script.

``torch.distributed.init_process_group("gloo")`` takes no number of threads. Therefore this module registers its own back end with torch,
whose groups are torch's ``ProcessGroupGloo`` with other options. Every group of this project comes from here.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vescale_ray.compat.core import enable_record_function, profiler_enabled

BACKEND = "vescale_gloo"
"""The back end's name in torch, as in ``new_group(backend=..)``. The first :func:`init_process_group` registers it."""

_TORCHS = "gloo"
_THREAD = "pt_gloo_runloop"
"""The name that torch gives to the worker threads."""
_NEW_NS = 1_000_000
"""A thread that has run for less time (nanoseconds) may be a worker that has not taken its name yet."""
_REST_S = 30.0
"""Longest wait for worker threads that run at the end of the process."""
_TORCHS_TIMEOUT = timedelta(minutes=30)


def init_process_group(backend: str | None = None, init_method: str | None = None, **options: Any) -> None:
    """Call ``torch.distributed.init_process_group``, with one worker thread wherever ``backend`` says gloo.

    Groups made from this one (``new_group``, ``init_device_mesh``) have one thread, too, unless they ask for ``"gloo"`` by name.

    Args:
        backend: ``"gloo"``, ``"cpu:gloo,cuda:nccl"``, or any other of torch's; None: the accelerator's, as in torch, or gloo.
    """
    dist.init_process_group(single_threaded(backend), init_method, **options)


def single_threaded(backend: str | None) -> str | None:
    """Return the name to give to torch for ``backend``, with this module's gloo in place of torch's."""
    if not isinstance(backend, str | None):
        raise TypeError(f"backend is {backend!r}: give a name, such as 'gloo' or 'cpu:gloo,cuda:nccl', or None")
    _register()
    if backend is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return BACKEND if accelerator is None else None
    parts = [part.rpartition(":") for part in backend.lower().split(",")]
    if all(name == _TORCHS for _, _, name in parts):
        return BACKEND  # also for "cpu:gloo": torch gives a group of one custom back end no default unless it gets the plain name
    return ",".join(device + colon + (BACKEND if name == _TORCHS else name) for device, colon, name in parts)


def create(store: Any, rank: int, size: int, timeout: timedelta = _TORCHS_TIMEOUT) -> Any:
    """Return a ``ProcessGroupGloo`` with one worker thread, on the interfaces in ``GLOO_SOCKET_IFNAME``, else on the host name's."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    # torch (ProcessGroupGloo::Options::create_default) ignores a single character and allows a trailing comma.
    names = [name for name in named.split(",") if name] if len(named) > 1 else []
    devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in names]
    options._devices = devices or [dist.ProcessGroupGloo.create_default_device()]
    options._timeout, options._threads = timeout, 1
    _rest_at_exit()
    return dist.ProcessGroupGloo(store, rank, size, options)


def unrecorded() -> Any:
    """Return a context for starting gloo operations that may finish after a profiler of this thread has stopped.

    torch's profiler records such an operation from its start to its wait. If it stops before the wait, the wait writes the end time into
    memory that the profiler has freed. Operations that start in this context are not recorded.
    """
    return _not_recording() if profiler_enabled() else nullcontext()


@contextmanager
def _not_recording() -> Iterator[None]:
    enable_record_function(False)
    try:
        yield
    finally:
        enable_record_function(True)


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether all of the group's communication uses gloo, torch's or this module's."""
    return dist.get_backend(group) in (_TORCHS, BACKEND)


def worker_threads(group: dist.ProcessGroup) -> int:
    """Return the number of threads that run the group's gloo collectives on host memory; 0 if gloo runs none."""
    if torch.device("cpu") not in group._device_types:
        return 0
    backend: Any = group._get_backend(torch.device("cpu"))
    while hasattr(backend, "wrapped_pg"):  # the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    if not isinstance(backend, dist.ProcessGroupGloo):
        return 0
    return int(backend.options._threads)  # type: ignore[attr-defined]


def warn_of_threads(groups: Sequence[dist.ProcessGroup]) -> None:
    """Warn once per process if a group has several worker threads, which race."""
    threads = max(map(worker_threads, groups), default=0)
    if threads > 1:
        default = worker_threads(dist.group.WORLD) > 1  # type: ignore[arg-type]
        how = ", which takes what torch's takes" if default else " and this one with backend=vescale_ray.gloo.BACKEND, not by name"
        warnings.warn(
            f"a process group of the mesh has {threads} gloo worker threads, whose race in torch can corrupt the heap: make the "
            f"default group with vescale_ray.gloo.init_process_group(..){how} (docs/reference/gloo.md)",
            RuntimeWarning,
            stacklevel=1,  # one place for all calls of fully_shard, so that Python shows the warning once
        )


@cache
def _rest_at_exit() -> None:
    """Let the worker threads come to rest before the interpreter ends.

    A worker needs the interpreter's lock to free a tensor that Python has dropped. If it waits for the lock when the interpreter ends,
    Python ends the thread, which aborts the process. The group of a sharded model has its worker even after ``destroy_process_group``.
    """
    atexit.register(_rest)


def _rest() -> None:
    end, before = time.monotonic() + _REST_S, None
    while (seen := _sleeping_threads()) != {} and (seen is None or seen != before) and time.monotonic() < end:
        before = seen
        # Gives the lock to a worker that waits for it. All that wait are awake within a switch interval.
        time.sleep(2 * sys.getswitchinterval())


def _sleeping_threads() -> dict[str, str] | None:
    """Return the kernel's CPU statistics of each gloo worker thread, or None if one of the threads is not asleep.

    A thread that has run meanwhile has other statistics.
    """
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            name, state = (task / "stat").read_text().partition("(")[2].rpartition(") ")[::2]
            account = (task / "schedstat").read_text()
        except OSError:  # the thread has ended
            continue
        if name == _THREAD or int(account.split()[0]) < _NEW_NS:
            found[task.name] = account
            if state[:1] != "S":
                return None
    return found


def _register() -> None:
    """Register the back end with torch, at its first use. An import must not do so: once any plugin is registered, torch gives groups of
    specifications such as ``"cpu:gloo"`` no default back end."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create_for_torch, extended_api=True, devices=["cpu", "cuda"])


def _create_for_torch(asked: Any, _options: Any) -> Any:
    made = create(asked.store, asked.group_rank, asked.group_size, asked.timeout)
    # torch does the same for its own groups; the flight recorder shows both values.
    made.options.global_ranks_in_group, made.options.group_name = asked.global_ranks_in_group, asked.group_id
    return made
