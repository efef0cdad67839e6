"""One parameter in its two forms, and where it and its group live."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from vescale_ray.compat.distributed import AsyncCollectiveTensor
from vescale_ray.compat.tensor import DTensorSpec, StridedShard, TensorMeta
from vescale_ray.dtensor import RaggedDTensor
from vescale_ray.dtensor_spec import contiguous_stride, make_spec
from vescale_ray.geometry import Block
from vescale_ray.messages import is_pairwise
from vescale_ray.placement import RaggedShard
from vescale_ray.redistribute import plain_spec

Owner = tuple["weakref.ref[nn.Module]", str]
"""A module and the attribute under which it holds the parameter; weak, so that units do not keep their model alive."""


REPLACED = "_vescale_replaced"
"""Attribute of parameters that are not in the model any more, since a sharded one took their place."""
GATHERED_OF = "_vescale_gathered_of"
"""Attribute of gathered parameters: a weak reference to their :class:`GroupParam`."""


@dataclass(frozen=True)
class Source:
    """A parameter as :func:`fully_shard` finds it."""

    name: str
    param: nn.Parameter
    owners: tuple[Owner, ...]
    block: Block | None
    parallel: Parallel | None = None
    gaps: bool = False
    """A stack of matrices that may be stored with a gap behind each."""
    shard_dim: int | None = None
    """The dimension of a plain ``Shard`` placement, if it is to have one."""
    hooked: bool = False
    """Its tensor class says what is gathered."""
    tied: bool = False
    """An earlier unit took it, too. What is sharded here is a copy, to be replaced before the first forward."""

    @property
    def value(self) -> torch.Tensor:
        """What this rank has to share out: the parameter, or the part of it that tensor or expert parallelism left here."""
        return self.param.detach() if self.parallel is None else local_of(self.param)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


@dataclass(frozen=True)
class Parallel:
    """Tensor or expert parallelism of a parameter that came as a DTensor. Data parallelism shares out what that leaves to a rank.

    Args:
        spec: of the DTensor: what the module's forward expects.
        data_dims: dimensions of its mesh that are data-parallel (``dp_mesh_dims``): Replicate there, gradients may be pending.
        model_mesh: its mesh without those; None if nothing is left.
        even: every rank of it has as much. If not, no ragged placement is the same on all ranks of the mesh, as one has to be.
    """

    spec: DTensorSpec
    data_dims: frozenset[int]
    model_mesh: DeviceMesh | None
    even: bool = True

    @property
    def model_placements(self) -> tuple[Placement, ...]:
        return tuple(p for i, p in enumerate(self.spec.placements) if i not in self.data_dims)

    def parts_along(self, dim: int) -> int:
        """Into how many parts tensor or expert parallelism cuts dimension ``dim``."""
        cut = [type(p) is Shard and p.dim % len(self.spec.shape) == dim for p in self.spec.placements]
        return math.prod(size for size, here in zip(self.spec.mesh.shape, cut, strict=True) if here)

    def local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient, as the parameter is placed; sums over data-parallel dimensions stay pending."""
        if not isinstance(grad, DTensor):
            raise TypeError(f"the gradient of a DTensor parameter is a {type(grad).__name__}, not a DTensor")
        wanted = tuple(g if i in self.data_dims else p for i, (g, p) in enumerate(zip(grad.placements, self.spec.placements, strict=True)))
        local = local_of(grad if grad.placements == wanted else grad.redistribute(placements=wanted))
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


class Place:
    """The ranks of a group, seen from this one."""

    __slots__ = ("_joint", "device", "mesh", "pairwise", "rank", "replicas", "replicate_group", "shard_group", "world")

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        shard_dim = mesh.ndim - 1
        self.mesh, self.device = mesh, device
        self.shard_group: dist.ProcessGroup = mesh.get_group(shard_dim)
        self.replicate_group: dist.ProcessGroup | None = mesh.get_group(0) if mesh.ndim == 2 else None
        self.world, self.rank = mesh.size(shard_dim), mesh.get_local_rank(shard_dim)
        self.replicas = mesh.size(0) if mesh.ndim == 2 else 1
        self.pairwise = is_pairwise(self.shard_group, device)
        self._joint: dict[int, DeviceMesh] = {}

    def spec(self, own: Placement, shape: tuple[int, ...], dtype: torch.dtype, parallel: Parallel | None) -> DTensorSpec:
        """The layout of a sharded parameter: ours on the data-parallel mesh, and beside it what tensor or expert parallelism did."""
        ragged = isinstance(own, RaggedShard)
        if parallel is not None and isinstance(own, Shard) and (split := parallel.parts_along(own.dim)) > 1:
            own = StridedShard(own.dim, split_factor=split)  # ours comes first in the mesh, but cuts what the others have left
        placements: tuple[Placement, ...] = (own,) if self.replicate_group is None else (Replicate(), own)
        if parallel is None:
            if ragged:
                return make_spec(self.mesh, placements, shape, dtype)
            return plain_spec(self.mesh, placements, shape, dtype)
        mesh, shape = self.mesh, tuple(parallel.spec.shape)
        if parallel.model_mesh is not None:
            key = id(parallel.model_mesh)
            if key not in self._joint:
                self._joint[key] = DeviceMesh._concatenate([self.mesh, parallel.model_mesh])
            mesh = self._joint[key]
        placements = (*placements, *parallel.model_placements)
        if ragged:
            return make_spec(mesh, placements, shape, dtype)
        return plain_spec(mesh, placements, shape, dtype)


