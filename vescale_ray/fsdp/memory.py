"""The pool: a small, fixed set of buffers that all units of a model share.

Two kinds of memory come and go in a step, both whole units large: gathered parameters and gradients on their way to the
reduce-scatter. The pool keeps prefetch depth + 1 buffers of each size and hands them out again; in the steady state a step
allocates nothing. There is no ``record_stream``: a buffer is given back at a known point of the compute stream.

What makes gathered parameters special: autograd saves views of them (``weight.t()``) in forward and reads those in backward,
after the unit was resharded and gathered again. So a unit must be gathered into the *same* storage in backward. A buffer may
serve several units of one step only if these are never needed at the same time in its backward. The pool learns that: in the
first step, and in every step that does not repeat the one before, a unit gets a storage of its own (freed whenever it is
resharded), and pairs that backward needed at the same time are noted. While a step repeats the last one, units share buffers
with those they never clashed with.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from enum import Enum
from typing import Any, Protocol

import torch


class Tenant(Protocol):
    """Who occupies a buffer of gathered parameters: a group."""

    name: str
    key: int
    in_use: bool
    """Between unshard and reshard of a pass: kernels, or views that autograd saved, need the buffer as it is."""

    def evict(self) -> bool:
        """Leave the buffer if that is possible without harm; False if it is in use."""
        ...


class Sharing(Enum):
    """With whom a buffer may be shared."""

    NONE = "none"
    """With no one: nothing is known of the backward to come."""
    PROVEN = "proven"
    """With units that were never needed at the same time: the step repeats itself."""
    ANY = "any"
    """With all: no backward follows, the buffer is free again before any other one begins."""


class BufferClash(RuntimeError):
    """Two units that share a buffer are needed at the same time for the first time."""


class Slot:
    """One buffer. Its storage object stays the same for life; its memory may be freed and allocated again."""

    __slots__ = ("_flats", "_storage", "bound", "clean_for", "device", "free_after", "nbytes", "occupant", "private", "used", "views")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device
        with torch.inference_mode(False):
            self._storage = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._flats: dict[torch.dtype, torch.Tensor] = {}
        self.occupant: weakref.ref[Any] | None = None
        self.bound: dict[int, int] = {}
        """Tenants whose forwards used this buffer and wait for their backward, and how many: autograd holds views of the storage.
        Counted by what the program does, not by which graphs are still alive: all ranks must choose buffers alike, since a
        buffer that is not free can put off an all-gather."""
        self.clean_for: str | None = None
        """Fingerprint of the layout whose padding is zero in this buffer."""
        self.views: dict[Any, list[torch.Tensor]] = {}
        """The tensors of the layouts that were laid over this buffer, by layout and dtype, so that views are made once."""
        self.used = False
        """Since the last backward ended."""
        self.private = False
        """Of one unit only, freed whenever it leaves."""
        self.free_after: Any = None
        """Event of the compute stream after which the memory may be overwritten."""

    @property
    def allocated(self) -> bool:
        return self._storage.untyped_storage().nbytes() > 0 or self.nbytes == 0

    def allocate(self) -> None:
        if not self.allocated:
            self._storage.untyped_storage().resize_(self.nbytes)
            self.clean_for = None

    def free(self) -> None:
        """Free the memory, keep the storage object: views stay what they are, and are valid again after :meth:`allocate`."""
        self._storage.untyped_storage().resize_(0)
        self.clean_for = None

    def bind(self, key: int) -> None:
        """A forward of tenant ``key`` has used this buffer."""
        self.bound[key] = self.bound.get(key, 0) + 1

    def unbind(self, key: int) -> None:
        """That forward's backward is over."""
        left = self.bound.pop(key, 1) - 1
        if left:
            self.bound[key] = left

    def flat(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole buffer as a 1-D tensor of ``dtype``: the same object at each call."""
        flat = self._flats.get(dtype)
        if flat is None:
            with torch.inference_mode(False):
                flat = self._flats[dtype] = self._storage.view(dtype)
        return flat


class Pool:
    """The buffers of one schedule. One thread at a time."""

    def __init__(self) -> None:
        self._slots: defaultdict[int, list[Slot]] = defaultdict(list)
        self._scratch: defaultdict[int, list[Slot]] = defaultdict(list)
        self._lent: dict[int, int] = {}
        self._users: defaultdict[int, int] = defaultdict(int)
        self._keys = 0
        self.peak_bytes = 0
        """Most bytes ever held. Set it to 0 to measure from then on."""
        self._seen: set[int] = set()
        self._clashes: defaultdict[int, set[int]] = defaultdict(set)

    # -- gathered parameters --

    def join(self) -> int:
        """A new tenant's key."""
        self._keys += 1
        return self._keys

    def expect(self, nbytes: int) -> None:
        """One more group will need buffers of this size: sizes with a single user are freed after use, the others kept."""
        self._users[nbytes] += 1

    def acquire(
        self,
        tenant: Tenant,
        nbytes: int,
        device: torch.device,
        *,
        wanted: Slot | None,
        last: Slot | None,
        backward: bool,
        sharing: Sharing,
    ) -> Slot:
        """A buffer for ``tenant``: ``wanted`` (whose views autograd holds), else a free one, ``last`` for preference.

        ``sharing``: what a free one may be bound to.

        Raises:
            BufferClash: ``wanted`` is in use by another unit. The pair never shares a buffer again.
        """
        slots = self._slots[nbytes]
        if backward:
            # What is gathered at the same time in forward gets different buffers anyway; in backward the buffer is given.
            for slot in slots:
                self._note_clash(tenant.key, slot)
        if wanted is not None:
            if wanted.occupant is not None:
                self._vacate(wanted, tenant)
            chosen = wanted
        else:
            chosen = self._choose(tenant.key, slots, last, sharing) or Slot(nbytes, device)
            chosen.private = sharing is Sharing.NONE
        if chosen not in slots:
            slots.append(chosen)
        if not chosen.allocated:
            chosen.allocate()
            chosen.free_after = None
        self._note_peak()
        chosen.occupant, chosen.used = weakref.ref(tenant), True
        return chosen

    def release(self, slot: Slot, event: Any) -> None:
        """The tenant's kernels up to ``event`` are the last that use the buffer for now."""
        slot.occupant, slot.free_after = None, event
        if slot.private or self._users[slot.nbytes] < 2:
            slot.free()

    def settle(self, keys: set[int]) -> None:
        """A backward is over: ``keys`` went through forward and backward, so their clashes are known. Free what it did not use."""
        self._seen |= keys
        for nbytes, slots in self._slots.items():
            for slot in slots:
                if not slot.used and slot.occupant is None:
                    slot.free()
            self._slots[nbytes] = [slot for slot in slots if slot.used or slot.occupant is not None]
            for slot in slots:
                slot.used = False
        for nbytes, slots in self._scratch.items():
            self._scratch[nbytes] = [slot for slot in slots if slot.used]
            for slot in slots:
                slot.used = False

    def trim(self) -> None:
        """Free all memory that no one uses now; it is allocated again when it is needed."""
        for slots in self._slots.values():
            for slot in slots:
                if slot.occupant is None and slot.allocated:
                    slot.free()
        self._scratch.clear()

    def _choose(self, key: int, slots: list[Slot], last: Slot | None, sharing: Sharing) -> Slot | None:
        """An unoccupied buffer that ``key`` may use: its last one if that has memory, else one that has, else its last one."""
        if last is not None and last not in slots:
            last = None  # freed for good, or of another size: the parameters were cast
        if last is not None and last.allocated and self._may_use(key, last, sharing):
            return last
        for slot in slots:
            if slot.allocated and self._may_use(key, slot, sharing):
                return slot
        return last if last is not None and self._may_use(key, last, sharing) else None

    def _may_use(self, key: int, slot: Slot, sharing: Sharing) -> bool:
        if slot.occupant is not None:
            return False
        others = slot.bound.keys()
        if not others or sharing is Sharing.ANY or (len(others) == 1 and key in others):
            return True
        return sharing is Sharing.PROVEN and key in self._seen and others <= self._seen and others.isdisjoint(self._clashes[key])

    def _note_clash(self, key: int, slot: Slot) -> None:
        other = slot.occupant() if slot.occupant is not None else None
        if other is not None and other.key != key and other.in_use:
            self._clashes[key].add(other.key)
            self._clashes[other.key].add(key)

    def _vacate(self, slot: Slot, tenant: Tenant) -> None:
        other = slot.occupant() if slot.occupant is not None else None
        if other is None or other is tenant or other.evict():
            slot.occupant = None
            return
        raise BufferClash(
            f"the parameters of {tenant.name!r} and {other.name!r} are needed at the same time in this backward, but share a buffer "
            f"since no earlier step needed both; they will not share one again: call reset_iter_state() on the root and repeat the step"
        )

    # -- gradients and other scratch memory --

    def borrow(self, tenant: Tenant, slot: Slot) -> bool:
        """Let ``tenant`` use a buffer of gathered parameters that is free just now, until it calls :meth:`return_borrowed`."""
        if slot.occupant is not None or not slot.allocated:
            return False
        slot.occupant, slot.used = weakref.ref(tenant), True
        return True

    def return_borrowed(self, slot: Slot) -> None:
        slot.occupant = None

    def take(self, nbytes: int, device: torch.device, clean_for: str | None = None) -> Slot:
        """Scratch memory, contents undefined (padding zero if ``slot.clean_for == clean_for``). Give it back."""
        free = self._scratch[nbytes]
        slot = next((s for s in free if s.clean_for == clean_for), free[0] if free else None)
        if slot is None:
            slot = Slot(nbytes, device)
        else:
            free.remove(slot)
        slot.used = True
        self._note_peak(slot.nbytes)
        self._lent[nbytes] = self._lent.get(nbytes, 0) + 1
        return slot

    def give_back(self, slot: Slot) -> None:
        """The current stream has passed the last use of ``slot``."""
        self._lent[slot.nbytes] = self._lent.get(slot.nbytes, 1) - 1
        if self._users[slot.nbytes] >= 2:
            self._scratch[slot.nbytes].append(slot)

    # -- figures --

    def bytes_held(self) -> int:
        """Bytes of all buffers that are allocated now, in use or kept."""
        kept = sum(s.nbytes for kind in (self._slots, self._scratch) for slots in kind.values() for s in slots if s.allocated)
        return kept + sum(nbytes * count for nbytes, count in self._lent.items())

    def _note_peak(self, coming: int = 0) -> None:
        self.peak_bytes = max(self.peak_bytes, self.bytes_held() + coming)

    def count(self) -> dict[int, tuple[int, int]]:
        """Allocated buffers by size: for gathered parameters, and for gradients and exchanges."""
        sizes = {*self._slots, *self._scratch, *self._lent}
        gathered = {n: sum(s.allocated for s in self._slots.get(n, ())) for n in sizes}
        return {n: (gathered[n], len(self._scratch.get(n, ())) + self._lent.get(n, 0)) for n in sorted(sizes)}
