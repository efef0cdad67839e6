"""Arrivals: the prefetches and checks that a unit runs when gradients of its parameters arrive."""

from __future__ import annotations

import weakref

from torch.autograd.graph import get_gradient_edge

from vescale_ray.compat.core import outside_transforms
from vescale_ray.fsdp.groups.group import ParameterGroup
from vescale_ray.fsdp.groups.running_backward import in_backward, will_accumulate
from vescale_ray.fsdp.layouts.phases import Phase
from vescale_ray.fsdp.units.unit import Unit


def listen(unit: Unit) -> None:
    """Register the unit's callbacks with its groups' gradients, which hold the unit weakly."""
    mine = weakref.ref(unit)
    for group in unit.groups:
        group.grads.on_first = lambda: _prefetch_at_first_gradient(mine)
        group.grads.on_most = lambda: _prefetch_at_most_gradients(mine)


def will_come(group: ParameterGroup) -> bool:
    """True if the running backward will accumulate a gradient of a parameter of ``group``."""
    leaves = (param.unsharded for param in group.params if param.sharded.requires_grad)
    with outside_transforms():  # inside torch.func.grad, a leaf of another level has no edge
        return any(leaf.requires_grad and will_accumulate(get_gradient_edge(leaf).node) for leaf in leaves if leaf is not None)


def _prefetch_at_first_gradient(unit_ref: weakref.ref[Unit]) -> None:
    """Prefetch before the first gradient buffer is filled.

    On the CPU all units share one, so the last reduce-scatter is finished first. On an accelerator the all-gather uses the memory of the
    gradients that are being reduced. This unit's buffers are taken before, so that they don't get that memory and wait for it.

    Raises:
        RuntimeError: the user has gathered the unit and has never called its root module, which would end the backward.
    """
    unit = unit_ref()
    if unit is None:
        return
    if unit.schedule is None:
        raise RuntimeError(
            f"a backward reached parameters of {unit.name!r} after unshard(), but its root module was never called, so that their "
            f"gradients would be lost: call the model itself, or register_fsdp_forward_method(model, name) for a method other than forward"
        )
    if in_backward():
        # A backward through the graph of create_graph=True passes no entry mark: a parameter's gradient is its first sign.
        unit.schedule.enter_backward(unit)
    if unit.schedule.overlaps:
        for group in unit.groups:
            if group.grads.trainable_count:
                group.grads.open()
        unit.schedule.lend_reduced()
    else:
        unit.schedule.finish_reductions()
    if not unit._prefetches_late:
        unit.prefetch_backward()
    if not unit.schedule.overlaps and unit.open_call is not None and unit.open_call.previous is None:
        unit.schedule.trim(scratch=False)


def _prefetch_at_most_gradients(unit_ref: weakref.ref[Unit]) -> None:
    unit = unit_ref()
    if unit is not None and unit.phase is Phase.BACKWARD and unit.schedule is not None and not unit.schedule.overlaps:
        unit.prefetch_backward()