class Subgroup:
    """``size`` neighbours of a shard group that hold all parameters between forward and backward, each ``1 / size`` of them.

    Created by all ranks of the mesh together; cached, since every unit of a model asks for the same one.
    """

    __slots__ = ("group", "pairwise", "rank", "size")

    def __init__(self, mesh: DeviceMesh, size: int, device: torch.device) -> None:
        # By process group, not by mesh: meshes of the same ranks are equal, also when those ranks have new groups by now.
        known = _SUBGROUPS.setdefault(mesh.get_group(mesh.ndim - 1), {})
        if size not in known:
            names = ("across", "neighbours")
            if mesh.size() == dist.get_world_size() or mesh.mesh_dim_names is None:
                known[size] = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, size), mesh_dim_names=names)
            else:  # the ranks beside this mesh make groups of their own now, which every rank has to know of
                known[size] = mesh._unflatten(mesh.ndim - 1, (mesh.size(mesh.ndim - 1) // size, size), names)
        self.size, self.rank = size, known[size].get_local_rank("neighbours")
        self.group: dist.ProcessGroup = known[size].get_group("neighbours")
        self.pairwise = is_pairwise(self.group, device)


_SUBGROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, DeviceMesh]] = weakref.WeakKeyDictionary()


class GroupParam:
    """One parameter: sharded (an ``nn.Parameter`` of type RaggedDTensor, or DTensor) and unsharded (a plain leaf, once it was gathered)."""

    __slots__ = (
        "__weakref__", "fqn", "home", "kept", "name", "owners", "parallel", "placement", "shape", "sharded", "slots", "spec", "tied",
        "unsharded"
    )  # fmt: skip

    def __init__(self, source: Source, sharded: nn.Parameter, placement: Placement, spec: DTensorSpec) -> None:
        self.name, self.fqn, self.owners, self.parallel = source.name, source.name, source.owners, source.parallel
        self.sharded, self.placement, self.spec = sharded, placement, spec
        self.tied = sharded if source.tied else None
        self.shape = source.shape
        """Of what is shared out: the parameter's own, or that of the part which tensor or expert parallelism left here."""
        self.unsharded: nn.Parameter | None = None
        self.kept = local_of(sharded)
        """The local tensor that looks into the master shard. The sharded parameter has another one once ``.data`` was assigned."""
        self.slots = [(module._parameters, attribute) for ref, attribute in source.owners if (module := ref()) is not None]
        """Where the modules hold the parameter."""
        self.home: GroupParam | None = None
        """Tied to this one of another group after sharding: the sharded parameter is a view of that group's shard, and this group has a
        copy, taken when parameters are gathered."""

    def new_unsharded(self, view: torch.Tensor) -> nn.Parameter:
        """A leaf that looks at ``view`` of the gathered buffer."""
        differentiable = view.is_floating_point() or view.is_complex()
        # Assigned through .data, a tensor keeps no tie to the version counter of the buffer: refilling that is no "modified by an
        # inplace operation" to autograd. The expanded scalar only lends its shape.
        local = torch.empty((), dtype=view.dtype, device=view.device).expand(view.shape)
        if self.parallel is None:
            self.unsharded = nn.Parameter(local, requires_grad=differentiable)
        else:
            given = self.parallel.spec
            meta = TensorMeta(given.shape, contiguous_stride(given.shape), view.dtype)
            whole = DTensor(local, DTensorSpec(given.mesh, given.placements, tensor_meta=meta), requires_grad=False)
            self.unsharded = nn.Parameter(whole, requires_grad=differentiable)
        self.point_to(view)
        self.unsharded.__dict__[GATHERED_OF] = weakref.ref(self)
        return self.unsharded

    def replace(self, sharded: nn.Parameter) -> None:
        """Take ``sharded`` for the sharded parameter from now on. Whoever holds the one before can be told."""
        if sharded is not self.sharded:
            self.sharded.__dict__[REPLACED] = True
            sharded.__dict__.pop(REPLACED, None)
            self.sharded = sharded
        self.kept = local_of(sharded)

    def point_to(self, view: torch.Tensor) -> None:
        """Let the unsharded parameter look at ``view``."""
        assert self.unsharded is not None
        (self.unsharded if self.parallel is None else local_of(self.unsharded)).data = view

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


def is_view_of(param: nn.Parameter, flat: torch.Tensor) -> bool:
    """Whether the local part of ``param`` lies in the storage of ``flat``."""
    return isinstance(param, DTensor) and local_of(param).untyped_storage()._cdata == flat.untyped_storage()._cdata


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """``local`` as a DTensor: ours if it has a ragged placement, else torch's, as torch makes it: ``torch.compile`` makes a tensor that
    stands for it in the same way, and both must start at the same offset."""
    if any(isinstance(placement, RaggedShard) for placement in spec.placements):
        return RaggedDTensor.from_spec(local, spec)
    return DTensor(local, spec, requires_grad=False)
