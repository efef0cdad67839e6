"""What ``torch.distributed.pipelining`` asks of a sharded stage, beyond the public methods of FSDPModule.

Its stages run backward in micro-batches without reduction and then, once, reach into the state that torch's own ``fully_shard`` leaves
on a module: they call ``post_backward()`` of every group and ``_root_post_backward_final_callback()`` (``stage.py``,
``perform_reduce_grad``, torch 2.13). A state of that shape, kept where torch looks for it, is all that it needs.
"""

from __future__ import annotations

import inspect
import weakref

from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_ray.fsdp.unit import Unit


class StageState:
    """A unit, in the shape of torch's ``FSDPState`` as far as pipelining uses it."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)  # the module holds both

    @property
    def _state_ctx(self) -> StageState:
        return self

    @property
    def all_states(self) -> list[StageState]:
        """Of all units below the root, once it has run a forward; before, this one only."""
        unit = self._unit()
        if unit is None or unit.schedule is None:
            return [self]
        return [StageState(one) for one in unit.schedule.units]

    @property
    def _fsdp_param_groups(self) -> list[StageState]:
        return [self]

    def post_backward(self) -> None:
        """All micro-batches are through: reduce the gradients of this unit."""
        unit = self._unit()
        if unit is not None and unit.schedule is not None:
            unit.take_in_gradients()
            unit.close()

    def _root_post_backward_final_callback(self) -> None:
        unit = self._unit()
        if unit is not None and unit.schedule is not None:
            unit.schedule.end_backward()


def leave_state(module: nn.Module, unit: Unit) -> None:
    """Let torch's ``fully_shard.state(module)`` find the unit."""
    module.__dict__.setdefault(STATE_KEY, {})[inspect.unwrap(torch_fully_shard)] = StageState(unit)
