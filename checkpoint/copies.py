"""Elements that several ranks hold, and write, though none of them could know it: what tensor parallelism leaves alone, under FSDP, is a
tensor on a mesh that says nothing of the meshes beside it.

The commit names each such element once. That the copies are copies is checked, by a digest that each rank makes of its pieces as it writes
them: two tensors that go by one name (of a pipeline's stages, of experts) would otherwise lose one of them and never tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from .layout import PlacedPiece, dtype_of
from .shard import Vote
from .store import ObjectStore

Held = tuple[int, int, int, int]
"""Start, end, rank, byte of its object: elements of one kind of one tensor."""
_READ_BYTES = 1 << 20


def each_once(pieces: Iterable[Held], itemsize: int) -> list[Held]:
    """Of pieces that may overlap, each element from one of them; what the others wrote of it stays unused in their objects."""
    taken: list[Held] = []
    position = 0
    for start, end, rank, offset in sorted(pieces, key=lambda piece: (piece[0], -piece[1], piece[2])):
        first = max(start, position)
        if first < end:
            taken.append((first, end, rank, offset + (first - start) * itemsize))
            position = end
    return taken


def contradiction(store: ObjectStore, votes: Sequence[Vote]) -> str | None:
    """Which tensor the ranks hold different copies of, if any. Copies of the same interval are compared by their digests; where the
    ranks have cut a tensor differently, what is common to two pieces is read.

    Raises:
        OSError: it can't be read.
    """
    copies: dict[tuple[str, str], list[tuple[PlacedPiece, Vote]]] = defaultdict(list)
    for vote in sorted(votes, key=lambda v: v.rank):
        for piece in vote.pieces:
            if piece.copied and piece.end > piece.start:
                copies[piece.name, piece.kind].append((piece, vote))
    for (name, kind), held in copies.items():
        held.sort(key=lambda one: (one[0].start, one[0].end, one[1].rank))
        distinct: list[tuple[PlacedPiece, Vote]] = []
        for piece, vote in held:
            same = bool(distinct) and (distinct[-1][0].start, distinct[-1][0].end) == (piece.start, piece.end)
            if not same:
                distinct.append((piece, vote))
            elif distinct[-1][0].digest != piece.digest:
                return _differ(name, kind, piece.start, piece.end, distinct[-1][1], vote)
        for index, (piece, vote) in enumerate(distinct):
            for other, theirs in distinct[index + 1 :]:
                if other.start >= piece.end:
                    break
                end = min(piece.end, other.end)
                if not _equal(store, piece, vote, other, theirs, end):
                    return _differ(name, kind, other.start, end, vote, theirs)
    return None


def _differ(name: str, kind: str, start: int, end: int, one: Vote, other: Vote) -> str:
    return (
        f"{kind!r} of tensor {name!r}: ranks {one.rank} and {other.rank} both hold elements [{start}, {end}), and they differ; "
        "if these are two tensors, give them names of their own; if they are one, make them equal (broadcast)"
    )


def _equal(store: ObjectStore, piece: PlacedPiece, vote: Vote, other: PlacedPiece, theirs: Vote, end: int) -> bool:
    """Whether two pieces agree from where ``other``, the later one, begins, up to ``end``."""
    itemsize = dtype_of(piece.dtype).itemsize
    size = (end - other.start) * itemsize
    left, right = (memoryview(bytearray(min(size, _READ_BYTES))) for _ in range(2))
    with store.open_read(vote.object.key) as first, store.open_read(theirs.object.key) as second:
        for position in range(0, size, _READ_BYTES):
            count = min(_READ_BYTES, size - position)
            ours = first.read_into(piece.offset + (other.start - piece.start) * itemsize + position, left[:count])
            others = second.read_into(other.offset + position, right[:count])
            if (ours, others) != (count, count) or left[:count] != right[:count]:
                return False
    return True
