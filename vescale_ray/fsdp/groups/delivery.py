"""Delivery: hands reduced gradients of one group to ``.grad`` of the sharded parameters.

If any rank used a parameter, every rank delivers its gradient; otherwise no rank does. If this rank used the parameter itself, it delivers
the gradient at once. Otherwise it waits until the ranks have exchanged their uses, at the end of the backward
(:mod:`vescale_ray.fsdp.groups.uses`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale_ray.dbuffer import KeptShard
from vescale_ray.fsdp.layouts.group_parameter import GroupParam, as_dtensor, local_of
from vescale_ray.planner.placement.layout import KeptElements


class Use(IntEnum):
    """Use of a parameter by a rank in a backward. Of all ranks' values, the largest one counts."""

    UNUSED = 0
    USED = 1
    FROZEN = 2


class Delivery:
    """The delivered and the undelivered gradients of one group.

    Args:
        params: the parameters, in the order of the layout.
        kept: the place of each parameter in a shard.
        offload: whether gradients are delivered in host memory.
    """

    def __init__(self, params: Sequence[GroupParam], kept: KeptElements, *, offload: bool) -> None:
        self.params, self.kept, self.offload = params, kept, offload
        self._rest: dict[int, torch.Tensor] = {}
        """Gradients of parameters that this rank did not use, by index: views of the shards that the reductions filled."""
        self._used: set[int] = set()
        """Parameters whose gradients this rank has sent since the ranks last exchanged their uses (:mod:`vescale_ray.fsdp.groups.uses`)."""
        self._held: set[int] = set()
        """Parameters that were trained in a backward whose gradients are not delivered yet. They may have been frozen since."""
        self._frozen: set[int] | None = None
        """Parameters that were frozen when the ranks last exchanged their uses; None: they have not yet."""

    @property
    def holds(self) -> bool:
        """True if gradients of an earlier backward may be undelivered, on this rank or on others."""
        return bool(self._held)

    def expects(self, index: int) -> bool:
        """Return True if a rank may have a gradient of the parameter: it is trained, or was when an undelivered gradient was made."""
        return self.params[index].sharded.requires_grad or index in self._held

    def settle(self, *, delivered: bool) -> None:
        """End a backward on every rank. If its gradients are not ``delivered``, remember which parameters it may have trained."""
        if not delivered:
            self._held.update(index for index, param in enumerate(self.params) if param.sharded.requires_grad)

    def used(self, counted: set[int], *, asks: bool, delivers: bool) -> list[int]:
        """Return the parameters whose gradients a reduction delivers at once: those that this rank ``counted``, or all if the ranks do not
        exchange their uses (``asks``). ``delivers``: whether the reduction includes all gradients that were held back.
        """
        used = [index for index in (sorted(counted) if asks else range(len(self.params))) if self.expects(index)]
        if asks:
            self._used.update(used)
        elif delivers:
            self._held.clear()
        return used

    def uses(self) -> tuple[list[Use], bool]:
        """Return this rank's :class:`Use` of each parameter since the last exchange of uses.

        Also returns whether the set of frozen parameters has changed since the last call."""
        before, self._frozen = self._frozen, {index for index in range(len(self.params)) if not self.expects(index)}
        uses = [Use.FROZEN if i in self._frozen else Use.USED if i in self._used else Use.UNUSED for i in range(len(self.params))]
        return uses, before is not None and before != self._frozen

    def deliver(self, part: torch.Tensor, used: Sequence[int], *, replaces: bool = False) -> None:
        """Deliver the gradients of the parameters ``used``, and keep those of the other parameters that other ranks may have used.

        ``replaces``: whether ``part`` includes the earlier gradients.
        """
        shard = self._shard_of(part.to("cpu") if self.offload else part)
        unused = self._expected_but(used)
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
        """Note that a reduction was added to ``flat``.

        Keeps the gradients of parameters that this rank did not use. Other ranks may have used them: see :meth:`deliver_rest`.
        """
        shard = KeptShard(self.kept, flat)
        for index in self._expected_but(used):
            self._rest[index] = self._local_view(shard, index)

    def deliver_rest(self, used: Sequence[bool], *, replaces: bool) -> None:
        """Deliver the kept gradients of parameters that any rank ``used``, and drop the others."""
        rest, self._rest = self._rest, {}
        self._used.clear()
        self._held.clear()
        late = [index for index in sorted(rest) if used[index]]
        with torch.no_grad():
            if replaces:
                for index in late:
                    self.params[index].sharded.grad = None
            self._add([(index, rest[index]) for index in late])
        rest.clear()
        self.call_hooks(late)

    def delivered(self) -> torch.Tensor | None:
        """Return the flat shard of an earlier delivery if all gradients are still views of it, else None.

        Only the gradients hold the flat shard, so it is freed when the user drops them.
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
        """Fill ``out`` with the sum of earlier reductions, delivered or kept, and with -0.0 for parameters that have none."""
        out.fill_(-0.0)
        shard = KeptShard(self.kept, out)
        for index, param in enumerate(self.params):
            earlier = self._rest.get(index)
            if earlier is None and param.sharded.grad is not None:
                earlier = _part_of_gradient(param)
            if earlier is not None:
                self._local_view(shard, index).copy_(earlier)
        return out

    def call_hooks(self, used: Sequence[int]) -> None:
        """Call the user's post-accumulate-grad hooks of the sharded parameters; warn about hooks on tensors, which lack this gradient."""
        for index in used:
            param = self.params[index]
            sharded, gathered = param.sharded, param.unsharded
            local = gathered is not None and bool(gathered._backward_hooks)
            late = gathered is not None and len(getattr(gathered, "_post_accumulate_grad_hooks", None) or ()) > 1  # one is the engine's
            if sharded._backward_hooks or local or late:
                what = "register_hook(), which sharded parameters do not call"
                if local:
                    what = "register_hook(), which got this rank's own gradient, since it was gathered"
                elif late:
                    what = "register_post_accumulate_grad_hook(), which found no .grad, since it is on the gathered parameter"
                warnings.warn(
                    f"parameter {param.fqn!r} has a hook of {what}: call register_post_accumulate_grad_hook() on the sharded parameter, "
                    f"before a forward or after a backward; these hooks get it with its gradient",
                    UserWarning,
                    stacklevel=2,
                )
            hooks: dict[int, Any] = getattr(sharded, "_post_accumulate_grad_hooks", None) or {}
            for hook in hooks.values():
                hook(sharded)

    def discard(self) -> None:
        """Drop the gradients that were not delivered."""
        self._rest = {}
        self._used.clear()
        self._held.clear()

    def _expected_but(self, used: Sequence[int]) -> list[int]:
        if len(used) == len(self.params):
            return []
        there = set(used)
        return [index for index in range(len(self.params)) if index not in there and self.expects(index)]

    def _put_aside(self, index: int, view: torch.Tensor, *, replaces: bool) -> None:
        earlier = None if replaces else self._rest.get(index)
        self._rest[index] = view if earlier is None else earlier.add_(view)

    def _add(self, views: Sequence[tuple[int, torch.Tensor]]) -> None:
        for index, view in views:
            param = self.params[index]
            if param.sharded.grad is None:
                param.sharded.grad = as_dtensor(view, param.spec)
            else:  # the gradient is from an earlier reduction, or from a parameter tied to this one after sharding
                _part_of_gradient(param).add_(view)

    def _shard_of(self, part: torch.Tensor) -> KeptShard:
        """Return ``part`` as the shard stores it: without the gaps inside tensors."""
        if self.kept.in_place:
            return KeptShard(self.kept, part)
        shard = KeptShard(self.kept, part.new_zeros(self.kept.numel))
        shard.collect(part)
        return shard

    def _local_view(self, shard: KeptShard, index: int) -> torch.Tensor:
        param = self.params[index]
        return shard.tensor(param.name).view(param.local.shape)


def _part_of_gradient(param: GroupParam) -> torch.Tensor:
    """Return this rank's part of the gradient that the parameter has.

    Raises:
        ValueError: a gradient with other placements was assigned to it.
    """
    grad = param.sharded.grad
    if isinstance(grad, DTensor) and grad.placements == param.sharded.placements:  # type: ignore[attr-defined]
        return local_of(grad)
    held = f"placements {list(grad.placements)}" if isinstance(grad, DTensor) else f"shape {tuple(grad.shape)}"  # type: ignore[union-attr]
    raise ValueError(
        f"parameter {param.fqn!r} has a {type(grad).__name__} with {held} as its gradient, to which a backward can't add its shard: set "
        f"parameter.grad = None, or to a tensor with the parameter's placements, such as torch.zeros_like(parameter)"
    )
