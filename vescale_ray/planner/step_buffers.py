"""Memory of the temporary buffers of a step, followed through forward and backward.

On an accelerator, the buffers share memory of torch's allocator (:func:`device_buffers`). On the CPU, :func:`host_buffers` follows the pool
of ``vescale_ray/fsdp/buffers/memory.py``. If several groups use buffers of one size, the pool keeps a released buffer for the next group,
until the pass needs no further unit. If only one group uses a size, its buffer is freed.

The next unit is gathered while one computes. A unit stays gathered while a unit inside it computes. On the CPU a unit's gradient buffers
are filled and reduced before the next unit's are opened.
The root's gradient buffer stays open during the whole backward. With more than two ranks, the exchange that replaces gloo's missing
reduce-scatter needs a second buffer of the same size. The groups of a unit are gathered together, and reduced together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from vescale_ray.errors import BadInput

STAGING_BYTES = 64 << 20, 512 << 20
"""Minimum and maximum number of bytes of each of the two staging buffers in which a reduction casts gradients."""
STAGING_CHUNKS = 6
"""Number of chunks in which a reduction casts gradients, between these limits.

A cast and a reduction can start when the running matrix product of the backward ends, so every chunk waits for up to some milliseconds. A
step of emulated Llama-70B layers on an H200 took 1.11 times as long as FSDP2's with 52 chunks of a layer, 0.98 times with 9, and 0.97
times with one."""
ALIGNED_BYTES = 128
"""A chunk has a multiple of this for each rank, since collectives of unaligned buffers are slow."""
GRADIENT_BLOCK = 128
"""Number of gradients that share a scale when they are sent in FP8."""
GRADIENT_CHUNK = 1 << 22
"""Number of gradients that are rounded, or summed, at a time when they are sent in FP8 or BF16; a multiple of the block."""
HOST_MAPPED_BYTES = 1 << 18
"""Size in bytes from which buffers in host memory are address ranges of their own; a rank's shard may live in such a range."""


