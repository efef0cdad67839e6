"""Gradients: the path of one group's gradients from autograd to the optimizer.

accumulate (a hook per parameter) -> flat buffer [W * S] -> reduce-scatter -> shard [S] -> delivery (``delivery.py``)

The buffer has the compute dtype if the reduce dtype holds each of its values, and the reduction casts them. Without gradient sync it has
the reduce dtype. A parameter may still get a second gradient before the reduction (reentrant checkpoints). The gradients then first move
to a buffer of the reduce dtype, are summed in it, and move back: what a rank sends must not depend on what it alone has computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from vescale_ray.communication import wait_notes
from vescale_ray.compat.core import current_graph_task_id, disable_dynamo
from vescale_ray.fsdp.buffers.memory import Buffer, Pool
from vescale_ray.fsdp.communication import comm
from vescale_ray.fsdp.groups.delivery import Delivery
from vescale_ray.fsdp.groups.flat_gradient import FlatGradient, give_back
from vescale_ray.fsdp.groups.gradient_settings import GradientSettings
from vescale_ray.fsdp.groups.linear import offer_sink
from vescale_ray.fsdp.groups.reduction import InOrder, Sums, reduce_scatter
from vescale_ray.fsdp.layouts.division import Division
from vescale_ray.fsdp.layouts.group_parameter import GroupParam, Place
from vescale_ray.planner.step_buffers import arrival_dtype


@dataclass
class Reduction:
    """A reduce-scatter under way."""

    pending: comm.Pending
    out: torch.Tensor
    buffer: Buffer | None
    used: list[int]
    """Parameters that this rank used."""


class Gradients(GradientSettings):
    """The gradients of one group.

    Args:
        params: in the order of ``division.layout.specs``.
        offload: whether gradient shards are delivered in host memory.
    """

    def __init__(self, place: Place, division: Division, params: Sequence[GroupParam], *, offload: bool) -> None:
        super().__init__()
        self.place, self.division, self.params = place, division, params
        self.layout, self.kept = division.layout, division.kept
        self.in_place = False
        """True if one rank holds everything, so that gradients are written into their shard directly."""
        self.delivery = Delivery(params, division.kept, offload=offload)
        self.orig_dtype = self.compute_dtype = self.reduce_dtype = torch.float32
        self.pool: Pool | None = None
        self.group = place.shard_group
        """Process group of the reduce-scatter."""
        self.trainable_count = sum(p.sharded.requires_grad for p in params)
        self.arrived_count = 0
        """Number of parameters whose gradients are in the buffer, from this backward or, without sync, an earlier one."""
        self._arrived = [False] * len(params)
        self._counts: set[int] = set()
        """Indices of the arrived gradients that count. Gradients of a rank that does not contribute do not count."""
        self.seen_count = 0
        """Number of parameters whose gradient arrived in the open part of a backward."""
        self._seen = [False] * len(params)
        self._seen_numel = 0
        self._claims: dict[int, int] = {}
        """Gradients that a linear layer wrote into the buffer and that autograd has not delivered yet: graph task by parameter index."""
        self._aside: dict[int, torch.Tensor] = {}
        """Gradients of claimed parameters that another graph task delivered meanwhile (reentrant checkpoints)."""
        self._names = tuple(p.name for p in params)
        self._flat: FlatGradient | None = None
        self._reductions: list[Reduction] = []
        self.partial: torch.Tensor | None = None
        self._partial_used: set[int] = set()
        self.leaves_out = False
        """True if buffers of gathered parameters have no memory for this rank's own part (see ``memory``)."""
        # Set by the unit. The callbacks must not hold the unit strongly.
        self.on_first: Callable[[], None] | None = None
        """Called before the first gradient of a backward arrives in the buffer."""
        self.on_most: Callable[[], None] | None = None
        """Called when gradients of five sixths of the elements have arrived."""

    @property
    def awaits_claimed(self) -> bool:
        """True if a claimed gradient has not arrived: a later part of this backward uses its parameter, too."""
        return bool(self._claims)

    @property
    def buffer_dtype(self) -> torch.dtype:
        """The dtype in which gradients arrive and leave, the same on every rank."""
        if self.in_place or self.holds or not (self.custom_scatter is None or getattr(self.custom_scatter, "narrow", False)):
            return self.reduce_dtype
        return arrival_dtype(self.compute_dtype, self.reduce_dtype)

    @property
    def buffer_bytes(self) -> int:
        return self.layout.numel * self.buffer_dtype.itemsize

    @property
    def delivers(self) -> bool:
        """True if a reduction becomes ``.grad`` at once, instead of waiting for a later sum over the replicas."""
        return self.place.replicate_group is None or self.all_reduce

    @property
    def waits(self) -> bool:
        """True if gradients of this rank wait for a reduction, or for a sum over the replicas that may start now."""
        return bool(self.arrived_count) or (self.partial is not None and self.delivers)

    @property
    def is_due(self) -> bool:
        """Return True if the group joins a reduction of its unit. Ranks with equal settings get equal answers."""
        return self.waits or bool(self.trainable_count) or self.delivery.holds

    @property
    def why_unordered(self) -> str | None:
        """The reason why the group can't sum in a fixed order, or None."""
        if self.place.replicate_group is not None:
            return "a mesh of replicas (HSDP): shard over all ranks"
        if self.custom_scatter is not None:
            return "a custom reduce-scatter: remove it"
        if self.division.copies or not self.kept.in_place:
            return "tensors that are cut by a plain Shard(dim > 0) or laid out with gaps: leave placements and gaps to the planner"
        return None

    # -- in backward -------------------------------------------------------------------------------------------------

    def hook(self, leaf: nn.Parameter, index: int) -> None:
        """Register a hook that takes the gradient of unsharded parameter ``index`` once autograd has accumulated it."""
        mine = weakref.ref(self)  # autograd keeps the hook as long as the leaf, and this object keeps the leaf

        @disable_dynamo
        def hook(_: torch.Tensor) -> None:
            owner = mine()
            if owner is not None:
                owner.accumulate(index)

        leaf.register_post_accumulate_grad_hook(hook)
        if self.params[index].parallel is None:
            offer_sink(leaf, mine, index)

    def claim(self, index: int, like: torch.Tensor) -> torch.Tensor | None:
        """Reserve the place of a gradient in the buffer, for a caller that computes it and hands it to autograd.

        Returns a view of the buffer, if that has the dtype and device of ``like``. Otherwise it returns None, and also if some of the
        gradient has arrived, the parameter is frozen, or this rank does not contribute. It returns None for a parameter with tensor hooks,
        too: a hook might keep the gradient longer than the buffer."""
        leaf = self.params[index].unsharded
        if not self.contributes or self._arrived[index] or index in self._claims:
            return None
        if leaf is None or not (leaf.requires_grad and self.params[index].sharded.requires_grad) or leaf._backward_hooks:
            return None
        flat = self._begin()
        view = flat.views[index]
        if view.dtype != like.dtype or view.device != like.device:
            return None
        self._claims[index] = current_graph_task_id()
        flat.writes(index)
        return view

    def accumulate(self, index: int) -> None:
        """Move a gradient that autograd has accumulated into the flat buffer: one pass over it (a write, or a read and a write)."""
        leaf = self.params[index].unsharded
        assert leaf is not None
        grad, leaf.grad = leaf.grad, None
        if grad is None or not self.params[index].sharded.requires_grad:  # frozen since the forward
            return
        if torch.is_grad_enabled():  # with create_graph=True, reduced gradients have no graph, as with FSDP2
            with torch.no_grad():
                leaf.grad = grad.detach()
                self.accumulate(index)
            return
        if grad.is_sparse:
            raise RuntimeError(f"{self.params[index].fqn!r} has a sparse gradient: build the embedding with sparse=False")
        parallel = self.params[index].parallel
        if parallel is not None:
            grad = parallel.local_gradient(grad, self.params[index].fqn)
        flat, claim = self._begin(), self._claims.get(index)
        if not self.contributes:
            # Write zeros: zero times the gradient of a stand-in batch would keep NaN and infinity.
            self._fill(flat, index, counts=False)
        elif claim is not None and claim != current_graph_task_id():
            # Autograd still holds the claimed view, maybe as a part of a sum: do not write there.
            held = self._aside.get(index)
            self._aside[index] = grad if held is None else held + grad
        else:
            held = None if self._claims.pop(index, None) is None else self._aside.pop(index, None)
            adds = claim is None and self._arrived[index]
            if adds or held is not None or grad.dtype != flat.tensor.dtype:
                flat = self._cast(flat, self.reduce_dtype)
            if claim is None and not adds:
                flat.writes(index)
            view = flat.views[index]
            if adds:
                view.add_(grad)
            elif claim is None or not _is_same(grad, view):
                view.copy_(grad)  # with a claim, it is the sum of the claimed view and gradients from other uses
            if held is not None:
                view.add_(held)
            self._arrives(index)
        if not self._seen[index]:
            self._seen[index] = True
            self.seen_count += 1
            before, most = self._seen_numel, self.layout.numel * 5 // 6
            self._seen_numel += leaf.numel()
            if self.on_most is not None and before < most <= self._seen_numel:
                self.on_most()

    def _arrives(self, index: int, *, counts: bool = True) -> None:
        """Record that the gradient of unsharded parameter ``index`` is in the buffer."""
        if counts:
            self._counts.add(index)
        if not self._arrived[index]:
            self._arrived[index] = True
            self.arrived_count += 1

    def _begin(self) -> FlatGradient:
        """Prepare for a gradient: the first one opens the buffer."""
        if self._flat is None and self.on_first is not None:
            self.on_first()
        return self.open()

    def _cast(self, flat: FlatGradient, dtype: torch.dtype) -> FlatGradient:
        """Move the gradients to a buffer of ``dtype``: in the reduce dtype, further ones add without more rounding than in the sum."""
        if flat.tensor.dtype == dtype:
            return flat
        self._flat = None
        moved = self.open(dtype)
        moved.writes_all()
        moved.tensor.copy_(flat.tensor)
        if not self._claims:  # else autograd still holds views of the earlier buffer; its memory lives as long as they do
            flat.give_back()
        return moved

    def end_window(self) -> None:
        """End the unit's part of this backward: later gradients belong to another part."""
        if self.seen_count:
            self._seen = [False] * len(self.params)
            self.seen_count = self._seen_numel = 0

    def end_backward(self) -> None:
        """End the backward: drop claims whose gradients never arrived."""
        claims, self._claims = self._claims, {}
        for index in claims:
            held = self._aside.pop(index, None)
            if held is not None:
                self.open().views[index].copy_(held)
                self._arrives(index)

    def open_unused(self) -> None:
        """Fill in zeros for missing gradients, so that every parameter counts (``set_reduce_scatter_unused_params``)."""
        flat = self.open()
        for index, param in enumerate(self.params):
            if param.sharded.requires_grad:
                self._fill(flat, index, counts=True)

    def _fill(self, flat: FlatGradient, index: int, *, counts: bool) -> None:
        """Fill in zeros for a gradient, unless one has arrived."""
        if not self._arrived[index]:
            flat.writes(index)
            # In a fixed order use -0.0, since adding it changes no number, while adding 0.0 changes -0.0.
            flat.views[index].fill_(-0.0 if self.ordered else 0.0)
        self._arrives(index, counts=counts)

    def reduce(self, lane: comm.Lane, together: Sums, *, asks: bool) -> None:
        """Start the reduce-scatter into this rank's shard, or add it to those that ``together`` starts.

        Gradients that have not arrived are zero.

        ``asks``: whether the ranks will exchange which parameters they used; if not, all of them count as used.
        """
        gradients = self._cast(self.open(), self.buffer_dtype)
        gradients.writes_all()
        used = self.delivery.used(self._counts, asks=asks, delivers=self.delivers)
        for index in range(len(self.params)):
            self._fill(gradients, index, counts=False)
        factor = 1.0 / (self.divide_factor if self.divide_factor is not None else self.place.ranks * self.params[0].summed_over)
        flat, buffer = gradients.tensor, gradients.buffer
        self._clear()
        self.holds = False
        if self.in_place:
            if factor != 1.0:
                flat.mul_(factor)
            self._reductions.append(Reduction(comm.Done(), flat, buffer, used))
            return
        if self.division.copies:
            flat, buffer = self._split(flat, buffer)
        out = torch.empty(self.division.part_numel, dtype=self.orig_dtype, device=self.place.device)
        assert self.pool is not None
        pending = reduce_scatter(
            *(out, flat, self.group, lane, self.pool, factor, self.reduce_dtype),
            together=together,
            pairwise=self.place.pairwise,
            leaves_out=self.leaves_out,
            sum_only=self.sum_only,
            ordered=self.ordered,
            custom=self.custom_scatter,
            staging=self.staging,
            name=self.params[0].fqn,
        )
        self._reductions.append(Reduction(pending, out, buffer, used))

    def _split(self, flat: torch.Tensor, buffer: Buffer | None) -> tuple[torch.Tensor, Buffer]:
        """Copy the gradients into parts for the ranks, and give their buffer back."""
        assert self.pool is not None
        numel = self.division.part_numel * self.place.world
        nbytes = numel * flat.itemsize
        if self.custom_scatter is None:
            parts = self.pool.take(nbytes, self.place.device)
        else:
            parts = Buffer(nbytes, self.place.device, comm.allocate(self.custom_scatter, numel, flat.dtype, self.place.device))
        parts.clean_for = None
        self.division.split(flat, parts.flat(flat.dtype))
        give_back(buffer, self.pool)
        return parts.flat(flat.dtype), parts

    def lend(self) -> None:
        """Give the buffers of the running reductions to the next all-gather, which then waits for their end. Only on an accelerator."""
        for reduction in self._reductions:
            buffer, pending = reduction.buffer, reduction.pending
            lendable = buffer is not None and not (buffer.fixed or buffer.apart)
            if buffer is not None and lendable and isinstance(pending, comm.EventPending) and pending.event is not None:
                assert self.pool is not None
                self.pool.lend(buffer, pending.event)
                reduction.buffer = None

    def finish(self) -> None:
        """Wait for the running reductions and deliver their results as ``.grad`` of the sharded parameters."""
        while self._reductions:
            reduction = self._reductions.pop(0)
            if isinstance(reduction.pending, InOrder):
                self._finish_in_order(reduction, reduction.pending)
                continue
            wait_notes.begin("reduce-scatter", self.params[0].fqn, self.buffer_bytes, self.place.world)
            reduction.pending.wait()
            wait_notes.end()
            give_back(reduction.buffer, self.pool)
            with torch.no_grad():
                out = self._over_replicas(reduction)
                if out is not None:
                    self.delivery.deliver(out, reduction.used)
            if out is not None:
                self.delivery.call_hooks(reduction.used)

    @torch.no_grad()
    def _finish_in_order(self, reduction: Reduction, parts: InOrder) -> None:
        """Continue the sum from the gradients of the reduction before."""
        out = self.delivery.delivered()
        earlier = out is not None and out.device == reduction.out.device
        if out is None or not earlier:
            out = self.delivery.gather_up(reduction.out)
        wait_notes.begin("reduce-scatter", self.params[0].fqn, self.buffer_bytes, self.place.world)
        parts.add_to(out)
        wait_notes.end()
        give_back(reduction.buffer, self.pool)
        self._call_all_reduce_hook(out)
        if earlier:
            self.delivery.added(out, reduction.used)
        else:
            self.delivery.deliver(out, reduction.used, replaces=True)
        self.delivery.call_hooks(reduction.used)

    def deliver_rest(self, used: Sequence[bool]) -> None:
        """Deliver the gradients of parameters that another rank ``used`` and this one did not."""
        self.delivery.deliver_rest(used, replaces=self.ordered and not self.in_place)

    def _over_replicas(self, reduction: Reduction) -> torch.Tensor | None:
        """HSDP: the sum over the replicas, or None if the user wants that sum only in a later backward."""
        out = reduction.out
        if self.place.replicate_group is not None:
            if self.partial is not None:
                out.add_(self.partial)
                reduction.used = sorted(self._partial_used.union(reduction.used))
                self.partial, self._partial_used = None, set()
            if not self.all_reduce:
                self.partial, self._partial_used = out, set(reduction.used)
                return None
            if self.place.replicas > 1:
                with wait_notes.counted("all_reduce"):
                    dist.all_reduce(out, group=self.place.replicate_group)
        self._call_all_reduce_hook(out)
        return out

    def _call_all_reduce_hook(self, out: torch.Tensor) -> None:
        hook, stream = self.all_reduce_hook, self.all_reduce_stream
        if hook is None or stream is None:
            if hook is not None:
                hook(out)
            return
        device = torch.get_device_module(self.place.device)
        current = device.current_stream()
        stream.wait_stream(current)
        with device.stream(stream):
            hook(out)
        current.wait_stream(stream)

    # -- the flat buffer ---------------------------------------------------------------------------------------------

    def open(self, dtype: torch.dtype | None = None) -> FlatGradient:
        """Return the buffer, which is taken now if there is none. ``dtype``: its dtype; None: :attr:`buffer_dtype`."""
        if self._flat is None and self.in_place:
            self._flat = FlatGradient.shard(self.layout, self._names, self.reduce_dtype, self.place.device)
        elif self._flat is None:
            assert self.pool is not None
            custom = None if self.division.copies else self.custom_scatter
            args = (self.layout, self._names, dtype or self.buffer_dtype, self.place.device)
            self._flat = FlatGradient.scratch(*args, self.pool, custom)
        return self._flat

    def _clear(self) -> None:
        self._claims, self._aside, self._flat = {}, {}, None
        self._arrived, self._counts = [False] * len(self.params), set()
        self.arrived_count = 0

    # -- between steps -----------------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Drop the gradients and reductions of an unfinished step."""
        self.end_window()
        reductions, self._reductions = self._reductions, []
        flat, self.partial, self._partial_used = self._flat, None, set()
        self._clear()
        self.delivery.discard()
        for param in self.params:
            if param.unsharded is not None:
                param.unsharded.grad = None
        for reduction in reductions:
            reduction.pending.wait()
        for one in (None if flat is None else flat.buffer, *(r.buffer for r in reductions)):
            give_back(one, self.pool)


def _is_same(grad: torch.Tensor, view: torch.Tensor) -> bool:
    return grad.data_ptr() == view.data_ptr() and grad.shape == view.shape and grad.stride() == view.stride()
