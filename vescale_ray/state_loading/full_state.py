"""A full state dict that all ranks have, or rank 0 alone, which then sends one tensor at a time."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor, RaggedShard, distribute_tensor
from vescale_ray.dtensor.spec import replicated
from vescale_ray.dtensor.transfer import MOVABLE, movable


class FullState:
    """A full state dict: names, shapes and dtypes on every rank; the values on every rank, or on rank 0 only."""

    def __init__(
        self,
        given: Any,
        options: StateDictOptions,
        device: torch.device,
        flattened: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda given: given,
    ) -> None:
        self.given, self.device = given, device
        self.sends = options.broadcast_from_rank0 and dist.is_initialized() and dist.get_world_size() > 1
        self.first = not self.sends or dist.get_rank() == 0
        described: list[Any] = [None]
        refusal = None
        if self.first:
            try:
                if not isinstance(given, Mapping):
                    raise TypeError(f"it is a {type(given).__name__}, not a dict")
                self.given = flattened(given)
                described = [{n: _sendable(n, _described(n, v)) for n, v in self.given.items()}]
            except Exception as error:  # the other ranks must learn of this refusal
                described, refusal = [_Refused(str(error) or type(error).__name__)], error
        if self.sends:
            dist.broadcast_object_list(described, src=0, device=device)
        self.refusal: ValueError | None = None
        self.items: dict[str, Any] = {}
        if isinstance(described[0], _Refused):
            self.refusal = ValueError(f"the full state dict can't be loaded: {described[0].why}")
            self.refusal.__cause__ = refusal
        else:
            self.items = described[0]

    def into(self, name: str, target: Any) -> Any:
        """Write the value of ``name`` into ``target`` and return it; if ``target`` is not a tensor, return the value itself."""
        entry = self.items[name]
        if not isinstance(entry, FullTensor):
            return entry
        if not isinstance(target, Tensor):
            return self._whole(name, entry)
        with torch.no_grad():
            if not self.sends and isinstance(target, RaggedDTensor):
                target.copy_(self.given[name])  # only this rank's part goes to the device
                return target
            if isinstance(target, RaggedDTensor) and _over_all_ranks(target):
                target.copy_(RaggedDTensor.from_spec(self._part(name, entry, target), target._spec))
                return target
            full = self._whole(name, entry)
            if isinstance(target, DTensor) and any(p.is_partial() for p in target.placements):
                target = target.redistribute(placements=replicated(target.device_mesh))  # such as a norm that an optimizer keeps as a state
            if isinstance(target, DTensor) and not isinstance(target, RaggedDTensor):
                full = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
            target.copy_(full)
        return target

    def _part(self, name: str, entry: FullTensor, target: RaggedDTensor) -> Tensor:
        """Receive this rank's part from rank 0, whose tensor is all parts in rank order: one all-to-all in which only rank 0 sends."""
        placement = cast(RaggedShard, target.placements[0])
        size = 1 if entry.dtype in MOVABLE else entry.dtype.itemsize
        counts = [(end - start) * size for start, end in placement.intervals(entry.shape)]
        world, rank = len(counts), dist.get_rank()
        part = torch.empty(placement.local_shape(entry.shape, rank), dtype=entry.dtype, device=self.device)
        full = self.given[name].detach().to(self.device).contiguous() if self.first else part.new_empty(0)
        given, wanted = counts if self.first else [0] * world, [counts[rank], *[0] * (world - 1)]
        dist.all_to_all_single(movable(part.view(-1)), movable(full.view(-1)), wanted, given)
        return part

    def _whole(self, name: str, entry: FullTensor) -> Tensor:
        if not self.first:
            full = torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
        else:
            full = self.given[name].detach().to(self.device).contiguous()
        if self.sends:
            raw = full if full.dtype not in (torch.bool, torch.int16) and full.dtype.itemsize > 1 else full.view(torch.uint8)
            dist.broadcast(raw, src=0)
        return full


class FullTensor:
    """Shape and dtype of a tensor on another rank."""

    def __init__(self, value: Tensor) -> None:
        self.shape, self.dtype = tuple(value.shape), value.dtype


class _Refused:
    """The reason why rank 0 can't send its state dict."""

    def __init__(self, why: str) -> None:
        self.why = why


def _over_all_ranks(tensor: RaggedDTensor) -> bool:
    """Return whether the tensor's parts lie on all ranks, in rank order."""
    return tensor.device_mesh.ndim == 1 and tensor.device_mesh.mesh.tolist() == list(range(dist.get_world_size()))


def _sendable(name: str, value: Any) -> Any:
    try:
        pickle.dumps(value)  # broadcast_object_list pickles it, too
    except Exception as error:
        raise ValueError(f"{name!r} can't be pickled: {error}") from None
    return value


def _described(name: str, value: Any) -> Any:
    if isinstance(value, DTensor):
        raise ValueError(f"a full state dict holds plain tensors, but {name!r} is a {type(value).__name__}: set full_state_dict=False")
    if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_meta):
        raise ValueError(
            f"a full state dict holds dense tensors with values, but {name!r} is {value.layout} on {value.device}: give its values"
        )
    return FullTensor(value) if isinstance(value, Tensor) else value
