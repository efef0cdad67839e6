"""RaggedDTensor: torch's DTensor with a RaggedShard on one mesh dimension.

It is a subclass of ``torch.distributed.tensor.DTensor`` with its own dispatch (``operations``) and its own collectives
(``redistribution.py``). torch is not patched: the end of this file adds one entry to each list in which DTensor registers itself. A mesh of
several dimensions has Replicate (HSDP: ``[Replicate(), RaggedShard(..)]``), Shard (TP, EP: ``[RaggedShard(..), Shard(0)]``) or Partial
on the other dimensions. The ragged cut comes last (``spec.py``).

The local tensor is contiguous, of shape ``(units_here, *shape[len(dims):])``; it may be a view of a larger buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor import distribute_tensor as _torch_distribute_tensor

from vescale_ray.compat.core import global_optimizer_pre_hooks, optim_foreach_types, run_as_is, util_foreach_types
from vescale_ray.compat.tensor import DTensorSpec, NormPartial
from vescale_ray.dtensor.arguments import check_saved_part, checked_spec, compare_with_others, placement_list, whole_shape
from vescale_ray.dtensor.autograd import Classes, FromLocal, RaggedAwareDTensor, redistributed
from vescale_ray.dtensor.derived import TENSOR_DATA, formatted, unpickled_derived
from vescale_ray.dtensor.operations.ops import RaggedFallbackWarning, dispatch, wrap
from vescale_ray.dtensor.operations.schema import PlainOperandError, called, with_parameter
from vescale_ray.dtensor.placement import RaggedShard
from vescale_ray.dtensor.spec import make_spec, ragged_mesh_dim, sharding_of
from vescale_ray.dtensor.transfer import arrived, take
from vescale_ray.geometry import Box, Shape, intervals

__all__ = ["RaggedDTensor", "RaggedFallbackWarning", "RaggedShard", "distribute_tensor", "local_interval", "redistribute"]


class RaggedDTensor(RaggedAwareDTensor):
    """A tensor whose flat elements are distributed by a :class:`RaggedShard`.

    Build one with :meth:`from_local` (differentiable, checked) or :func:`distribute_tensor`. In hot paths use :meth:`from_spec` (cheap).

    Element-wise, foreach and fused operations run on the local parts. Norms and sums give a DTensor with a pending reduction. Other
    read-only operations gather first, with a warning (an error with ``VE_RAGGED_STRICT=1``). Operations that can't write locally raise.
    """

    # -- construction --------------------------------------------------------------------------------------------------

    @staticmethod
    @run_as_is
    def from_local(  # type: ignore[override]
        local_tensor: Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        run_check: bool = False,
    ) -> RaggedDTensor:
        """Make the tensor of global ``shape`` whose part on this rank is ``local_tensor``. It shares memory and is differentiable.

        Args:
            local_tensor: contiguous, shape ``(units_here, *shape[len(dims):])``.
            placements: exactly one RaggedShard, and Replicate, Shard or Partial elsewhere.
            shape: global shape; None: computed from this rank's rows, if every rank has some and no other dimension is cut.
            stride: strides of the global tensor, which must be row-major.
            run_check: compare with the other ranks (one small object gather per mesh dimension), so that all ranks raise if one does.

        Raises:
            ValueError: the placements don't fit the mesh or the shape, or the local tensor has the wrong shape, is not contiguous, or is a
                DTensor. The message names the value and the rule.
        """
        fault, spec = None, None
        try:
            placements = placement_list(placements)
            shape = whole_shape(local_tensor, device_mesh, placements) if shape is None else shape
            spec = checked_spec(local_tensor, device_mesh, placements, shape, stride)
        except ValueError as error:
            if not run_check:
                raise
            fault = error  # the other ranks must learn of it before they use the tensor
        if run_check:
            mine = (tuple(shape or ()), str(local_tensor.dtype), [repr(p) for p in placements], str(fault) if fault else None)
            compare_with_others(device_mesh, mine, fault)
        assert spec is not None
        return cast(RaggedDTensor, FromLocal.apply(local_tensor, spec))

    @classmethod
    def from_spec(cls, local: Tensor, spec: DTensorSpec, requires_grad: bool = False) -> RaggedDTensor:
        """Wrap ``local`` (shared memory) in the layout of ``spec``, as in ``RaggedDTensor.from_spec(grad, param._spec)``.

        It is for hot paths: it checks nothing and skips autograd, and takes about 2 us. ``local`` must be contiguous and have the layout's
        local shape; its dtype may differ from the spec's.
        """
        return wrap(cls, local, spec, requires_grad)

    # -- conversion ----------------------------------------------------------------------------------------------------

    def share_memory_(self) -> NoReturn:
        """Raise: the memory belongs to the local tensor."""
        raise RuntimeError("share_memory_() of a RaggedDTensor: share its to_local()")

    def local_interval(self) -> tuple[int, int]:
        """Return the flat elements ``[start, end)`` of the full tensor that this rank holds; ``start == end`` if none.

        Raises:
            ValueError: the part is not an interval, because another mesh dimension has a Shard of an inner dimension.
        """
        return sharding_of(self._spec).interval()

    def local_intervals(self) -> list[tuple[int, int]]:
        """Return the flat elements of the full tensor that this rank holds, in the order of the local tensor. Most layouts have one
        interval. With a Shard of an inner dimension on another mesh dimension there is about one per row. A rank without elements has none.
        """
        return intervals(tuple(self.shape), self.local_boxes())

    def local_boxes(self) -> Sequence[Box]:
        """Return this rank's part as boxes ``(offsets, sizes)``: at most ``2 * ndim - 1``, none of them empty."""
        return sharding_of(self._spec).boxes()

    # -- dispatch and the tensor's own machinery -----------------------------------------------------------------------

    @classmethod
    @run_as_is
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        try:
            return dispatch(RaggedDTensor, func, args, kwargs or {})
        except PlainOperandError as error:
            raise with_parameter(func, args, error) from None

    def __repr__(self) -> str:  # type: ignore[override]
        sharding = sharding_of(self._spec)
        shown = ", ".join(map(repr, self.placements))
        of = f" of section {sharding.offsets}+{tuple(sharding.section)}" if sharding.section != tuple(sharding.shape) else ""
        held = f"local elements [{sharding.start}, {sharding.end}){of}: {arrived(self._local_tensor)}"
        return f"RaggedDTensor(shape={tuple(self.shape)}, {held}, mesh={self.device_mesh}, placements=({shown}))"

    def __format__(self, spec: str) -> str:
        return formatted(self, spec)

    @property
    def data(self) -> Tensor:
        """The tensor without its autograd history, sharing memory. The setter swaps the local tensor, too, and takes any placements."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, DTensor) and value.shape == self.shape and value.device_mesh == self.device_mesh:
            value = redistribute(cast(DTensor, value.detach()), self.placements)  # as vector_to_parameters() assigns
        if not isinstance(value, RaggedDTensor) or not sharding_of(value._spec).same_layout(sharding_of(self._spec)):
            raise ValueError(
                f"can't set .data of {called(self)} to {_describe(value)}: give a DTensor of its shape, "
                "such as vescale_ray.distribute_tensor(whole, p.device_mesh, p.placements), or write with copy_()"
            )
        TENSOR_DATA.__set__(self, value)
        self._local_tensor, self._spec = value._local_tensor, value._spec

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedDTensor:
        found = memo.get(id(self))
        if found is not None:
            return cast(RaggedDTensor, found)
        if not self.is_leaf:
            raise RuntimeError("only graph leaves can be deep-copied: call .detach() first")
        # The mesh and the spec are shared: they are values, and process groups can't be copied.
        result = memo[id(self)] = self.from_spec(self._local_tensor.detach().clone(), self._spec, self.requires_grad)
        for key, value in self.__dict__.items():
            if key not in ("_local_tensor", "_spec"):
                result.__dict__[key] = value if isinstance(value, bool | str | int | float) else _deepcopy(value, memo)
        if self.grad is not None:
            result.grad = _deepcopy(self.grad, memo)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        shape = tuple(int(n) for n in self.shape)
        is_param = bool(getattr(self, "_is_param", False))
        return _rebuild, (self._local_tensor.detach(), self.device_mesh, self.placements, shape, self.requires_grad, is_param)

    def __tensor_flatten__(self) -> Any:
        return super().__tensor_flatten__()

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> RaggedDTensor:
        placements, meta, _, requires_grad = flatten_spec
        spec = make_spec(inner_tensors["device_mesh"], placements, outer_size, meta.dtype)
        return wrap(RaggedDTensor, inner_tensors["_local_tensor"], spec, requires_grad)

    # -- torch.distributed.checkpoint: the part as boxes ---------------------------------------------------------------

    def _boxes(self) -> tuple[Box, ...]:
        sharding = sharding_of(self._spec)
        if sharding.pending:
            raise ValueError(f"{sharding.describe()} has a reduction pending, which no checkpoint can hold: redistribute it first")
        if sharding.numel == 0:  # one rank writes an empty tensor: without its key, the checkpoint can't be loaded strictly
            shape = tuple(int(n) for n in sharding.shape)
            first = all(sharding.mesh.get_local_rank(dim) == 0 for dim in sharding.cut_dims())
            return (((0,) * len(shape), shape),) if first else ()
        return sharding.boxes()

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes of the tensor that this rank holds: at most ``2 * ndim - 1``, none of them empty."""
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self._boxes()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the box that starts at ``index.offset``, as a view of the local tensor."""
        flat, position = arrived(self._local_tensor).detach().view(-1), 0
        wanted = None if index.offset is None else tuple(index.offset)
        for offsets, sizes in self._boxes():
            numel = math.prod(sizes)
            if offsets == wanted:
                return flat[position : position + numel].view(sizes)
            position += numel
        held = [offsets for offsets, _ in self._boxes()]
        raise ValueError(f"{index.fqn}: this rank holds no box at offset {wanted}; its boxes start at {held}")


Classes.ragged = RaggedDTensor


@run_as_is
def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute ``tensor`` as torch's ``distribute_tensor`` does, with support for RaggedShard.

    Args:
        tensor: the full tensor, on every rank; a leaf.
        src_data_rank: rank within each mesh dimension whose values are used (one broadcast per dimension); None: every rank uses its
            own values, without communication.

    Raises:
        ValueError: the placements don't fit the mesh or the shape, or the tensor is distributed already in another way.
    """
    placements = None if placements is None else placement_list(placements)
    if placements is None or ragged_mesh_dim(placements) is None:
        if isinstance(tensor, RaggedDTensor):
            raise ValueError(f"tensor is {sharding_of(tensor._spec).describe()} already: use its redistribute()")
        return _torch_distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    if isinstance(tensor, DTensor):
        if tensor.device_mesh == device_mesh and tensor.placements == tuple(placements):
            return tensor
        raise ValueError(f"tensor is distributed already, with placements {tensor.placements}: use redistribute()")
    if not tensor.is_leaf:
        raise ValueError("distribute_tensor is for leaf tensors; inside a computation use RaggedDTensor.from_local")
    spec = make_spec(device_mesh, placements, tensor.shape, tensor.dtype)
    if sharding_of(spec).pending:
        raise ValueError(f"can't distribute a tensor with placements {spec.placements}: a pending reduction comes from an operation")
    if src_data_rank is not None and not 0 <= src_data_rank < min(device_mesh.shape):
        raise ValueError(f"src_data_rank = {src_data_rank}: give a rank below {min(device_mesh.shape)}, or None for each rank's own values")
    full = tensor.detach()
    if not full.is_meta:
        full = full.to(device_mesh.device_type).contiguous()
        if src_data_rank is not None:
            full = full.clone() if full.data_ptr() == tensor.data_ptr() else full
            for dim in range(device_mesh.ndim):
                group = device_mesh.get_group(dim)
                if device_mesh.size(dim) > 1:
                    dist.broadcast(full, src=dist.get_global_rank(group, src_data_rank), group=group)
    return wrap(RaggedDTensor, take(full, sharding_of(spec)), spec, tensor.requires_grad)


