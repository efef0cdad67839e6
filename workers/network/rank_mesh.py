"""The device mesh of a generation's ranks: (shard,), or (replicate, shard) if there are replicas."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_ray.config.sharding import RankGrid
from vescale_ray.workers.network.process_groups import GroupFailed, describe

if TYPE_CHECKING:
    from vescale_ray.workers.network.connections import Connections


def rank_mesh(grid: RankGrid, device: str, timeout_s: float | None = None, lines: Connections | None = None) -> DeviceMesh:
    """Return the mesh of all ranks of the default group. Collective if there are replicas, which need groups of their own.

    Args:
        device: type of the mesh's device.
        timeout_s: time limit of every collective in the new groups, in seconds; None: torch's.
        lines: connections object that records the new groups. Its owner can then end their forming and their collectives.

    Raises:
        GroupFailed: a rank was lost while the groups were formed, or ``lines`` was cut.
    """
    if grid.replicas == 1:
        return init_device_mesh(device, (grid.shards,))
    failure = None
    try:
        if lines is None:
            return _two_dimensional(grid, device)
        with lines.recorded(grid.size):
            mesh = _two_dimensional(grid, device)
        for group in mesh.get_all_groups():
            if timeout_s is not None:
                group.set_timeout(timedelta(seconds=timeout_s))
            if device == "cuda":
                lines.hold(group._get_backend(torch.device("cuda")))
        return mesh
    except Exception as error:
        failure = f"forming the groups of {grid.replicas} replicas of {grid.shards} shards failed: {describe(error)}"
    raise GroupFailed(failure)


def _two_dimensional(grid: RankGrid, device: str) -> DeviceMesh:
    return init_device_mesh(device, (grid.replicas, grid.shards), mesh_dim_names=("replicate", "shard"))
