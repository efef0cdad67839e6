"""Sharding of parameters, gradients and optimizer states over mesh dimensions: DDP, ZeRO-1, 2 and 3, HSDP and combinations.

Parameters P, gradients G and optimizer states O are each sharded over a set of mesh dimensions, and replicated over the others. The sets
must be nested, P within G within O. The master weights are sharded like the optimizer states.

| | parameters | gradients | optimizer |
|---|---|---|---|
| DDP | | | |
| ZeRO-1 | | | shard |
| ZeRO-2 | | shard | shard |
| ZeRO-3 (FSDP) | shard | shard | shard |
| HSDP (replicate, shard) | shard | shard | shard |
| HSDP, optimizer sharded over all ranks | shard | replicate, shard | replicate, shard |

The ranks of O shard the master weights: gradients are reduce-scattered over O, and all-reduced over the other dimensions.

- If P equals O, parameters are gathered for forward and for backward. If P is empty, they are gathered once after an optimizer step and
  kept. If P is between, they are gathered over O once after an optimizer step. Each rank then keeps its part within the group over P, and
  gathers within that group.
- G decides about micro-batches before the last one (``set_requires_gradient_sync(False)``). If G is empty, gradients add up unsharded, and
  nothing is sent. Otherwise they are reduce-scattered over O at once and add up as shards. So gradients may be sharded over more than G,
  but never over less.

(Rajbhandari et al., ZeRO, arXiv 1910.02054; Zhao et al., PyTorch FSDP, arXiv 2304.11277, for hybrid sharding; Wang et al., ZeRO++,
arXiv 2306.10209, for a second partition of parameters.)
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_ray import gloo
from vescale_ray.fsdp.layouts.phases import Retain

Dims = tuple[str, ...]


@dataclass(frozen=True)
class Sharding:
    """Names of the mesh dimensions over which parameters, gradients and optimizer states are sharded: one name or a tuple for each.

    Raises:
        TypeError: a value holds something other than names.
        ValueError: parameters are sharded over a dimension that gradients are not, or gradients over one that optimizer states are not.
    """

    parameters: Dims | str = ()
    gradients: Dims | str = ()
    optimizer: Dims | str = ()

    def __post_init__(self) -> None:
        for name in ("parameters", "gradients", "optimizer"):
            value = getattr(self, name)
            dims = (value,) if isinstance(value, str) else value
            if not isinstance(dims, tuple | list | frozenset | set) or not all(isinstance(dim, str) for dim in dims):
                raise TypeError(f"Sharding({name}={value!r}): give the name of a mesh dimension, or a tuple of names")
            object.__setattr__(self, name, tuple(dims))
        for less, more in (("parameters", "gradients"), ("gradients", "optimizer")):
            beyond = sorted(set(getattr(self, less)) - set(getattr(self, more)))
            if beyond:
                raise ValueError(f"{less} are sharded over {beyond[0]!r} but {more} are not: shard {more} over it, too")

    @classmethod
    def ddp(cls) -> Sharding:
        """Replicate everything on every rank."""
        return cls()

    @classmethod
    def zero1(cls, *dims: str) -> Sharding:
        """Shard optimizer states over ``dims``, by default ``"shard"``."""
        return cls((), (), dims or ("shard",))

    @classmethod
    def zero2(cls, *dims: str) -> Sharding:
        """Shard gradients and optimizer states over ``dims``, by default ``"shard"``."""
        return cls((), dims or ("shard",), dims or ("shard",))

    @classmethod
    def zero3(cls, *dims: str) -> Sharding:
        """Shard everything over ``dims``, by default ``"shard"``, as ``fully_shard`` does without a ``sharding``."""
        return cls(dims or ("shard",), dims or ("shard",), dims or ("shard",))


def default_mesh() -> DeviceMesh:
    """Return a mesh of all ranks, on the accelerator if there is one. Initialises the default process group if needed, as torch does."""
    if not dist.is_initialized():
        gloo.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator is not None else "cpu", (dist.get_world_size(),))


@dataclass(frozen=True)
class ShardingPlan:
    """A :class:`Sharding` resolved on a mesh.

    Attributes:
        mesh: (shard,) or (replicate, shard).
        keep: whether parameters stay on every rank between optimizer steps.
        neighbours: number of ranks that together keep all parameters between optimizer steps; None: no such subgroup.
        hold: whether gradients of earlier micro-batches add up unsharded.
    """

    mesh: DeviceMesh
    keep: bool = False
    neighbours: int | None = None
    hold: bool = True

    @property
    def retain(self) -> Retain:
        """The gathered parameters that every group keeps until the next optimizer step."""
        return Retain.ALL if self.keep else Retain.PART if self.neighbours is not None else Retain.NOTHING


def plan_sharding(sharding: Sharding | None, mesh: DeviceMesh) -> ShardingPlan:
    """Resolve ``sharding`` on ``mesh``. None shards everything over the mesh's last dimension.

    Raises:
        ValueError: the mesh lacks a dimension, or parameters are sharded over other than the last of the optimizer's dimensions.
    """
    if sharding is None:
        return ShardingPlan(mesh)
    names = mesh.mesh_dim_names or (("shard",) if mesh.ndim == 1 else ())
    if len(names) != mesh.ndim:
        raise ValueError(f"sharding needs a mesh with named dimensions, not {mesh}: make it with mesh_dim_names")
    for name in sharding.optimizer:
        if name not in names:
            raise ValueError(
                f"sharding names the mesh dimension {name!r}; the mesh has {', '.join(names)}: name one of these, as "
                f"Sharding.zero3({names[-1]!r})"
            )
    shard = tuple(n for n in names if n in sharding.optimizer)
    kept = tuple(n for n in shard if n in sharding.parameters)
    if kept != shard[len(shard) - len(kept) :]:
        raise ValueError(
            f"parameters are sharded over {', '.join(kept)}, the optimizer over {', '.join(shard)}: parameters need the last of these, "
            f"whose ranks are neighbours; name {', '.join(kept)} last in the mesh's mesh_dim_names"
        )
    size = math.prod(mesh.size(names.index(n)) for n in kept)
    return ShardingPlan(
        mesh=_arranged(mesh, names, shard),
        keep=not kept,
        neighbours=size if kept and kept != shard else None,
        hold=not sharding.gradients,
    )


def _arranged(mesh: DeviceMesh, names: Dims, shard: Dims) -> DeviceMesh:
    """Return the mesh (shard,) or (replicate, shard). All ranks together create new process groups, once."""
    rest = tuple(n for n in names if n not in shard)
    if (not rest and len(shard) == 1) or (mesh.ndim == 2 and (rest, shard) == (names[:1], names[1:])):
        return mesh
    # The key is the process group: meshes of the same ranks compare equal even if the ranks have new groups by now.
    known = _MESHES.setdefault(mesh.get_group(0), {})
    if (names, shard) not in known:
        whole = mesh.size() == dist.get_world_size() or mesh.mesh_dim_names is None
        known[names, shard] = _whole(mesh, names, rest, shard) if whole else data_parallel_part(mesh, rest, shard)
    return known[names, shard]


def _whole(mesh: DeviceMesh, names: Dims, rest: Dims, shard: Dims) -> DeviceMesh:
    """Return a mesh of all ranks in another arrangement."""
    order = [names.index(n) for n in (*rest, *shard)]
    width = math.prod(mesh.size(names.index(n)) for n in shard)
    ranks = mesh.mesh.permute(order).reshape(-1, width)
    if not rest:
        return DeviceMesh(mesh.device_type, ranks.reshape(-1), mesh_dim_names=("shard",))
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("replicate", "shard"))


def data_parallel_part(mesh: DeviceMesh, replicate: Dims, shard: Dims) -> DeviceMesh:
    """Return the mesh (shard,) or (replicate, shard) of some dimensions of ``mesh``, derived by torch. The ranks outside create the same
    groups at the same time, and every rank must know all of them."""
    if not replicate:
        return _flattened(mesh, shard)
    replicas = _flattened(mesh, replicate)
    if not shard:
        return replicas._unflatten(0, (replicas.size(), 1), ("replicate", "shard"))
    return DeviceMesh._concatenate([replicas, _flattened(mesh, shard)])


def _flattened(mesh: DeviceMesh, dims: Dims) -> DeviceMesh:
    """Return the dimensions ``dims`` of ``mesh``, flattened into one in the order of the mesh."""
    one = mesh if dims == mesh.mesh_dim_names else mesh[dims]
    return one if len(dims) == 1 else one._flatten("_".join(dims))


_MESHES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Dims, Dims], DeviceMesh]] = weakref.WeakKeyDictionary()
