"""Which of a model's tensors are sharded over which mesh dimensions: DDP, ZeRO-1, 2 and 3, HSDP and what lies between, as one algebra.

Parameters P, gradients G and optimizer states O are each sharded over a set of mesh dimensions, and replicated over the others; what is
needed more often is sharded less: P within G within O. The master weights are where the optimizer states are.

| | parameters | gradients | optimizer |
|---|---|---|---|
| DDP | | | |
| ZeRO-1 | | | shard |
| ZeRO-2 | | shard | shard |
| ZeRO-3 (FSDP) | shard | shard | shard |
| HSDP (replicate, shard) | shard | shard | shard |
| HSDP, optimizer sharded over all ranks | shard | replicate, shard | replicate, shard |

How it is carried out:

- the ranks of O share out the master weights: reduce-scatter over O, all-reduce over the dimensions that are left;
- P is O: gathered for forward and for backward. P is empty: gathered once after an optimizer step, and kept. Between the two: gathered
  from all of O once after an optimizer step, then each rank keeps its part of the group over P, and gathers within that;
- G decides what happens to gradients of micro-batches before the last one (``set_requires_gradient_sync(False)``): G is empty: they add up
  unsharded, and nothing is sent; else they are reduce-scattered over O at once, and add up there. (More than G may ask for, never less.)

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

Dims = tuple[str, ...]


@dataclass(frozen=True)
class Sharding:
    """Names of the mesh dimensions that parameters, gradients and optimizer states are sharded over: a tuple each, or one name.

    Raises:
        TypeError: something else than names.
        ValueError: parameters over a dimension that gradients are not sharded over, or gradients and optimizer states.
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
        """Everything on every rank."""
        return cls()

    @classmethod
    def zero1(cls, *dims: str) -> Sharding:
        """Optimizer states sharded; over ``dims``, or ``"shard"``."""
        return cls((), (), dims or ("shard",))

    @classmethod
    def zero2(cls, *dims: str) -> Sharding:
        """Gradients and optimizer states sharded."""
        return cls((), dims or ("shard",), dims or ("shard",))

    @classmethod
    def zero3(cls, *dims: str) -> Sharding:
        """Everything sharded: what ``fully_shard`` does without a ``sharding``."""
        return cls(dims or ("shard",), dims or ("shard",), dims or ("shard",))


def default_mesh() -> DeviceMesh:
    """All ranks, on the accelerator if there is one. As torch, initialises the default process group from the environment if need be."""
    if not dist.is_initialized():
        gloo.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator is not None else "cpu", (dist.get_world_size(),))


@dataclass(frozen=True)
class Plan:
    """What a :class:`Sharding` comes to on a mesh.

    Attributes:
        mesh: (shard,) or (replicate, shard).
        keep: parameters stay on every rank between optimizer steps.
        neighbours: ranks that keep all parameters together between optimizer steps; None: those of ``mesh``, or each for itself.
        hold: gradients of earlier micro-batches add up unsharded.
    """

    mesh: DeviceMesh
    keep: bool
    neighbours: int | None
    hold: bool


def plan_sharding(sharding: Sharding, mesh: DeviceMesh) -> Plan:
    """Carry out ``sharding`` on ``mesh``.

    Raises:
        ValueError: a dimension that the mesh has not; parameters sharded over other than the last of the optimizer's dimensions.
    """
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
    return Plan(
        mesh=_data_mesh(mesh, names, shard),
        keep=not kept,
        neighbours=size if kept and kept != shard else None,
        hold=not sharding.gradients,
    )


def _data_mesh(mesh: DeviceMesh, names: Dims, shard: Dims) -> DeviceMesh:
    """(shard,) or (replicate, shard); new process groups are made once, by all ranks together."""
    rest = tuple(n for n in names if n not in shard)
    if (not rest and len(shard) == 1) or (mesh.ndim == 2 and (rest, shard) == (names[:1], names[1:])):
        return mesh
    # By process group, not by mesh: meshes of the same ranks are equal, also when those ranks have new groups by now.
    known = _MESHES.setdefault(mesh.get_group(0), {})
    if (names, shard) not in known:
        whole = mesh.size() == dist.get_world_size() or mesh.mesh_dim_names is None
        known[names, shard] = _whole(mesh, names, rest, shard) if whole else _part(mesh, rest, shard)
    return known[names, shard]


def _whole(mesh: DeviceMesh, names: Dims, rest: Dims, shard: Dims) -> DeviceMesh:
    """A mesh of all ranks, arranged anew."""
    order = [names.index(n) for n in (*rest, *shard)]
    width = math.prod(mesh.size(names.index(n)) for n in shard)
    ranks = mesh.mesh.permute(order).reshape(-1, width)
    if not rest:
        return DeviceMesh(mesh.device_type, ranks.reshape(-1), mesh_dim_names=("shard",))
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("replicate", "shard"))


def _part(mesh: DeviceMesh, rest: Dims, shard: Dims) -> DeviceMesh:
    """A mesh of some of the ranks, cut out of a larger one: the ranks beside it make the same groups of their own at the same time, and
    every rank has to know of all of them. Hence by what torch derives from the larger mesh."""
    if not rest:
        return flattened(mesh, shard)
    replicas = flattened(mesh, rest)
    if not shard:
        return replicas._unflatten(0, (replicas.size(), 1), ("replicate", "shard"))
    return DeviceMesh._concatenate([replicas, flattened(mesh, shard)])


def flattened(mesh: DeviceMesh, dims: Dims) -> DeviceMesh:
    """The dimensions ``dims`` of ``mesh`` as one, in the order of the mesh."""
    one = mesh if dims == mesh.mesh_dim_names else mesh[dims]
    return one if len(dims) == 1 else one._flatten("_".join(dims))


_MESHES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Dims, Dims], DeviceMesh]] = weakref.WeakKeyDictionary()
