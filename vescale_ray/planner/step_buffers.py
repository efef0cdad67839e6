"""The buffers that come and go in a step, followed through forward and backward.

On an accelerator torch's allocator hands on what is freed (:func:`device_buffers`). On the CPU (:func:`host_buffers`), what the
pool of ``vescale_ray/fsdp/memory.py`` does in host memory: a buffer of a size that several groups use is kept when it is released, for
the next one of that size, until the pass needs no further unit; one of a size that a single group uses is freed. The next unit is
gathered while one computes. A gradient buffer is filled and reduced before the next one is opened, the root's is open from first to last,
and whole when its last gradient has come; with more than two ranks the exchange that stands for gloo's missing reduce-scatter needs as
much again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

HOST_MAPPED_BYTES = 1 << 18
"""Buffers in host memory are address ranges of their own from this size on; a rank's shard may live in such a one."""


@dataclass(frozen=True)
class Travel:
    """A group's bytes on the way: gathered parameters, and gradients before they are reduced (0: frozen).

    ``stays``: of what is gathered, the bytes that don't come and go, since the master shard itself is this part of the buffer.
    """

    gathered: int
    gradient: int
    stays: int = 0

    @property
    def moving(self) -> _Size:
        return _Size(self.gathered, self.stays)

    def scratch(self, ranks: int) -> list[_Size]:
        """Of the gradients: they are filled into one buffer; with more than two ranks the exchange of parts takes another, which
        leaves out the own part where the buffer of the parameters does, so that it can take over its pages."""
        if not self.gradient:
            return []
        exchange = _Size(self.gradient, self.stays if self.gradient == self.gathered else 0)
        return [_Size(self.gradient), exchange][: 1 if ranks == 2 else 2]


@dataclass(frozen=True)
class _Size:
    """Buffers that can take over each other's memory: as long, and with the same part left out."""

    whole: int
    stays: int = 0

    @property
    def nbytes(self) -> int:
        return self.whole - self.stays


Unit = Sequence[Travel]


def host_buffers(units: Sequence[Unit], root: Unit, ranks: int) -> tuple[int, int]:
    """The most bytes of gathered parameters, and of gradient and exchange buffers, at any time of a step.

    Args:
        units: in order of use, without the root, which stays gathered from forward to backward.
    """
    users = Counter(
        size for unit in [*units, root] for group in unit for size in {group.moving, *group.scratch(ranks)[:1]} if size.nbytes
    )
    return _gathered(units, root, users), _gradients(units, root, users, ranks)


def device_buffers(units: Sequence[Unit], root: Unit) -> tuple[int, int]:
    """The same on an accelerator: the unit that computes and the next one are gathered; one gradient buffer is filled while another
    is reduced."""
    gathered = [sum(group.gathered for group in unit) for unit in units]
    trained = sorted(sum(group.gradient for group in unit) for unit in units)
    most = max((sum(gathered[i : i + 2]) for i in range(len(gathered))), default=0)
    return sum(group.gathered for group in root) + most, sum(group.gradient for group in root) + sum(trained[-2:])


class _Held:
    """Memory in use and kept, by size."""

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


def _gathered(units: Sequence[Unit], root: Unit, users: Counter[_Size]) -> int:
    held = _Held(users, sum(group.moving.nbytes for group in root))
    for order in (units, units[::-1]):
        sizes = [[group.moving for group in unit] for unit in order]
        for index, current in enumerate(sizes):
            if not index:
                held.take(current)
            if index + 1 < len(sizes):
                held.take(sizes[index + 1])
            held.give(current)
    return held.peak


def _gradients(units: Sequence[Unit], root: Unit, users: Counter[_Size], ranks: int) -> int:
    held = _Held(users, sum(group.gradient for group in root))
    for unit in reversed(units):
        for group in unit:
            held.take(group.scratch(ranks))
            held.give(group.scratch(ranks))
    return max(held.peak, sum(size.nbytes for group in root for size in group.scratch(ranks)) + held.now)
