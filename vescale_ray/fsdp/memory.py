"""The pool: where gathered parameters and gradients live while a step needs them.

Gathered parameters have one difficulty: autograd saves views of them (``weight.t()``) in forward and reads those in backward,
after the unit was resharded and gathered again. So a unit has to be gathered into the *same* storage each time. Were that storage
shared with other units, two of them could be needed at once by a backward that no one could foresee. Here every group has a
:class:`Buffer` of its own, whose storage and addresses stay for the life of the model, and only the memory behind it comes and goes:

- On an accelerator it comes from torch's caching allocator, on the gather stream, and goes back when the unit is resharded. Since
  nothing else is allocated there, the next unit of that size gets the same block; an event of the compute stream, not
  ``record_stream``, says when it may be overwritten.
- In host memory a buffer is an address range of its own, and its pages wander: the range that is gathered next takes over the
  pages of one that was released (``mremap``, 0.1 ms for 200 MiB), so that they are neither zeroed nor faulted in again. (On a
  2-core virtual machine new small pages are written at 1.8 GB/s, new huge ones at 6, those at hand at 13.)

On every device a buffer that is not gathered is invalid to torch: an operation that reads or writes it raises ``RuntimeError``.

In host memory the buffer may also be the home of this rank's own part (FP32 master weights that are not cast): that part of the range
has memory for good, and only the rest comes and goes. So the own part is neither held twice nor copied into what is gathered.

Either way the memory in use at a time is prefetch depth + 1 units, whatever order backward takes. Gradient and exchange buffers
have no views that anyone keeps; they are plain buffers that are handed out again. A gradient buffer fills over the time of a unit's
backward, while its activations go: new host memory for it comes page by page as it is written, and is counted like that.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from vescale_ray.fsdp.address_range import LARGE_IN_PIECES, AddressRange
from vescale_ray.fsdp.invalid_storage import Guard
from vescale_ray.planner.step_buffers import HOST_MAPPED_BYTES

MAPPED_BYTES = HOST_MAPPED_BYTES
"""Host buffers from this size on are address ranges of their own; below, the C library keeps freed memory at hand anyway."""

Key = tuple[int, tuple[int, int]]
"""Buffers of one key can take over each other's memory: as long, and with the same part that stays."""

NOWHERE = (0, 0)


