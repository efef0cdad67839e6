"""An independent check of layouts and a brute-force search. Neither uses code of the planner."""

from __future__ import annotations

from collections.abc import Sequence


def check(
    sizes: Sequence[int],
    blocks: Sequence[int],
    offsets: Sequence[int],
    num_shards: int,
    shard: int,
    *,
    quantum: int,
    start: int,
    matrices: Sequence[int] | None = None,
) -> None:
    """Check every boundary of every tensor of a layout.

    Tensors are contiguous, disjoint, and inside the buffer; no block is cut; starts and shards are aligned. Blocks begin anew in each
    of a tensor's ``matrices`` (elements of each).
    """
    assert shard % quantum == 0, f"a shard of {shard} is not a multiple of {quantum}"
    taken = []
    for size, block, offset, matrix in zip(sizes, blocks, offsets, matrices or sizes, strict=True):
        if not size:
            continue
        assert offset >= 0 and offset % start == 0, f"a tensor starts at {offset}, not a multiple of {start}"
        assert offset + size <= num_shards * shard, f"a tensor ends at {offset + size} of {num_shards * shard}"
        taken.append((offset, offset + size))
        boundary = -(-offset // shard) * shard
        while boundary < offset + size:
            assert (boundary - offset) % matrix % block == 0, f"the boundary at {boundary} cuts a block of {block} of a tensor at {offset}"
            boundary += shard
    taken.sort()
    for (_, end), (begin, _) in zip(taken, taken[1:], strict=False):
        assert end <= begin, f"tensors overlap at {begin}"


def smallest_shard(
    sizes: Sequence[int], blocks: Sequence[int], num_shards: int, *, quantum: int, start: int, matrices: Sequence[int] | None = None
) -> int:
    """The smallest shard over all orders and all offsets of all tensors.

    For each shard size and each subset of the tensors, a bit set holds the positions at which the subset can end. Any other tensor may
    follow at any valid offset. No order or offset is assumed to be good.
    """
    tensors = [(size, block, matrix) for size, block, matrix in zip(sizes, blocks, matrices or sizes, strict=True) if size]
    if not tensors:
        return 0
    shard = quantum
    while not _some_layout(tensors, num_shards, shard, start):
        shard += quantum
    return shard


def _some_layout(tensors: list[tuple[int, int, int]], num_shards: int, shard: int, start: int) -> bool:
    limit = num_shards * shard
    if sum(size for size, _, _ in tensors) > limit:
        return False
    slots = limit // start
    everywhere = (1 << (slots + 1)) - 1
    starts = []
    for size, block, matrix in tensors:
        bits = 0
        for slot in range(slots):
            offset = slot * start
            if offset + size > limit:
                break
            inside = range((offset // shard + 1) * shard, offset + size, shard)
            if all((boundary - offset) % matrix % block == 0 for boundary in inside):
                bits |= 1 << slot
        if not bits:
            return False
        starts.append(bits)
    ends = {0: 1}
    for subset in range(1, 1 << len(tensors)):
        reached = 0
        for k, (size, _, _) in enumerate(tensors):
            before = ends.get(subset & ~(1 << k)) if subset >> k & 1 else None
            if before:
                lowest = before & -before
                behind = everywhere & ~(lowest - 1)
                reached |= (behind & starts[k]) << -(-size // start)
        ends[subset] = reached
    return ends[(1 << len(tensors)) - 1] != 0
