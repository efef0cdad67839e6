"""Reshard: fill a new trainer's shards from the workers' memory or from a checkpoint.

From memory, every participant announces the shards it holds (its own and copies) and the shards it wants. All compute the same plan
(:mod:`vescale_ray.workers.resharding.reshard_plan`) and carry out their part of it. Each transfer carries a checksum.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from vescale_ray.workers.network.process_groups import GroupFailed, all_gather_bytes, collectives, messages
from vescale_ray.workers.resharding.reshard_plan import ROUND_BYTES, Move, ReshardError, plan
from vescale_ray.workers.resharding.shards import (
    Piece,
    Shards,
    Strip,
    aligned,
    check_scalars,
    dtype_of,
    export_shards,
    import_scalars,
    strips_of,
)

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Checkpoint
    from vescale_ray.workers.trainer import Trainer

_DIGEST_BYTES = 16
"""8 bytes of xxh3 and 8 bytes of padding, so that the message after it stays aligned."""

DIRECT_BYTES = 64 << 10
"""Smallest size, in bytes, of a move with a message of its own. A message costs as much as packing and unpacking about this many bytes."""


class TransferCorrupt(GroupFailed):
    """The received bytes differ from those sent. The attempt ends, as after a lost peer."""


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
    seconds: float
    words: tuple[bytes, ...] = ()


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
        round_bytes: see :data:`vescale_ray.workers.resharding.reshard_plan.ROUND_BYTES`.

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
    seconds, words = time.perf_counter() - begin, tuple(word for _, _, word in told)
    return ReshardReport(state[0], state[2], planned.moved_bytes, planned.lower_bound, seconds, words)


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


def _filled(shards: Sequence[Shards]) -> list[Piece]:
    """Return the pieces that are not empty. A rank holds few of a unit's tensors, and fewer the more ranks there are."""
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
    """Return the one state (generation, world, step) that all shards belong to."""
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
        """Yield the messages, as bytes, with the values ``of`` the moves. Large messages are sent before the checksum is complete."""
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
        """Copy the values to their targets. Values that were received in place need no copy."""
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
