"""Geometry of blocks, against an enumeration of indices, and a step over any shards, against a step over the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ray import Block
from vescale_ray.block_grid import Grid, block_text, parse_block
from vescale_ray.optim.eight_bit.adamw8bit import step_blocks
from vescale_ray.optim.eight_bit.adamw8bit_values import Held, Hyper


def block_numbers(shape: tuple[int, ...], block: Any) -> list[int]:
    """For each element of the tensor, in memory order, the number of its block in the order of the states."""
    experts = shape[0] if len(shape) == 3 else 1
    rows = shape[1] if len(shape) == 3 else shape[0]
    cols = math.prod(shape) // experts // rows
    if isinstance(block, int):
        each = -(-rows * cols // block)
        return [e * each + i // block for e in range(experts) for i in range(rows * cols)]
    r = rows if block.kind == "tensor" else min(block.row_count, rows)
    c = cols if block.col_count is None else min(block.col_count, cols)
    bands, columns = -(-rows // r), -(-cols // c)
    return [(e * bands + i // r) * columns + j // c for e in range(experts) for i in range(rows) for j in range(cols)]


shapes = st.one_of(
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(1, 8)),
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
)
specs: st.SearchStrategy[Any] = st.one_of(
    st.integers(1, 40),
    st.integers(1, 9).map(Block.rows),
    st.tuples(st.integers(1, 9), st.integers(1, 9)).map(lambda rc: Block.tile(*rc)),
    st.just(Block.tensor()),
)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], Any, list[int]]:
    """A shape, blocks, and positions at which shards may end, from 0 to the end."""
    shape, block = draw(shapes), draw(specs)
    grid, numel = Grid.of(shape, block), math.prod(shape)
    allowed = [k for k in range(1, numel) if grid.allows_cut(k)]
    cuts = draw(st.lists(st.sampled_from(allowed), max_size=4, unique=True)) if allowed else []
    return shape, block, [0, *sorted(cuts), numel]


@settings(max_examples=300)
@given(cut_tensors())
def test_regions_tile_a_shard_with_whole_blocks_in_state_order(case: tuple[tuple[int, ...], Any, list[int]]) -> None:
    shape, block, cuts = case
    grid, numbers = Grid.of(shape, block), block_numbers(shape, block)
    assert math.prod(grid.state_shape) == max(numbers) + 1
    for start, end in zip(cuts, cuts[1:], strict=False):
        first = grid.band_of(start) * grid.columns
        assert end == cuts[-1] or grid.band_of(end) * grid.columns == max(numbers[:end]) + 1
        position = start
        for region in grid.regions(start, end):
            assert region.element == position - start
            elements = torch.arange(position, position + region.bands * region.band_numel).view(region.bands, region.rows, region.cols)
            for band in range(region.bands):
                for column in range(region.columns):
                    inside = elements[band, :, column * region.block_cols : (column + 1) * region.block_cols].flatten().tolist()
                    number = first + region.block + band * region.columns + column
                    assert inside == [i for i, n in enumerate(numbers) if n == number]
            position += region.bands * region.band_numel
        assert position == end


@settings(max_examples=200)
@given(shapes, specs)
def test_cuts_part_no_block_or_row_of_tiles_and_fit_the_policy(shape: tuple[int, ...], block: Any) -> None:
    grid = Grid.of(shape, block)
    numbers = block_numbers(shape, Block.rows(block.row_count) if isinstance(block, Block) and block.kind == "tile" else block)
    for cut in range(1, math.prod(shape)):
        assert grid.allows_cut(cut) == (not set(numbers[:cut]) & set(numbers[cut:]))
    policy = grid.policy_block()
    assert all(grid.allows_cut(cut) for cut in range(1, math.prod(shape)) if cut % policy.period(shape) % policy.numel(shape) == 0)


@settings(max_examples=60)
@given(cut_tensors(), st.integers(0, 1000))
def test_step_over_shards_equals_the_whole_step_bit_for_bit(case: tuple[tuple[int, ...], Any, list[int]], seed: int) -> None:
    shape, block, cuts = case
    grid, numel = Grid.of(shape, block), math.prod(shape)
    generator = torch.Generator().manual_seed(seed)
    blocks = math.prod(grid.state_shape)
    start = Held(
        torch.randn(numel, generator=generator),
        torch.randn(numel, generator=generator),
        torch.randint(0, 256, (numel,), generator=generator, dtype=torch.uint8),
        torch.rand(blocks, generator=generator),
        torch.randint(0, 256, (numel,), generator=generator, dtype=torch.uint8),
        torch.rand(blocks, generator=generator),
    )
    hyper = Hyper(0.9, 0.999, 1e-8, 0.99, 0.1, 2.0)
    whole = Held(*(t.clone() for t in start))
    step_blocks([(whole, list(grid.regions(0, numel)), hyper)])
    parts = Held(*(t.clone() for t in start))
    for first, last in zip(cuts, cuts[1:], strict=False):
        block_first = grid.band_of(first) * grid.columns
        block_last = blocks if last == numel else grid.band_of(last) * grid.columns
        mine = Held(*(t.clone() for t in parts.part(first, last - first, block_first, block_last - block_first)))
        step_blocks([(mine, list(grid.regions(first, last)), hyper)])
        for target, value in zip(parts.part(first, last - first, block_first, block_last - block_first), mine, strict=True):
            target.copy_(value)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    assert not torch.equal(whole.param, start.param)


@pytest.mark.parametrize("block", [1024, Block.tile(32, 48), Block.rows(8), Block.tensor()], ids=str)
def test_block_reads_back_from_its_text(block: Any) -> None:
    assert parse_block(block_text(block)) == parse_block(block) == block
