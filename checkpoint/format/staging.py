"""A rank's object built in memory: one copy of its pieces into a reusable buffer with the layout of the object on disk.

    pieces (parameters, optimizer states, on any device)
       |  one copy: the only wait of training
       v
    slab: [ header | sections, padded with zeros ]     written from here without another copy, past the page cache

A slab is page-aligned, and page-locked if the pieces are on a GPU. Its pages are touched when it is made, since first touches cost ten
times the copy. The next save reuses it. It may have several holders, such as a save being written and a copy being sent.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..stores.store import ALIGNMENT
from .object_layout import ObjectLayout, ShardPiece, lay_out
from .pages import aligned_buffer, touched_buffer


class Slab:
    """``nbytes`` of host memory for one staged object. :class:`SlabPool` makes it."""

    def __init__(self, nbytes: int, pinned: bool, pool: SlabPool) -> None:
        self.pinned = pinned
        self.buffer = _pinned(nbytes) if pinned else touched_buffer(nbytes)
        self._pool = pool
        self._holders = 1
        self._gaps_of: ObjectLayout | None = None
        self.layout: ObjectLayout | None = None

    def retain(self) -> Slab:
        """Add a holder; each holder calls :meth:`release` once."""
        with self._pool.lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """Remove a holder. After the last one the pool may reuse the slab."""
        with self._pool.lock:
            self._holders -= 1
            if self._holders == 0:
                self._pool.take_back(self)
            assert self._holders >= 0, "a slab was released twice"

    @property
    def shared(self) -> bool:
        """True if there is more than one holder; then the bytes must not change."""
        with self._pool.lock:
            return self._holders > 1

    def again(self) -> None:
        """Reset the number of holders. The pool calls this with its lock held when it hands out the slab."""
        self._holders = 1

    def lay(self, layout: ObjectLayout) -> torch.Tensor:
        """Set the layout and zero the gaps between pieces. Returns the object's bytes, into which the caller copies the pieces."""
        view = self.buffer[: layout.bytes]
        if self._gaps_of is not layout:
            position = 0
            for place in (*layout.placed, None):
                start = place.offset if place else layout.bytes
                view[position:start].zero_()
                position = max(position, start)
                if place:
                    position = place.offset + (place.end - place.start) * layout.itemsize(place)
            self._gaps_of = layout
        self.layout = layout
        return view


class SlabPool:
    """Reusable slabs. ``pinned``: page-locked memory, for copies from a GPU that overlap its work.

    A free slab that is too small is replaced, not kept beside a larger one. So the pool holds as many slabs as were ever in use at once.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self.lock = threading.RLock()
        self.pinned = pinned
        self._free: list[Slab] = []
        self._alive: weakref.WeakSet[Slab] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, in use or free."""
        with self.lock:
            return sum(slab.buffer.numel() for slab in self._alive)

    def take(self, nbytes: int) -> Slab:
        """Return a slab of at least ``nbytes`` bytes; a fresh one if no free one is large enough."""
        with self.lock:
            for index, slab in enumerate(self._free):
                if slab.buffer.numel() >= nbytes:
                    del self._free[index]
                    slab.again()
                    return slab
            if self._free:
                self._free.pop()
        slab = Slab(nbytes, self.pinned, self)  # outside the lock, since touching its pages takes long
        with self.lock:
            self._alive.add(slab)
        return slab

    def take_back(self, slab: Slab) -> None:
        """Take a slab back; for :meth:`Slab.release`."""
        with self.lock:
            self._free.append(slab)

    def clear(self) -> None:
        """Return the free slabs' memory to the system."""
        with self.lock:
            self._free.clear()


class LayoutMemo:
    """The last layout, reused as long as the pieces' descriptions stay exactly the same."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._layout: ObjectLayout | None = None

    def of(self, pieces: Sequence[ShardPiece]) -> ObjectLayout:
        key = tuple((p.name, p.kind, p.start, p.end, p.shape, p.dtype, p.copied, p.tiling) for p in pieces)
        if self._layout is None or key != self._key:
            self._layout, self._key = lay_out(pieces), key
        return self._layout


class Copying:
    """A copy into a slab that may still run on a GPU's stream."""

    def __init__(self, event: Any = None, alive: Sequence[torch.Tensor] = ()) -> None:
        self._event, self._alive = event, alive

    def wait(self) -> None:
        """Wait until every byte is in the slab; then the pieces may change."""
        if self._event is not None:
            self._event.synchronize()
        self._event, self._alive = None, ()


def written(pieces: Sequence[ShardPiece]) -> Any:
    """Return the event at which the pieces' current values are written, for :func:`copy_pieces` in another thread. None if they are written
    already."""
    device = next((piece.data.device for piece in pieces if piece.data.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


def copy_pieces(layout: ObjectLayout, pieces: Sequence[ShardPiece], into: torch.Tensor, *, after: Any = None) -> Copying:
    """Copy each piece to its place. Pieces that are adjacent in memory and in the object are one copy.

    From a GPU the copies run on a separate stream, after the event ``after`` (:func:`written`), or else after the current stream's work so
    far. Work of that stream after :meth:`Copying.wait` cannot affect them.
    """
    sources = list(layout.sources(pieces))
    if any(flat.is_cuda for _, flat in sources):
        return _from_gpu(sources, into, after)
    base = into.data_ptr()
    place = address = size = 0
    for offset, flat in sources:
        start, count = flat.data_ptr(), flat.numel()
        if offset == place + size and start == address + size:
            size += count
            continue
        if size:
            # memmove, not Tensor.copy_: it is twice as fast on large pieces (it does not read the target), and lets other threads run.
            ctypes.memmove(base + place, address, size)
        place, address, size = offset, start, count
    if size:
        ctypes.memmove(base + place, address, size)
    return Copying()


def _from_gpu(sources: Sequence[tuple[int, torch.Tensor]], into: torch.Tensor, after: Any) -> Copying:
    device = next(flat.device for _, flat in sources if flat.is_cuda)
    stream = torch.cuda.Stream(device)
    stream.wait_event(torch.cuda.current_stream(device).record_event() if after is None else after)
    with torch.cuda.stream(stream):
        k = 0
        while k < len(sources):
            offset, flat = sources[k]
            size = flat.numel()
            k += 1
            while k < len(sources) and _follows(offset, flat, size, *sources[k]):
                size += sources[k][1].numel()
                k += 1
            whole = flat if size == flat.numel() else flat.as_strided((size,), (1,))
            into[offset : offset + size].copy_(whole, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    return Copying(event, [flat for _, flat in sources])


def _follows(offset: int, flat: torch.Tensor, size: int, next_offset: int, following: torch.Tensor) -> bool:
    return (
        next_offset == offset + size
        and following.data_ptr() == flat.data_ptr() + size
        and following.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    )


def _pinned(nbytes: int) -> torch.Tensor:
    return aligned_buffer(max(ALIGNMENT, nbytes), pinned=True)
