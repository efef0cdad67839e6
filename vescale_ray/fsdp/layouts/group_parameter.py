"""One parameter in its sharded and unsharded form, and the ranks and devices of its group."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from vescale_ray.communication.point_to_point import is_pairwise
from vescale_ray.compat.distributed import AsyncCollectiveTensor
from vescale_ray.compat.tensor import DTensorSpec, StridedShard, TensorMeta
from vescale_ray.dtensor.operations.schema import GATHERED_OF, SHARDED_OF  # their marks refer weakly to the parameter's GroupParam
from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor
from vescale_ray.dtensor.redistribution import plain_spec
from vescale_ray.dtensor.spec import contiguous_stride, make_spec
from vescale_ray.fsdp.layouts.division import Division
from vescale_ray.fsdp.layouts.phases import Retain
from vescale_ray.fsdp.layouts.shared_memory import sharers
from vescale_ray.fsdp.layouts.wire import GroupWire
from vescale_ray.geometry import Block
from vescale_ray.quantization import Fp8Block

Owner = tuple["weakref.ref[nn.Module]", str]
"""A module and the name of the parameter in it. The reference is weak, so that units do not keep their model alive."""


REPLACED = "_vescale_replaced"
"""Attribute of parameters that a sharded parameter has replaced in the model: their name."""
SUMMED_OVER = "_vescale_summed_over"
"""Attribute of parameters under expert parallelism: the number of ranks whose losses a local gradient sums up."""
SINK = "_vescale_sink"
"""Attribute of gathered weights of linear layers: a :class:`PrivateMark` of where backward writes their gradient."""
INNER = "_vescale_inner"
"""Attribute of parameters of a tensor class: the names of the class's own attributes."""
_PLAIN = {nn.Parameter, DTensor, RaggedDTensor}
_NO_MARKS = frozenset({REPLACED, GATHERED_OF, SHARDED_OF, SUMMED_OVER, SINK, "_local_tensor", "_spec", "_is_param"})
"""Attributes that this package and torch set on parameters."""


class PrivateMark(tuple[Any, ...]):
    """Values in an attribute of a gathered or sharded parameter. A pickled copy of the parameter has an empty set in their place."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return set, ()  # torch.load(weights_only=True) knows this type


@dataclass(frozen=True)
class OriginalParameter:
    """A parameter as ``fully_shard`` finds it in the model."""

    name: str
    param: nn.Parameter
    owners: tuple[Owner, ...]
    mesh: DeviceMesh
    """The ranks that shard the parameter: (shard,) or (replicate, shard)."""
    block: Block | None
    parallel: Parallel | None = None
    gaps: bool = False
    """True if the parameter is a stack of matrices that may have a gap after each matrix."""
    form: Fp8Block | None = None
    """The FP8 format in which the parameter is gathered; None: the compute dtype."""
    cut_block: Block = Block.rows(1)
    """The block that shards must keep whole if they cut tiles of ``form``."""
    shard_dim: int | None = None
    """Dimension of a plain ``Shard`` placement; None: the planner cuts the parameter."""
    hooked: bool = False
    """True if the parameter's tensor class defines the all-gather."""
    tied: bool = False
    """True if an earlier unit holds the parameter, too. This unit shards a copy, which must be replaced before the first forward."""

    @property
    def value(self) -> torch.Tensor:
        """The tensor to shard: the parameter, or this rank's local part of it under tensor or expert parallelism."""
        return self.param.detach() if self.parallel is None else local_of(self.param)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


