"""Delivery: reduced gradients of one group on their way to ``.grad`` of the sharded parameters.

A parameter's gradient is delivered on every rank if any rank used the parameter, and on none otherwise. A rank delivers what it used itself
at once. The rest stays here until the ranks have told each other what they used, at the end of the backward (:mod:`vescale_ray.fsdp.uses`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale_ray.dbuffer import KeptShard
from vescale_ray.fsdp.parameters import GroupParam, as_dtensor, local_of
from vescale_ray.planner.layout import Kept


class Delivery:
    """The delivered and the undelivered gradients of one group.

    Args:
        params: in the order of the layout.
        kept: where each lies in a shard.
        offload: gradients are handed over in host memory.
    """

    def __init__(self, params: Sequence[GroupParam], kept: Kept, *, offload: bool) -> None:
        self.params, self.kept, self.offload = params, kept, offload
        self._rest: dict[int, torch.Tensor] = {}
        """Sums for parameters that this rank did not use, by index: views of the shards that they came in."""

    def deliver(self, part: torch.Tensor, used: Sequence[int], *, replaces: bool = False) -> None:
        """Hand the gradients of the parameters ``used`` over, and keep those of the other trainable ones.

        ``replaces``: what is in ``part`` includes the earlier gradients.
        """
        shard = self._shard_of(part.to("cpu") if self.offload else part)
        unused = self._trainable_but(used)
        for index in unused:
            self._put_aside(index, self._local_view(shard, index), replaces=replaces)
        if replaces:
            for index in used:
                self.params[index].sharded.grad = None
        elif len(used) == len(self.params):
            earlier = self.delivered()
            if earlier is not None:
                earlier.add_(shard.flat)  # one kernel for the whole group
                return
        self._add([(index, self._local_view(shard, index)) for index in used])

    def added(self, flat: torch.Tensor, used: Sequence[int]) -> None:
        """A reduction was added to ``flat``, where all gradients are: hooks hear of those not used here if others used them."""
        shard = KeptShard(self.kept, flat)
        for index in self._trainable_but(used):
            self._rest[index] = self._local_view(shard, index)

    def deliver_rest(self, used: Sequence[bool], *, replaces: bool) -> None:
        """Hand over what was kept of the parameters that any rank ``used``, and drop the rest."""
        rest, self._rest = self._rest, {}
        late = [index for index in sorted(rest) if used[index]]
        with torch.no_grad():
            if replaces:
                for index in late:
                    self.params[index].sharded.grad = None
            self._add([(index, rest[index]) for index in late])
        rest.clear()
        self.call_hooks(late)

    def delivered(self) -> torch.Tensor | None:
        """The flat shard that all gradients of the parameters lie in, if it is one that was delivered before and none was replaced.

        Only the gradients hold it, so that it is freed when the user drops them.
        """
        flat: torch.Tensor | None = None
        for param in self.params:
            grad = param.sharded.grad
            local = local_of(grad) if isinstance(grad, DTensor) else None
            base = local._base if local is not None else None
            if local is None or base is None or base.shape != (self.kept.numel,) or (flat is not None and base is not flat):
                return None
            flat = base
            start = flat.storage_offset() + self.kept.offsets[param.name]
            if local.storage_offset() != start or local.shape != param.local.shape or not local.is_contiguous():
                return None
        return flat

    def gather_up(self, out: torch.Tensor) -> torch.Tensor:
        """``out`` with what earlier reductions left of each gradient, delivered or not, and nothing (-0.0) where none did."""
        out.fill_(-0.0)
        shard = KeptShard(self.kept, out)
        for index, param in enumerate(self.params):
            earlier = self._rest.get(index)
            if earlier is None and param.sharded.grad is not None:
                earlier = local_of(param.sharded.grad)
            if earlier is not None:
                self._local_view(shard, index).copy_(earlier)
        return out

    def call_hooks(self, used: Sequence[int]) -> None:
        """Call the user's hooks on the sharded parameters: an optimizer step in backward, for example. Hooks on tensors are not called."""
        for index in used:
            sharded = self.params[index].sharded
            if sharded._backward_hooks:
                warnings.warn(
                    f"parameter {self.params[index].fqn!r} has a hook of register_hook(), which sharded parameters do not call: use "
                    f"register_post_accumulate_grad_hook(), which gets the parameter with its gradient",
                    UserWarning,
                    stacklevel=2,
                )
            hooks: dict[int, Any] = getattr(sharded, "_post_accumulate_grad_hooks", None) or {}
            for hook in hooks.values():
                hook(sharded)

    def discard(self) -> None:
        """Forget what was not delivered."""
        self._rest = {}

    def _trainable_but(self, used: Sequence[int]) -> list[int]:
        if len(used) == len(self.params):
            return []
        there = set(used)
        return [index for index, param in enumerate(self.params) if index not in there and param.sharded.requires_grad]

    def _put_aside(self, index: int, view: torch.Tensor, *, replaces: bool) -> None:
        earlier = None if replaces else self._rest.get(index)
        self._rest[index] = view if earlier is None else earlier.add_(view)

    def _add(self, views: Sequence[tuple[int, torch.Tensor]]) -> None:
        for index, view in views:
            param = self.params[index]
            if param.sharded.grad is None:
                param.sharded.grad = as_dtensor(view, param.spec)
            else:  # of an earlier reduction, or of a parameter that it was tied to after sharding
                local_of(param.sharded.grad).add_(view)

    def _shard_of(self, part: torch.Tensor) -> KeptShard:
        """This rank's part of the buffer as it is kept: without the gaps inside tensors."""
        if self.kept.in_place:
            return KeptShard(self.kept, part)
        shard = KeptShard(self.kept, part.new_zeros(self.kept.numel))
        shard.collect(part)
        return shard

    def _local_view(self, shard: KeptShard, index: int) -> torch.Tensor:
        param = self.params[index]
        return shard.tensor(param.name).view(param.local.shape)
