"""DBuffer: a flat buffer with views of it as the tensors of a layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ray.dbuffer import DBuffer, gaps
from vescale_ray.geometry import Block
from vescale_ray.planner import TensorSpec, plan_layout

SPECS = [
    TensorSpec("a", (7, 20)),
    TensorSpec("b", (3,)),
    TensorSpec("c", ()),
    TensorSpec("d", (4, 5, 6), Block.rows(5)),
    TensorSpec("e", (0, 4)),
]


def full_values():
    return {s.name: torch.randn(s.shape, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(SPECS)}


@pytest.mark.parametrize("world", [1, 2, 3, 5, 16])
def test_shards_of_all_ranks_concatenate_to_the_full_buffer(world):
    layout, values = plan_layout(SPECS, world), full_values()
    whole = DBuffer.empty(layout, rank=None, dtype=torch.float32, device="cpu")
    shards = [DBuffer.empty(layout, rank=r, dtype=torch.float32, device="cpu") for r in range(world)]
    for name, value in values.items():
        whole.load(name, value)
        for shard in shards:
            shard.load(name, value)
    assert torch.equal(torch.cat([s.flat for s in shards]), whole.flat)
    for name, value in values.items():
        assert torch.equal(whole.tensor(name), value)
        assert torch.equal(torch.cat([s.tensor(name) for s in shards]), value.flatten())
    assert all(torch.equal(whole.shard(r).flat, shards[r].flat) for r in range(world))
    assert {name for name, _ in whole.tensors()} == set(values)


def test_tensors_are_views_and_operators_act_on_the_whole_buffer():
    layout = plan_layout(SPECS, 3)
    one = DBuffer(layout, torch.ones(layout.numel), rank=None)
    two = DBuffer(layout, torch.full((layout.numel,), 2.0), rank=None)
    assert one.tensor("a").data_ptr() == one.flat[layout.offsets["a"] :].data_ptr()
    one.add_(two).scale_(0.5)
    assert one.tensor("d").unique().tolist() == [1.5]
    assert one.cast(torch.bfloat16).dtype == torch.bfloat16
    assert one.copy_(two.cast(torch.float64)).tensor("b").tolist() == [2.0] * 3
    assert one.zero_().flat.count_nonzero() == 0
    assert one.nbytes == layout.numel * 4
    assert "full" in repr(one)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=6), st.integers(1, 6))
def test_padding_is_exactly_what_no_tensor_covers(sizes, world):
    layout = plan_layout([TensorSpec(str(i), (n,)) for i, n in enumerate(sizes)], world)
    covered = torch.zeros(layout.numel, dtype=torch.bool)
    for i, n in enumerate(sizes):
        covered[layout.offsets[str(i)] : layout.offsets[str(i)] + n] = True
    marked = torch.ones(layout.numel, dtype=torch.bool)
    for start, end in gaps(layout, None):
        marked[start:end] = False
    assert torch.equal(marked, covered)
    for rank in range(world):
        buffer = DBuffer(layout, torch.full((layout.shard_numel,), 7.0), rank=rank)
        buffer.zero_padding()
        low = rank * layout.shard_numel
        assert torch.equal(buffer.flat != 0, covered[low : low + layout.shard_numel])


def test_dbuffer_refuses_mismatched_sizes_ranks_and_layouts():
    layout, other = plan_layout(SPECS, 2), plan_layout(SPECS[:2], 2)
    with pytest.raises(ValueError, match=f"{layout.numel} elements"):
        DBuffer(layout, torch.zeros(3), rank=None)
    with pytest.raises(ValueError, match="there is no rank 2 in a layout with 2 shards"):
        DBuffer(layout, torch.zeros(layout.shard_numel), rank=2)
    buffer = DBuffer(layout, torch.zeros(layout.numel), rank=None)
    with pytest.raises(ValueError, match="has shape"):
        buffer.load("a", torch.zeros(20, 7))
    with pytest.raises(ValueError, match="different layouts"):
        buffer.add_(DBuffer(other, torch.zeros(other.numel), rank=None))
    with pytest.raises(ValueError, match="already the shard"):
        buffer.shard(1).shard(0)


def test_stack_with_gaps_is_a_strided_view_and_gaps_are_padding():
    specs = [TensorSpec("first", (5,)), TensorSpec("experts", (4, 3, 8), Block.rows(4), stored_rows=4), TensorSpec("last", (6, 2))]
    layout = plan_layout(specs, 3)
    full = DBuffer(layout, torch.full((layout.numel,), torch.nan), rank=None)
    values = {"first": torch.randn(5), "experts": torch.randn(4, 3, 8), "last": torch.randn(6, 2)}
    for name, value in values.items():
        full.load(name, value)
    full.zero_padding()
    assert full.tensor("experts").stride() == (32, 8, 1)
    for name, value in values.items():
        assert torch.equal(full.tensor(name), value)
    assert full.flat.isfinite().all() and torch.isclose(full.flat.abs().sum(), torch.stack([v.abs().sum() for v in values.values()]).sum())
    for rank in range(3):
        shard = DBuffer.empty(layout, rank=rank, dtype=torch.float32, device="cpu")
        for name, value in values.items():
            shard.load(name, value)
        assert torch.equal(shard.flat, full.shard(rank).flat)
