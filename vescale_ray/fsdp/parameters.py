"""One parameter in its two forms, and where it and its group live."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale_ray.fsdp.comm import is_pairwise
from vescale_ray.geometry import Block

Owner = tuple["weakref.ref[nn.Module]", str]
"""A module and the attribute under which it holds the parameter; weak, so that units do not keep their model alive."""


@dataclass(frozen=True)
class Source:
    """A parameter as :func:`fully_shard` finds it."""

    name: str
    param: nn.Parameter
    owners: tuple[Owner, ...]
    block: Block | None


class Place:
    """The ranks of a group, seen from this one."""

    __slots__ = ("device", "mesh", "pairwise", "rank", "replicas", "replicate_group", "shard_group", "world")

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        shard_dim = mesh.ndim - 1
        self.mesh, self.device = mesh, device
        self.shard_group: dist.ProcessGroup = mesh.get_group(shard_dim)
        self.replicate_group: dist.ProcessGroup | None = mesh.get_group(0) if mesh.ndim == 2 else None
        self.world, self.rank = mesh.size(shard_dim), mesh.get_local_rank(shard_dim)
        self.replicas = mesh.size(0) if mesh.ndim == 2 else 1
        self.pairwise = is_pairwise(self.shard_group, device)


class Subgroup:
    """``size`` neighbours of a shard group that hold all parameters between forward and backward, each ``1 / size`` of them.

    Created by all ranks of the mesh together; cached, since every unit of a model asks for the same one.
    """

    __slots__ = ("group", "pairwise", "rank", "size")

    def __init__(self, mesh: DeviceMesh, size: int, device: torch.device) -> None:
        # By process group, not by mesh: meshes of the same ranks are equal, also when those ranks have new groups by now.
        known = _SUBGROUPS.setdefault(mesh.get_group(mesh.ndim - 1), {})
        if size not in known:
            known[size] = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, size), mesh_dim_names=("across", "neighbours"))
        self.size, self.rank = size, known[size].get_local_rank(1)
        self.group: dist.ProcessGroup = known[size].get_group(1)
        self.pairwise = is_pairwise(self.group, device)


_SUBGROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, DeviceMesh]] = weakref.WeakKeyDictionary()


class GroupParam:
    """One parameter: sharded (an ``nn.Parameter`` of type RaggedDTensor) and unsharded (a plain leaf, once it was gathered)."""

    __slots__ = ("fqn", "name", "owners", "shape", "sharded", "spec", "unsharded")

    def __init__(self, name: str, owners: tuple[Owner, ...], sharded: nn.Parameter, spec: Any) -> None:
        self.name, self.fqn, self.owners = name, name, owners
        self.sharded, self.spec = sharded, spec
        self.shape = tuple(sharded.shape)
        self.unsharded: nn.Parameter | None = None

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds of it: a view of the master shard."""
        return local_of(self.sharded)

    def install(self, parameter: nn.Parameter) -> None:
        """Make ``parameter`` the one that the modules hold."""
        for module_ref, attribute in self.owners:
            module = module_ref()
            if module is not None:
                module._parameters[attribute] = parameter

    def installed(self) -> nn.Parameter | None:
        """The one that the (first) module holds."""
        module = self.owners[0][0]()
        return None if module is None else module._parameters.get(self.owners[0][1])


def local_of(param: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, without autograd."""
    local: torch.Tensor = param._local_tensor  # type: ignore[attr-defined]
    return local
