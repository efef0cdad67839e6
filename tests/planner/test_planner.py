"""plan_layout against brute force and an independent check."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ray.geometry import Block
from vescale_ray.planner import Layout, TensorSpec, plan_layout

QUANTUM, START = 32, 16  # 128 and 64 bytes of float32


def _smallest(sizes: list[int], blocks: list[int], shards: int) -> int:
    """Smallest shard in this order, by trying every shard size and, for each tensor, every offset."""
    size = QUANTUM
    while True:
        position = 0
        for numel, block in zip(sizes, blocks, strict=True):
            at = -(-position // START) * START
            while at + numel <= shards * size:
                inside = range(at // size + 1, (at + numel - 1) // size + 1)
                if all((k * size - at) % block == 0 for k in inside):
                    break
                at += START
            else:
                break
            position = at + numel
        else:
            return size
        size += QUANTUM


tensors = st.tuples(st.integers(1, 24), st.sampled_from([1, 2, 3, 5, 8, 12, 33]))


@settings(max_examples=150)
@given(st.lists(tensors, min_size=1, max_size=4), st.integers(1, 6))
def test_plan_in_a_given_order_is_exact(shapes: list[tuple[int, int]], shards: int) -> None:
    specs = [TensorSpec(f"t{i}", shape, Block.rows(1)) for i, shape in enumerate(shapes)]
    sizes, blocks = [math.prod(s) for s in shapes], [s[1] for s in shapes]
    given_order = plan_layout(specs, shards, order="given")
    assert given_order.shard_numel == _smallest(sizes, blocks, shards) >= plan_layout(specs, shards).shard_numel


def test_a_whole_tensor_block_stays_on_one_rank() -> None:
    layout = plan_layout([TensorSpec("a", (40, 10), Block.tensor()), TensorSpec("b", (400,))], 4)
    held = [layout.local_range("a", r) for r in range(4)]
    assert sum(end > start for start, end in held) == 1
    assert layout.dims("a") == (0,) and sorted(layout.units("a")) == [0, 0, 0, 1]


def test_scalars_empty_tensors_and_too_few_blocks_get_a_plan() -> None:
    layout = plan_layout([TensorSpec("scalar", ()), TensorSpec("none", (0, 7)), TensorSpec("few", (2, 3), Block.rows(1))], 8)
    assert layout.dims("scalar") == () and sum(layout.units("scalar")) == 1
    assert sum(layout.units("none")) == 1
    assert layout.shard_numel * 8 >= 7
    assert plan_layout([], 3).shard_numel == 0


@pytest.mark.parametrize(
    ("specs", "shards", "options", "says"),
    [
        ([TensorSpec("a", (4,))], 0, {}, "num_shards is 0"),
        ([TensorSpec("a", (4,)), TensorSpec("a", (5,))], 2, {}, "'a' is listed twice"),
        ([TensorSpec("a", (4,))], 2, {"order": "best"}, "order 'best' is unknown"),
        ([TensorSpec("a", (4,))], 2, {"align": 100}, "align is 100 bytes"),
    ],
)
def test_plan_layout_reports_bad_input_with_its_value(specs: list[TensorSpec], shards: int, options: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan_layout(specs, shards, **options)  # type: ignore[arg-type]


def test_a_layout_that_cuts_a_block_or_overlaps_cannot_be_built() -> None:
    specs = (TensorSpec("a", (10, 10), Block.rows(1)), TensorSpec("b", (64,)))
    with pytest.raises(ValueError, match="cuts a block of 10"):
        Layout(specs, 4, 64, {"a": 0, "b": 128}, {"a": 10, "b": 1}, 0)
    with pytest.raises(ValueError, match="overlap"):
        Layout(specs, 2, 160, {"a": 0, "b": 32}, {"a": 10, "b": 1}, 0)
    with pytest.raises(ValueError, match="below the lower bound"):
        Layout((), 2, 32, {}, {}, 64)
