"""Process groups on a worker that outlives them: form, use, and dissolve them promptly after a failure.

Two facts about torch's gloo back end shape this module:

- A gloo collective cannot be aborted. Only ranks that wait for the dead peer itself see an error, in milliseconds. The other ranks see one
  when those ranks close their sockets. Therefore a rank that gets an error destroys its group before it does anything else.
- ``destroy_process_group`` alone does not close the sockets. A traceback's frames, or a reference cycle through them, keep the group alive.
  Therefore this module turns the error into a string, clears its frames and collects garbage.

Without the second step, survivors that are no neighbours of the dead rank hang until the timeout (30 s instead of 0.03 s).
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

# torch.distributed.nn.functional has `group=group.WORLD` as default arguments, and the first DTensor of a process imports it. If that
# happens while a group exists, the functions keep the group and its sockets for ever. Import it now, before any group.
import torch.distributed.nn.functional

from vescale_ray import gloo
from vescale_ray.communication.point_to_point import Messages
from vescale_ray.compat.distributed import AllgatherOptions, BarrierOptions, abort_process_group, count_groups_anew, get_default_group
from vescale_ray.compat.optional import clear_mesh_caches
from vescale_ray.workers.network.connections import Connections

FORM_SECONDS = 15.0
"""Default time limit for forming a group, in seconds. The group's collectives have a limit of their own."""

MOST_TRACE = 8000

NCCL = {
    # With 1 and 3 (the default), a process that notices a lost peer ends itself, and the shards in its memory are lost.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # a CUDA error in NCCL's own threads must not end the process either
    # A dump delays the abort by 15 s, and its writer then ends the process. Hang reports read the flight recorder anyway.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "NCCL_NVLS_ENABLE": "0",  # frees multicast memory of aborted communicators; NVIDIA's in-process restart requires this too
}
"""Environment with which a process outlives its NCCL communicators. Variables that are already set keep their values. Sources: torch's
``ProcessGroupNCCL.hpp`` and the requirements of NVIDIA's resiliency extension. A rank that waits for an aborted collective sees no error,
so ``Trainer`` verifies its collectives."""

_MOVE = 7003
"""Tag of the messages of moved shards."""

_COLLECTIVE_ERROR = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out|process group", re.IGNORECASE)


class GroupFailed(Exception):
    """A process group could not be formed, or a collective failed: a peer is gone, hung or slow.

    Holds text only. It never carries the original exception, whose frames would keep the group's sockets open.
    """

    trace: traceback.TracebackException | None = None
    """Call stack of the failed collective: file names and lines, without frames."""


def prepare() -> None:
    """Import the modules that the first step needs, and exempt them from garbage collection. Call it once per process, off any critical
    path.

    The imports make a joiner's first step as fast as its later ones. The exemption makes the ``gc.collect`` of :func:`dissolve` take 4 to
    15 ms instead of 120 to 580 ms with torch loaded.
    """
    for module in ("numpy.ma", "vescale_ray.compat.fsdp", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.checkpoint"):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def form(
    store_host: str,
    store_port: int,
    prefix: str,
    rank: int,
    world: int,
    backend: str,
    timeout_s: float,
    *,
    form_timeout_s: float = FORM_SECONDS,
    closed: Callable[[], bool] | None = None,
    lines: Connections | None = None,
) -> Connections:
    """Initialise the default process group of one attempt of one generation, and return its connections.

    Args:
        store_host: host of the run's ``TCPStore``, which lives outside the workers, since workers die.
        store_port: port of that store.
        prefix: store prefix, unique per attempt, such as ``run/generation/attempt``. gloo cannot form two groups under one prefix.
        rank: rank of this worker in the new group.
        world: number of ranks in the new group.
        backend: ``gloo`` or ``nccl``. With ``nccl``, gloo handles CPU tensors: records, copies and moved shards are exchanged through the
            host.
        timeout_s: time limit of every collective in the group, in seconds.
        form_timeout_s: time limit for forming the group, in seconds.
        closed: returns whether the attempt was given up meanwhile because a rank is known to be lost; then the wait ends.
        lines: connections object to fill and return. Its owner can end the forming by :meth:`Connections.cut`, even if a rank is lost after
            it joined.

    Raises:
        GroupFailed: not all ranks joined in time, or the attempt was ``closed`` or cut. No group stays initialised; the next attempt needs
            a new prefix.
        ValueError: a group is still initialised, or ``rank`` is out of range.
    """
    if dist.is_initialized():
        raise ValueError("this process still has a process group: call groups.dissolve() before forming the next one")
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of a world of {world}: ranks go from 0 to {world - 1}")
    failure, lines = None, lines or Connections()
    if backend == "nccl":
        for name, value in NCCL.items():
            os.environ.setdefault(name, value)
    try:
        with lines.recorded(world):
            store = _store(store_host, store_port, prefix, form_timeout_s)
            with lines.paused():
                _meet(store, world, form_timeout_s, closed)
            count_groups_anew()
            gloo.init_process_group(
                "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
                store=store,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=form_timeout_s),
                device_id=torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None,
            )
        made = get_default_group()
        made.set_timeout(timedelta(seconds=timeout_s))
        if backend == "nccl":
            lines.hold(made._get_backend(torch.device("cuda")))
        del made
    except Exception as error:
        failure = f"forming {prefix} as rank {rank} of {world} failed within {form_timeout_s:g} s: {describe(error)}"
    if failure:
        dissolve()
        raise GroupFailed(failure)
    return lines


