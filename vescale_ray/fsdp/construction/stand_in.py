"""A stand-in for torch's ``fully_shard`` in programs that import it, such as trainers whose code can't be changed.

    from vescale_ray.fsdp import stand_in_for_torch

    stand_in_for_torch()                      # once, at the beginning of the program; or: with stand_in_for_torch(): ...
    trainer = Trainer(.., fsdp_version=2)     # shards with vescale_ray now

``import vescale_ray`` leaves torch as it is. Only this call changes torch, until it is undone:

- ``fully_shard``, ``register_fsdp_forward_method`` and ``share_comm_ctx`` become those of vescale_ray;
- ``distribute_tensor``, ``DTensor.from_local``, ``DTensor.redistribute`` and ``torch.distributed.tensor.zeros`` (``ones``, ``full``, ..)
  also accept ragged placements, as in ``distribute_tensor(full, param.device_mesh, param.placements)``;
- ``compute_local_shape_and_global_offset`` tells where a rank's rows lie;
- ``set_model_state_dict`` and ``set_optimizer_state_dict`` of ``torch.distributed.checkpoint`` load full state dicts into ragged tensors:
  each rank takes its part.

The call replaces these functions in every module that has imported them, under any name, and where later imports find them. It can't
reach one that is held elsewhere: in a class, a closure, a ``functools.partial``, or a variable of a running function. Call it first.

Some code cuts checkpoints by a parameter's ``placements`` itself and knows no ragged placements, for example
``from_pretrained(.., distributed_config=..)`` of transformers 5. Use ``stand_in_for_torch(plain_shards=True)`` with it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from vescale_ray.compat.tensor import compute_local_shape_and_global_offset, distribute_tensors, init_tensor
from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor, distribute_tensor, redistribute
from vescale_ray.dtensor.spec import layout_of, ragged_mesh_dim
from vescale_ray.fsdp.construction.fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx


class StandIn:
    """The result of :func:`stand_in_for_torch`: call :meth:`undo`, or use it as a context that calls it at the end."""

    def __init__(self) -> None:
        self._replaced: list[Callable[[], object]] = []

    def undo(self) -> None:
        """Restore torch's functions. Modules that are sharded stay sharded."""
        while self._replaced:
            self._replaced.pop()()

    def _replace(self, original: Any, ours: Any) -> None:
        if original is ours:  # replaced already
            return
        for where, module in list(sys.modules.items()):
            # Other objects there may be libraries of cffi, which build all of their functions if asked, in one thread only.
            if not issubclass(type(module), ModuleType) or where.partition(".")[0] == "vescale_ray":  # ours call torch's functions
                continue
            namespace = ModuleType.__getattribute__(module, "__dict__")  # a lazy module loads itself if its own method is called
            for name in [name for name, value in namespace.items() if value is original]:
                self._replaced.append(functools.partial(namespace.__setitem__, name, original))
                namespace[name] = ours

    def _replace_method(self, name: str, ours: Any) -> None:
        original = DTensor.__dict__[name]
        if original is not ours:
            self._replaced.append(functools.partial(setattr, DTensor, name, original))
            setattr(DTensor, name, ours)

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()


def stand_in_for_torch(*, plain_shards: bool = False) -> StandIn:
    """Replace torch's ``fully_shard`` and the functions that load into it in this process, until :meth:`StandIn.undo`.

    ``plain_shards``: give ``Shard(0)``, with FSDP2's copies around collectives, to parameters for which the caller names no placement.
    """
    stand_in = StandIn()
    stand_in._replace(torch.distributed.fsdp.fully_shard, _with_plain_shards if plain_shards else fully_shard)
    stand_in._replace(torch.distributed.fsdp.register_fsdp_forward_method, register_fsdp_forward_method)
    stand_in._replace(torch.distributed.fsdp.share_comm_ctx, share_comm_ctx)
    stand_in._replace(torch.distributed.tensor.distribute_tensor, distribute_tensor)
    stand_in._replace_method("from_local", _OUR_FROM_LOCAL)
    stand_in._replace_method("redistribute", _redistribute)
    stand_in._replace(init_tensor, _init_tensor)
    stand_in._replace(distribute_tensors, _distribute_tensors)
    stand_in._replace(compute_local_shape_and_global_offset, _local_shape_and_global_offset)
    return stand_in