class Buffer:
    """One storage for life. Its memory may go (:meth:`free`) and come back (:meth:`allocate`), contents undefined.

    While the memory is gone, and from :meth:`invalidate` on, torch operations on the storage raise ``RuntimeError``.

    Args:
        memory: a 1-D uint8 tensor of someone else's to use instead, which stays as it is.
        stays: bytes ``[start, end)`` that are not concerned (:meth:`resident`); only where :func:`may_stay` allows it.
        in_pieces: it is written piece by piece, over some time: new memory is to come as it is written, in small pages if it is small.
        invalid_because: gives the error of these operations. It is called once, when the buffer gets memory for the first time.
    """

    __slots__ = (
        "__weakref__", "_flats", "_guard", "_range", "_storage", "allocated", "clean_for", "device", "fixed", "in_pieces", "nbytes",
        "stays", "unwritten", "used", "views"
    )  # fmt: skip

    def __init__(
        self,
        nbytes: int,
        device: torch.device,
        memory: torch.Tensor | None = None,
        stays: tuple[int, int] = NOWHERE,
        *,
        in_pieces: bool = False,
        invalid_because: weakref.WeakMethod[Callable[[], str]] | None = None,
    ) -> None:
        self.nbytes, self.device, self.stays, self.in_pieces = nbytes, device, stays, in_pieces
        self.unwritten = 0
        """Bytes that nothing was written to since the memory was new: the kernel has not given it yet."""
        self.fixed = memory is not None
        self._range: AddressRange | None = None
        with torch.inference_mode(False):
            if memory is not None:
                self._storage = memory
            elif may_stay(nbytes, device):
                self._range = AddressRange(nbytes, stays, huge=not in_pieces or nbytes >= LARGE_IN_PIECES)
                lent = self._range.memory
                self._storage = torch.frombuffer(lent, dtype=torch.uint8, count=nbytes)
                # A shard that someone keeps when the model is gone holds all addresses, but is not to hold what was gathered there. The
                # storage holds this object for as long as anything views it, a graph for example.
                weakref.finalize(lent, self._range.close).atexit = False
            else:
                self._storage = torch.empty(nbytes, dtype=torch.uint8, device=device)
                self._storage.untyped_storage().resize_(0)
            self._guard = None if self.fixed else Guard(self._storage.untyped_storage(), nbytes, invalid_because)
            self.invalidate()
        self._flats: dict[torch.dtype, torch.Tensor] = {}
        self.allocated = False
        self.clean_for: str | None = None
        """Fingerprint of the layout whose padding is zero in this buffer."""
        self.views: dict[Any, list[torch.Tensor]] = {}
        """The tensors of the layouts that were laid over this buffer, by layout and dtype, so that views are made once."""
        self.used = False
        """Since the last backward ended."""

    @property
    def key(self) -> Key:
        return self.nbytes, self.stays

    def resident(self, dtype: torch.dtype) -> torch.Tensor:
        """The part that stays, as a 1-D tensor that shares nothing with others of this buffer but the memory: for the first time it is
        zero. Whoever holds it holds the addresses of the whole buffer."""
        assert self._range is not None
        start, end = self.stays
        with torch.inference_mode(False):
            return torch.frombuffer(self._range.memory, dtype=dtype, count=(end - start) // dtype.itemsize, offset=start)

    def invalidate(self) -> None:
        """Let torch refuse every read and write until :meth:`validate`. The memory stays where it is."""
        if self._guard is not None:
            self._guard.invalidate()

    def validate(self) -> None:
        """Undo :meth:`invalidate`."""
        if self._guard is not None:
            self._guard.validate()

    def allocate(self, donor: Buffer | None = None) -> None:
        """Make the memory usable: the pages of ``donor`` (same key, with memory, its contents no longer needed), else new memory."""
        if self.fixed:
            self.allocated = True
            return
        moved = False
        if donor is not None:
            moved = self._range is not None and donor._range is not None and self._range.take_over(donor._range)
            if not moved:
                donor.free()
            donor.invalidate()
            donor.allocated, donor.clean_for, donor.unwritten = False, None, 0
        self.validate()
        if self._range is None:
            self._storage.untyped_storage().resize_(self.nbytes)
        elif not moved:
            self._range.open()
        self.allocated, self.clean_for = True, None
        self.unwritten = _moving(self.key) if self.in_pieces and self._range is not None and not moved else 0

    def free(self) -> None:
        """Give the memory back. Views stay what they are, and are valid again after :meth:`allocate`."""
        if not self.allocated or self.fixed:
            return
        if self._range is None:
            self.validate()
            self._storage.untyped_storage().resize_(0)
        else:
            self._range.close()
        self.invalidate()
        self.allocated, self.clean_for, self.unwritten = False, None, 0

    def flat(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole buffer as a 1-D tensor of ``dtype``: the same object at each call."""
        flat = self._flats.get(dtype)
        if flat is None:
            with torch.inference_mode(False):
                bare = self._range is None and not (self.allocated or self.fixed)
                if bare:  # a view can't be made of a storage without memory
                    self.allocate()
                flat = self._flats[dtype] = self._storage.view(dtype)
                if bare:
                    self.free()
        return flat


def may_stay(nbytes: int, device: torch.device) -> bool:
    """Whether a part of a buffer of this size can have its memory for good while that of the rest comes and goes."""
    return device.type == "cpu" and nbytes >= MAPPED_BYTES and AddressRange.supported


def _malloc_keeps() -> int:
    """Bytes of unused memory that the process is told not to give back: what ``MALLOC_TRIM_THRESHOLD_`` tells glibc holds for our
    ranges, too, which don't come from malloc. Unset: none."""
    value = os.environ.get("MALLOC_TRIM_THRESHOLD_", "")
    return int(value) if value.isdigit() else 0


class Pool:
    """The memory of one schedule. One thread at a time.

    Args:
        device: where the buffers are. In host memory they hand their pages on to each other; elsewhere torch's allocator does that.
    """

    def __init__(self, device: torch.device) -> None:
        self.hands_on = device.type == "cpu"
        self.keep = _malloc_keeps()
        self._released: defaultdict[Key, list[Buffer]] = defaultdict(list)
        """Buffers of gathered parameters that no one needs, and whose memory waits for the next one of that key."""
        self._idle: defaultdict[Key, list[Buffer]] = defaultdict(list)
        """Scratch buffers that are not lent; with memory, or without where another buffer took it over."""
        # Weak: groups that are deleted, in the middle of a step even, are no users any more, and hold nothing.
        self._users: defaultdict[Key, weakref.WeakSet[Any]] = defaultdict(weakref.WeakSet)
        self._gathered: defaultdict[Key, weakref.WeakSet[Buffer]] = defaultdict(weakref.WeakSet)
        self._lent: defaultdict[Key, weakref.WeakSet[Buffer]] = defaultdict(weakref.WeakSet)
        self.released_event: Any = None
        """Of the compute stream: the last kernels that read what was released. What is gathered next waits for it."""
        self.peak_bytes = 0
        """Most bytes ever held. Set it to 0 to measure from then on."""

    def expect(self, nbytes: int, user: object, stays: tuple[int, int] = NOWHERE) -> None:
        """As long as ``user`` lives, it will need buffers of this key: memory of keys with a single user is freed after use, the rest
        kept."""
        self._users[nbytes, stays].add(user)

    # -- gathered parameters --

    def provide(self, buffer: Buffer) -> None:
        """Give ``buffer`` memory. On an accelerator: on the stream that it will be written on, after :attr:`released_event`."""
        released = self._released[buffer.key]
        if buffer in released:
            released.remove(buffer)
            buffer.validate()
        elif not buffer.allocated:
            buffer.allocate(None if buffer.fixed else self._donor(buffer.key))
        self._gathered[buffer.key].add(buffer)
        self._note_peak()

    def release(self, buffer: Buffer, event: Any) -> None:
        """The kernels up to ``event`` are the last that use what is in ``buffer``."""
        self._gathered[buffer.key].discard(buffer)
        self.released_event = event
        buffer.invalidate()
        if self.hands_on and len(self._users[buffer.key]) >= 2 and not buffer.fixed:
            self._released[buffer.key].append(buffer)
        else:
            buffer.free()

    # -- gradients and other scratch memory --

    def take(
        self,
        nbytes: int,
        device: torch.device,
        clean_for: str | None = None,
        stays: tuple[int, int] = NOWHERE,
        *,
        in_pieces: bool = False,
    ) -> Buffer:
        """Scratch memory, contents undefined (padding zero if ``buffer.clean_for == clean_for``), without bytes ``stays``. Give it back.

        ``in_pieces``: the caller says what it writes, each byte once (:meth:`written`). Until then new host memory is not there.
        """
        key = nbytes, stays
        idle = self._idle[key]
        buffer = next((b for b in idle if b.allocated and b.clean_for == clean_for), None)
        buffer = buffer or next((b for b in idle if b.allocated), None) or (idle[0] if idle else None)
        if buffer is None:
            buffer = Buffer(nbytes, device, stays=stays, in_pieces=in_pieces)
        else:
            idle.remove(buffer)
        if not buffer.allocated:
            buffer.allocate(self._donor(key))
        if not in_pieces:
            buffer.unwritten = 0
        buffer.used = True
        self._lent[key].add(buffer)
        self._note_peak()
        return buffer

    def written(self, buffer: Buffer, nbytes: int) -> None:
        """So much more of ``buffer`` has been written, or is about to be."""
        if buffer.unwritten:
            buffer.unwritten = max(0, buffer.unwritten - nbytes)
            self._note_peak()

    def give_back(self, buffer: Buffer) -> None:
        """The current stream has passed the last use of ``buffer``."""
        self.written(buffer, buffer.nbytes)
        self._lent[buffer.key].discard(buffer)
        if len(self._users[buffer.key]) >= 2:
            self._idle[buffer.key].append(buffer)

    # -- both --

    def settle(self) -> None:
        """A backward is over: drop the scratch buffers that it did not use."""
        for key, idle in self._idle.items():
            self._idle[key] = [buffer for buffer in idle if buffer.used]
            for buffer in idle:
                buffer.used = False

    def spares(self, nbytes: int) -> bool:
        """Whether so much memory is worth some time: it is not less than what the process is told to keep."""
        return nbytes > self.keep

    def trim(self, *, scratch: bool = True) -> None:
        """Free the memory that no one uses now, unless it is less than what the process is told to keep; it is allocated again when
        it is needed. ``scratch``: not only of gathered parameters."""
        kinds = (self._released, self._idle) if scratch else (self._released,)
        unused = (b for kind in kinds for buffers in kind.values() for b in buffers if b.allocated)
        if not self.spares(sum(_moving(buffer.key) for buffer in unused)):
            return
        for kind in kinds:
            for buffers in kind.values():
                for buffer in buffers:
                    buffer.free()
        self._released.clear()

    def _donor(self, key: Key) -> Buffer | None:
        """A buffer whose memory can go to another one: of released parameters, else scratch, at last such with clean padding."""
        if not self.hands_on:
            return None
        released = self._released[key]
        if released:
            return released.pop()
        return min((b for b in self._idle[key] if b.allocated), key=lambda b: b.clean_for is not None, default=None)

    # -- figures --

    def bytes_held(self, least: int = 0) -> int:
        """Bytes of all buffers of at least ``least`` that have memory now, in use or kept, without those that stay and those of new
        memory that are still to be written (to a huge page, where it comes in those)."""
        keys = [key for key in self._keys() if key[0] >= least]
        return sum(_moving(key) * sum(self._count(key)) - sum(b.unwritten for b in self._lent[key]) for key in keys)

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.bytes_held())

    def count(self) -> dict[int, tuple[int, int]]:
        """Buffers with memory, by the bytes of them that come and go: for gathered parameters, and for gradients and exchanges."""
        found: dict[int, tuple[int, int]] = {}
        for key in sorted(self._keys()):
            (gathered, scratch), (more_gathered, more_scratch) = found.get(_moving(key), (0, 0)), self._count(key)
            found[_moving(key)] = gathered + more_gathered, scratch + more_scratch
        return found

    def _keys(self) -> set[Key]:
        return {*self._gathered, *self._lent, *self._idle}

    def _count(self, key: Key) -> tuple[int, int]:
        return (
            len(self._gathered[key]) + len(self._released.get(key, ())),
            len(self._lent[key]) + sum(b.allocated for b in self._idle.get(key, ())),
        )


def _moving(key: Key) -> int:
    nbytes, (start, end) = key
    return nbytes - (end - start)
