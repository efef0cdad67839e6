"""FSDPModule's methods to end a step by hand, which torch has since 2.15 and vescale_ray has with every torch.

A schedule of micro-batches (torch's pipelines) runs several backwards, and only it knows when the gradients are complete. It calls
``set_manual_backward_finalization(True)``, runs the forwards and backwards, and calls ``finalize_backward()``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed.fsdp

from vescale_ray.errors import BadArgument
from vescale_ray.fsdp.groups.running_backward import in_backward
from vescale_ray.fsdp.layouts.phases import PhaseError
from vescale_ray.fsdp.surface.lookup import sharded_unit, take_in_gradients
from vescale_ray.fsdp.units.interfaces import UnitSchedule
from vescale_ray.fsdp.units.unit import Unit

_Base: Any = getattr(torch.distributed.fsdp, "GradientReductionHandle", object)  # isinstance checks need torch's class if there is one


class ReductionHandle(_Base):
    """The reductions that ``finalize_backward(async_op=True)`` has started. If ``schedule`` is None, there are none."""

    def __init__(self, schedule: UnitSchedule[Unit] | None) -> None:
        self._schedule = schedule
        self._step = None if schedule is None else schedule.ending.step

    def wait(self) -> None:
        """Wait until the gradients are delivered. A second call does nothing.

        Raises:
            PhaseError: ``reset_iter_state()`` has dropped the step.
        """
        schedule, self._schedule = self._schedule, None
        if schedule is None:
            return
        if not schedule.ending.pending or schedule.ending.step != self._step:
            raise PhaseError("the step of this handle was given up by reset_iter_state(): its gradients are lost, run it again")
        schedule.settle(wait=True)


class FinalizesBackward:
    """Methods of FSDPModule that end a step by hand."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether only :meth:`finalize_backward` waits for reductions; ``set_is_last_backward`` then has no effect. Call it on the
        root.

        Raises:
            PhaseError: the unit is below the root, or a step has begun with the other setting.
        """
        unit = _root(self, "set_manual_backward_finalization")
        begun = unit.ending.by_hand if unit.ending.active is None and in_backward() else unit.ending.active
        if begun is not None and begun != enabled:
            raise PhaseError(
                f"set_manual_backward_finalization({enabled}) in the middle of a step: call finalize_backward() or reset_iter_state() first"
                if begun
                else f"set_manual_backward_finalization({enabled}) in the middle of a step: call it before the step's first backward"
            )
        unit.ending.by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> ReductionHandle | None:
        """End the step after all its backwards: reduce the gradients and reshard, according to the current settings. Call it on the root.

        Every rank calls it. If the backwards ran without gradient sync, call ``set_requires_gradient_sync(True)`` before. It does nothing
        before the first forward.

        Args:
            async_op: only start the reductions. Wait on the handle before the gradients are used and before the next forward.

        Raises:
            PhaseError: it is called on a unit below the root, inside a backward, without :meth:`set_manual_backward_finalization`, or
                before the last handle was waited on; or gradients must not be summed over the replicas (HSDP) yet.
        """
        unit = _root(self, "finalize_backward")
        schedule = unit.schedule
        if schedule is None:
            return ReductionHandle(None) if async_op else None
        _check(schedule)
        for one in reversed(schedule.units):
            take_in_gradients(one)
            one.close()
        schedule.settle(wait=not async_op)
        if not async_op:
            return None
        schedule.ending.pending = True
        return ReductionHandle(schedule)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Refuse torch's switch to keep the memory of gathered parameters after resharding: here the units share that memory.

        Raises:
            BadArgument: ``keep`` is true.
        """
        if keep:
            raise BadArgument(
                "set_keep_unsharded_storage(True) is not supported: units share the memory that they gather into; "
                "call set_reshard_after_forward(False) and set_reshard_after_backward(False) to keep parameters gathered"
            )


def _root(module: Any, method: str) -> Unit:
    unit = sharded_unit(module)
    if unit.schedule is not None and not unit.is_root:
        raise PhaseError(f"{method} must be called on the root FSDP module, not on unit {unit.name!r}")
    return unit


def _check(schedule: UnitSchedule[Unit]) -> None:
    ending = schedule.ending
    if ending.pending:
        raise PhaseError("finalize_backward(async_op=True) is under way: wait on its handle before the next finalize_backward()")
    if not (ending.by_hand if ending.active is None else ending.active):
        raise PhaseError("finalize_backward needs set_manual_backward_finalization(True) before the step's first backward")
    if schedule.running or in_backward():
        raise PhaseError("finalize_backward is called inside a forward or a backward: call it after all backwards")
    for group in (group for unit in schedule.units if unit.options.gradient_sync for group in unit.groups):
        held_back = group.place.replicate_group is not None and group.grads.arrived_count and not group.grads.all_reduce
        if held_back or group.grads.partial is not None:
            raise PhaseError(
                f"gradients of {group.name!r} are not summed over the replicas: call set_requires_all_reduce(True) before the backwards"
            )