@dataclass(frozen=True)
class Parallel:
    """Tensor or expert parallelism of a parameter that is a DTensor already. Data parallelism shards each rank's local part.

    Args:
        spec: the DTensor's spec, which the module's forward expects.
        data_dims: data-parallel dimensions of its mesh (``dp_mesh_dims``): Replicate, with sums of gradients possibly pending.
        model_mesh: its mesh without these dimensions; None if none is left.
        even: whether every rank has the same number of elements. If not, the ranks can't share one ragged placement, so it needs ``Shard``.
        summed_over: number of ranks whose losses a local gradient sums up: those that exchange tokens with this one.
    """

    spec: DTensorSpec
    data_dims: frozenset[int]
    model_mesh: DeviceMesh | None
    even: bool = True
    summed_over: int = 1

    @property
    def model_placements(self) -> tuple[Placement, ...]:
        return tuple(p for i, p in enumerate(self.spec.placements) if i not in self.data_dims)

    def parts_along(self, dim: int) -> int:
        """Return the number of parts into which tensor or expert parallelism cuts dimension ``dim``."""
        cut = [type(p) is Shard and p.dim % len(self.spec.shape) == dim for p in self.spec.placements]
        return math.prod(size for size, here in zip(self.spec.mesh.shape, cut, strict=True) if here)

    def local_gradient(self, grad: torch.Tensor, fqn: str) -> torch.Tensor:
        """Return this rank's part of a gradient in the parameter's placements; sums over data-parallel dimensions stay pending."""
        if not isinstance(grad, DTensor):
            raise TypeError(f"parameter {fqn!r} is a DTensor, and a backward gave it a {type(grad).__name__}: return a DTensor from it")
        wanted = tuple(g if i in self.data_dims else p for i, (g, p) in enumerate(zip(grad.placements, self.spec.placements, strict=True)))
        local = local_of(grad if grad.placements == wanted else grad.redistribute(placements=wanted))
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


@dataclass(frozen=True)
class GroupPlan:
    """A group that is to be built.

    Attributes:
        sources: parameters of one dtype and one ``requires_grad``, in the order of ``division.layout.specs``.
        wire: what the all-gather sends.
        mesh: 1-D (shard) or 2-D (replicate, shard).
        retain: the gathered parameters that stay until the next optimizer step.
        neighbours: size of the subgroup that keeps all parameters between forward and backward; None: no subgroup.
    """

    sources: Sequence[OriginalParameter]
    division: Division
    wire: GroupWire
    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    retain: Retain
    neighbours: int | None


class Place:
    """The ranks and the device of a group, and this rank's position."""

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

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.world * self.replicas

    def spec(self, own: Placement, shape: tuple[int, ...], dtype: torch.dtype, parallel: Parallel | None) -> DTensorSpec:
        """Return the spec of a sharded parameter: ``own`` on the data-parallel mesh, with the placements of tensor or expert
        parallelism."""
        ragged = isinstance(own, RaggedShard)
        if parallel is not None and isinstance(own, Shard) and (split := parallel.parts_along(own.dim)) > 1:
            own = StridedShard(own.dim, split_factor=split)  # it comes first in the mesh, but cuts the part that the others leave
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
    """``size`` neighbouring ranks of a shard group. Between forward and backward each keeps ``1 / size`` of the gathered parameters.

    All ranks of the mesh create it together. It is cached, since every unit of a model uses the same one.
    """

    __slots__ = ("group", "pairwise", "rank", "size")

    def __init__(self, mesh: DeviceMesh, size: int, device: torch.device) -> None:
        # The key is the process group: meshes of the same ranks compare equal even if the ranks have new groups by now.
        known = _SUBGROUPS.setdefault(mesh.get_group(mesh.ndim - 1), {})
        if size not in known:
            names = ("across", "neighbours")
            if mesh.size() == dist.get_world_size() or mesh.mesh_dim_names is None:
                known[size] = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, size), mesh_dim_names=names)
            else:  # the ranks outside this mesh create groups at the same time, and every rank must know all of them
                known[size] = mesh._unflatten(mesh.ndim - 1, (mesh.size(mesh.ndim - 1) // size, size), names)
        self.size, self.rank = size, known[size].get_local_rank("neighbours")
        self.group: dist.ProcessGroup = known[size].get_group("neighbours")
        self.pairwise = is_pairwise(self.group, device)


_SUBGROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, DeviceMesh]] = weakref.WeakKeyDictionary()


