"""Reshard: fill a new trainer's shards from the workers' memory or from a checkpoint, and give shards to a checkpoint.

From memory, every participant announces the shards it holds (its own and copies) and the shards it wants. All compute the same plan, by
interval arithmetic in one index space. Each rank then receives only the elements that it does not hold itself. The same code serves a
shrink, a growth, a replacement and a death; only the holders differ. Each transfer carries a checksum.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from vescale_ray.geometry import Extent, FlatSpace, Route, routes
from vescale_ray.workers.network.process_groups import GroupFailed, all_gather_bytes, collectives, messages
from vescale_ray.workers.resharding.shards import (
    Piece,
    Shards,
    Strip,
    aligned,
    check_scalars,
    dtype_of,
    export_shards,
    import_scalars,
    stored_pieces,
    strips_of,
)

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Checkpoint, Vote
    from vescale_ray.workers.trainer import Trainer

_DIGEST_BYTES = 16
"""8 bytes of xxh3 and 8 bytes of padding, so that the message after it stays aligned."""

ROUND_BYTES = 256 << 20
"""Most bytes that a rank sends, or receives, in one round. It bounds the extra memory of a move for any model size."""

DIRECT_BYTES = 64 << 10
"""Least size, in bytes, of a move with a message of its own. A message costs as much as packing and unpacking about this many bytes."""


class ReshardError(ValueError):
    """The workers' shards cannot fill the new layout: elements are missing, or belong to another state or model."""


class TransferCorrupt(GroupFailed):
    """The received bytes differ from those sent. The attempt ends, as after a lost peer."""


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


@dataclass(frozen=True)
class ReshardReport:
    """Result of a move; the same on every rank except ``seconds``.

    Attributes:
        words: each participant's message, by its rank in the move's group.
    """

    generation: int
    step: int
    moved_bytes: int
    lower_bound: int
    total_bytes: int
    seconds: float
    words: tuple[bytes, ...] = ()


