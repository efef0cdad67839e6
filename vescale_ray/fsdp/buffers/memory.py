"""The pool: memory of gathered parameters and gradients while a step needs them.

Autograd saves views of gathered parameters (``weight.t()``) in forward and reads them in backward, after the unit was resharded and
gathered again. So a unit must gather into the *same* storage each time. Units can't share one storage either, since a backward may need two
of them at once. Therefore every group has its own :class:`Buffer`, whose storage and addresses live as long as the model. Only its memory
is freed and allocated again:

- On an accelerator the memory comes from torch's caching allocator on the gather stream, and returns there on reshard. Little else is
  allocated on that stream, so the next buffer of the same size gets the same block. An event of its last use, instead of
  ``record_stream``, tells when it may be overwritten (``freed.py``). Gradient buffers come from there, too. Their memory returns when the
  reduce-scatter has started (:meth:`Pool.lend`): its next user waits for the end. The root's buffers live for a whole step and have other
  sizes, so they would cut blocks of the units in two: they come from the compute stream's memory (``apart``).
- In host memory a buffer is an address range, and its pages move: the next range to be gathered takes over the pages of a released one
  (``mremap``, 0.1 ms for 200 MiB). So they need not be zeroed and faulted in again. On a 2-core virtual machine new small pages are written
  at 1.8 GB/s, new huge pages at 6 GB/s, and present pages at 13 GB/s.

A buffer that is not gathered is invalid to torch on every device: an operation that reads or writes it raises ``RuntimeError``.

In host memory a buffer may also hold this rank's master shard (FP32 weights that are not cast). The memory of that part of the range stays,
and only the rest is freed. So the shard is neither stored twice nor copied into the gathered parameters.

In both cases prefetch depth + 1 units have gathered memory at a time, for any order of backward. No code keeps views of gradient and
exchange buffers, so these are plain buffers that the pool reuses. In host memory, a gradient buffer fills during a unit's backward, while
activations are freed. So its new memory is allocated, and counted, page by page as it is written.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from vescale_ray.fsdp.buffers.address_range import LARGE_IN_PIECES, AddressRange, malloc_keeps
from vescale_ray.fsdp.buffers.freed import FreedMemory
from vescale_ray.fsdp.buffers.invalid_storage import Guard
from vescale_ray.fsdp.communication import comm
from vescale_ray.planner.step_buffers import HOST_MAPPED_BYTES

MAPPED_BYTES = HOST_MAPPED_BYTES
"""Bytes from which a host buffer is an address range of its own. For smaller ones the C library keeps freed memory ready anyway."""

Key = tuple[int, tuple[int, int]]
"""Size and permanent part of a buffer. Buffers with the same key can take over each other's memory."""

NOWHERE = (0, 0)