class GroupParam:
    """One parameter: the sharded ``nn.Parameter`` (a RaggedDTensor or DTensor), and the unsharded leaf once it was gathered."""

    __slots__ = (
        "__weakref__", "fqn", "home", "kept", "name", "outer", "owners", "parallel", "placement", "shape", "sharded", "sharers", "slots",
        "spec", "tied", "unsharded"
    )  # fmt: skip

    def __init__(self, source: OriginalParameter, sharded: nn.Parameter, placement: Placement, spec: DTensorSpec) -> None:
        self.name, self.fqn, self.owners, self.parallel = source.name, source.name, source.owners, source.parallel
        self.sharded, self.placement, self.spec = sharded, placement, spec
        sharded.__dict__[SHARDED_OF] = PrivateMark((weakref.ref(self),))
        self.tied = sharded if source.tied else None
        self.sharers = () if source.tied else sharers(source.value, self)
        """Parameters whose originals had the same memory."""
        self.shape = source.shape
        """Shape of the tensor that is sharded: the parameter's, or that of its local part under tensor or expert parallelism."""
        self.unsharded: nn.Parameter | None = None
        self.kept = local_of(sharded)
        """The local tensor, a view of the master shard. After ``.data`` is assigned, the sharded parameter has another one."""
        self.outer = outer_of(sharded)
        self.slots = [(module._parameters, attribute) for ref, attribute in source.owners if (module := ref()) is not None]
        """The dicts and names under which the modules hold the parameter."""
        self.home: GroupParam | None = None
        """The parameter of another group to which this one was tied after sharding. The sharded parameter is a view of that group's shard.
        This group keeps a copy, refreshed when it gathers."""

    @property
    def summed_over(self) -> int:
        """Number of ranks whose losses a gradient sums up before data parallelism reduces it."""
        return 1 if self.parallel is None else self.parallel.summed_over

    def new_unsharded(self, view: torch.Tensor) -> nn.Parameter:
        """Return a leaf parameter on ``view`` of the gathered buffer."""
        differentiable = view.is_floating_point() or view.is_complex()
        # A tensor assigned through .data does not share the buffer's version counter, so autograd does not take a refill for an in-place
        # write. The expanded scalar only lends its shape.
        local = torch.empty((), dtype=view.dtype, device=view.device).expand(view.shape)
        if self.parallel is None:
            self.unsharded = nn.Parameter(local, requires_grad=differentiable)
        else:
            given = self.parallel.spec
            meta = TensorMeta(given.shape, contiguous_stride(given.shape), view.dtype)
            # The DTensor is made of the view: torch.compile expects it to begin where its local tensor does.
            whole = DTensor(view, DTensorSpec(given.mesh, given.placements, tensor_meta=meta), requires_grad=False)
            self.unsharded = nn.Parameter(whole, requires_grad=differentiable)
            self.unsharded._local_tensor = local  # type: ignore[attr-defined]
        self.point_to(view)
        self.unsharded.__dict__[GATHERED_OF] = PrivateMark((weakref.ref(self),))
        return self.unsharded

    def replace(self, sharded: nn.Parameter) -> None:
        """Use ``sharded`` as the sharded parameter, and mark the previous one as replaced."""
        if sharded is not self.sharded:
            self.sharded.__dict__[REPLACED], self.sharers = self.fqn, ()
            sharded.__dict__.pop(REPLACED, None)
            sharded.__dict__[SHARDED_OF] = PrivateMark((weakref.ref(self),))
            self.sharded = sharded
        self.kept, self.outer = local_of(sharded), outer_of(sharded)

    @property
    def moved(self) -> bool:
        """True if ``.data`` of a RaggedDTensor was assigned, or another value was swapped in, since the group adopted it."""
        return local_of(self.sharded) is not self.kept

    def lost_data(self) -> bool:
        """Return True if ``.data`` of torch's DTensor was assigned since the last call. Such an assignment does not change the local
        tensor."""
        if self.outer is outer_of(self.sharded) or self.moved:
            return False
        self.sharded.data = as_dtensor(self.kept, self.spec)  # a storage of its own again
        self.outer = outer_of(self.sharded)
        return True

    def point_to(self, view: torch.Tensor) -> None:
        """Make the unsharded parameter a view of ``view``."""
        assert self.unsharded is not None
        (self.unsharded if self.parallel is None else local_of(self.unsharded)).data = view

    def tie_to(self, home: GroupParam) -> bool:
        """Tie this parameter to ``home`` of another group. Returns False if the ranks hold different parts of the two."""
        same = isinstance(self.placement, Shard) and self.placement == home.placement and self.spec.mesh == home.spec.mesh
        if not same or self.spec.shape != home.spec.shape or self.sharded.dtype != home.sharded.dtype:
            return False
        self.home = home
        return True

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of the parameter: a view of the master shard."""
        return local_of(self.sharded)

    def install(self, parameter: nn.Parameter) -> None:
        """Put ``parameter``, sharded or not, into the modules, with the attributes that were set on the one that they held."""
        previous = self.unsharded if parameter is self.sharded else self.sharded
        if previous is not None:
            copy_marks(previous, parameter)
        for held, attribute in self.slots:
            held[attribute] = parameter

    def installed(self) -> nn.Parameter | None:
        """Return the parameter that the first module holds now, or held last."""
        held, attribute = self.slots[0]
        return held.get(attribute)

    @property
    def is_left(self) -> bool:
        """Return True if no module that held the parameter exists any more. This happens if the user has replaced a head."""
        return all(module() is None for module, _ in self.owners)


def sharded_parameter(local: torch.Tensor, spec: DTensorSpec, like: nn.Parameter) -> nn.Parameter:
    """Return a sharded parameter on ``local``, which it shares with its version counter. It is trained if ``like`` is, and has its
    marks."""
    sharded = nn.Parameter(as_dtensor(local, spec), requires_grad=like.requires_grad)
    sharded._local_tensor = local  # type: ignore[attr-defined]  # nn.Parameter detached it, and with it the version counter
    copy_marks(like, sharded)
    return sharded


def copy_marks(source: nn.Parameter, target: nn.Parameter) -> None:
    """Give ``target`` the attributes that users and optimizers have set on ``source``, and no others."""
    marks, theirs = source.__dict__, target.__dict__
    if not (marks.keys() - _NO_MARKS or theirs.keys() - _NO_MARKS):
        return  # nearly always: this runs for each parameter at each gather and release
    own, kept = _inner(source), _inner(target)
    given = {key: value for key, value in marks.items() if _is_mark(key) and key not in own}
    for key in [key for key in theirs if key not in given and _is_mark(key) and key not in kept]:
        del theirs[key]
    theirs.update(given)


def _is_mark(attribute: str) -> bool:
    return attribute not in _NO_MARKS and not attribute.startswith(("_vescale", "_dynamo"))


def _inner(param: nn.Parameter) -> frozenset[str]:
    """Return the attributes from which a tensor class makes its instances, such as inner tensors. A user has not set them."""
    if type(param) in _PLAIN:
        return frozenset()
    if INNER not in param.__dict__:
        param.__dict__[INNER] = frozenset(param.detach().__dict__)
    inner: frozenset[str] = param.__dict__[INNER]
    return inner


def gathered_of(tensor: Any) -> GroupParam | None:
    """Return the parameter that ``tensor`` is the gathered form of, if there is one. Cost: 0.2 us."""
    mark: PrivateMark | None = getattr(tensor, GATHERED_OF, None)
    return mark[0]() if mark else None


def local_of(param: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, without autograd."""
    local: torch.Tensor = param._local_tensor  # type: ignore[attr-defined]
    return local


def outer_of(sharded: nn.Parameter) -> Any:
    """Return the storage that torch's DTensor itself has; an assignment to ``.data`` replaces it. None for a RaggedDTensor."""
    return None if isinstance(sharded, RaggedDTensor) else sharded.untyped_storage()


def is_view_of(param: nn.Parameter, flat: torch.Tensor) -> bool:
    """True if the local part of ``param`` lies in the storage of ``flat``."""
    return isinstance(param, DTensor) and local_of(param).untyped_storage()._cdata == flat.untyped_storage()._cdata


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return ``local`` as a RaggedDTensor for a ragged placement, else as torch's DTensor. It is built as ``torch.compile`` builds its
    traced stand-in, since both must start at the same offset."""
    if any(isinstance(placement, RaggedShard) for placement in spec.placements):
        return RaggedDTensor.from_spec(local, spec)
    return DTensor(local, spec, requires_grad=False)
