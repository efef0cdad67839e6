"""Methods of sharded modules that set how backward sums and reduces gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from vescale_ray.errors import BadArgument
from vescale_ray.fsdp.construction.arguments import check_call, check_flag, finite, positive
from vescale_ray.fsdp.surface.lookup import check_resting, sharded_unit, units_below
from vescale_ray.planner.step_buffers import check_staging


class ReducesGradients:
    """Mixed into ``FSDPModule``. The methods have torch's names and meanings where torch has them."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last of the step. The last one waits for all reductions."""
        sharded_unit(self).ending.is_last = check_flag("is_last_backward", is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients. Without sync, they add up in the unsharded buffers, in the reduce dtype.

        Call it alike on all ranks.
        """
        requires_gradient_sync = check_flag("requires_gradient_sync", requires_gradient_sync)
        for unit in units_below(self, recurse):
            unit.options.gradient_sync = requires_gradient_sync
            for group in unit.groups:
                group.grads.all_reduce = requires_gradient_sync
                group.grads.holds = group.grads.holds or not unit.options.reduces

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """HSDP: set whether backward also sums over the replicas. If not, the reduce-scattered sum is kept for a later backward."""
        requires_all_reduce = check_flag("requires_all_reduce", requires_all_reduce)
        for unit in units_below(self, recurse):
            for group in unit.groups:
                group.grads.all_reduce = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of data-parallel ranks; 1.0 gives the plain sum. Not recursive."""
        factor = finite("gradient divide factor", factor)
        for group in sharded_unit(self).groups:
            group.grads.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Torch's deprecated name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Always use SUM in collectives, and scale separately. By default NCCL and custom collectives use AVG if it fits."""
        enable = check_flag("enable", enable)
        for group in sharded_unit(self).groups:
            group.grads.sum_only = enable

    def set_ordered_reduction(self, ordered: bool = True, *, recurse: bool = True) -> None:
        """Sum gradients in a fixed order: rank 0's first, and each reduction of a step continues the sum of the one before.

        Assume that micro-batch k of a step is rank ``k % W``'s in its backward ``k // W``, and that every backward reduces
        (``set_requires_gradient_sync(True)``). If the divide factor does not depend on W, the sum is ``((g0 + g1) + g2) + ..`` for every
        number of ranks W, bit for bit. This costs one reduction per backward instead of one per step, and on an accelerator an all-to-all
        instead of the reduce-scatter. A rank whose turn has no micro-batch calls :meth:`set_contributes`.

        Raises:
            PhaseError: a step is under way.
            BadArgument: the unit has several replicas (HSDP), tensors laid out with gaps, or a custom reduce-scatter.
        """
        ordered = check_flag("ordered", ordered)
        units = list(units_below(self, recurse))
        for unit in units:
            check_resting(unit, "order of summation")
            hindrance = next(filter(None, (group.grads.why_unordered for group in unit.groups)), None) if ordered else None
            if hindrance is not None:
                raise BadArgument(f"unit {unit.name!r}: its gradients can't be summed in a fixed order with {hindrance}")
        for unit in units:
            for group in unit.groups:
                group.grads.ordered = ordered

    def set_contributes(self, contributes: bool, *, recurse: bool = True) -> None:
        """Set whether this rank's gradients in the next backwards count. If not, it joins the reductions with zeros, for example when its
        batch is a stand-in. Gradients that earlier backwards have added up without sync stay.

        Parallel experts also compute rows of other ranks, so their gradients always count. If this rank does not contribute, the experts
        take no rows from it and return zeros to it.
        """
        contributes = check_flag("contributes", contributes)
        for unit in units_below(self, recurse):
            unit.options.contributes = contributes
            for group in unit.groups:
                group.grads.contributes = contributes or group.params[0].summed_over > 1

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Give zero gradients to parameters that no rank used. Without it their ``grad`` stays None on all ranks, as in one process.

        If the losses of only some ranks depend on a unit, it is not enough: add the unit's result times 0 to the other losses.
        """
        reduce_scatter_unused_params = check_flag("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for unit in units_below(self, recurse):
            unit.options.reduce_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set the number of units whose reduce-scatters may run while backward goes on. Each of these units keeps its gradient buffers
        meanwhile.

        The root uses the largest value.
        """
        max_input_buffers = positive("max_input_buffers", max_input_buffers)
        for unit in units_below(self, recurse):
            unit.options.max_reductions = max_input_buffers
            if unit.schedule is not None:
                unit.schedule.max_reductions = max(other.options.max_reductions for other in unit.schedule.units)

    def set_reduce_scatter_staging(self, nbytes: int | None, *, recurse: bool = True) -> None:
        """Set the bytes of each of the two buffers in which the reduction of a unit casts gradients, one chunk in each.

        By default (None) a buffer has a sixth of the unit's gradients in the reduce dtype, at least 64 and at most 512 MiB. If all
        gradients fit, they are one chunk in one buffer. The result has the same bits. The size has no effect on gloo, with a custom
        reduce-scatter, and if gradients arrive in the reduce dtype. All ranks must set the same number.

        Raises:
            TypeError: ``nbytes`` is neither an int nor None.
            ValueError: ``nbytes`` is less than 128 for each rank.
            PhaseError: a forward or a backward is under way.
        """
        if nbytes is not None:
            nbytes = positive("the size of a staging buffer in bytes", nbytes)
        units = list(units_below(self, recurse))
        for unit in units:
            check_resting(unit, "staging buffers")
            for group in unit.groups:
                if nbytes is not None:
                    check_staging(nbytes, group.place.world)
        for unit in units:
            for group in unit.groups:
                group.grads.staging = nbytes

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Run reduce-scatters on a separate process group, so that they can overlap with all-gathers on the wire. Collective."""
        enable = check_flag("enable", enable)
        created: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for unit in units_below(self, recurse):
            for group in unit.groups:
                shared = group.place.shard_group
                if not enable:
                    group.grads.group = shared
                    continue
                ranks = tuple(dist.get_process_group_ranks(shared))
                if group.grads.group is not shared:
                    created.setdefault(ranks, group.grads.group)
                if ranks not in created:
                    created[ranks] = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="fsdp_reduce_scatter")
                group.grads.group = created[ranks]

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook(flat gradient shard)`` on ``stream`` (or the current one) after the reduction, before the shard becomes ``.grad``.

        Raises:
            ValueError: the unit has several groups, or ``stream`` is set although the unit does the all-reduce itself (HSDP).
        """
        unit = sharded_unit(self)
        if hook is not None:
            check_call("hook", hook, "gradient")
        if len(unit.groups) > 1:
            kinds = ", ".join(str(group.orig_dtype).removeprefix("torch.") for group in unit.groups)
            raise ValueError(
                f"unit {unit.name!r} has {len(unit.groups)} groups ({kinds}): an all-reduce hook would not know which one it gets. Apply "
                f"fully_shard to modules of one dtype and one requires_grad each"
            )
        for group in unit.groups:
            if stream is not None and group.place.replicate_group is not None:
                raise ValueError("stream cannot be set when using native HSDP: leave it out")
            group.grads.all_reduce_hook, group.grads.all_reduce_stream = hook, stream
