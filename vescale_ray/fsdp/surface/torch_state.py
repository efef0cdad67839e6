"""A unit in the shape of the state object of torch's own ``fully_shard``, for code that reads that object.

Several parts of torch read it. A pipeline stage runs the backwards of micro-batches without reduction and then calls ``post_backward()`` of
every group and ``_root_post_backward_final_callback()`` once (``stage.py``, ``perform_reduce_grad``, torch 2.13). ``replicate`` skips
modules that are registered as sharded. ``FSDPMemTracker`` wraps forward hooks and the backward of groups. Trainers and tests ask for the
root, the names of parameters, and whether a unit is gathered. These classes have only what a unit really has. ``fully_shard.state(module)``
and ``module._get_fsdp_state()`` return them.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.hooks import RemovableHandle

from vescale_ray.compat.fsdp import REGISTRY_KEY, STATE_KEY, ParamModuleInfo, RegistryItem, TrainingState
from vescale_ray.fsdp.layouts.phases import Phase, Residency
from vescale_ray.fsdp.surface.lookup import take_in_gradients
from vescale_ray.fsdp.units.schedule import Schedule, unit_of

if TYPE_CHECKING:
    from vescale_ray.fsdp.groups.group import ParameterGroup
    from vescale_ray.fsdp.layouts.group_parameter import GroupParam
    from vescale_ray.fsdp.units.unit import Unit


class State:
    """A unit with the attributes of torch's ``FSDPState``, as far as a unit has their values."""

    def __init__(self, unit: Unit) -> None:
        self._unit_ref = weakref.ref(unit)  # a weak reference, since the modules hold both
        self._fsdp_param_groups = [ParamGroup(unit, group) for group in unit.groups]
        self._pre_forward_hook_handle: Any = Handles(unit.pre_hooks)
        self._post_forward_hook_handle: Any = Handles(unit.post_hooks)

    @property
    def _unit(self) -> Unit:
        unit = self._unit_ref()
        assert unit is not None, "the module of this state is gone"
        return unit

    def _lazy_init(self) -> None:
        """Do the work of the first forward: make this unit the root of the units below it."""
        if self._unit.schedule is None:
            Schedule.start(self._unit)

    @property
    def _is_root(self) -> bool | None:
        """None until the first forward has run."""
        return None if self._unit.schedule is None else self._unit.is_root

    @property
    def _modules(self) -> tuple[nn.Module, ...]:
        return tuple(module for ref in self._unit.modules if (module := ref()) is not None)

    @property
    def _device(self) -> torch.device:
        return self._unit.device

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self._unit.policy

    @property
    def _training_state(self) -> TrainingState:
        return _TRAINING_STATES[self._unit.phase]

    @property
    def _state_ctx(self) -> State:
        return self

    @property
    def all_states(self) -> list[State]:
        """The states of all units below the root after its first forward; before, only this one."""
        schedule = self._unit.schedule
        return [self] if schedule is None else [state_of_unit(one) for one in schedule.units]

    @property
    def _states_to_forward_prefetch(self) -> list[State]:
        return [state_of_unit(unit) for ref in self._unit.options.forward_prefetch if (unit := ref()) is not None]

    @_states_to_forward_prefetch.setter
    def _states_to_forward_prefetch(self, states: list[State]) -> None:
        self._unit.options.forward_prefetch = [weakref.ref(state._unit) for state in states]

    @property
    def _states_to_backward_prefetch(self) -> list[State]:
        return [state_of_unit(unit) for ref in self._unit.options.backward_prefetch if (unit := ref()) is not None]

    @_states_to_backward_prefetch.setter
    def _states_to_backward_prefetch(self, states: list[State]) -> None:
        self._unit.options.backward_prefetch = [weakref.ref(state._unit) for state in states]

    @property
    def is_last_backward(self) -> bool:
        """True if the next backward is the last of the step, on ``_state_ctx``."""
        return self._unit.ending.is_last

    @is_last_backward.setter
    def is_last_backward(self, last: bool) -> None:
        self._unit.ending.is_last = last

    @property
    def _comm_ctx(self) -> object:
        """One object for all states that share streams and buffers (``share_comm_ctx``), and different objects otherwise."""
        return self._unit.lanes or self

    @property
    def _modules_to_run_forward(self) -> set[nn.Module]:
        """The modules of a list that the running forward has not run yet."""
        return {module for module in self._modules if id(module) in self._unit._waiting} if len(self._modules) > 1 else set()

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        return self._fsdp_param_groups[0] if self._fsdp_param_groups else None

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._unit.pre_forward(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._unit.post_forward(module, args, output)

    def _root_post_backward_final_callback(self) -> None:
        if self._unit.schedule is not None:
            self._unit.schedule.end_backward()

    def replaced(self, method: str) -> Callable[[], None] | None:
        """Return a function that runs the replacement that other code (torch's ``FSDPMemTracker``) put in place of a group's method, or
        None."""
        if not any(method in group.__dict__ for group in self._fsdp_param_groups):
            return None

        def call() -> None:
            for group in self._fsdp_param_groups:
                getattr(group, method)()

        return call


class ParamGroup:
    """The attributes of torch's ``FSDPParamGroup`` that a group can answer. The first group of a unit acts for all its groups."""

    def __init__(self, unit: Unit, group: ParameterGroup) -> None:
        self._unit_ref, self._group_ref = weakref.ref(unit), weakref.ref(group)

    @property
    def _group(self) -> ParameterGroup:
        group = self._group_ref()
        assert group is not None, "the module of this group is gone"
        return group

    @property
    def _acting(self) -> Unit | None:
        unit = self._unit_ref()
        return unit if unit is not None and unit.schedule is not None and unit.groups[0] is self._group_ref() else None

    @property
    def _module_fqn(self) -> str | None:
        """Names of the unit's modules below the root; None before it is known."""
        unit = self._unit_ref()
        return None if unit is None or unit.schedule is None else unit.fqn

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        unit = self._unit_ref()
        return () if unit is None else tuple(module for ref in unit.modules if (module := ref()) is not None)

    @property
    def fsdp_params(self) -> list[Param]:
        return [Param(param) for param in self._group.params]

    @property
    def device(self) -> torch.device:
        return self._group.place.device

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        return self._group.policy

    @property
    def _orig_dtype(self) -> torch.dtype:
        return self._group.orig_dtype

    @property
    def _reduce_dtype(self) -> torch.dtype | None:
        """None: gradients are reduced in the compute dtype."""
        group = self._group
        return None if group.reduce_dtype == group.compute_dtype else group.reduce_dtype

    @property
    def _reshard_after_forward(self) -> bool:
        unit = self._unit_ref()
        return unit is not None and unit.resharding_after_forward

    @property
    def is_unsharded(self) -> bool:
        return self._group.residency is Residency.UNSHARDED

    @property
    def is_sharded(self) -> bool:
        return self._group.residency is Residency.SHARDED

    def pre_backward(self, *_: Any) -> None:
        """Gather the unit's parameters: the gradient of an output has arrived."""
        unit = self._acting
        if unit is not None:
            unit.enter_backward()

    def post_backward(self, *_: Any) -> None:
        """Reduce the unit's gradients, after all micro-batches."""
        unit = self._acting
        if unit is not None:
            take_in_gradients(unit)
            unit.leave_backward()


class Param:
    """The attributes of torch's ``FSDPParam`` that a parameter can answer."""

    def __init__(self, param: GroupParam) -> None:
        self._param_fqn, self.sharded_param = param.fqn, param.sharded
        self.unsharded_param = self._unsharded_param = param.unsharded
        self._orig_size, self.sharded_size, self.orig_dtype = torch.Size(param.shape), param.local.shape, param.sharded.dtype
        owners = [(module, name) for ref, name in param.owners if (module := ref()) is not None]
        (module, name), shared = owners[0], owners[1:]
        self._module_info = ParamModuleInfo(module, name, [one for one, _ in shared], [attribute for _, attribute in shared])


class Handles:
    """The hooks of all modules of a unit, which are removed together."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


_TRAINING_STATES = {
    Phase.RESTING: TrainingState.IDLE,
    Phase.FORWARD: TrainingState.FORWARD,
    Phase.BACKWARD: TrainingState.PRE_BACKWARD,
    Phase.RECOMPUTE: TrainingState.PRE_BACKWARD,
}


def leave_state(module: nn.Module, unit: Unit) -> None:
    """Register the unit as the module's state, so that ``fully_shard.state(module)`` and other composable functions find it."""
    module.__dict__.setdefault(STATE_KEY, OrderedDict())[inspect.unwrap(torch_fully_shard)] = state_of_unit(unit)
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()


def state_of_unit(unit: Unit) -> State:
    """Return the unit's state, the same object each time."""
    state = unit.torch_state
    if not isinstance(state, State):
        state = unit.torch_state = State(unit)
    return state


def state_of(module: nn.Module) -> State | None:
    """Return the state of a module that was given to :func:`vescale_ray.fully_shard` itself, else None."""
    unit = unit_of(module)
    return None if unit is None else state_of_unit(unit)
