"""The layout of a RaggedDTensor: computed once, kept on the DTensorSpec, and shared by all dtypes.

torch builds a DTensorSpec per tensor. Building one takes about 10 us, too much for every result of a step over hundreds of parameters.
Therefore each spec carries a :class:`LocalSharding`, which finds a result's spec by dtype. The cache hangs on the specs and not on the
module. It dies with the tensors, and so does the last reference to their mesh and process groups.

On a mesh of several dimensions the ragged cut comes last, wherever it stands among the placements. The ``Shard`` placements of the other
dimensions (TP, EP) cut first, in mesh order as in torch. They leave each coordinate a *section*, a box of the tensor, and the RaggedShard
distributes the section's row-major elements. Example: on a 2 x 2 mesh, ``[RaggedShard((0,), (1, 3)), Shard(0)]`` of a tensor [8, 5] gives
rank (0, 1) row 4 and rank (1, 1) rows 5..7. veScale calls this a StridedRaggedShard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from vescale_ray.compat.core import FakeTensor, FunctionalTensor
from vescale_ray.compat.tensor import DTensorSpec, NormPartial, TensorMeta
from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.geometry import Box, Shape, boxes

Placements = tuple[Placement, ...]
T = TypeVar("T", bound=DTensor)


class ShapedSpec(DTensorSpec):
    """A spec that always compares its shape, too. ``torch.compile`` compares specs without shapes: if a rank held equal parts of two
    tensors, it would run the code of one on the other, and the result would have the wrong shape."""

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:
        return super()._check_equals(other)

    def __deepcopy__(self, memo: object) -> ShapedSpec:
        return self  # in torch's copy for a guard, a pending norm (_NormPartial) would lose its order


class LocalSharding:
    """One layout (mesh, placements, global shape) from this rank's point of view."""

    __slots__ = (
        "__weakref__",
        "_interval",
        "_reduced",
        "_specs",
        "_views",
        "end",
        "first_unit",
        "local_shape",
        "mesh",
        "mesh_dim",
        "numel",
        "offsets",
        "pending",
        "placement",
        "placements",
        "rank",
        "section",
        "section_numel",
        "shape",
        "simple",
        "start",
        "stride",
    )

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> None:
        self.mesh = mesh
        self.shape = torch.Size(shape)
        self.placements: Placements = check_placements(mesh, placements, self.shape)
        self.stride: Shape = contiguous_stride(self.shape)
        self.numel = math.prod(self.shape)
        self.mesh_dim = next(i for i, p in enumerate(self.placements) if isinstance(p, RaggedShard))
        ragged = self.placements[self.mesh_dim]
        assert isinstance(ragged, RaggedShard)
        self.placement: RaggedShard = ragged
        for whole in _section_shapes(tuple(mesh.shape), self.placements, tuple(self.shape)):
            ragged.validate(whole, mesh.size(self.mesh_dim))  # check every coordinate, so that all ranks raise together
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"this process is not part of {mesh}: create its tensors on the ranks of the mesh only")
        self.rank = int(coordinate[self.mesh_dim])
        self.offsets, self.section = section(tuple(mesh.shape), self.placements, tuple(self.shape), tuple(coordinate))
        """The box that the Shard placements of other mesh dimensions leave to this coordinate; without them, the whole tensor."""
        self.section_numel = math.prod(self.section)
        self.start, self.end = ragged.interval(self.section, self.rank)
        """Flat elements of the section that this rank holds."""
        self.local_shape: Shape = ragged.local_shape(self.section, self.rank)
        self.first_unit = ragged.units_of(self.section) * sum(ragged.local_units[: self.rank]) // sum(ragged.local_units)
        self.pending = any(p.is_partial() for p in self.placements)
        self.simple = bool(self.shape) and not self.pending
        """True if element-wise operations may run on local tensors without further checks."""
        self._interval: tuple[int, int] | None = None
        self._views: dict[object, LocalSharding | None] = {}
        self._specs: dict[torch.dtype, DTensorSpec] = {}
        self._reduced: dict[object, DTensorSpec] = {}

    @property
    def world(self) -> int:
        """Number of ranks that share the tensor."""
        return len(self.placement.local_units)

    def same_layout(self, other: LocalSharding) -> bool:
        """True if mesh, placements and shape are equal, so that local tensors correspond element by element."""
        return self is other or (self.shape == other.shape and self.placements == other.placements and self.mesh == other.mesh)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Return the spec of a tensor with this layout and ``dtype``, the same object each time."""
        found = self._specs.get(dtype)
        if found is None:
            found = ShapedSpec(self.mesh, self.placements, tensor_meta=TensorMeta(self.shape, self.stride, dtype))
            self.adopt(found)
        return found

    def adopt(self, spec: DTensorSpec) -> None:
        """Use ``spec`` for its dtype, unless there is one already."""
        spec._ragged = self  # type: ignore[attr-defined]
        assert spec.tensor_meta is not None
        self._specs.setdefault(spec.tensor_meta.dtype, spec)

    def interval(self) -> tuple[int, int]:
        """Return this rank's flat elements ``[start, end)`` of the whole tensor. Raises ValueError if they are not an interval."""
        if self._interval is None:
            offsets, part, shape = self.offsets, self.section, self.shape
            cut = next((d for d in reversed(range(len(shape))) if part[d] != shape[d]), 0)
            if math.prod(part[:cut]) > 1:
                raise ValueError(f"this rank's part of {self.describe()} is not one interval of its elements: call local_intervals()")
            base = sum(o * s for o, s in zip(offsets, self.stride, strict=True)) if self.section_numel else 0
            self._interval = base + self.start, base + self.end
        return self._interval

    def boxes(self) -> tuple[Box, ...]:
        """Return the boxes of the tensor that this rank holds, in the order of the local tensor's elements; none is empty."""
        return _shifted(boxes(self.section, self.start, self.end), self.offsets)

    def cut_dims(self) -> list[int]:
        """Mesh dimensions that distribute the elements: the ragged one and those with Shard."""
        return [i for i, p in enumerate(self.placements) if i == self.mesh_dim or p.is_shard()]

    def reduced_spec(self, partial: Placement, shape: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
        """Return the spec of a reduction over all elements: ``partial`` on the mesh dimensions that distribute them."""
        key = (partial, tuple(shape), dtype)
        found = self._reduced.get(key)
        if found is None:
            placements = tuple(partial if i == self.mesh_dim or p.is_shard() else p for i, p in enumerate(self.placements))
            found = self._reduced[key] = pending_spec(self.mesh, placements, shape, dtype)
        return found

    def reshaped(self, shape: Sequence[int]) -> LocalSharding | None:
        """Return the layout of the same elements on the same ranks, in the same order, with another ``shape``; None if there is none.

        If another mesh dimension has Shard(d), the dimensions up to d must stay unchanged.
        """
        shape = tuple(int(n) for n in shape)
        key = ("reshaped", shape)
        if key not in self._views:
            kept = 1 + max((p.dim for p in self.placements if type(p) is Shard), default=-1)
            self._views[key] = None
            merges = range(len(shape) + 1) if tuple(self.shape[:kept]) == shape[:kept] else ()
            for merged in merges:  # take the fewest that fit: the same number on every rank, for any section
                try:
                    self._views[key] = self._with(RaggedShard(tuple(range(merged)), self.placement.local_units), shape)
                    break
                except ValueError:
                    pass
        return self._views[key]

    def resized(self, shape: Sequence[int], gone: Sequence[int] = ()) -> LocalSharding:
        """Return the layout of a tensor with other inner dimensions. It has as many units, of another size.

        ``gone``: dimensions of this shape that the new one lacks; no placement cuts them.
        """
        shape = tuple(int(n) for n in shape)
        key = ("resized", shape, tuple(gone))
        found = self._views.get(key)
        if found is None:
            moved = tuple(Shard(p.dim - sum(d < p.dim for d in gone)) if type(p) is Shard else p for p in self.placements)
            found = self._views[key] = layout_of(self.mesh, moved, shape)
        return found

    def settled(self) -> LocalSharding:
        """Return this layout with nothing pending."""
        found = self._views.get("settled")
        if found is None:
            found = self._views["settled"] = layout_of(self.mesh, settled_placements(self.placements), self.shape)
        return found

    def _with(self, placement: RaggedShard, shape: Shape) -> LocalSharding:
        return layout_of(self.mesh, tuple(placement if i == self.mesh_dim else p for i, p in enumerate(self.placements)), shape)

    def describe(self) -> str:
        return f"a ragged tensor of shape {tuple(self.shape)} with placements [{', '.join(map(str, self.placements))}]"


def sharding_of(spec: DTensorSpec) -> LocalSharding:
    """Return the spec's layout. Except for the first time, it costs one attribute access."""
    try:
        return spec._ragged  # type: ignore[attr-defined]
    except AttributeError:
        assert spec.tensor_meta is not None
        sharding = layout_of(spec.mesh, spec.placements, spec.tensor_meta.shape)
        sharding.adopt(spec)
        return sharding


_PENDING: WeakValueDictionary[object, DTensorSpec] = WeakValueDictionary()
_LAYOUTS: WeakValueDictionary[object, LocalSharding] = WeakValueDictionary()
"""Layouts by the mesh's identity. A live Sharding holds its mesh, so no other mesh has the same identity."""


def pending_spec(mesh: DeviceMesh, placements: Placements, shape: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
    """Return the one spec of a reduction's result. Equal specs are one object, which shows that norms can be stacked directly."""
    shape = numbers(shape)
    key = (id(mesh), placements, shape, dtype)
    found = _PENDING.get(key)
    if found is None:
        meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
        found = _PENDING[key] = ShapedSpec(mesh, placements, tensor_meta=meta)
    return found


def numbers(shape: Sequence[int]) -> Shape:
    """Return ``shape`` with numbers in place of symbols of ``torch.compile``, since a layout has one shape. So a function is compiled for
    each shape."""
    return tuple(shape) if all(type(n) is int for n in shape) else tuple(int(n) for n in shape)


def layout_of(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> LocalSharding:
    """Return the one Sharding of a layout. Tensors with equal layouts are then recognized by identity."""
    shape = numbers(shape)
    key = (id(mesh), tuple(placements), shape)
    found = _LAYOUTS.get(key)
    if found is None:
        found = _LAYOUTS[key] = LocalSharding(mesh, placements, shape)
    return found


def ragged_mesh_dim(placements: Sequence[Placement]) -> int | None:
    """Return the mesh dimension with a RaggedShard, or None."""
    for i, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            return i
    return None


def check_placements(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> Placements:
    """Return the placements of a supported layout, with negative dimensions made positive.

    Raises:
        ValueError: there is not one placement per mesh dimension, not exactly one RaggedShard, or another kind than Replicate, Partial
            and Shard.
    """
    shown = f"[{', '.join(map(str, placements))}]"
    if len(placements) != mesh.ndim:
        raise ValueError(f"placements {shown} are {len(placements)}, but the mesh has {mesh.ndim} dimensions")
    ragged = sum(isinstance(p, RaggedShard) for p in placements)
    if ragged != 1:
        raise ValueError(f"placements {shown} hold {ragged} RaggedShard: a RaggedDTensor needs exactly one")
    for i, placement in enumerate(placements):
        if not isinstance(placement, RaggedShard | Replicate | Partial) and type(placement) is not Shard:
            raise ValueError(
                f"placements {shown}: beside a RaggedShard only Replicate, Partial and Shard(dim) are supported, "
                f"not {placement} on mesh dimension {i}"
            )
    return positive_dims(placements, shape)


def positive_dims(placements: Sequence[Placement], shape: Sequence[int]) -> Placements:
    """Return ``Shard(-1)`` as ``Shard(ndim - 1)``; raises ValueError for a dimension that the tensor lacks."""
    found = []
    for placement in placements:
        if type(placement) is Shard:
            if not -len(shape) <= placement.dim < len(shape):
                raise ValueError(f"{placement} of a tensor of shape {tuple(shape)}: there is no dimension {placement.dim}")
            placement = placement if placement.dim >= 0 else Shard(placement.dim + len(shape))
        found.append(placement)
    return tuple(found)


def settled_placements(placements: Sequence[Placement]) -> Placements:
    """Return the placements with Replicate in place of pending reductions."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return one part of a dimension, cut like ``torch.chunk``: parts of ceil(size / parts), the last ones shorter or empty."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


@lru_cache(maxsize=65536)
def section(mesh_shape: Shape, placements: Placements, shape: Shape, coordinate: Shape) -> Box:
    """Return the offsets and sizes of the box that the Shard placements leave to a coordinate. They cut in mesh order, each one the box
    that the earlier ones leave."""
    offsets, sizes = [0] * len(shape), list(shape)
    for parts, placement, index in zip(mesh_shape, placements, coordinate, strict=True):
        if type(placement) is Shard:
            start, end = chunk(sizes[placement.dim], parts, index)
            offsets[placement.dim] += start
            sizes[placement.dim] = end - start
    return tuple(offsets), tuple(sizes)


@lru_cache(maxsize=65536)
def holding(mesh_shape: Shape, placements: Placements, shape: Shape, coordinate: Shape) -> tuple[Box, ...]:
    """Return the boxes of the tensor that a coordinate holds, in the order of its local tensor's elements; none is empty."""
    offsets, sizes = section(mesh_shape, placements, shape, coordinate)
    dim = ragged_mesh_dim(placements)
    if dim is None:
        return () if 0 in sizes else ((offsets, sizes),)
    ragged = placements[dim]
    assert isinstance(ragged, RaggedShard)
    return _shifted(boxes(sizes, *ragged.interval(sizes, coordinate[dim])), offsets)


def _shifted(found: tuple[Box, ...], by: Shape) -> tuple[Box, ...]:
    if not any(by):
        return found
    return tuple((tuple(o + b for o, b in zip(offsets, by, strict=True)), sizes) for offsets, sizes in found)


def section_shapes(tensor: DTensor) -> tuple[Shape, ...]:
    """Return the distinct shapes of the boxes that the Shard placements of ``tensor`` leave to the coordinates of its mesh."""
    return _section_shapes(tuple(tensor.device_mesh.shape), tuple(tensor.placements), tuple(tensor.shape))


@lru_cache(maxsize=65536)
def _section_shapes(mesh_shape: Shape, placements: Placements, shape: Shape) -> tuple[Shape, ...]:
    """Return the distinct section shapes of all coordinates."""
    spans = [range(n if type(p) is Shard else 1) for n, p in zip(mesh_shape, placements, strict=True)]
    return tuple({section(mesh_shape, placements, shape, coordinate)[1]: None for coordinate in product(*spans)})


def make_spec(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype) -> DTensorSpec:
    """Return a checked spec for a tensor of ``shape``; raises ValueError like :func:`check_placements` and ``RaggedShard.validate``."""
    return layout_of(mesh, placements, shape).spec(dtype)


def contiguous_stride(shape: Sequence[int]) -> Shape:
    """Return the strides of a row-major tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(int(size), 1)
    return tuple(reversed(strides))


def norm_partial(order: float) -> Placement:
    """Return the pending reduction that combines local norms of this order."""
    if order == math.inf:
        return Partial("max")
    if order == -math.inf:
        return Partial("min")
    if order == 0:
        return Partial("sum")
    return NormPartial(order)


def replicated(mesh: DeviceMesh) -> tuple[Placement, ...]:
    return (Replicate(),) * mesh.ndim


def wrap(cls: type[T], local: Tensor, spec: DTensorSpec, requires_grad: bool = False) -> T:
    """Return a ``cls`` with ``local``'s dtype and ``spec``'s layout. It skips DTensor's ``__init__``, which does nothing."""
    if local.dtype is not spec.tensor_meta.dtype:  # type: ignore[union-attr]
        spec = sharding_of(spec).spec(local.dtype)
    return enclose(cls, local, spec, requires_grad)


def enclose(cls: type[T], local: Tensor, spec: DTensorSpec, requires_grad: bool = False) -> T:
    """Make a DTensor of class ``cls`` around ``local``, which may begin anywhere in its storage.

    With ``cls.__new__`` the DTensor would take over the offset, and its ``data_ptr()`` would not be 0. DCP's ``async_save``, for one,
    relies on 0.
    """
    if type(local) not in _WITH_OFFSET or not local.storage_offset():
        return cls.__new__(cls, local, spec, requires_grad=requires_grad)  # type: ignore[return-value]
    if type(local) is not Tensor:  # traced: the result must match the tensor that it stands for
        made = cls.__new__(cls, local.new_empty(0), spec, requires_grad=requires_grad)
        made._local_tensor = local
        return cast(T, made)
    kind = local.dtype, local.device
    if kind not in _STARTS:
        with torch.inference_mode(False):
            _STARTS[kind] = torch.empty(0, dtype=local.dtype, device=local.device)
    made = cls.__new__(cls, _STARTS[kind], spec, requires_grad=requires_grad)
    made._local_tensor = local
    return cast(T, made)


_WITH_OFFSET = (Tensor, FakeTensor, FunctionalTensor)
_STARTS: dict[tuple[torch.dtype, torch.device], Tensor] = {}