class Buffer:
    """A storage that lives as long as the model. Its memory can be freed (:meth:`free`) and allocated again (:meth:`allocate`).

    While the memory is gone, and from :meth:`invalidate` on, torch operations on the storage raise ``RuntimeError``.

    Args:
        memory: a 1-D uint8 tensor to use instead of own memory; it is never freed. With ``invalid_because`` the buffer has another storage
            of this memory, so that the giver's own one stays valid.
        stays: bytes ``[start, end)`` whose memory is permanent (:meth:`resident`); only if :func:`may_stay` allows it.
        in_pieces: whether the buffer is written piece by piece. New memory is then allocated as it is written, with small pages if it is
            short.
        invalid_because: returns the error text of these operations. It is called once, when the buffer gets memory for the first time.
    """

    __slots__ = (
        "__weakref__", "_flats", "_guard", "_range", "_storage", "addresses", "allocated", "apart", "clean_for", "device", "given",
        "in_pieces", "nbytes", "stays", "unwritten", "used", "views"
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
        """Bytes of new memory that were never written, for which the kernel has allocated no pages yet."""
        self.given = memory
        self._range: AddressRange | None = None
        with torch.inference_mode(False):
            if memory is not None:
                self._storage = memory if invalid_because is None else from_dlpack(to_dlpack(memory))
            elif may_stay(nbytes, device):
                self._range = AddressRange(nbytes, stays, huge=not in_pieces or nbytes >= LARGE_IN_PIECES)
                lent = self._range.memory
                self._storage = torch.frombuffer(lent, dtype=torch.uint8, count=nbytes)
                # After the model is gone, a shard that the user keeps still holds all addresses, but must not hold gathered memory. The
                # storage holds this object for as long as anything views it, for example a graph.
                weakref.finalize(lent, self._range.close).atexit = False
            else:
                self._storage = torch.empty(nbytes, dtype=torch.uint8, device=device)
                self._storage.untyped_storage().resize_(0)
            guarded = memory is None or invalid_because is not None
            self._guard = Guard(self._storage.untyped_storage(), nbytes, invalid_because) if guarded else None
            self.invalidate()
        self._flats: dict[torch.dtype, torch.Tensor] = {}
        self.allocated = False
        self.apart = False
        """The memory of an accelerator comes from the compute stream's memory and not from the lane's."""
        self.addresses = NOWHERE
        """Addresses of the lane's memory; those of the last :meth:`allocate` after :meth:`free`."""
        self.clean_for: str | None = None
        """Fingerprint of the layout for which the padding in this buffer is zero."""
        self.views: dict[Any, list[torch.Tensor]] = {}
        """Views of this buffer's tensors, by layout and dtype, so that they are made once."""
        self.used = False
        """True if a backward has used the buffer since the last one ended."""

    @property
    def fixed(self) -> bool:
        """True if the memory was given, and so is never freed."""
        return self.given is not None

    @property
    def exported(self) -> bool:
        """True if a NumPy array shares the memory, which then stays: it is neither freed nor moved to another buffer."""
        return self._guard is not None and self._guard.exported

    @property
    def key(self) -> Key:
        return self.nbytes, self.stays

    def resident(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the permanent part as a 1-D tensor, initially zero. It shares only the memory with the buffer's other tensors. While it
        lives, the addresses of the whole buffer stay reserved."""
        assert self._range is not None
        start, end = self.stays
        with torch.inference_mode(False):
            return torch.frombuffer(self._range.memory, dtype=dtype, count=(end - start) // dtype.itemsize, offset=start)

    def invalidate(self) -> None:
        """Make torch refuse every read and write until :meth:`validate`. The memory stays allocated."""
        if self._guard is not None:
            self._guard.invalidate()

    def validate(self) -> None:
        """Undo :meth:`invalidate`. Raise RuntimeError if the memory was put in shared memory."""
        if self._guard is not None:
            self._guard.validate()

    def allocate(self, donor: Buffer | None = None) -> None:
        """Make the memory usable: take over the pages of ``donor`` (same key, allocated, contents not needed), else allocate new memory."""
        if self.fixed:
            self.validate()
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
            if not self.exported:
                self._storage.untyped_storage().resize_(self.nbytes)
        elif not moved:
            self._range.open()
        self.allocated, self.clean_for = True, None
        self.unwritten = _moving(self.key) if self.in_pieces and self._range is not None and not moved else 0

    def locate(self) -> tuple[int, int]:
        """Return the addresses of the memory. It is allocated."""
        start = self._storage.untyped_storage().data_ptr()
        return start, start + self.nbytes

    def free(self) -> None:
        """Free the memory. Views stay, and are valid again after :meth:`allocate`."""
        if not self.allocated or self._guard is None:
            return
        if self.fixed or self.exported:
            pass
        elif self._range is None:
            self.validate()
            self._storage.untyped_storage().resize_(0)
        else:
            self._range.close()
        self.invalidate()
        self.allocated, self.clean_for, self.unwritten = False, None, 0

    def flat(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the whole buffer as a 1-D tensor of ``dtype``, the same object at each call."""
        flat = self._flats.get(dtype)
        if flat is None:
            with torch.inference_mode(False):
                bare = self._range is None and not (self.allocated or self.fixed)
                if bare:  # torch can't make a view of a storage without memory
                    self.allocate()
                flat = self._flats[dtype] = self._storage.view(dtype)
                if bare:
                    self.free()
        return flat


def may_stay(nbytes: int, device: torch.device) -> bool:
    """True if a part of a buffer of this size can have permanent memory."""
    return device.type == "cpu" and nbytes >= MAPPED_BYTES and AddressRange.supported


class Pool:
    """The memory of one schedule. Not thread-safe.

    Args:
        device: the device of the buffers. In host memory they pass their pages on; elsewhere torch's allocator does that.
        lane: the stream of the all-gathers, on which the memory of an accelerator is allocated.
    """

    def __init__(self, device: torch.device, lane: comm.Lane | None = None) -> None:
        self.hands_on = device.type == "cpu"
        self.device, self.lane = device, lane or comm.Lane(device)
        self.freed = FreedMemory()
        self.keep = malloc_keeps() if self.hands_on else 0
        self._released: defaultdict[Key, list[Buffer]] = defaultdict(list)
        """Released buffers of gathered parameters, whose memory waits for the next buffer with that key."""
        self._idle: defaultdict[Key, list[Buffer]] = defaultdict(list)
        """Scratch buffers that are not lent, with memory or, if another buffer took it over, without."""
        # Weak references: a group that is deleted, even in the middle of a step, must not count as a user or hold memory.
        self._users: defaultdict[Key, weakref.WeakSet[Any]] = defaultdict(weakref.WeakSet)
        self._gathered: defaultdict[Key, weakref.WeakSet[Buffer]] = defaultdict(weakref.WeakSet)
        self._lent: defaultdict[Key, weakref.WeakSet[Buffer]] = defaultdict(weakref.WeakSet)
        self._apart: set[int] = set()
        self.peak_bytes = 0
        """Peak bytes held. Set it to 0 to start a new measurement."""

    def expect(self, nbytes: int, user: object, stays: tuple[int, int] = NOWHERE) -> None:
        """Announce that ``user`` needs buffers of this size and resident part while it lives. If a size has a single user, the pool frees
        its memory after each use."""
        self._users[nbytes, stays].add(user)

    def keep_apart(self, *nbytes: int) -> None:
        """Take an accelerator's memory for buffers of these sizes, which live for a whole step, from the compute stream's memory."""
        self._apart.update(nbytes)

    # -- gathered parameters --

    def provide(self, buffer: Buffer) -> None:
        """Give ``buffer`` memory, which the lane writes."""
        released = self._released[buffer.key]
        if buffer in released:
            released.remove(buffer)
            buffer.validate()
        elif not buffer.allocated:
            self._allocate(buffer, self.lane.stream)
            if buffer.apart:
                self.lane.after_current()
        self._gathered[buffer.key].add(buffer)
        self._note_peak()

    def release(self, buffer: Buffer, event: Any) -> None:
        """Take the memory of ``buffer`` back. The kernels before ``event`` are the last to use it."""
        self._gathered[buffer.key].discard(buffer)
        self.freed.add(buffer.addresses, event)
        buffer.invalidate()
        if self.hands_on and len(self._users[buffer.key]) >= 2 and not (buffer.fixed or buffer.exported):
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
        """Return a scratch buffer with undefined contents (zero padding if ``buffer.clean_for == clean_for``), without bytes ``stays``.

        Return it with :meth:`give_back`. ``in_pieces``: the caller reports each byte that it writes once (:meth:`written`); new host memory
        is not allocated before.
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
            self._allocate(buffer, None if self.hands_on else comm.current_stream(self.device))
        if not in_pieces:
            buffer.unwritten = 0
        buffer.used = True
        self._lent[key].add(buffer)
        self._note_peak()
        return buffer

    def written(self, buffer: Buffer, nbytes: int) -> None:
        """Record that ``nbytes`` more of ``buffer`` have been written, or are about to be."""
        if buffer.unwritten:
            buffer.unwritten = max(0, buffer.unwritten - nbytes)
            self._note_peak()

    def give_back(self, buffer: Buffer) -> None:
        """Return a scratch buffer once the current stream has passed its last use."""
        self.written(buffer, buffer.nbytes)
        self.lend(buffer, None if self.hands_on else comm.current_event(self.device))

    def lend(self, buffer: Buffer, event: Any) -> None:
        """Return a scratch buffer before its last use, which ends with ``event`` of an accelerator's stream. The next user of its memory
        waits for it."""
        self.freed.add(buffer.addresses, event)
        self._take_back(buffer)

    def _take_back(self, buffer: Buffer) -> None:
        self._lent[buffer.key].discard(buffer)
        if not self.hands_on:
            buffer.free()
        if len(self._users[buffer.key]) >= 2:
            self._idle[buffer.key].append(buffer)

    # -- both --

    def settle(self) -> None:
        """Drop the scratch buffers that the last backward did not use."""
        for key, idle in self._idle.items():
            self._idle[key] = [buffer for buffer in idle if buffer.used]
            for buffer in idle:
                buffer.used = False

    def spares(self, nbytes: int) -> bool:
        """True if ``nbytes`` is more than the process may keep, so that freeing it is worth the time."""
        return nbytes > self.keep

    def trim(self, *, scratch: bool = True) -> None:
        """Free unused memory, unless it is less than the process may keep. ``scratch``: also that of scratch buffers."""
        kinds = (self._released, self._idle) if scratch else (self._released,)
        unused = (b for kind in kinds for buffers in kind.values() for b in buffers if b.allocated)
        if not self.spares(sum(_moving(buffer.key) for buffer in unused)):
            return
        for kind in kinds:
            for buffers in kind.values():
                for buffer in buffers:
                    buffer.free()
        self._released.clear()

    def _allocate(self, buffer: Buffer, stream: Any) -> None:
        """Give ``buffer`` memory that ``stream`` uses next. The stream waits for earlier users of the lane's memory."""
        buffer.apart = buffer.nbytes in self._apart and len(self._users[buffer.key]) < 2
        with nullcontext() if buffer.apart else self.lane.context():
            buffer.allocate(None if buffer.fixed else self._donor(buffer.key))
        buffer.addresses = NOWHERE if buffer.apart or self.hands_on else buffer.locate()
        self.freed.reuse(buffer.addresses, stream)

    def _donor(self, key: Key) -> Buffer | None:
        """Return a buffer whose memory another one can take: a released buffer, else a scratch buffer, last one with clean padding."""
        if not self.hands_on:
            return None
        released = self._released[key]
        if released:
            return released.pop()
        return min((b for b in self._idle[key] if b.allocated and not b.exported), key=lambda b: b.clean_for is not None, default=None)

    # -- figures --

    def bytes_held(self, least: int = 0) -> int:
        """Return the bytes of all buffers of at least ``least`` bytes that have memory, in use or kept. Permanent parts and new memory that
        is still to be written (up to a huge page) don't count."""
        keys = [key for key in self._keys() if key[0] >= least]
        return sum(_moving(key) * sum(self._count(key)) - sum(b.unwritten for b in self._lent[key]) for key in keys)

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.bytes_held())

    def count(self) -> dict[int, tuple[int, int]]:
        """Return the numbers of buffers with memory, gathered and scratch, by their bytes without permanent parts."""
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