def plan(sources: Sequence[Sequence[Strip]], wanted: Sequence[Sequence[Strip]], *, round_bytes: int = ROUND_BYTES) -> ReshardPlan:
    """Plan the move from ``sources[i]``, the shards of participant i, to ``wanted[j]``, the shards that participant j needs. Pure.

    The plan prefers a rank's own memory, then the lowest rank that holds the elements.

    Raises:
        ReshardError: the wanted strips do not tile a tensor exactly, an element has no holder, or a tensor's shape or dtype differs. The
            message names the tensor.
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


def execute(
    held: Sequence[Shards], trainer: Trainer | None, group: Any = None, *, word: bytes = b"", round_bytes: int = ROUND_BYTES
) -> ReshardReport:
    """Fill ``trainer`` from all shards that the participants hold of one state. Collective.

    A rank returns once it has its shards and has sent those that others want. The others may not have received theirs yet.

    Args:
        held: this worker's shards of the state to resume (``snapshots.shards(..)``); empty on a joiner.
        trainer: the new generation's trainer; None on a worker that only gives.
        group: None for the default group, or a transfer group, whose first ranks are the new generation's, in order.
        word: extra message to all participants, which saves them another collective.
        round_bytes: see :data:`ROUND_BYTES`.

    Raises:
        ReshardError: on every rank alike, before anything is written.
        TransferCorrupt: a checksum does not match.
        GroupFailed: a peer was lost during the move. ``held`` is unchanged; ``trainer`` must not be used.
    """
    begin = time.perf_counter()
    pieces = _filled(held)
    wants = _filled([export_shards(trainer)]) if trainer is not None else []
    with collectives("move shards"):
        # The word is a separate line, since it may be long and only its receiver may need to parse it.
        told = [text.partition(b"\n") for text in all_gather_bytes(_describe(held, pieces, wants) + b"\n" + word, group)]
        everyone = [json.loads(text) for text, _, _ in told]
        state = _agree(everyone)
        sources = [[Strip.from_json(row) for row in one["have"]] for one in everyone]
        wanted = [[Strip.from_json(row) for row in one["want"]] for one in everyone]
        planned = plan(sources, wanted, round_bytes=round_bytes)
        me = _my_index(group)

        def copy_own() -> None:
            for move in planned.local:
                if move.dst == me:
                    source = _slice(pieces, move.src_piece, move.src_offset, move.numel)
                    _slice(wants, move.dst_piece, move.dst_offset, move.numel).copy_(source)

        if not planned.rounds:
            copy_own()
        idle = 0
        for turn, moves in enumerate(planned.rounds):
            # A rank without moves in the last rounds arrives early, so the wait is the timeout of a collective for each of those rounds.
            _exchange(moves, me, len(everyone), pieces, wants, group, copy_own if turn == 0 else lambda: None, rounds=1 + idle)
            idle = 0 if any(me in (move.src, move.dst) for move in moves) else idle + 1
            if trainer is not None:
                trainer.beat()
    if trainer is not None:
        import_scalars(trainer, next(one["scalars"] for one in everyone if one["scalars"] is not None))
    total = sum((strip.end - strip.start) * strip.itemsize for strips in wanted for strip in strips)
    seconds, words = time.perf_counter() - begin, tuple(word for _, _, word in told)
    return ReshardReport(state[0], state[2], planned.moved_bytes, planned.lower_bound, total, seconds, words)


def restore_from_checkpoint(trainer: Trainer, checkpoint: Checkpoint) -> int:
    """Fill ``trainer`` from a checkpoint of any world size and layout, and return the number of bytes read. Reads only this rank's ranges.

    Not a collective. It may take minutes, so each piece read counts as a heartbeat.

    Raises:
        CheckpointMismatch: the checkpoint is of another model or optimizer. Raised before anything is changed.
        CheckpointCorrupt: names the object, block and tensors. The trainer must not be used afterwards.
        ValueError: the global batch or the optimizer states' blocks differ, or no training run saved the checkpoint. Raised before anything
            is changed.
    """
    pieces = export_shards(trainer).pieces
    checkpoint.require(
        {(p.name, p.kind): (p.shape, p.data.dtype) for p in pieces},
        among=[(name, kind) for name, tensor in checkpoint.tensors.items() for kind in tensor.kinds],
    )
    scalars = checkpoint.aux(0)
    if not isinstance(scalars, Mapping) or not {"step", "consumed", "optimizer"} <= set(scalars):
        raise ValueError(f"{checkpoint} holds no training state (step, consumed samples, optimizer): no training run saved it")
    check_scalars(trainer, scalars)
    read = checkpoint.read_ranges([(p.name, p.kind, p.start, p.end, p.data) for p in pieces], progress=lambda: trainer.beat())
    import_scalars(trainer, scalars)
    return read.planned


def write_checkpoint_shard(shards: Shards, root: Any, attempt: str, *, epoch: int | None = None) -> Vote:
    """Write this rank's object of a checkpoint and return its vote. Not a collective: the controller commits all votes.

    Args:
        shards: live shards (:func:`export_shards`) or a held copy; they must not change until this returns.
        root: checkpoint folder, or a store.
        attempt: ``checkpoint.new_attempt()``, the same on all ranks of this save.
        epoch: number that orders and fences writers; the generation by default.

    Raises:
        SaveFailed: the storage failed; earlier checkpoints are untouched.
    """
    from vescale_ray.checkpoint import write_shard

    aux = stored_aux(shards.rank, shards.scalars)
    epoch = shards.generation if epoch is None else epoch
    return write_shard(root, attempt, shards.rank, stored_pieces(shards), aux=aux, step=shards.step, epoch=epoch, world=shards.world)


def stored_aux(rank: int, scalars: Mapping[str, Any]) -> dict[str, Any] | None:
    """A rank's auxiliary object of a checkpoint. The scalars are the same on all ranks, so only rank 0 writes them."""
    return dict(scalars) if rank == 0 else None


