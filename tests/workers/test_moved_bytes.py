"""For every N to M in 1..8: layouts as the planner makes them for a real model, the numbering and the plan that a run would use, and a
bound that shares no code with any of them: the overlap of the tensors' ranges, and the best of all numberings."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from vescale_ray import Block
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.planner import TensorSpec, plan_buffers
from vescale_ray.workers.reshard import plan
from vescale_ray.workers.seating import seated
from vescale_ray.workers.shards import Span

Ranges = dict[str, tuple[int, int]]
KINDS = ("param", "exp_avg")
ELEMENT = 4 * len(KINDS)
"""Bytes that move with each element of a parameter."""


@functools.cache
def layout_of(world: int, block: Block | None = None) -> tuple[Ranges, ...]:
    """What each rank owns of a Llama whose matrices are cut only between blocks, unit by unit."""
    with torch.device("meta"):
        model = Llama(LlamaConfig(dim=256, layers=2, heads=4, kv_heads=2, ffn=688, vocab=1000, max_seq=16, rope_theta=1e4, tie=False))
    units: dict[str, list[TensorSpec]] = {}
    for name, parameter in model.named_parameters():
        unit = ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
        units.setdefault(unit, []).append(TensorSpec(name, tuple(parameter.shape), block if parameter.ndim == 2 else None))
    ranks: list[Ranges] = [{} for _ in range(world)]
    for specs in units.values():
        for planned in plan_buffers(specs, world):
            for spec in planned.specs:
                for rank in range(world):
                    ranks[rank][spec.name] = planned.local_range(spec.name, rank)
    return tuple(ranks)


@functools.cache
def shapes() -> dict[str, int]:
    return {name: max(ranges[name][1] for ranges in layout_of(1)) for name in layout_of(1)[0]}


def spans(ranges: Ranges) -> list[Span]:
    return [Span(name, kind, (shapes()[name],), "float32", *at) for name, at in ranges.items() for kind in KINDS]


def owned_bytes(ranges: Ranges) -> int:
    return ELEMENT * sum(end - start for start, end in ranges.values())


def kept_bytes(held: Sequence[Ranges], wanted: Ranges) -> int:
    """Bytes of ``wanted`` that whoever holds ``held`` has already: intervals of one tensor against each other."""
    total = 0
    for name, (start, end) in wanted.items():
        covered = sorted((max(start, h[name][0]), min(end, h[name][1])) for h in held)
        at = start
        for low, high in covered:
            total += max(0, high - max(low, at))
            at = max(at, high)
    return ELEMENT * total


def most_kept(kept: Sequence[Sequence[int]]) -> int:
    """The most that any numbering keeps: over sets of ranks that are taken, worker by worker."""
    count = len(kept)
    best = {0: 0}
    for row in kept:
        after: dict[int, int] = {}
        for taken, value in best.items():
            for rank in range(count):
                if not taken >> rank & 1:
                    key = taken | 1 << rank
                    after[key] = max(after.get(key, 0), value + row[rank])
        best = after
    return best[(1 << count) - 1]


def ratios(block: Block | None, copies: bool) -> dict[tuple[int, int], float]:
    """Moved bytes over the bound, for every pair; fails where the plan moves what its new owner has."""
    found = {}
    for before in range(1, 9):
        for after in range(1, 9):
            if before == after and not copies:
                continue
            old, new = layout_of(before, block), layout_of(after, block)
            # With copies, the last worker of a larger world is lost; its part is with its neighbour.
            alive = [rank for rank in range(before) if not (copies and before > 1 and rank == before - 1)]
            held = {f"w{rank}": [rank, (rank - 1) % before] if copies else [rank] for rank in alive}
            staying = [f"w{rank}" for rank in alive][:after]
            members = seated([*staying, *(f"j{i}" for i in range(after - len(staying)))], held, before)
            leavers = [w for w in held if w not in members]
            sources = [[s for rank in dict.fromkeys(held.get(w, ())) for s in spans(old[rank])] for w in (*members, *leavers)]
            planned = plan(sources, [*(spans(ranges) for ranges in new), *([] for _ in leavers)])

            kept = [[kept_bytes([old[r] for r in held.get(w, ())], ranges) for ranges in new] for w in members]
            total = sum(owned_bytes(ranges) for ranges in new)
            assert total == ELEMENT * sum(shapes().values())
            here = total - sum(kept[i][i] for i in range(after))
            assert planned.moved_bytes == here, (before, after, "the plan moves bytes that their new owner holds")
            bound = total - most_kept(kept)
            found[before, after] = planned.moved_bytes / bound if bound else 1.0 + planned.moved_bytes
    return found


@pytest.mark.parametrize("copies", [False, True], ids=["parked: own parts", "lost: with copies"])
def test_for_every_n_to_m_in_1_to_8_no_numbering_and_no_plan_moves_2_percent_less(copies: bool) -> None:
    assert len({owned_bytes(ranges) for ranges in layout_of(7)}) > 1, "the parts are to be uneven"
    found = ratios(None, copies)
    print(f"\nat most {max(found.values()):.4f} of the bound", end="")
    assert len(found) == (64 if copies else 56) and max(found.values()) <= 1.02, found


@pytest.mark.xfail(
    strict=True,
    reason="with blocks the planner orders a unit's tensors otherwise at each world size; the numbering takes parts for equal intervals",
)
def test_with_blocks_no_numbering_moves_2_percent_less_either() -> None:
    assert max(ratios(Block.tile(32, 32), copies=False).values()) <= 1.02
