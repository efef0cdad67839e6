"""Loading of optimizer state dicts by parameter name, nested or flat, into optimizers with any groups and any states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_ray.state_loading.new_states import OF_SCHEDULERS, canonical

OF_THE_MODEL = frozenset({"params", "param_names"})
"""Keys of a param group that are no hyperparameters."""


def by_name(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]]]:
    """Return the states and the hyperparameters of each parameter in a state dict, nested or flat."""
    states: dict[str, Any] = {}
    hyper: dict[str, Any] = {}
    if "state" in given:
        states.update(given["state"])
        for group in given["param_groups"]:
            hyper.update(dict.fromkeys(group["params"], {key: value for key, value in group.items() if key not in OF_THE_MODEL}))
        return states, hyper
    for path, value in given.items():
        if path.startswith("param_groups."):
            name, _, key = path.removeprefix("param_groups.").rpartition(".")
            hyper.setdefault(name, {}).update({} if key in OF_THE_MODEL else {key: value})
    for path, value in given.items():
        if path.startswith("state."):
            name, keys = _split(path.split(".")[1:], hyper)
            inner = states.setdefault(name, {})
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = value
    return states, hyper


def _split(parts: list[str], names: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Divide a path into the name of a parameter and the keys of its state."""
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        if name in names:
            return name, parts[count:]
    return ".".join(parts[:-1]), parts[-1:]


def with_names_of(model: nn.Module, named: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return ``named`` with the parameter names that ``groups`` use. A shared parameter has several names, and runs may choose different
    ones.

    Raises:
        ValueError: two entries belong to one parameter of this model.
    """
    aliases: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(param), []).append(canonical(name))
    shared = {name: names for names in aliases.values() if len(names) > 1 for name in names}
    result = dict(named)
    for name in (name for group in groups for name in group["params"] if name in shared):
        found = [alias for alias in shared[name] if alias in named]
        if len(found) > 1:
            raise ValueError(
                f"{found[0]!r} and {found[1]!r} are one parameter here, but two in the optimizer state dict: build the model that was saved"
            )
        if found:
            result[name] = result.pop(found[0])
    return result


def load_by_name(
    optimizers: Sequence[torch.optim.Optimizer],
    mine: Mapping[str, Any],
    given: Mapping[str, Any],
    hyper: Mapping[str, Mapping[str, Any]],
    *,
    strict: bool,
) -> None:
    """Load states and hyperparameters, by the name of the parameter.

    torch's setter leaves out the states of frozen parameters. Of flat state dicts it also leaves out states that the optimizer does not
    have yet. If groups were merged, it uses the hyperparameters of one for all; if a group was split, it sets none.

    Args:
        mine: the state dict of all ``optimizers``, by parameter name.
        given: the states to load; ``hyper``: the hyperparameters.
        strict: refuse parameters that ``hyper`` lacks, and, if the optimizer has states, those that ``given`` lacks. Otherwise such
            parameters keep their states and hyperparameters.

    Raises:
        ValueError: nothing was changed, unless an optimizer itself refuses its part.
    """
    remaining = iter(mine["param_groups"])
    states = {**({} if strict else mine["state"]), **{name: found for name, found in given.items() if found}}
    loaded = []
    for optimizer in optimizers:
        state: dict[int, Any] = {}
        described: list[dict[str, Any]] = []
        count = 0
        stateful = any(optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"])
        for group in optimizer.param_groups:
            names = next(remaining)["params"]
            if strict:
                _refuse_missing([name for name in names if name not in hyper], "hyperparameters")
            own = {key: value for key, value in group.items() if key not in OF_THE_MODEL}
            loaded_ones = _shared(names, hyper)
            if strict:
                _refuse_other(type(optimizer).__name__, own.keys() - OF_SCHEDULERS, loaded_ones.keys() - OF_SCHEDULERS)
                trained = [name for name, p in zip(names, group["params"], strict=True) if p.requires_grad and stateful]
                _refuse_missing([name for name in trained if not given.get(name)], "states")
                lacking = {name: mine["state"].get(name, {}).keys() - given[name].keys() for name in trained}
                for kind in sorted(set().union(*lacking.values())):
                    _refuse_missing([name for name in trained if kind in lacking[name]], f"state {kind!r}")
            described.append({**own, **loaded_ones, "params": [*range(count, count + len(names))]})
            for number, name in enumerate(names, count):
                if name in states:
                    state[number] = _placed(states[name], mine["state"].get(name, {}))
            count += len(names)
        loaded.append({"state": state, "param_groups": described})
    for optimizer, state_dict in zip(optimizers, loaded, strict=True):
        optimizer.load_state_dict(state_dict)


def _placed(states: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of one parameter, sharded as those that the optimizer has. Collective if they are sharded otherwise."""
    result = dict(states)
    for key, value in states.items():
        here = mine.get(key)
        if isinstance(value, DTensor) and isinstance(here, DTensor) and value.shape == here.shape and value.placements != here.placements:
            with torch.no_grad():
                result[key] = torch.empty_like(here, dtype=value.dtype).copy_(value)
    return result


def _refuse_missing(names: Sequence[str], what: str) -> None:
    if names:
        shown = f"{', '.join(map(repr, names[:3]))}{'..' if len(names) > 3 else ''}"
        raise ValueError(
            f"the optimizer state dict has no {what} of {shown}: build the model and the groups as they were saved, or load what "
            "it has with StateDictOptions(strict=False)"
        )


def _refuse_other(optimizer: str, ours: Set[str], theirs: Set[str]) -> None:
    """Refuse the state dict of another optimizer. Other versions of torch may have more hyperparameters, or fewer."""
    if not (ours <= theirs or theirs <= ours):
        raise ValueError(
            f"the state dict is not one of {optimizer}: they differ in the hyperparameters {', '.join(sorted(ours ^ theirs)[:4])}; make "
            "the same optimizer, or a new one without loading its state"
        )


def _shared(names: Sequence[str], hyper: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the hyperparameters of a group: those of its first parameter, which all of them have."""
    found = [name for name in names if name in hyper]
    for name in found:
        first, other = hyper[found[0]], hyper[name]
        key = next((key for key in first.keys() | other.keys() if not _same(first.get(key), other.get(key))), None)
        if key is not None:
            raise ValueError(
                f"{found[0]!r} and {name!r} are in one parameter group here, but {key} is {first.get(key)!r} and {other.get(key)!r} in the "
                "state dict: build the optimizer with the groups that were saved"
            )
    return hyper[found[0]] if found else {}


def _same(one: Any, other: Any) -> bool:
    return one is other or bool(torch.as_tensor(one == other).all())