def staging_bytes(cast: int, given: int | None = None) -> int:
    """Return the bytes of each of the two staging buffers of a reduction of ``cast`` bytes. ``given``: the user's choice."""
    least, most = STAGING_BYTES
    return given or min(max(cast // STAGING_CHUNKS, least), most)


def check_staging(nbytes: int, ranks: int) -> None:
    """Raise BadInput if a staging buffer of ``nbytes`` has no room for the least chunk of a reduction over ``ranks`` ranks."""
    each, least = ALIGNED_BYTES, ALIGNED_BYTES * ranks
    if nbytes < least:
        raise BadInput(f"a staging buffer of {nbytes} bytes is less than {each} bytes for each of {ranks} ranks: give at least {least}")


def arrival_dtype(compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients arrive: the compute dtype if each of its values is one of the reduce dtype, else the reduce
    dtype."""
    return compute if torch.promote_types(compute, reduce) == reduce else reduce


def reduction_calls(nbytes: int, compute: torch.dtype, reduce: torch.dtype, staging: int | None = None) -> int:
    """Collective calls that reduce a unit's gradients of ``nbytes`` in the reduce dtype: one, or one per chunk if they are cast."""
    return 1 if arrival_dtype(compute, reduce) == reduce else max(1, -(-nbytes // staging_bytes(nbytes, staging)))


def wire_bytes(numel: int, wire: str = "fp8") -> int:
    """Return the bytes in which a rank sends ``numel`` gradients to another one: BF16, or an e4m3 code each and an FP32 scale per block."""
    return 2 * numel if wire == "bfloat16" else -(-numel // GRADIENT_BLOCK) * (GRADIENT_BLOCK + 4)


def exchange_bytes(numel: int, ranks: int, wire: str = "fp8") -> int:
    """Return the bytes of an exchange of gradients in low precision, in which each of ``ranks`` ranks gets the sum of ``numel`` elements:
    what a rank sends and receives, the FP32 sum, and at most 40 bytes for each element of a chunk that is rounded (parts of 128 elements
    and more)."""
    return 2 * ranks * wire_bytes(numel, wire) + 4 * numel + 40 * min(GRADIENT_CHUNK, ranks * numel)


@dataclass(frozen=True)
class Travel:
    """Bytes of a group's collectives: gathered parameters, and gradients before they are reduced (0: frozen).

    ``stays``: the bytes of the gathered buffer that are never freed, because they hold the master shard itself. ``cast``: the bytes of the
    gradients in the reduce dtype if they arrive in another one, else 0. ``staging``: the user's choice of the bytes of a staging buffer.
    ``ranks``: the ranks of the collectives. ``received``: the bytes of the parts if they are received apart from the gathered buffer (FP8
    codes); they live until the unit waits for them, before the next unit is gathered. ``exchange``: the bytes of an exchange of gradients
    in low precision (:func:`exchange_bytes`), instead of a cast.
    """

    gathered: int
    gradient: int
    stays: int = 0
    cast: int = 0
    staging: int | None = None
    ranks: int = 2
    received: int = 0
    exchange: int = 0

    @property
    def moving(self) -> _Size:
        return _Size(self.gathered, self.stays)

    @property
    def scratch(self) -> list[_Size]:
        """Return the gradient buffers: the one that is filled, and with more than two ranks or in low precision one for the exchange.

        The exchange buffer leaves out the rank's own part if the parameters' buffer does, so that it can reuse its pages.
        """
        if not self.gradient:
            return []
        if self.exchange:
            return [_Size(self.gradient), _Size(self.exchange)]
        exchange = _Size(self.gradient, self.stays if self.gradient == self.gathered else 0)
        return [_Size(self.gradient), exchange][: 1 if self.ranks == 2 else 2]


@dataclass(frozen=True)
class _Size:
    """Size of a buffer. Buffers of equal size and equal resident part can reuse each other's memory."""

    whole: int
    stays: int = 0

    @property
    def nbytes(self) -> int:
        return self.whole - self.stays


Unit = Sequence[Travel]


def host_buffers(units: Sequence[Unit], root: Unit, depths: Sequence[int] = ()) -> tuple[int, int]:
    """Return the peak bytes of gathered parameters, and of gradient and exchange buffers, during a step.

    Args:
        units: the units in order of use, without the root, which stays gathered from forward to backward. A unit comes before those inside
            it.
        depths: for each unit, the number of ``units`` that it is inside of; by default none is inside another one.
    """
    users = Counter(size for unit in [*units, root] for group in unit for size in {group.moving, *group.scratch[:1]} if size.nbytes)
    # The pool keeps one buffer of each size that several groups receive parts in.
    parts = Counter(group.received for unit in [*units, root] for group in unit)
    own = max(sum(group.received for group in unit if parts[group.received] == 1) for unit in [*units, root])
    received = own + sum(size for size, count in parts.items() if count > 1)
    return _gathered(units, root, users, _Order.of(depths or [0] * len(units))) + received, _gradients(units, root, users)


def device_buffers(units: Sequence[Unit], root: Unit, depths: Sequence[int] = ()) -> tuple[int, int]:
    """Return the same bytes on an accelerator, at the peak of their sum.

    Either the computing unit and the next one are gathered, and one gradient buffer is filled. Or one unit is gathered, and one gradient
    buffer is filled while another is reduced: the next unit is gathered into its memory. The next unit is gathered before the gradients of
    the units inside the computing one are reduced.
    """
    gathered = [sum(group.gathered for group in unit) for unit in units]
    trained = [sum(group.gradient for group in unit) for unit in units]
    order = _Order.of(depths or [0] * len(units))
    moments = [(0, 0)]
    for i, earlier in enumerate([*trained[1:], 0][: len(units)]):
        following, early = order.after(i)
        ahead = gathered[following] if following is not None else 0
        parameters = sum(gathered[j] for j in order.around[i])
        moments += [(parameters + ahead, trained[i]), (parameters + ahead * early, trained[i] + earlier)]
    parameters, gradients = max(moments, key=lambda moment: (sum(moment), moment[0]))
    staging, received = (max(of(unit) for unit in [*units, root]) for of in (_staging, _received))
    return sum(group.gathered for group in root) + parameters + received, sum(group.gradient for group in root) + gradients + staging


@dataclass(frozen=True)
class _Order:
    """The order in which forward and backward enter the units.

    ``around``: for each unit, the units that it is inside of, and itself. They are gathered while it computes.
    """

    around: Sequence[Sequence[int]]
    backward: Sequence[int]

    @classmethod
    def of(cls, depths: Sequence[int]) -> _Order:
        around: list[list[int]] = []
        for i, depth in enumerate(depths):
            around.append([*(around[-1][:depth] if depth else ()), i])
        # The last unit comes first, but a unit before those inside it.
        return cls(around, sorted(range(len(around)), key=lambda i: [-j for j in around[i]]))

    def windows(self) -> Iterator[set[int]]:
        """Yield the units that are gathered at a time, one after the other: those that compute, and the next one."""
        for order in (range(len(self.around)), self.backward):
            for i, following in zip_longest(order, order[1:]):
                yield {*self.around[i]} | ({following} if following is not None else set())

    def after(self, i: int) -> tuple[int | None, bool]:
        """Return the unit that backward enters after ``i`` and the units inside it, and whether there are units inside."""
        later = self.backward[self.backward.index(i) + 1 :]
        return next((j for j in later if i not in self.around[j]), None), any(i in self.around[j] for j in later[:1])


def _staging(unit: Unit) -> int:
    """Return the bytes in which a unit's reduction casts gradients, one buffer if they all fit, else two; or exchanges them."""
    cast = sum(group.cast for group in unit)
    each = max((staging_bytes(cast, group.staging) for group in unit), default=0)
    return (cast if cast <= each else 2 * each) + sum(group.exchange for group in unit)


def _received(unit: Unit) -> int:
    return sum(group.received for group in unit)


class _Held:
    """Memory in use and memory kept for reuse, by size."""

    def __init__(self, users: Counter[_Size], always: int) -> None:
        self.users, self.always = users, always
        self.used: Counter[_Size] = Counter()
        self.kept: Counter[_Size] = Counter()
        self.peak = always

    def take(self, sizes: Sequence[_Size]) -> None:
        self.used.update(sizes)
        for size in sizes:
            if self.users[size] >= 2:
                self.kept[size] = max(self.kept[size], self.used[size])
        self.peak = max(self.peak, self.always + self.now)

    def give(self, sizes: Sequence[_Size]) -> None:
        self.used.subtract(sizes)

    @property
    def now(self) -> int:
        return sum(size.nbytes * max(count, self.kept[size]) for size, count in (self.used | self.kept).items())


def _gathered(units: Sequence[Unit], root: Unit, users: Counter[_Size], order: _Order) -> int:
    held = _Held(users, sum(group.moving.nbytes for group in root))
    sizes, now = [[group.moving for group in unit] for unit in units], set[int]()
    for window in order.windows():
        for i in now - window:
            held.give(sizes[i])
        for i in window - now:
            held.take(sizes[i])
        now = window
    return held.peak


def _gradients(units: Sequence[Unit], root: Unit, users: Counter[_Size]) -> int:
    held = _Held(users, sum(group.gradient for group in root))
    for unit in reversed(units):
        scratch = [size for group in unit for size in group.scratch]
        held.take(scratch)
        held.give(scratch)
    return max(held.peak, sum(size.nbytes for group in root for size in group.scratch) + held.now)