def dissolve() -> None:
    """Destroy the default process group, if any, and collect garbage, so that its sockets close now. Never raises.

    First drop the objects that refer to the group: trainer, device mesh, pending works. The sockets close with the last reference.
    """
    if dist.is_initialized():
        try:
            group = get_default_group()
            if "nccl" in str(dist.get_backend_config(group)):
                # NCCL can be aborted; without an abort, destroy waits for kernels that never finish.
                abort_process_group()
            del group
        except Exception as error:
            describe(error)
        try:
            dist.destroy_process_group()
        except Exception as error:
            describe(error)
    clear_mesh_caches()
    gc.collect()


class collectives:
    """Turn failures of collectives inside the block into :class:`GroupFailed`; let every other exception pass.

    The original exception is reduced to its text. Its frames are cleared, since they hold tensors and works, and its traceback and causes
    are cut. The caller must drop the frames that are still running, such as its own.

    Other exceptions are this rank's own, such as a model bug or lack of memory. Its peers still wait for it. Therefore the caller must
    :func:`describe` the exception, drop its trainer and :func:`dissolve` the group.
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, GroupFailed) or not is_collective_error(error):
            return
        found = trace_of(error)
        failure = GroupFailed(f"{self._doing}: {describe(error)}")
        failure.trace = found
        # The with statement sets the original exception as the new one's context; describe() has emptied it.
        del error, trace
        raise failure


def is_collective_error(error: BaseException) -> bool:
    """Return whether ``error`` comes from a process group or its store rather than from the rank's own code.

    gloo raises plain ``RuntimeError``, so the message decides.
    """
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, (torch.OutOfMemoryError, NotImplementedError, RecursionError)):
        return False
    return bool(_COLLECTIVE_ERROR.search(str(error)))


def trace_of(error: BaseException) -> traceback.TracebackException:
    """Return the traceback of ``error``, for :func:`tell` to print later. Call it before :func:`describe`.

    It records only files and lines and reads no source yet, so that a recovery does not wait for it.
    """
    kept = error.trace if isinstance(error, GroupFailed) else None
    return kept or traceback.TracebackException.from_exception(error, lookup_lines=False)


def tell(found: traceback.TracebackException) -> str:
    """Return the traceback as text. A text over ``MOST_TRACE`` characters loses its middle."""
    text = "".join(found.format())
    return text if len(text) <= MOST_TRACE else f"{text[: MOST_TRACE // 4]}\n  ..\n{text[-3 * MOST_TRACE // 4 :]}"


def describe(error: BaseException) -> str:
    """Return the error in one line. Afterwards the error holds no frames, tensors or further exceptions."""
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".strip()
    seen: BaseException | None = error
    while seen is not None:
        following = seen.__cause__ or seen.__context__
        if seen.__traceback__ is not None:
            traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen.__cause__ = seen.__context__ = None
        seen = following
    return text


def open_transfer(
    store_host: str,
    store_port: int,
    prefix: str,
    rank: int,
    world: int,
    timeout_s: float,
    *,
    meet_timeout_s: float = FORM_SECONDS,
    form_timeout_s: float = FORM_SECONDS,
    closed: Callable[[], bool] | None = None,
    lines: Connections | None = None,
) -> Any:
    """Open a second (gloo) group beside the default one, to move shards together with workers that leave afterwards.

    The ranks of the new generation keep their numbers; the leavers follow. torch does not register this group: pass it to
    :func:`vescale_ray.workers.resharding.reshard.execute`, then to :class:`Closing`.

    Args:
        meet_timeout_s: time limit for all ranks to join, in seconds. The other arguments are as for :func:`form`.

    Raises:
        GroupFailed: not all ranks joined in time, or the attempt was ``closed`` or cut, as for :func:`form`.
    """
    failure, lines = None, lines or Connections()
    try:
        with lines.recorded(world):
            store = _store(store_host, store_port, prefix, form_timeout_s)
            with lines.paused():
                _meet(store, world, meet_timeout_s, closed)
            group = gloo.create(store, rank, world, timedelta(seconds=form_timeout_s))
        group.set_timeout(timedelta(seconds=timeout_s))
        return group
    except Exception as error:
        failure = f"forming the transfer group {prefix} as rank {rank} of {world} failed: {describe(error)}"
    gc.collect()
    raise GroupFailed(failure)


class Closing:
    """Barrier at the end of a transfer group: each rank must stay until all are done, since closing a connection may lose sent data.

    A leaver waits for the barrier (:meth:`wait`) and may then exit. A rank that trains on does not wait: it keeps this object during its
    first steps, until :meth:`is_over`.
    """

    def __init__(self, group: Any, lines: Connections, bound_s: float | None = None) -> None:
        """``bound_s``: seconds that the other ranks may take; None means the timeout of the group's collectives. After that time gloo
        breaks the connections of the waiting ranks."""
        self._group, self._lines = group, lines
        options = BarrierOptions()
        if bound_s is not None:
            options.timeout = timedelta(seconds=bound_s)
        with collectives("close the transfer group"):
            self._work = group.barrier(options)

    def wait(self) -> None:
        """Wait until every rank is done.

        Raises:
            GroupFailed: a rank was lost before it was done.
        """
        with collectives("close the transfer group"):
            self._work.wait()

    def is_over(self) -> bool:
        """Return whether all ranks are done or one is lost. Then this object may be dropped, which closes the sockets."""
        return bool(self._work.is_completed())

    def give_up(self) -> None:
        """Break the connections if a rank is still not done; otherwise dropping this object would wait for that rank."""
        if not self.is_over():
            self._lines.cut()


_FIRST_BYTES = 32 << 10
"""Bytes of each rank's payload sent along with its length. If ranks share cores, a second collective costs as much as moving more bytes."""


