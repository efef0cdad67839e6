"""Arrivals: what a unit does when gradients of its parameters come, beside taking them in."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from vescale_ray.compat.core import current_graph_task_id
from vescale_ray.fsdp.phases import Phase

if TYPE_CHECKING:
    from vescale_ray.fsdp.unit import Unit


def listen(unit: Unit) -> None:
    """Let the gradients of the unit's groups tell it. They hold it weakly."""
    mine = weakref.ref(unit)
    for group in unit.groups:
        group.grads.on_first = lambda: _prefetch_at_first_gradient(mine)
        group.grads.on_most = lambda: _prefetch_at_most_gradients(mine)
        group.grads.on_complete = lambda: _reduce_if_complete(mine)


def in_backward() -> bool:
    """Whether the calling thread is inside a backward."""
    return current_graph_task_id() != -1


def _reduce_if_complete(unit_ref: weakref.ref[Unit]) -> None:
    """The unit's only trainable parameter has its gradient: send it off, if no mark on an input is still to come. With several
    parameters, those that a rank uses may differ, and no rank knows when another one has all of its gradients.

    The unit stays open: frozen parameters of it, units inside, or a reentrant checkpoint may still need its parameters.
    """
    unit = unit_ref()
    if unit is None or unit.phase is not Phase.BACKWARD or unit._awaited_marks or unit.reduce_unused:
        return
    if unit.trainable_count == 1:
        unit.reduce()


def _prefetch_at_first_gradient(unit_ref: weakref.ref[Unit]) -> None:
    """A gradient buffer is about to be filled: where there is one for all units, the last reduce-scatter has to be through."""
    unit = unit_ref()
    if unit is None or unit.schedule is None:
        return
    if in_backward():
        # The graph of a backward with create_graph=True has no hooks of ours: its parameters' gradients are the first that we hear of it.
        unit.schedule.enter_backward(unit)
    if not unit.schedule.overlaps:
        unit.schedule.finish_reductions()
        if not unit._prefetches_late:
            unit.prefetch_backward()
        if unit.open_call is not None and unit.open_call.previous is None:
            unit.schedule.trim(scratch=False)


def _prefetch_at_most_gradients(unit_ref: weakref.ref[Unit]) -> None:
    unit = unit_ref()
    if unit is not None and unit.phase is Phase.BACKWARD:
        unit.prefetch_backward()
