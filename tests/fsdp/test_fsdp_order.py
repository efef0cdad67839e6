"""Ranks that start the collectives of several units in different orders."""

from __future__ import annotations

import torch

from tests.fsdp.towers import Tower, inputs, same, seeded, shard_tower
from tests.ranks import on_processes


@on_processes(2)
def test_equal_units_in_other_orders_keep_their_parameters(rank, world):
    ours, alone = shard_tower(seeded(Tower), reshard_after_forward=True), seeded(Tower)
    with torch.no_grad():
        ours(inputs(rank, world))
    units = list(ours.layers)
    handles = [unit.unshard(async_op=True) for unit in (units if rank == 0 else reversed(units))]
    for handle in handles:
        handle.wait()
    same(dict(ours.layers.named_parameters()), dict(alone.layers.named_parameters()), 0.0)
