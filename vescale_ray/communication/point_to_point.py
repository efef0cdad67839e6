"""Point-to-point messages between ranks of a gloo group; the engine's collectives, Muon's and shard moves are built from them."""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vescale_ray import gloo
from vescale_ray.communication import abortable_waits, wait_notes


class Clock(Protocol):
    """Counter of the seconds that a thread has waited for messages."""

    waited_s: float


class Messages:
    """Messages between this rank and others of a gloo group, all in flight at once.

    The group's timeout bounds a wait, and :func:`~vescale_ray.communication.abortable_waits.give_up` ends it.

    If a message's Work is dropped, gloo stops reading from that peer, and later operations of the group wait for its timeout. This
    happens if a model is deleted after an exception in its backward. Messages that are dropped before their wait are therefore kept,
    with their memory. They are freed once later messages of the group have arrived, or the group is gone.

    Args:
        group: a group of ``torch.distributed``, or a backend object.
        tag: tag of one purpose; messages with one tag between two ranks arrive in the order they were sent.
    """

    __slots__ = ("_clock", "_group", "_limit", "_since", "_tag", "_under_way")

    _dropped: weakref.WeakKeyDictionary[Any, list[tuple[Any, object]]] = weakref.WeakKeyDictionary()
    _failed: weakref.WeakSet[Any] = weakref.WeakSet()
    """Groups that failed. Their messages are not kept, so that their sockets can close."""

    def __init__(self, group: Any, tag: int, clock: Clock | None = None) -> None:
        self._under_way: list[tuple[Any, object]] = []
        """Each message's Work, and what holds its memory."""
        self._group, self._tag, self._clock, self._since = weakref.ref(group), tag, clock, abortable_waits.mark()
        self._limit = abortable_waits.bound(group)

    def receive(self, received: torch.Tensor, source: int) -> None:
        """Receive from rank ``source`` of the group."""
        group = self._alive()
        with gloo.unrecorded():
            if isinstance(group, dist.ProcessGroup):  # torch's own call, so that tools that watch communication see it
                work: Any = dist.irecv(received, group=group, tag=self._tag, group_src=source)
            else:
                work = group.recv([received], source, self._tag)
        self._under_way.append((work, received))

    def send(self, sent: torch.Tensor, target: int) -> None:
        """Send to rank ``target`` of the group."""
        group = self._alive()
        with gloo.unrecorded():
            if isinstance(group, dist.ProcessGroup):
                work: Any = dist.isend(sent, group=group, tag=self._tag, group_dst=target)
            else:
                work = group.send([sent], target, self._tag)
        self._under_way.append((work, sent))

    def keep(self, memory: object) -> None:
        """Hold ``memory`` as long as the messages: the memory of their tensors, which may have lost it since."""
        self._under_way = [(work, (held, memory)) for work, held in self._under_way]

    def wait(self, times: int = 1) -> None:
        """Wait for all messages, at most ``times`` times the group's timeout."""
        # Clear the list first: a failed Work keeps its exception, and so the frames, alive.
        under_way, self._under_way = self._under_way, []
        group = self._group()
        earlier = self._dropped.pop(group, []) if group is not None and self._dropped else []
        began = time.perf_counter()
        try:
            for works in (under_way, earlier):
                while works:
                    abortable_waits.wait(works.pop()[0], self._since, self._limit * times)
        except BaseException as error:
            awaited = wait_notes.awaited(threading.get_ident())
            if awaited is not None:
                error.add_note(
                    f"this rank waited for {awaited}; if another rank waits elsewhere, the ranks call different collectives: "
                    f"VESCALE_RAY_FSDP_DEBUG=1 or vescale_ray.fsdp.set_debug(True) names the first one"
                )
            under_way.clear()
            earlier.clear()
            if group is not None:
                self._failed.add(group)
            raise
        if self._clock is not None:
            self._clock.waited_s += time.perf_counter() - began

    def _alive(self) -> Any:
        group = self._group()
        if group is None:
            raise RuntimeError("gloo: the process group of a message is gone")
        return group

    def __del__(self) -> None:
        group = self._group() if self._under_way else None
        if group is not None and group not in self._failed:
            self._dropped.setdefault(group, []).extend(self._under_way)


def tag_of(purpose: str) -> int:
    """Return the tag of messages with one ``purpose``, for example a unit's all-gather.

    If the ranks call different collectives, messages of different purposes then never meet. With one tag for all, a rank would take another
    unit's parameters for those it waits for, or a message of another size would end its process.
    """
    return 0x57000000 | zlib.crc32(purpose.encode()) & 0xFFFFFF


def is_pairwise(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether this group's collectives use messages between pairs of ranks: several ranks on gloo, in host memory."""
    return device.type == "cpu" and group.size() > 1 and gloo.is_gloo(group)


def all_to_all(
    out: torch.Tensor, given: torch.Tensor, out_sizes: Sequence[int], given_sizes: Sequence[int], group: Any, tag: int
) -> Messages:
    """Send flat ``given``, cut into ``given_sizes`` per rank, into flat ``out``; neither may change before the returned messages' wait.

    Two ranks with nothing to send to each other exchange no message.
    """
    rank, world = group.rank(), group.size()
    arriving, leaving = out.split(list(out_sizes)), given.split(list(given_sizes))
    messages = Messages(group, tag)
    for distance in range(1, world):
        source, target = (rank - distance) % world, (rank + distance) % world
        if out_sizes[source]:
            messages.receive(arriving[source], source)
        if given_sizes[target]:
            messages.send(leaving[target], target)
    if out_sizes[rank]:
        arriving[rank].copy_(leaving[rank])
    return messages
