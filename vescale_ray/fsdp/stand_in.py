"""Our ``fully_shard`` for programs that import torch's: trainers of other people, whose code is not ours to change.

    from vescale_ray.fsdp import stand_in_for_torch

    stand_in_for_torch()                      # once, before the model is sharded; or: with stand_in_for_torch(): ...
    trainer = Trainer(.., fsdp_version=2)     # shards with vescale_ray now

``import vescale_ray`` leaves torch as it is; this call, and nothing else, changes it, until it is undone:

- ``fully_shard``, ``register_fsdp_forward_method`` and ``share_comm_ctx`` are ours;
- ``distribute_tensor`` also knows ragged placements, as in ``distribute_tensor(full, param.device_mesh, param.placements)``;
- ``set_model_state_dict`` and ``set_optimizer_state_dict`` of ``torch.distributed.checkpoint`` load full state dicts into ragged tensors:
  each rank takes its part.

A name is replaced in every module that has imported it by now, and where later imports will find it.

Code that cuts checkpoints by a parameter's ``placements`` itself, or puts parameters together with ``DTensor.from_local``
(``from_pretrained(.., distributed_config=..)`` of transformers 5) knows no ragged placements: ``stand_in_for_torch(plain_shards=True)``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import nn
from torch.distributed.tensor import Shard

from vescale_ray.compat.fsdp import distribute_tensors
from vescale_ray.dtensor import RaggedDTensor, distribute_tensor
from vescale_ray.fsdp.api import fully_shard, register_fsdp_forward_method, share_comm_ctx


class StandIn:
    """What :func:`stand_in_for_torch` returns: undo it, or use it as a context that does."""

    def __init__(self) -> None:
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []

    def undo(self) -> None:
        """Give torch's names back their own functions. Modules that are sharded stay so."""
        while self._replaced:
            namespace, name, original = self._replaced.pop()
            namespace[name] = original

    def _replace(self, name: str, original: Any, ours: Any) -> None:
        if original is ours:  # stood in for already
            return
        for module in list(sys.modules.values()):
            namespace = getattr(module, "__dict__", None)
            if isinstance(namespace, dict) and namespace.get(name) is original:
                self._replaced.append((namespace, name, original))
                namespace[name] = ours

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()


def stand_in_for_torch(*, plain_shards: bool = False) -> StandIn:
    """Put ours in the place of torch's ``fully_shard`` and what loads into it, in this process, until :meth:`StandIn.undo`.

    ``plain_shards``: parameters that the caller places nowhere get ``Shard(0)``, as with FSDP2, and its copies around collectives.
    """
    stand_in = StandIn()
    stand_in._replace("fully_shard", torch.distributed.fsdp.fully_shard, _with_plain_shards if plain_shards else fully_shard)
    stand_in._replace("register_fsdp_forward_method", torch.distributed.fsdp.register_fsdp_forward_method, register_fsdp_forward_method)
    stand_in._replace("share_comm_ctx", torch.distributed.fsdp.share_comm_ctx, share_comm_ctx)
    stand_in._replace("distribute_tensor", torch.distributed.tensor.distribute_tensor, distribute_tensor)
    stand_in._replace("_distribute_tensors", distribute_tensors, _distribute_tensors)
    return stand_in


@functools.wraps(fully_shard)
def _with_plain_shards(module: Any, *, shard_placement_fn: Callable[[nn.Parameter], Any] | None = None, **options: Any) -> Any:
    def placed(param: nn.Parameter) -> Any:
        chosen = shard_placement_fn(param) if shard_placement_fn is not None else None
        return Shard(0) if chosen is None and param.dim() else chosen

    return fully_shard(module, shard_placement_fn=placed, **options)


def _distribute_tensors(local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None) -> None:
    """Torch's: where ``local_state_dict`` has ``(sharded, full)``, make it the sharded tensor with this rank's part of the full one."""
    others = []
    for key in keys:
        pair = local_state_dict.get(key)
        if not isinstance(pair, tuple) or not isinstance(pair[0], RaggedDTensor):
            others.append(key)
            continue
        sharded, full = pair
        mine = distribute_tensor(full.detach(), sharded.device_mesh, sharded.placements, src_data_rank=None)
        if sharded.is_meta:
            local_state_dict[key] = mine.clone()  # the part is a view of the full tensor, which would stay
        else:
            sharded.to_local().copy_(mine.to_local())
            local_state_dict[key] = sharded
    distribute_tensors(local_state_dict, others, device, pg)