# ------------------------------------------------------------------------------------------------------------------- planning


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
    """The strips split so that each has one kind."""
    return [[strip._replace(kinds=(kind,)) for strip in strips for kind in strip.kinds] for strips in participants]


def _check_tiling(wanted: Sequence[Sequence[Strip]]) -> dict[_Key, tuple[tuple[int, ...], _Kinds]]:
    """Shape and dtypes of each tensor, after a check that its wanted strips cover it without gap or overlap."""
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
        for start, end in sorted(i for i in intervals if i[1] > i[0]):
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
    """The moves of a route, one for each kind."""
    src, dst = held.strip_at(route.src_offset), wants.strip_at(route.dst_offset)
    src_offset, dst_offset = route.src_offset - held.starts[src], route.dst_offset - wants.starts[dst]
    for k, (_, dtype) in enumerate(wants.strips[dst].kinds):
        yield Move(route.src, route.dst, held.first[src] + k, src_offset, wants.first[dst] + k, dst_offset, route.length, dtype)


def _side_by_side(moves: list[Move]) -> list[Move]:
    """The moves ordered by the bytes that their receiver got before, so that all receivers progress together. Routes come receiver by
    receiver."""
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
    """The move split into parts of at most ``limit`` bytes."""
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
    """Bytes that their new owner does not hold, by subtraction of intervals rather than a count of routes."""
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
    """A sentence on the first wanted tensor that the sources do not cover."""
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


# ------------------------------------------------------------------------------------------------------------------ execution


def _filled(shards: Sequence[Shards]) -> list[Piece]:
    """The pieces that are not empty. A rank holds few of a unit's tensors, and fewer the more ranks there are."""
    return [piece for one in shards for piece in one.pieces if piece.end > piece.start]


def _describe(held: Sequence[Shards], pieces: Sequence[Piece], wants: Sequence[Piece]) -> bytes:
    states = [[s.generation, s.world, s.step] for s in held]
    return json.dumps(
        {
            "states": states,
            "have": strips_of(pieces),
            "want": strips_of(wants),
            "scalars": dict(held[0].scalars) if held else None,
        }
    ).encode()


def _agree(everyone: Sequence[Mapping[str, Any]]) -> tuple[int, int, int]:
    """The one state (generation, world, step) that all shards belong to."""
    states = {tuple(state) for one in everyone for state in one["states"]}
    if not states:
        raise ReshardError("no worker holds any shard: initialize, or restore a checkpoint")
    if len(states) > 1:
        raise ReshardError(f"the workers offer different states (generation, world, step): {sorted(states)}; all must offer the same one")
    state = states.pop()
    return int(state[0]), int(state[1]), int(state[2])


def _my_index(group: Any) -> int:
    from vescale_ray.compat.distributed import get_default_group

    return int((get_default_group() if group is None else group).rank())


def _slice(pieces: Sequence[Piece], index: int, offset: int, numel: int) -> Tensor:
    return pieces[index].data[offset : offset + numel]


