"""Optimizer steps. After a step, the casts of the parameters that it has written are out of date."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vescale_ray.compat.core import global_optimizer_post_hooks
from vescale_ray.fsdp.groups.group import ParameterGroup


class HasGroups(Protocol):
    """The interface of a schedule that :class:`OptimizerSteps` needs."""

    @property
    def groups(self) -> Sequence[ParameterGroup]: ...

    def refresh(self, groups: Sequence[ParameterGroup]) -> None: ...


class OptimizerSteps:
    """Refreshes the groups of one schedule after each step of an optimizer that holds their parameters.

    An optimizer may write the master shards with kernels that change no version counter.
    """

    def __init__(self, schedule: HasGroups) -> None:
        self._schedule = weakref.ref(schedule)
        self._stepped_by: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[ParameterGroup]] = weakref.WeakKeyDictionary()
        _ALL.append(weakref.ref(self, _ALL.remove))

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the casts of the groups whose parameters ``optimizer`` has stepped as out of date."""
        groups, schedule = self._stepped_by.get(optimizer), self._schedule()
        if groups is None and schedule is not None:
            held = {id(p) for param_group in optimizer.param_groups for p in param_group["params"]}
            groups = [group for group in schedule.groups if any(id(p.sharded) in held for p in group.params)]
            if groups:
                self._stepped_by[optimizer] = groups
        if groups and schedule is not None:
            schedule.refresh(groups)


_ALL: list[weakref.ref[OptimizerSteps]] = []


def after_optimizer_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Tell every schedule in this process that ``optimizer`` has taken a step."""
    for ref in tuple(_ALL):
        steps = ref()
        if steps is not None:
            steps.after(optimizer)


# One hook, added here: torch's step fails if hooks are added or removed meanwhile, by another thread or by garbage collection. Written
# into the dictionary: register_optimizer_step_post_hook would change a counter on a class of torch.
global_optimizer_post_hooks[-1] = after_optimizer_step