@run_as_is
def redistribute(
    tensor: DTensor,
    placements: Sequence[Placement],
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Change the placements of ``tensor`` on its mesh, like :meth:`RaggedDTensor.redistribute`. It also accepts torch's own DTensors,
    whose ``redistribute`` knows no ragged placements."""
    return redistributed(tensor, placements, async_op, forward_dtype, backward_dtype)


def local_interval(tensor: Tensor) -> tuple[int, int]:
    """Return the flat elements ``[start, end)`` of the full tensor that this rank holds.

    It is defined for RaggedDTensor, for plain tensors and DTensors with Replicate (all elements), and for DTensors with one Shard(0) and
    Replicate elsewhere.

    Raises:
        ValueError: the part of another DTensor is not one interval.
    """
    if isinstance(tensor, RaggedDTensor):
        return tensor.local_interval()
    numel = math.prod(tensor.shape)
    if not isinstance(tensor, DTensor):
        return 0, numel
    cut = [i for i, p in enumerate(tensor.placements) if not p.is_replicate()]
    if not cut:
        return 0, numel
    placement = tensor.placements[cut[0]]
    if len(cut) > 1 or type(placement) is not Shard or placement.dim != 0:
        raise ValueError(f"the part of a DTensor with placements {tensor.placements} is not one interval of its elements")
    mesh = tensor.device_mesh
    rows, inner = int(tensor.shape[0]), math.prod(tensor.shape[1:])
    step, rank = -(-rows // mesh.size(cut[0])), mesh.get_local_rank(cut[0])
    return min(rank * step, rows) * inner, min((rank + 1) * step, rows) * inner


# -- small helpers -------------------------------------------------------------------------------------------------------


def _rebuild(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Shape, requires_grad: bool, is_param: bool
) -> RaggedDTensor:
    """Rebuild a pickled tensor."""
    check_saved_part(mesh, placements, shape)
    result = wrap(RaggedDTensor, local.contiguous(), make_spec(mesh, placements, shape, local.dtype), requires_grad)
    if is_param:
        result._is_param = True  # type: ignore[attr-defined]
    return result


def _deepcopy(value: Any, memo: dict[int, Any]) -> Any:
    from copy import deepcopy

    return deepcopy(value, memo)


def _describe(value: Any) -> str:
    if isinstance(value, DTensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} with placements {value.placements}"
    return f"a {type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


# -- registration: the lists in which torch.distributed.tensor registers DTensor, and a hook of torch ----------------------

torch.serialization.add_safe_globals([RaggedDTensor, RaggedShard, _rebuild, unpickled_derived, NormPartial])
for _types in (optim_foreach_types, util_foreach_types):
    if RaggedDTensor not in _types:
        _types.append(RaggedDTensor)  # type: ignore[arg-type]


def _refuse_muon(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step of torch.optim.Muon on ragged parameters before it changes anything. torch's Muon needs whole matrices, and would fail
    at a ragged one after changing momenta and other parameters."""
    if type(optimizer).step is not torch.optim.Muon.step:
        return
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if isinstance(p, RaggedDTensor):
            raise RuntimeError(f"torch.optim.Muon needs whole matrices, but has {called(p)}: use vescale_ray.optim.Muon for it")


# Written into the dictionary: register_optimizer_step_pre_hook would change a counter on a class of torch.
global_optimizer_pre_hooks[-1] = _refuse_muon