def all_gather_bytes(payload: bytes, group: Any = None) -> list[bytes]:
    """Return every rank's ``payload``, in rank order. One collective suffices; payloads over 32 KiB need a second, padded to the
    longest."""
    group = _group(group)
    heads = _all_gather(len(payload).to_bytes(8, "little") + payload[:_FIRST_BYTES], 8 + _FIRST_BYTES, group)
    lengths = [int.from_bytes(head[:8], "little") for head in heads]
    longest = max(lengths) - _FIRST_BYTES
    tails = _all_gather(payload[_FIRST_BYTES:], longest, group) if longest > 0 else [b""] * len(heads)
    return [(head[8:] + tail)[:length] for head, tail, length in zip(heads, tails, lengths, strict=True)]


def barrier(bound_s: float | None = None) -> None:
    """Wait until all ranks of the default group are here. Only the host processes meet; accelerators are not synchronised.

    Args:
        bound_s: seconds to wait for the last rank; None means the timeout of the group's collectives.
    """
    _all_gather(b"", 1, _group(None), bound_s)


def _all_gather(part: bytes, width: int, group: Any, bound_s: float | None = None) -> list[bytes]:
    mine = torch.zeros(width, dtype=torch.uint8)
    if part:
        mine[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    everyone = [torch.empty(width, dtype=torch.uint8) for _ in range(group.size())]
    options = AllgatherOptions()
    if bound_s is not None:
        options.timeout = timedelta(seconds=bound_s)  # overrides the group's timeout for this collective
    group.allgather([everyone], [mine], options).wait()
    return [row.numpy().tobytes() for row in everyone]


def messages(group: Any = None) -> Messages:
    """Message channel for moved shards, between this rank and others of the group."""
    return Messages(_group(group), _MOVE)


def _group(group: Any) -> Any:
    """Return the back end's own process group. Its methods also serve a transfer group; ``torch.distributed`` functions need a registered
    group."""
    return get_default_group() if group is None else group


def _meet(store: Any, world: int, bound_s: float, closed: Callable[[], bool] | None) -> None:
    """Wait until all ranks are at the store, since gloo's own rendezvous cannot be ended if a rank is lost before it joins."""
    began = time.monotonic()
    if store.add("here", 1) >= world:
        store.set("all here", b"1")
    while not store.check(["all here"]):
        waited = time.monotonic() - began
        if closed is not None and closed():
            raise RuntimeError(f"the attempt was closed when {store.add('here', 0)} of {world} ranks had joined")
        if waited > bound_s:
            raise RuntimeError(f"only {store.add('here', 0)} of {world} ranks joined in time")
        # The pause adds at most 5% to the wait. With many ranks each asks less often, so that the store's load stays constant.
        time.sleep(min(0.02 * max(1.0, world / 64), max(0.0005, waited / 20)))


def _store(host: str, port: int, prefix: str, timeout_s: float) -> Any:
    client = torch.distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return torch.distributed.PrefixStore(prefix, client)