@functools.wraps(fully_shard)
def _with_plain_shards(module: Any, *, shard_placement_fn: Callable[[nn.Parameter], Any] | None = None, **options: Any) -> Any:
    def placed(param: nn.Parameter) -> Any:
        chosen = shard_placement_fn(param) if shard_placement_fn is not None else None
        return Shard(0) if chosen is None and param.dim() else chosen

    return fully_shard(module, shard_placement_fn=placed, **options)


_torchs_from_local, _torchs_redistribute = DTensor.from_local, DTensor.redistribute


@functools.wraps(_torchs_from_local)
def _from_local(
    local_tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    run_check: bool = False,
    shape: torch.Size | None = None,
    stride: tuple[int, ...] | None = None,
    **how: Any,
) -> DTensor:
    if placements is None or ragged_mesh_dim(placements) is None:
        return _torchs_from_local(local_tensor, device_mesh, placements, run_check=run_check, shape=shape, stride=stride, **how)
    if any(value is not None for value in how.values()):
        raise ValueError(f"DTensor.from_local with placements {list(placements)} takes no {', '.join(how)}: leave it out")
    mesh = _torchs_from_local(torch.empty(0)).device_mesh if device_mesh is None else device_mesh
    return RaggedDTensor.from_local(local_tensor, mesh, placements, shape=shape, stride=stride, run_check=run_check)


@functools.wraps(init_tensor)
def _init_tensor(
    init_op: Any, size: torch.Size, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **how: Any
) -> DTensor:
    if placements is None or ragged_mesh_dim(placements) is None:
        return init_tensor(init_op, size, device_mesh, placements, **how)  # type: ignore[no-any-return]
    whole = init_tensor(init_op, size, device_mesh, None, **{**how, "requires_grad": False})
    made = distribute_tensor(whole.to_local(), whole.device_mesh, placements, src_data_rank=None).clone()
    return cast(DTensor, made.requires_grad_(bool(how.get("requires_grad"))))


_OUR_FROM_LOCAL = staticmethod(_from_local)


@functools.wraps(_torchs_redistribute)
def _redistribute(
    self: DTensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **how: Any
) -> DTensor:
    if placements is None or ragged_mesh_dim(placements) is None:
        return _torchs_redistribute(self, device_mesh, placements, **how)
    if device_mesh is not None and device_mesh != self.device_mesh:
        raise ValueError(f"can't redistribute from {self.device_mesh} to {device_mesh}: only placements on the same mesh can change")
    return redistribute(self, placements, **how)


@functools.wraps(compute_local_shape_and_global_offset)
def _local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if ragged_mesh_dim(placements) is None:
        return compute_local_shape_and_global_offset(tuple(global_shape), mesh, placements, skip_offset)
    layout = layout_of(mesh, placements, global_shape)
    boxes = layout.boxes() or [((*global_shape[:1], *(0 for _ in global_shape[1:])), layout.local_shape)]
    offsets, sizes = boxes[0]
    if len(boxes) > 1 or tuple(sizes) != tuple(layout.local_shape):
        raise ValueError(
            f"a part of {tuple(global_shape)} with placements {list(placements)} is not a box: use local_boxes() of the RaggedDTensor, or "
            f"stand_in_for_torch(plain_shards=True)"
        )
    return tuple(sizes), () if skip_offset else tuple(offsets)


def _distribute_tensors(local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None) -> None:
    """Torch's function, extended: replace each pair ``(sharded, full)`` by the sharded tensor with this rank's part of ``full``."""
    others = []
    for key in keys:
        pair = local_state_dict.get(key)
        if not isinstance(pair, tuple) or not isinstance(pair[0], RaggedDTensor):
            others.append(key)
            continue
        sharded, full = pair
        mine = distribute_tensor(full.detach(), sharded.device_mesh, sharded.placements, src_data_rank=None)
        if sharded.is_meta:
            local_state_dict[key] = mine.clone()  # without the clone, the part as a view would keep the full tensor
        else:
            sharded.to_local().copy_(mine.to_local())
            local_state_dict[key] = sharded
    distribute_tensors(local_state_dict, others, device, pg)
