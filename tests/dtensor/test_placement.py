"""RaggedShard as a value, its geometry, its errors, and its contact with torch's own DTensor."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from tests.ranks import run_threads
from vescale_ray.dtensor.placement import RaggedShard


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    st.integers(1, 12),
    st.integers(1, 8),
    st.lists(st.integers(0, 2), max_size=2),
)
def test_of_blocks_cuts_no_block_and_no_slice_of_a_sharded_dim(shape: tuple[int, ...], block: int, ranks: int, dims: list[int]) -> None:
    dims = [d for d in dims if d < len(shape)]
    placement, total = RaggedShard.of_blocks(shape, block, ranks, dims), math.prod(shape)
    placement.validate(shape, ranks)
    intervals = placement.intervals(shape)
    strides = [math.prod(shape[d + 1 :]) for d in dims if d > 0]
    for cut in {end for _, end in intervals} - {total}:
        assert cut % block == 0 and all(cut % stride == 0 for stride in strides)
    step = math.lcm(block, *strides)
    sizes = [end - start for start, end in intervals]
    assert max(sizes) - min(sizes) <= 2 * step - 1, "even to within a block and the short one at the end"


def test_ragged_shard_is_a_value_compared_by_reduced_units() -> None:
    a, b = RaggedShard((0,), (2, 0, 4)), RaggedShard([0], [1, 0, 2])
    assert isinstance(a, Placement) and a == b and hash(a) == hash(b) and a.local_units == (1, 0, 2)
    assert {a: 1}[b] == 1
    for other in (RaggedShard((0,), (1, 1, 2)), RaggedShard((0, 1), (1, 0, 2)), Shard(0), Replicate(), Partial(), "x"):
        assert a != other and other != a


def test_ragged_shard_is_immutable_and_survives_copy_and_pickle() -> None:
    placement = RaggedShard((0, 1), (3, 0, 5))
    with pytest.raises(AttributeError, match="immutable"):
        placement.dims = (0,)
    with pytest.raises(AttributeError, match="immutable"):
        del placement.dims
    assert copy.copy(placement) is placement and copy.deepcopy(placement) is placement
    assert pickle.loads(pickle.dumps(placement)) == placement
    import vescale_ray.dtensor  # noqa: F401  registers it as safe

    buffer = io.BytesIO()
    torch.save({"placement": placement}, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True)["placement"] == placement


def test_ragged_shard_is_a_shard_and_not_replicate_or_partial() -> None:
    placement = RaggedShard((0, 1), (1, 2))
    assert placement.is_shard() and placement.is_shard(1) and not placement.is_shard(2)
    assert not placement.is_replicate() and not placement.is_partial() and not placement.is_partial("sum")
    with pytest.raises(RuntimeError, match="no single dim"):
        getattr(placement, "dim", None)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], RaggedShard]:
    """A shape and a fitting placement, built from each rank's number of units."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    k = draw(st.integers(0, len(shape)))
    units, world = math.prod(shape[:k]), draw(st.integers(1, 6))
    cuts = sorted(draw(st.lists(st.integers(0, units), min_size=world - 1, max_size=world - 1)))
    return shape, RaggedShard(tuple(range(k)), [b - a for a, b in zip([0, *cuts], [*cuts, units], strict=True)])


@settings(max_examples=100)
@given(layouts())
def test_intervals_tile_the_tensor_by_rank_at_unit_boundaries(case: tuple[tuple[int, ...], RaggedShard]) -> None:
    shape, placement = case
    placement.validate(shape, len(placement.local_units))
    position = 0
    for rank, (start, end) in enumerate(placement.intervals(shape)):
        assert start == position and (end - start) % math.prod(shape[len(placement.dims) :]) == 0
        assert (end - start) * sum(placement.local_units) == math.prod(shape) * placement.local_units[rank]
        assert math.prod(placement.local_shape(shape, rank)) == end - start
        assert placement.local_shape(shape, rank)[1:] == shape[len(placement.dims) :]
        assert placement.interval(shape, rank) == (start, end)
        position = end
    assert position == math.prod(shape)


@settings(max_examples=100)
@given(layouts())
def test_of_intervals_restores_intervals_with_no_more_dims(case: tuple[tuple[int, ...], RaggedShard]) -> None:
    shape, placement = case
    again = RaggedShard.of_intervals(shape, [end - start for start, end in placement.intervals(shape)])
    assert again.intervals(shape) == placement.intervals(shape)
    assert len(again.dims) <= max(len(placement.dims), 1)


@pytest.mark.parametrize(
    ("dims", "units", "says"),
    [
        ((1,), (1, 2), r"dims are \(1,\): they must be a prefix"),
        ((0, 2), (1, 2), r"dims are \(0, 2\)"),
        ((-1,), (1, 2), r"dims are \(-1,\)"),
        ((0,), (1, -2), r"local_units are \(1, -2\): units can't be negative"),
        ((0,), (0, 0), r"local_units are \(0, 0\): give one number for each rank"),
        ((0,), (), r"local_units are \(\): give one number for each rank"),
    ],
)
def test_invalid_placement_is_refused_with_value_and_rule(dims: tuple[int, ...], units: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RaggedShard(dims, units)


@pytest.mark.parametrize(
    ("placement", "shape", "world", "says"),
    [
        (RaggedShard((0,), (1, 2)), (3, 4), 3, "units for 2 ranks, but the mesh dimension has 3"),
        (RaggedShard((0, 1), (1, 2)), (3,), 2, r"merges 2 dims, but shape \(3,\) has only 1"),
        (RaggedShard((0,), (1, 2)), (4, 3), 2, r"shares 3 equal parts, but shape \(4, 3\) has 4 units over dims \(0,\)"),
        (RaggedShard((), (1, 1)), (4,), 2, "has 1 units over dims"),
    ],
)
def test_misfit_of_mesh_or_shape_is_refused_with_value_and_rule(
    placement: RaggedShard, shape: tuple[int, ...], world: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        placement.validate(shape, world)


def _base_dtensor_meets_ragged(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    placement = RaggedShard((0,), (1, 2, 3))
    ways: list[tuple[str, Any]] = [
        ("from_local", lambda: DTensor.from_local(torch.ones(rank + 1, 2), mesh, [placement])),
        ("distribute_tensor", lambda: torch_distribute(torch.ones(6, 2), mesh, [placement])),
        ("Replicate ->", lambda: DTensor.from_local(torch.ones(6, 2), mesh, [Replicate()]).redistribute(mesh, [placement])),
        ("Partial ->", lambda: DTensor.from_local(torch.ones(6, 2), mesh, [Partial()]).redistribute(mesh, [placement])),
        ("Shard(0) ->", lambda: DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]).redistribute(mesh, [placement])),
        ("Shard(1) ->", lambda: DTensor.from_local(torch.ones(6, 1), mesh, [Shard(1)]).redistribute(mesh, [placement])),
    ]
    silent = []
    for name, way in ways:
        try:
            way()
            silent.append(name)
        except (RuntimeError, ValueError, NotImplementedError):
            pass
    return silent


def test_torchs_own_dtensor_never_takes_ragged_shard_silently() -> None:
    """Without the ``dim`` and hooks that raise, ``Replicate -> ragged`` keeps the whole tensor on each rank."""
    assert run_threads(3, _base_dtensor_meets_ragged) == [[], [], []]
