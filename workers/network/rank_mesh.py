"""The device meshes of a generation's ranks: of all ranks, and of those that share the experts of a layer.

               all ranks             with ``train.expert_parallel``, also
    no replicas  (shard,)              (shard, expert)
    replicas     (replicate, shard)    (replicate, shard, expert)
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_ray.config.rank_grid import RankGrid
from vescale_ray.workers.network.process_groups import GroupFailed, describe

if TYPE_CHECKING:
    from vescale_ray.workers.network.connections import Connections


@dataclass(frozen=True)
class RankMeshes:
    """The meshes of a generation.

    Attributes:
        ranks: all ranks: (shard,), or (replicate, shard) if there are replicas.
        experts: the same ranks with a last dimension ``expert``, whose ranks hold different experts; None: each rank gathers all experts.
    """

    ranks: DeviceMesh
    experts: DeviceMesh | None = None

    @property
    def beside_experts(self) -> DeviceMesh:
        """The ranks that hold parts of the same experts: (shard,), or (replicate, shard)."""
        if self.experts is None:
            return self.ranks
        names = self.experts.mesh_dim_names
        assert names is not None
        return self.experts[names[:-1]]


def rank_meshes(grid: RankGrid, device: str, timeout_s: float | None = None, lines: Connections | None = None) -> RankMeshes:
    """Return the meshes of all ranks of the default group. Collective if replicas or experts need groups of their own.

    Args:
        device: type of the mesh's device.
        timeout_s: time limit of every collective in the new groups, in seconds; None: torch's.
        lines: connections object that records the new groups. Its owner can then end their forming and their collectives.

    Raises:
        GroupFailed: a rank was lost while the groups were formed, or ``lines`` was cut.
    """
    if grid.replicas == grid.experts == 1:
        return RankMeshes(init_device_mesh(device, (grid.shards,)))
    failure = None
    try:
        if lines is None:
            return _formed(grid, device)
        with lines.recorded(grid.size):
            meshes = _formed(grid, device)
        for mesh in (meshes.ranks if grid.replicas > 1 else None, meshes.experts):
            for group in () if mesh is None else mesh.get_all_groups():
                if timeout_s is not None:
                    group.set_timeout(timedelta(seconds=timeout_s))
                if device == "cuda":
                    lines.hold(group._get_backend(torch.device("cuda")))
        return meshes
    except Exception as error:
        shared = f", {grid.experts} of which share the experts," if grid.experts > 1 else ""
        failure = f"forming the groups of {grid.replicas} replicas of {grid.shards} shards{shared} failed: {describe(error)}"
    raise GroupFailed(failure)


def _formed(grid: RankGrid, device: str) -> RankMeshes:
    replicas, names = ((grid.replicas,), ("replicate",)) if grid.replicas > 1 else ((), ())
    ranks = init_device_mesh(device, (*replicas, grid.shards), mesh_dim_names=(*names, "shard"))
    if grid.experts == 1:
        return RankMeshes(ranks)
    shape = (*replicas, grid.shards // grid.experts, grid.experts)
    return RankMeshes(ranks, init_device_mesh(device, shape, mesh_dim_names=(*names, "shard", "expert")))
