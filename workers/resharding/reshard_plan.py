"""Plan which elements move between ranks, from the shards that each holds and the shards that each wants. Pure; no communication.

Every rank computes the same plan, by interval arithmetic in one index space. A rank receives only elements that it does not hold itself.
The same code serves a shrink, a growth, a replacement and a death; only the holders differ.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from vescale_ray.geometry import Extent, FlatSpace, Route, routes
from vescale_ray.workers.resharding.shards import Strip, aligned, dtype_of

ROUND_BYTES = 256 << 20
"""Maximum number of bytes that a rank sends, or receives, in one round. It bounds the extra memory of a move for any model size."""


class ReshardError(ValueError):
    """The workers' shards cannot fill the new layout: elements are missing, or belong to another state or model."""


class Move(NamedTuple):
    """Transfer of ``numel`` elements of one tensor from ``src``'s piece to ``dst``'s. Pieces are given by index, offsets in elements."""

    src: int
    dst: int
    src_piece: int
    src_offset: int
    dst_piece: int
    dst_offset: int
    numel: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.numel * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class ReshardPlan:
    """Moves that fill every wanted span exactly once, in the same order on every rank.

    Attributes:
        rounds: moves between ranks, cut so that no rank sends or receives more than a bound in one round.
        local: copies within one rank.
        moved_bytes: bytes that go from one rank to another.
        lower_bound: bytes wanted by ranks that hold no copy of them; no plan can move fewer.
    """

    rounds: tuple[tuple[Move, ...], ...]
    local: tuple[Move, ...]
    moved_bytes: int
    lower_bound: int


def plan(sources: Sequence[Sequence[Strip]], wanted: Sequence[Sequence[Strip]], *, round_bytes: int = ROUND_BYTES) -> ReshardPlan:
    """Plan the move from ``sources[i]``, the shards of participant i, to ``wanted[j]``, the shards that participant j needs. Pure.

    The plan prefers a rank's own memory, then the lowest rank that holds the elements.

    Raises:
        ReshardError: the wanted strips do not tile a tensor exactly (once, or once for each replica), an element has no holder, or a
            tensor's shape or dtype differs. The message names the tensor.
    """
    if not _alike((*sources, *wanted)):
        sources, wanted = _apart(sources), _apart(wanted)
    tensors = _check_tiling(wanted)
    space = FlatSpace([(_told(key), prod(shape)) for key, (shape, _) in sorted(tensors.items())])
    for strips in sources:
        for strip in strips:
            key = _key(strip)
            expected = tensors.get(key)
            if expected is None:
                raise ReshardError(f"the held state has {_told(key)}, the new one does not: the model or optimizer has changed")
            if expected != (strip.shape, strip.kinds):
                here, there = _form(strip.shape, strip.kinds), _form(*expected)
                raise ReshardError(f"{_told(key)} is held as {here}, wanted as {there}: the model or optimizer has changed")
    held = [_Owned(strips, space) for strips in sources]
    wants = [_Owned(strips, space) for strips in wanted]
    held_extents, want_extents = [one.extents for one in held], [one.extents for one in wants]
    try:
        found = routes(held_extents, want_extents)
    except ValueError:
        raise ReshardError(_missing(sources, wanted)) from None
    local: list[Move] = []
    cross: list[Move] = []
    for route in found:
        (local if route.src == route.dst else cross).extend(_moves(route, held[route.src], wants[route.dst]))
    moved = sum(move.nbytes for move in cross)
    return ReshardPlan(_rounds(_side_by_side(cross), round_bytes), tuple(local), moved, _lower_bound(held_extents, want_extents, wanted))


_Key = tuple[str, tuple[str, ...]]
_Kinds = tuple[tuple[str, str], ...]


def _key(strip: Strip) -> _Key:
    return strip.name, tuple(kind for kind, _ in strip.kinds)


def _told(key: _Key) -> str:
    return f"{', '.join(key[1])} of {key[0]}"


def _form(shape: tuple[int, ...], kinds: _Kinds) -> str:
    return f"{shape} {', '.join(dtype for _, dtype in kinds)}"


def _alike(participants: Sequence[Sequence[Strip]]) -> bool:
    """Return whether every strip of a tensor has the same kinds, so that the kinds can be planned together."""
    known: dict[str, _Kinds] = {}
    return all(known.setdefault(strip.name, strip.kinds) == strip.kinds for strips in participants for strip in strips)


def _apart(participants: Sequence[Sequence[Strip]]) -> list[list[Strip]]:
    """Split the strips so that each has one kind."""
    return [[strip._replace(kinds=(kind,)) for strip in strips for kind in strip.kinds] for strips in participants]


def _check_tiling(wanted: Sequence[Sequence[Strip]]) -> dict[_Key, tuple[tuple[int, ...], _Kinds]]:
    """Return the shape and dtypes of each tensor, after a check that its wanted strips cover it without gap or overlap. Replicas want equal
    strips, which count once."""
    tensors: dict[_Key, tuple[tuple[int, ...], _Kinds]] = {}
    found: dict[_Key, list[tuple[int, int]]] = {}
    for strips in wanted:
        for strip in strips:
            key, form = _key(strip), (strip.shape, strip.kinds)
            if tensors.setdefault(key, form) != form:
                raise ReshardError(f"{_told(key)} is wanted as {_form(*tensors[key])} and as {_form(*form)}")
            found.setdefault(key, []).append((strip.start, strip.end))
    for key, intervals in found.items():
        position, numel = 0, prod(tensors[key][0])
        for start, end in sorted({i for i in intervals if i[1] > i[0]}):
            if start != position:
                raise ReshardError(f"{_told(key)}: the new layout leaves out or repeats elements around {min(start, position)}")
            position = end
        if position != numel:
            raise ReshardError(f"{_told(key)}: the new layout ends at element {position} of {numel}")
    return tensors


