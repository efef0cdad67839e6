"""What a RaggedDTensor knows of its layout: computed once, kept on the DTensorSpec, shared by all dtypes of one layout.

torch builds a DTensorSpec per tensor; building one costs about 10 us, which a step over hundreds of parameters can't pay
for every result. So each spec carries a :class:`Sharding`, and a result's spec is looked up there by dtype. The cache hangs
on the specs (not on the module): it dies with the tensors, and with it the last reference to their mesh and process groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial

from vescale_ray.geometry import Shape
from vescale_ray.placement import RaggedShard


class Sharding:
    """One layout (mesh, placements, global shape) seen from this rank."""

    __slots__ = (
        "_reduced",
        "_specs",
        "_views",
        "end",
        "first_unit",
        "local_shape",
        "mesh",
        "mesh_dim",
        "numel",
        "placement",
        "placements",
        "rank",
        "shape",
        "start",
        "stride",
    )

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> None:
        placements = tuple(placements)
        self.mesh = mesh
        self.placements: tuple[Placement, ...] = placements
        self.shape = torch.Size(shape)
        self.stride: Shape = contiguous_stride(self.shape)
        self.numel = math.prod(self.shape)
        self.mesh_dim = check_placements(mesh, placements)
        ragged = placements[self.mesh_dim]
        assert isinstance(ragged, RaggedShard)
        self.placement: RaggedShard = ragged
        ragged.validate(self.shape, mesh.size(self.mesh_dim))
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"this process is not part of {mesh}: create its tensors on the ranks of the mesh only")
        self.rank = int(coordinate[self.mesh_dim])
        self.start, self.end = ragged.interval(self.shape, self.rank)
        self.local_shape: Shape = ragged.local_shape(self.shape, self.rank)
        self.first_unit = ragged.units_of(self.shape) * sum(ragged.local_units[: self.rank]) // sum(ragged.local_units)
        self._views: dict[tuple[Shape, bool], Sharding] = {}
        self._specs: dict[torch.dtype, DTensorSpec] = {}
        self._reduced: dict[object, DTensorSpec] = {}

    @property
    def world(self) -> int:
        """Ranks that share the tensor."""
        return len(self.placement.local_units)

    def same_layout(self, other: Sharding) -> bool:
        """Equal mesh, placements and shape: local tensors correspond element by element."""
        return self is other or (self.shape == other.shape and self.placements == other.placements and self.mesh == other.mesh)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """The spec of a tensor of this layout with ``dtype``; always the same object."""
        found = self._specs.get(dtype)
        if found is None:
            found = DTensorSpec(self.mesh, self.placements, tensor_meta=TensorMeta(self.shape, self.stride, dtype))
            self.adopt(found)
        return found

    def adopt(self, spec: DTensorSpec) -> None:
        """Make ``spec`` the one for its dtype, unless there is one already."""
        spec._ragged = self  # type: ignore[attr-defined]
        assert spec.tensor_meta is not None
        self._specs.setdefault(spec.tensor_meta.dtype, spec)

    def reduced_spec(self, partial: Placement, shape: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
        """The spec of a reduction over all elements: ``partial`` on the ragged mesh dimension, the other dimensions as here."""
        key = (partial, tuple(shape), dtype)
        found = self._reduced.get(key)
        if found is None:
            placements = tuple(partial if i == self.mesh_dim else p for i, p in enumerate(self.placements))
            meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
            found = self._reduced[key] = DTensorSpec(self.mesh, placements, tensor_meta=meta)
        return found

    def reshaped(self, shape: Sequence[int]) -> Sharding:
        """The layout of the same flat elements on the same ranks seen in another ``shape`` of as many elements."""
        shape = tuple(int(n) for n in shape)
        found = self._views.get((shape, True))
        if found is None:
            counts = [end - start for start, end in self.placement.intervals(self.shape)]
            found = self._views[shape, True] = self._with(RaggedShard.of_intervals(shape, counts), shape)
        return found

    def resized(self, shape: Sequence[int]) -> Sharding:
        """The layout of a tensor with the same merged dimensions and other inner ones: the same units, of another size."""
        shape = tuple(int(n) for n in shape)
        found = self._views.get((shape, False))
        if found is None:
            found = self._views[shape, False] = self._with(self.placement, shape)
        return found

    def _with(self, placement: RaggedShard, shape: Shape) -> Sharding:
        return Sharding(self.mesh, tuple(placement if i == self.mesh_dim else p for i, p in enumerate(self.placements)), shape)

    def describe(self) -> str:
        return f"a ragged tensor of shape {tuple(self.shape)} with placements [{', '.join(map(str, self.placements))}]"


def sharding_of(spec: DTensorSpec) -> Sharding:
    """The spec's layout. Cost when known (always but the first time): one attribute."""
    try:
        return spec._ragged  # type: ignore[attr-defined]
    except AttributeError:
        assert spec.tensor_meta is not None
        sharding = Sharding(spec.mesh, spec.placements, spec.tensor_meta.shape)
        sharding.adopt(spec)
        return sharding


def ragged_mesh_dim(placements: Sequence[Placement]) -> int | None:
    """The mesh dimension that a RaggedShard lies on, or None."""
    for i, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            return i
    return None


def check_placements(mesh: DeviceMesh, placements: Sequence[Placement]) -> int:
    """The ragged mesh dimension of a layout that we support.

    Raises:
        ValueError: anything but exactly one RaggedShard with Replicate on every other mesh dimension.
    """
    shown = f"[{', '.join(map(str, placements))}]"
    if len(placements) != mesh.ndim:
        raise ValueError(f"placements {shown} are {len(placements)}, but the mesh has {mesh.ndim} dimensions")
    ragged = [i for i, p in enumerate(placements) if isinstance(p, RaggedShard)]
    if len(ragged) != 1:
        raise ValueError(f"placements {shown} hold {len(ragged)} RaggedShard: a RaggedDTensor needs exactly one")
    for i, placement in enumerate(placements):
        if i != ragged[0] and not placement.is_replicate():
            raise ValueError(f"placements {shown}: beside a RaggedShard only Replicate is supported, not {placement} on mesh dimension {i}")
    return ragged[0]


def make_spec(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
    """A checked spec for a tensor of ``shape``; raises ValueError as :func:`check_placements` and ``RaggedShard.validate``."""
    return Sharding(mesh, placements, shape).spec(dtype)


def contiguous_stride(shape: Sequence[int]) -> Shape:
    """Strides of a row-major tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(int(size), 1)
    return tuple(reversed(strides))


def norm_partial(order: float) -> Placement:
    """The pending reduction that joins local norms of this order."""
    if order == math.inf:
        return Partial("max")
    if order == -math.inf:
        return Partial("min")
    if order == 0:
        return Partial("sum")
    return _NormPartial(order)


def replicated(mesh: DeviceMesh) -> tuple[Placement, ...]:
    return (Replicate(),) * mesh.ndim