def _exchange(
    moves: Sequence[Move],
    me: int,
    world: int,
    pieces: Sequence[Piece],
    wants: Sequence[Piece],
    group: Any,
    meanwhile: Callable[[], None],
    rounds: int,
) -> None:
    """Run one round. A large move is a message of its own, from memory to memory; small moves share a message, which ends with the
    checksum. A peer may be up to ``rounds`` rounds late."""
    posted = messages(group)
    arriving: dict[int, list[Move]] = {}
    leaving: dict[int, list[Move]] = {}
    for move in moves:
        if move.dst == me:
            arriving.setdefault(move.src, []).append(move)
        elif move.src == me:
            leaving.setdefault(move.dst, []).append(move)
    peers = [rank for rank in range(world) if rank in arriving or rank in leaving]
    incoming = [_Batch(arriving.get(rank, ())) for rank in peers]
    outgoing = [_Batch(leaving.get(rank, ())) for rank in peers]
    for rank, batch in zip(peers, incoming, strict=True):
        for part in batch.opened([_slice(wants, move.dst_piece, move.dst_offset, move.numel) for move in batch.large]):
            posted.receive(part, rank)
    for rank, batch in zip(peers, outgoing, strict=True):
        for part in batch.filled(lambda move: _slice(pieces, move.src_piece, move.src_offset, move.numel)):
            posted.send(part, rank)
    meanwhile()
    posted.wait(rounds)
    for rank, batch in zip(peers, incoming, strict=True):
        if not batch.is_whole():
            raise TransferCorrupt(
                f"{batch.nbytes} bytes from participant {rank} to {me} arrived with a wrong checksum: the move must be repeated"
            )
        batch.deliver(lambda move: _slice(wants, move.dst_piece, move.dst_offset, move.numel))


class _Batch:
    """Moves from one rank to another in one round.

    Attributes:
        large: moves with a message of their own, directly from and to shards in host memory.
        small: moves that share the last message, each aligned, before the checksum of everything.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        self.large = [move for move in moves if move.nbytes >= DIRECT_BYTES]
        self.small = [move for move in moves if move.nbytes < DIRECT_BYTES]
        self.nbytes = sum(move.nbytes for move in moves)
        self._parts: list[Tensor] = []

    def filled(self, of: Callable[[Move], Tensor]) -> Iterator[Tensor]:
        """The messages, as bytes, with the values ``of`` the moves. Large messages are sent before the checksum is complete."""
        if not self.nbytes:
            return
        for move in self.large:
            self._parts.append(of(move).cpu().view(torch.uint8))
            yield self._parts[-1]
        last = self._last()
        for move, view in zip(self.small, _views(last, self.small), strict=True):
            view.copy_(of(move))
        last[-_DIGEST_BYTES : -_DIGEST_BYTES + 8] = torch.frombuffer(bytearray(self._digest()), dtype=torch.uint8)
        yield last

    def opened(self, targets: Sequence[Tensor]) -> Iterator[Tensor]:
        """Memory for the messages, as bytes. A target in host memory receives its large message directly."""
        if not self.nbytes:
            return
        self._parts = [(t if t.device.type == "cpu" else torch.empty_like(t, device="cpu")).view(torch.uint8) for t in targets]
        yield from self._parts
        yield self._last()

    def is_whole(self) -> bool:
        """Return whether the received bytes match the checksum."""
        return not self.nbytes or bytes(self._parts[-1][-_DIGEST_BYTES : -_DIGEST_BYTES + 8].numpy()) == self._digest()

    def deliver(self, to: Callable[[Move], Tensor]) -> None:
        """Copy the values to their targets, unless they were received there."""
        if not self.nbytes:
            return
        for move, part in zip(self.large, self._parts, strict=False):
            target = to(move)
            if target.device.type != "cpu":
                target.copy_(part.view(dtype_of(move.dtype)))
        for move, view in zip(self.small, _views(self._parts[-1], self.small), strict=True):
            to(move).copy_(view)

    def _last(self) -> Tensor:
        # Zeroed, since the checksum covers the gaps between values.
        self._parts.append(torch.zeros(sum(aligned(move.nbytes) for move in self.small) + _DIGEST_BYTES, dtype=torch.uint8))
        return self._parts[-1]

    def _digest(self) -> bytes:
        count = xxhash.xxh3_64()
        for part in self._parts[:-1]:
            count.update(part.numpy().data)
        count.update(self._parts[-1][:-_DIGEST_BYTES].numpy().data)
        return count.digest()


def _views(message: Tensor, batch: Sequence[Move]) -> list[Tensor]:
    views = []
    position = 0
    for move in batch:
        views.append(message[position : position + move.nbytes].view(dtype_of(move.dtype)))
        position += aligned(move.nbytes)
    return views
