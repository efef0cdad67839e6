"""Scales of FP8 tiles are on the rank that has the tile, in aligned parts."""

from __future__ import annotations

import math

import pytest
import torch

from vescale_ray.geometry import Block
from vescale_ray.planner import TensorSpec, plan_layout
from vescale_ray.planner.placement.scales import ScaleShards

FP8 = torch.float8_e4m3fn


def test_every_tile_and_its_scale_are_on_one_rank() -> None:
    tile = Block.tile(4, 3)
    specs = [
        TensorSpec("a", (40, 7), tile, FP8),
        TensorSpec("norm", (7,), None, FP8),
        TensorSpec("stack", (5, 8, 6), tile, FP8),
        TensorSpec("tail", (10, 6), tile, FP8),
    ]
    for ranks in (1, 2, 3, 7, 40):
        layout = plan_layout(specs, ranks)
        scales = ScaleShards(layout, 4, 3)
        assert layout.shard_numel % 128 == 0 and scales.shard_numel * 4 % 128 == 0
        for spec in (specs[0], specs[2], specs[3]):
            owners = torch.full(spec.shape, -1).flatten()
            for rank in range(ranks):
                start, end = layout.local_range(spec.name, rank)
                owners[start:end] = rank
            tiles: dict[int, int] = {}
            for matrix in owners.view(-1, *spec.shape[-2:]):
                for row in range(0, spec.shape[-2], 4):
                    for column in range(0, spec.shape[-1], 3):
                        (owner,) = matrix[row : row + 4, column : column + 3].unique().tolist()
                        tiles[owner] = tiles.get(owner, 0) + 1
            assert tiles == {r: n for r in range(ranks) if (n := scales.count(spec.name, r))}, (spec.name, ranks)
        for rank in range(ranks):
            ends = [(scales.offset(n, rank), scales.offset(n, rank) + scales.count(n, rank)) for n in scales.names]
            assert ends[0][0] == 0 and all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False))
            assert ends[-1][1] <= scales.shard_numel
        assert scales.count("norm", 0) == 0


def test_deepseek_scales_are_a_16384th_of_the_elements() -> None:
    specs = [TensorSpec(f"e{i}", (2048, 7168), Block.tile(128, 128), FP8) for i in range(32)]
    layout = plan_layout(specs, 64)
    scales = ScaleShards(layout)
    assert scales.shard_numel == math.ceil(layout.shard_numel / 128 / 128 / 32) * 32


def test_a_layout_without_whole_tiles_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensor of this layout has blocks of 128 rows"):
        ScaleShards(plan_layout([TensorSpec("a", (256, 256))], 2))
