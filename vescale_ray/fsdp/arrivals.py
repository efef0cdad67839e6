"""Arrivals: what a unit does when gradients of its parameters come, beside taking them in."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.autograd.graph import get_gradient_edge

from vescale_ray.compat.core import current_graph_task_id
from vescale_ray.fsdp.linear import will_accumulate
from vescale_ray.fsdp.phases import Phase

if TYPE_CHECKING:
    from vescale_ray.fsdp.group import Group
    from vescale_ray.fsdp.unit import Unit


def listen(unit: Unit) -> None:
    """Let the gradients of the unit's groups tell it. They hold it weakly."""
    mine = weakref.ref(unit)
    for group in unit.groups:
        group.grads.on_first = lambda: _prefetch_at_first_gradient(mine)
        group.grads.on_most = lambda: _prefetch_at_most_gradients(mine)


def in_backward() -> bool:
    """Whether the calling thread is inside a backward."""
    return current_graph_task_id() != -1


def will_come(group: Group) -> bool:
    """Whether the backward that runs will add to the gradient of a parameter of ``group``."""
    leaves = (param.unsharded for param in group.params if param.sharded.requires_grad)
    return any(leaf.requires_grad and will_accumulate(get_gradient_edge(leaf).node) for leaf in leaves if leaf is not None)


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
