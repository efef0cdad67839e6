"""The life of process groups on a worker that outlives them: form, use, and after a failure let go at once.

Two facts of torch's gloo back end shape this file (measured with torch 2.13):

- A gloo collective can't be aborted. Only ranks that wait on the dead peer itself see an error, in milliseconds; the
  others learn when *these* close their sockets. So a rank that got an error destroys its group before it does anything else.
- ``destroy_process_group`` alone does not close the sockets while a traceback's frames, or a reference cycle through
  them, keep the group alive. So the error is turned into a string, its frames are cleared, and the garbage is collected.

Without the second, survivors that are no neighbours of the dead rank hang to the full timeout (30 s instead of 0.03 s).
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
# happens while a group exists, the function objects keep that group, and its sockets, for ever. So: now, before any group.
import torch.distributed.nn.functional

from vescale_ray import gloo
from vescale_ray.compat.distributed import AllgatherOptions, BarrierOptions, abort_process_group, count_groups_anew, get_default_group
from vescale_ray.compat.optional import clear_mesh_caches
from vescale_ray.messages import Messages
from vescale_ray.workers.lines import Lines

FORM_SECONDS = 15.0
"""Default bound of forming a group; the bound of its collectives is another."""

MOST_TRACE = 8000

NCCL = {
    # 1 and 3 (the default) end the process of whoever notices that a peer is gone, and with it the shards in its memory.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # nor does an error of CUDA in NCCL's own threads
    # A dump puts off the abort by 15 s, and its writer then ends the process. Hang reports have the flight recorder's entries anyway.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "NCCL_NVLS_ENABLE": "0",  # multicast memory of aborted communicators: NVIDIA's in-process restart asks for this, too
}
"""Environment with which a process outlives its NCCL communicators; what is set already is left. (torch's ``ProcessGroupNCCL.hpp``; the
requirements of NVIDIA's resiliency extension.) Who waits for a collective that is aborted learns nothing: ``Trainer`` proves them."""

_MOVE = 7003
"""The tag of its messages."""

_COLLECTIVE_ERROR = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out|process group", re.IGNORECASE)


class GroupFailed(Exception):
    """A process group could not be formed, or a collective failed: a peer is gone, hung or slow.

    Holds text only. It never carries the original exception, whose frames would keep the group's sockets open.
    """

    trace: traceback.TracebackException | None = None
    """Where the collective was that failed: file names and lines, no frames."""


def prepare() -> None:
    """Call once per process, off any critical path: imports what the first step would import, and takes it out of the collector's sight.

    The first makes a joiner's first step as fast as its others; the second makes the ``gc.collect`` of :func:`dissolve` take
    4 to 15 ms instead of 120 to 580 ms with torch loaded.
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
    lines: Lines | None = None,
) -> Lines:
    """Initialise the default process group of one attempt of one generation; its connections, for whoever may have to break them.

    Args:
        store_host: where the run's ``TCPStore`` listens; it lives outside the workers, since workers die.
        store_port: its port.
        prefix: unique per attempt, such as ``run/generation/attempt``: gloo can't meet twice under one prefix.
        rank: of this worker in the new world.
        world: ranks that will meet.
        backend: ``gloo``; or ``nccl``, which gets gloo beside it for CPU tensors (records, copies and moved shards are
            exchanged through the host).
        timeout_s: bound of every collective in the group.
        form_timeout_s: bound of the meeting itself.
        closed: whether the attempt was given up meanwhile, as somebody is known to be lost who has not come yet: then nobody waits for it.
        lines: what is returned. Who has it can end the forming by :meth:`Lines.cut`, also where a rank was lost after it had come.

    Raises:
        GroupFailed: not all ranks came in time, or the attempt was ``closed`` or cut; nothing stays initialised, and a new prefix is
            needed.
        ValueError: a group is still initialised: dissolve it first.
    """
    if dist.is_initialized():
        raise ValueError("this process still has a process group: call groups.dissolve() before forming the next one")
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of a world of {world}: ranks go from 0 to {world - 1}")
    failure, lines = None, lines or Lines()
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
    """Destroy the default process group, if any, and collect, so that its sockets close now. Never raises.

    Drop what refers to the group (trainer, device mesh, pending works) first: sockets close when the last reference goes.
    """
    if dist.is_initialized():
        try:
            group = get_default_group()
            if "nccl" in str(dist.get_backend_config(group)):
                # NCCL can be aborted, and without an abort destroy waits for kernels that never finish.
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

    The original exception is reduced to its text: frames cleared (they hold tensors and works), traceback and causes
    cut. Frames that are still running, such as the caller's own, are the caller's to drop.

    An exception that passes is this rank's own (a bug in the model, out of memory): its peers still wait for it, so
    the caller must :func:`describe` it, drop its trainer and :func:`dissolve` all the same.
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
        # The with statement makes the original the new one's context; describe() has emptied it.
        del error, trace
        raise failure


def is_collective_error(error: BaseException) -> bool:
    """Whether ``error`` came from a process group or its store rather than from the rank's own code.

    gloo raises plain ``RuntimeError``, so that the message decides.
    """
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, (torch.OutOfMemoryError, NotImplementedError, RecursionError)):
        return False
    return bool(_COLLECTIVE_ERROR.search(str(error)))


def trace_of(error: BaseException) -> traceback.TracebackException:
    """Where ``error`` was raised, for :func:`tell` to print later: files and lines only, read from no source yet, so that a recovery does
    not wait for it. Call it before :func:`describe`."""
    kept = error.trace if isinstance(error, GroupFailed) else None
    return kept or traceback.TracebackException.from_exception(error, lookup_lines=False)


def tell(found: traceback.TracebackException) -> str:
    """The traceback as text; the middle of a very long one is left out."""
    text = "".join(found.format())
    return text if len(text) <= MOST_TRACE else f"{text[: MOST_TRACE // 4]}\n  ..\n{text[-3 * MOST_TRACE // 4 :]}"


def describe(error: BaseException) -> str:
    """The error in one line; afterwards it holds no frames, tensors or further exceptions."""
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
    lines: Lines | None = None,
) -> Any:
    """A second (gloo) group beside the default one, for a move of shards that workers take part in who leave afterwards.

    The new generation's ranks keep their numbers here, the leavers follow. It is known to nobody but the caller: pass it
    to :func:`vescale_ray.workers.reshard.execute`, then to :class:`Closing`.

    Args:
        meet_timeout_s: bound of the wait for the others to come; the rest is as for :func:`form`.

    Raises:
        GroupFailed: not all came in time, or the attempt was ``closed`` or cut, as for :func:`form`.
    """
    failure, lines = None, lines or Lines()
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
    """This rank is done with the transfer group. It has to stay until all are: what was sent may be lost with the connection.

    A leaver waits for that (:meth:`wait`), and is free to go. Who trains on does not: it keeps this beside its first steps, until
    :meth:`is_over`.
    """

    def __init__(self, group: Any, lines: Lines, bound_s: float | None = None) -> None:
        """``bound_s``: for so long the others may take to be done (gloo breaks the connections of who waits in vain); None: for as long as
        a collective of the group."""
        self._group, self._lines = group, lines
        options = BarrierOptions()
        if bound_s is not None:
            options.timeout = timedelta(seconds=bound_s)
        with collectives("close the transfer group"):
            self._work = group.barrier(options)

    def wait(self) -> None:
        """Until every rank is done.

        Raises:
            GroupFailed: one was lost before.
        """
        with collectives("close the transfer group"):
            self._work.wait()

    def is_over(self) -> bool:
        """Whether all are done, or one is lost: it may be dropped, and the sockets close."""
        return bool(self._work.is_completed())

    def give_up(self) -> None:
        """Wait no longer for a rank that stands still: dropping this would."""
        if not self.is_over():
            self._lines.cut()


_FIRST_BYTES = 32 << 10
"""Of each rank's payload that go with its length. A collective costs milliseconds where ranks share cores, as much as moving more."""


def all_gather_bytes(payload: bytes, group: Any = None) -> list[bytes]:
    """Every rank's ``payload``, in rank order: one collective, or a second for what is longer than 32 KiB, padded to the longest."""
    group = _group(group)
    heads = _all_gather(len(payload).to_bytes(8, "little") + payload[:_FIRST_BYTES], 8 + _FIRST_BYTES, group)
    lengths = [int.from_bytes(head[:8], "little") for head in heads]
    longest = max(lengths) - _FIRST_BYTES
    tails = _all_gather(payload[_FIRST_BYTES:], longest, group) if longest > 0 else [b""] * len(heads)
    return [(head[8:] + tail)[:length] for head, tail, length in zip(heads, tails, lengths, strict=True)]


def barrier(bound_s: float | None = None) -> None:
    """All ranks of the default group have come here. Their processes have: nothing is asked of an accelerator.

    Args:
        bound_s: for so long it is waited for the last one; None: for as long as in any collective of the group.
    """
    _all_gather(b"", 1, _group(None), bound_s)


def _all_gather(part: bytes, width: int, group: Any, bound_s: float | None = None) -> list[bytes]:
    mine = torch.zeros(width, dtype=torch.uint8)
    if part:
        mine[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    everyone = [torch.empty(width, dtype=torch.uint8) for _ in range(group.size())]
    options = AllgatherOptions()
    if bound_s is not None:
        options.timeout = timedelta(seconds=bound_s)  # of this one, whatever the group's is
    group.allgather([everyone], [mine], options).wait()
    return [row.numpy().tobytes() for row in everyone]


def messages(group: Any = None) -> Messages:
    """Messages of moved shards, between this rank and others of the group."""
    return Messages(_group(group), _MOVE)


def _group(group: Any) -> Any:
    """The back end's own methods serve the default group and a transfer group alike; ``torch.distributed``'s need a registered group."""
    return get_default_group() if group is None else group


def _meet(store: Any, world: int, bound_s: float, closed: Callable[[], bool] | None) -> None:
    """Wait until all ranks are at the store. What gloo does there next can't be ended when one of them is lost before it comes."""
    began = time.monotonic()
    if store.add("here", 1) >= world:
        store.set("all here", b"1")
    while not store.check(["all here"]):
        waited = time.monotonic() - began
        if closed is not None and closed():
            raise RuntimeError(f"it was closed while {store.add('here', 0)} of {world} ranks were there")
        if waited > bound_s:
            raise RuntimeError(f"{store.add('here', 0)} of {world} ranks came in time")
        # At most a twentieth is lost; many ranks ask less often, together as often as a few.
        time.sleep(min(0.02 * max(1.0, world / 64), max(0.0005, waited / 20)))


def _store(host: str, port: int, prefix: str, timeout_s: float) -> Any:
    client = torch.distributed.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return torch.distributed.PrefixStore(prefix, client)
