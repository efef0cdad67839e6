"""Loading of optimizer states: either all existing states are replaced, or none.

torch's own ``load_state_dict`` accepts incomplete state dicts. If a parameter's state is missing, the next step silently recreates
it from zero. States of another shape fail in that step, or broadcast. If an older state dict lacks a key of a param group, the
step fails, too. The classes here check first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_ray.dtensor.arguments import check_saved_part
from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor
from vescale_ray.dtensor.spec import sharding_of
from vescale_ray.optim.parameters import named_of

_OF_THE_MODEL = ("params", "param_names")


class StrictLoading(torch.optim.Optimizer):
    """An optimizer whose ``load_state_dict`` refuses states that do not match the existing ones. Inherit from it before torch's class."""

    def _check_loaded_group(self, group: Mapping[str, Any], theirs: dict[str, Any]) -> None:
        """Raise ValueError if a loaded param group, completed by this group's values, can't replace this group."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load as torch does; keys that a loaded param group lacks keep their value.

        Raises:
            ValueError: a parameter's state is missing, or has other keys, shapes or placements than here; a state belongs to an
                unknown parameter; or the param groups differ. Nothing was changed.
        """
        # This hook runs last before torch's own work, so it sees the changes of the user's hooks.
        hook = self.register_load_state_dict_pre_hook(lambda _, given: completed(self, given))
        try:
            super().load_state_dict(_as_dict(state_dict))
        finally:
            hook.remove()


class InPlaceLoading(StrictLoading):
    """Loading that copies values into the existing states, which keep their dtype.

    torch would cast to the parameter's dtype, even the FP32 scales of a BF16 parameter.
    """

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load as torch does; keys that a loaded param group lacks keep their value, and states keep their dtype.

        Raises:
            ValueError: as :meth:`StrictLoading.load_state_dict`. Nothing was changed.
        """
        before = {param: states for param, states in self.state.items() if states}
        loaded: dict[Tensor, Mapping[str, Any]] = {}

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            given = completed(self, given)
            rest = dict(given["state"])
            for param, key in _pairs(self, given):
                if param in before:
                    loaded[param] = rest.pop(key)
            return {**given, "state": rest}

        def give(_: torch.optim.Optimizer) -> None:
            with torch.no_grad():
                for param, states in before.items():
                    for key, target in states.items():
                        value = loaded[param][key]
                        if value is not target:
                            target.copy_(value) if isinstance(value, Tensor) else target.fill_(value)
                    self.state[param] = states

        hooks = [self.register_load_state_dict_pre_hook(take), self.register_load_state_dict_post_hook(give, prepend=True)]
        try:
            super(StrictLoading, self).load_state_dict(_as_dict(state_dict))
        finally:
            for hook in hooks:
                hook.remove()


def _as_dict(state_dict: Any) -> dict[str, Any]:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"the state dict is a {type(state_dict).__name__}: give what state_dict() of the optimizer returns")
    return dict(state_dict)


def completed(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given``, with missing keys of its param groups taken from the optimizer's.

    Raises:
        ValueError: it can't be loaded (see :meth:`StrictLoading.load_state_dict`).
    """
    lacks = [key for key in ("state", "param_groups") if key not in given]
    if lacks:
        raise ValueError(
            f"the state dict of {type(optimizer).__name__} has no {lacks[0]!r}, but {list(given)[:3]}: give what the optimizer's "
            f"state_dict() returns, not a part of a checkpoint"
        )
    groups, theirs = optimizer.param_groups, list(given["param_groups"])
    sizes, their_sizes = ([len(group["params"]) for group in some] for some in (groups, theirs))
    if sizes != their_sizes:
        raise ValueError(f"the state dict has param groups of {their_sizes} parameters, here are {sizes}: build it from the same ones")
    merged = []
    for group, their in zip(groups, theirs, strict=True):
        whole = {**{key: value for key, value in group.items() if key not in _OF_THE_MODEL}, **their}
        if isinstance(optimizer, StrictLoading):
            optimizer._check_loaded_group(group, whole)
        merged.append(whole)
    names = [name for index, group in enumerate(groups) for name, _ in named_of(group, index)]
    known = set()
    for name, (param, key) in zip(names, _pairs(optimizer, given), strict=True):
        known.add(key)
        here, found = optimizer.state.get(param), given["state"].get(key)
        if here:
            _check(type(optimizer).__name__, name, here, found or {})
        for kind, value in (found or {}).items() if not here else ():
            if isinstance(value, Tensor) and value.shape == param.shape and param.dim():
                _check_placed(kind, name, value, param)
    for value in (value for states in given["state"].values() for value in states.values() if type(value) is DTensor):
        check_saved_part(value.device_mesh, value.placements, value.shape)
    unknown = [key for key in given["state"] if key not in known]
    if unknown:
        raise ValueError(f"the state dict has states of parameters {unknown[:3]}, which are in none of its param groups: it is damaged")
    return {**given, "param_groups": merged}


def _pairs(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any]]:
    """Yield each parameter with its key in the state dict."""
    for group, theirs in zip(optimizer.param_groups, given["param_groups"], strict=True):
        yield from zip(group["params"], theirs["params"], strict=True)


def _check(optimizer: str, name: str, here: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    if set(found) != set(here):
        raise ValueError(
            f"the state of parameter {name} has {sorted(found) or 'nothing'}, but {optimizer} keeps {sorted(here)}: missing states would "
            f"start from zero. Load a state dict of this optimizer with the same routing of parameters, or build a new one to start anew"
        )
    for kind, value in found.items():
        _check_placed(kind, name, value, here[kind])


def _check_placed(kind: str, name: str, value: Any, here: Any) -> None:
    if not _fits(value, here):
        raise ValueError(
            f"{kind} of parameter {name} is {_shown(value)}, here {_shown(here)}: it belongs to another parameter, has other blocks, or is "
            f"sharded differently (vescale_ray.state_dict.set_optimizer_state_dict and checkpoints reshard states)"
        )


def _fits(value: Any, here: Any) -> bool:
    if not isinstance(here, Tensor):
        return not isinstance(value, Tensor) or value.numel() == 1
    if isinstance(value, int | float):
        return here.numel() == 1
    if not isinstance(value, Tensor) or value.shape != here.shape or isinstance(value, DTensor) != isinstance(here, DTensor):
        return False
    if isinstance(value, RaggedDTensor) and isinstance(here, RaggedDTensor):
        return sharding_of(value._spec).same_layout(sharding_of(here._spec))
    return getattr(value, "placements", None) == getattr(here, "placements", None)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    placements = f", placed {list(value.placements)}" if isinstance(value, DTensor) else ", not sharded"
    return f"{tuple(value.shape)}{placements}"