class _Owned:
    """A participant's strips as extents of the index space. Its own offsets run through its strips, one after another.

    Attributes:
        starts: own offset of each strip.
        first: piece index of each strip's first span.
    """

    def __init__(self, strips: Sequence[Strip], space: FlatSpace) -> None:
        self.strips = strips
        self.extents: list[Extent] = []
        self.starts: list[int] = []
        self.first: list[int] = []
        position = piece = 0
        for strip in strips:
            base = space.base(_told(_key(strip)))
            self.extents.append(Extent(base + strip.start, base + strip.end, position))
            self.starts.append(position)
            self.first.append(piece)
            position += strip.end - strip.start
            piece += len(strip.kinds)

    def strip_at(self, offset: int) -> int:
        # A route stays within one extent on each side, so it belongs to one strip. An empty strip shares its start with the next one;
        # bisect_right skips it.
        return bisect_right(self.starts, offset) - 1


def _moves(route: Route, held: _Owned, wants: _Owned) -> Iterator[Move]:
    """Yield the moves of a route, one for each kind."""
    src, dst = held.strip_at(route.src_offset), wants.strip_at(route.dst_offset)
    src_offset, dst_offset = route.src_offset - held.starts[src], route.dst_offset - wants.starts[dst]
    for k, (_, dtype) in enumerate(wants.strips[dst].kinds):
        yield Move(route.src, route.dst, held.first[src] + k, src_offset, wants.first[dst] + k, dst_offset, route.length, dtype)


def _side_by_side(moves: list[Move]) -> list[Move]:
    """Return the moves ordered by the bytes that their receiver got before, so that all receivers progress together. Routes come receiver
    by receiver."""
    got: dict[int, int] = {}
    keyed = []
    for index, move in enumerate(moves):
        before = got.get(move.dst, 0)
        got[move.dst] = before + aligned(move.nbytes)
        keyed.append((before, index))
    return [moves[index] for _, index in sorted(keyed)]


def _rounds(moves: list[Move], limit: int) -> tuple[tuple[Move, ...], ...]:
    """Put each move in the first round in which its sender and its receiver have room.

    If rounds followed the order of the moves alone, ranks would wait for each other in turn: with 64 ranks, 900 rounds instead of 70.
    """
    rounds: list[list[Move]] = []
    sent: list[dict[int, int]] = []
    got: list[dict[int, int]] = []
    first: dict[tuple[bool, int], int] = {}  # the first round in which this sender or receiver is not almost full
    full = limit - limit // 16
    for whole in moves:
        for move in _cut(whole, limit):
            size = aligned(move.nbytes)
            sender, receiver = (True, move.src), (False, move.dst)
            turn = max(first.get(sender, 0), first.get(receiver, 0))
            while turn < len(rounds) and max(sent[turn].get(move.src, 0), got[turn].get(move.dst, 0)) + size > limit:
                turn += 1
            if turn == len(rounds):
                rounds.append([])
                sent.append({})
                got.append({})
            rounds[turn].append(move)
            for side, rank, taken in ((sender, move.src, sent), (receiver, move.dst, got)):
                taken[turn][rank] = taken[turn].get(rank, 0) + size
                at = first.get(side, 0)
                while at < len(rounds) and taken[at].get(rank, 0) >= full:
                    at += 1
                first[side] = at
    return tuple(tuple(moves) for moves in rounds)


def _cut(move: Move, limit: int) -> list[Move]:
    """Return the move split into parts of at most ``limit`` bytes."""
    step = max(1, limit // dtype_of(move.dtype).itemsize)
    if move.numel <= step:
        return [move]
    return [
        Move(
            move.src,
            move.dst,
            move.src_piece,
            move.src_offset + k,
            move.dst_piece,
            move.dst_offset + k,
            min(step, move.numel - k),
            move.dtype,
        )
        for k in range(0, move.numel, step)
    ]


def _lower_bound(held: list[list[Extent]], want: list[list[Extent]], wanted: Sequence[Sequence[Strip]]) -> int:
    """Return the bytes that their new owner does not hold, by subtraction of intervals rather than a count of routes."""
    total = 0
    for rank, extents in enumerate(want):
        own = sorted((e.start, e.end) for e in held[rank] if e.end > e.start) if rank < len(held) else []
        starts = [start for start, _ in own]
        for extent, strip in zip(extents, wanted[rank], strict=True):
            missing, position = 0, extent.start
            k = max(0, bisect_right(starts, position) - 1)
            while position < extent.end and k < len(own):
                start, end = own[k]
                if start >= extent.end:
                    break
                missing += max(0, start - position)
                position = max(position, end)
                k += 1
            missing += max(0, extent.end - position)
            total += missing * strip.itemsize
    return total


def _missing(sources: Sequence[Sequence[Strip]], wanted: Sequence[Sequence[Strip]]) -> str:
    """Return a sentence about the first wanted tensor that the sources do not cover."""
    for participant in wanted:
        for want in participant:
            position = want.start
            for start, end in sorted((s.start, s.end) for ss in sources for s in ss if _key(s) == _key(want)):
                if start <= position:
                    position = max(position, end)
            if position < want.end:
                return (
                    f"{_told(_key(want))}: element {position} of {prod(want.shape)} is held by no worker; "
                    "resume from a state that choose_resume returns, or from a checkpoint"
                )
    return "the held shards do not cover the wanted ones"
