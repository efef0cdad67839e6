"""State dicts of models and optimizers with ragged parameters: torch's ``get/set_*_state_dict``, which also load full state dicts.

torch's own setters can't load full state dicts, because with ``full_state_dict`` they cut full tensors for Shard only. Getting, and
setting from sharded state dicts, is torch's own code. The options are torch's :class:`StateDictOptions`:

| option                 | meaning                                                                                                  |
|------------------------|----------------------------------------------------------------------------------------------------------|
| full_state_dict        | plain whole tensors; with cpu_offload on rank 0 only, the other ranks get an empty dict                   |
| broadcast_from_rank0   | rank 0 has the full state dict (the others pass anything), and sends one tensor at a time                 |
| strict                 | every name must be known on both sides; checked on all ranks before anything is written                   |

Memory: for a ragged tensor over all ranks, rank 0 sends each rank only its part, straight from the given state dict, without a copy.
For other tensors (replicas, tensor parallelism), a rank holds one full tensor at a time besides its shards.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from vescale_ray.communication.collectives import in_parameter_order
from vescale_ray.state_loading.full_state import FullState, FullTensor
from vescale_ray.state_loading.named_states import OF_THE_MODEL, by_name, load_by_name, with_names_of
from vescale_ray.state_loading.new_states import adopt, is_new, undisturbed, unstepped

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def get_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Return the model's parameters and buffers by name, sharded, or whole (``full_state_dict``)."""
    _check_model(model)
    return torchs.get_model_state_dict(model, options=_checked(options))


@torch.inference_mode(False)  # training goes on with the states that are made here
def get_optimizer_state_dict(model: nn.Module, optimizers: Optimizers, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Return the optimizers' state by parameter name: ``{"state": {name: {..}}, "param_groups": [..]}``, sharded or whole.

    An optimizer without state gets one, by a step with zero gradients and learning rate, as in torch, but its ``step`` is 0. Whole states
    are gathered in the order of the model's parameters, because the optimizer's own order may differ by rank.
    """
    options, optimizers = _checked(options), _listed(optimizers)
    _rest(model, optimizers)
    mine = _with_states(model, optimizers)
    if options == StateDictOptions():
        return mine
    if options.full_state_dict:
        shapes = {name: getattr(value, "shape", ()) for name, value in _flattened(mine).items() if name.startswith("state.")}
        if _differ(shapes, model.parameters()):
            raise ValueError(
                "the ranks have optimizer states of different parameters or shapes, which can't be gathered: "
                "let all ranks take the same steps"
            )
        for optimizer in optimizers:
            in_parameter_order(optimizer.state, model.parameters())
    return torchs.get_optimizer_state_dict(model, optimizers, options=options)


@torch.inference_mode(False)  # training goes on with the states that are made here
def set_model_state_dict(model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None) -> Any:
    """Load a state dict into the model: sharded in any layout, or whole; returns ``missing_keys`` and ``unexpected_keys`` as torch
    does.

    Raises:
        ValueError: ``broadcast_from_rank0`` without ``full_state_dict``; a tensor of another shape; a parameter on the meta device;
            missing or unexpected names (``strict``). Raised on every rank, before anything is written.
    """
    options = _checked(options)
    _check_model(model)
    if not options.full_state_dict:
        return torchs.set_model_state_dict(model, dict(model_state_dict), options=options)
    mine = torchs.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=options.ignore_frozen_params))
    source = FullState(model_state_dict, options, _device(mine))
    missing, unexpected = _fill(mine, source, options, "model")
    # Load the written values once more from the model itself: this runs the modules' hooks, and sets values that are not tensors.
    result = torchs.set_model_state_dict(model, {n: v for n, v in mine.items() if n not in missing}, options=StateDictOptions(strict=False))
    result.unexpected_keys.extend(unexpected)
    return result


@torch.inference_mode(False)  # training goes on with the states that are made here
def set_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, optim_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> None:
    """Load a state dict, by parameter names as :func:`get_optimizer_state_dict` returns it, into the optimizers.

    With ``full_state_dict`` and one optimizer it may be the ``state_dict()`` of an unsharded one, which numbers the parameters. The numbers
    are taken in the order of the groups here. States of frozen parameters are loaded, too; torch's function leaves them out.

    Raises:
        ValueError: as :func:`set_model_state_dict`.
    """
    options = _checked(options)
    optimizers = _listed(optimizers)
    _rest(model, optimizers)
    mine = _with_states(model, optimizers)
    groups = mine["param_groups"]
    if not options.full_state_dict:
        _load_sharded(model, optimizers, mine, optim_state_dict, options.strict)
        return
    flat = _flattened(mine)
    named = groups if len(optimizers) == 1 else []
    source = FullState(optim_state_dict, options, _device(flat), functools.partial(_flattened, groups=named))
    adopt(mine, flat, optimizers, source.items)
    _fill(flat, source, options, "optimizer", groups)
    states = {name: _nested(f"state.{name}", states, flat) for name, states in mine["state"].items()}
    hyper = by_name({path: flat[path] for path in source.items if path.startswith("param_groups.") and path in flat})[1]
    load_by_name(optimizers, mine, states, hyper, strict=False)


def _load_sharded(
    model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], mine: Mapping[str, Any], given: Any, strict: bool
) -> None:
    """Load a sharded state dict. If it numbers the parameters instead of naming them, it came from the optimizer's own ``state_dict()``."""
    if not isinstance(given, Mapping) or not given or ("state" in given) != ("param_groups" in given):
        shown = list(given)[:3] if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(f"the optimizer state dict has no 'param_groups', but {shown}: give what get_optimizer_state_dict() returns")
    if not all(isinstance(name, str) for group in given.get("param_groups", ()) for name in group["params"]):
        for optimizer in optimizers:
            optimizer.load_state_dict(dict(given))
        return
    states, hyper = (with_names_of(model, named, mine["param_groups"]) for named in by_name(given))
    load_by_name(optimizers, mine, states, hyper, strict=strict)


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, *, options: StateDictOptions | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of the model (:func:`get_model_state_dict`) and of its optimizers (:func:`get_optimizer_state_dict`)."""
    optimizers = _listed(optimizers)
    return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizers, options=options)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Load both state dicts, as :func:`get_state_dict` returns them. Returns what :func:`set_model_state_dict` returns.

    Raises:
        ValueError: as :func:`set_model_state_dict`. The optimizers are loaded first.
    """
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)


def _fill(
    mine: dict[str, Any], source: FullState, options: StateDictOptions, what: str, groups: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[str], list[str]]:
    """Write ``source`` into ``mine`` after checking names, shapes and the hyperparameters of ``groups``; return the missing and the
    unexpected names."""
    missing = [name for name in mine if name not in source.items]
    unexpected = [name for name in source.items if name not in mine]
    refusal = source.refusal
    try:
        if refusal is None:
            _refuse(options, what, missing, unexpected, none_fits=len(missing) == len(mine))
            _check({name: (mine[name], entry) for name, entry in source.items.items() if name in mine})
            _check_groups(groups, source.items)
    except ValueError as error:
        refusal = error
    loaded = {name: _shown(value) for name, value in source.items.items() if name in mine}
    differ = not source.sends and _differ({**loaded, "": refusal is not None}, (value for _, value in sorted(mine.items())))
    if refusal is not None:
        raise refusal
    if differ:
        raise ValueError(
            f"the ranks have different full {what} state dicts: give all of them the same one, or set broadcast_from_rank0=True if rank 0 "
            f"has it"
        )
    for name in source.items:  # If rank 0 sends, its order applies, because the order of ``mine`` may differ by rank.
        if name in mine:
            mine[name] = source.into(name, mine[name])
    return missing, unexpected


def _differ(mine: Mapping[str, Any], sharded: Iterable[Any]) -> bool:
    """Return whether the ranks that share the ``sharded`` tensors have a different ``mine``. Collective."""
    digest = _hash(repr(sorted(mine.items())).encode())
    meshes = [one.device_mesh for one in sharded if isinstance(one, DTensor)]
    groups = {group: mesh.device_type for mesh in meshes for group in mesh.get_all_groups()}
    differ = False
    for group, device in groups.items():
        sent = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
        every = sent.repeat(group.size())
        dist.all_gather_single(every, sent, group=group)
        parts = every.cpu().view(group.size(), -1)
        differ = differ or bool((parts != parts[0]).any())
        digest = _hash(bytes(every.tolist()))  # ranks in the other dimensions of the mesh learn of a difference in this one
    return differ


def _shown(value: Any) -> Any:
    """Return what identifies an entry of a full state dict: its value, or the shape of a tensor. Other objects may show their address."""
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return value if isinstance(value, bool | int | float | str | bytes) else getattr(value, "shape", type(value).__name__)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}: give the module itself")


def _listed(optimizers: Any) -> tuple[torch.optim.Optimizer, ...]:
    if isinstance(optimizers, torch.optim.Optimizer):
        return (optimizers,)
    found = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(f"the optimizers hold a {type(one).__name__}: give an optimizer, or a list of optimizers")
    return found


def _rest(model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    """Reshard all units, and check that the optimizers' parameters are the model's.

    A gathered unit's modules hold the gathered parameters in place of the sharded ones. A call of ``state_dict`` reshards it.
    """
    _check_model(model)
    model.state_dict(keep_vars=True)
    known = set(map(id, model.parameters()))
    for optimizer in optimizers:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if id(param) not in known:
                raise ValueError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} that is not in the model: build it from "
                    f"model.parameters(), after fully_shard"
                )


def _checked(options: StateDictOptions | None) -> StateDictOptions:
    options = options if options is not None else StateDictOptions()
    if not isinstance(options, StateDictOptions):
        raise TypeError(f"options must be a StateDictOptions, for example StateDictOptions(full_state_dict=True), not {options!r}")
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError("broadcast_from_rank0 sends full tensors: set full_state_dict=True as well")
    return options


def _refuse(options: StateDictOptions, what: str, missing: list[str], unexpected: list[str], none_fits: bool) -> None:
    if options.strict and (missing or unexpected):
        how = "load what fits with StateDictOptions(strict=False)"
        if what == "model" and missing and unexpected:
            how = f"rename its entries, call model.load_state_dict() on all ranks if hooks of the modules rename them, or {how}"
        if none_fits:
            how = {
                "": "set broadcast_from_rank0=True if rank 0 has one",
                "model": "rename its entries, as the model calls them",
                "optimizer": "give one that names parameters, as get_optimizer_state_dict() returns it",
            }[what if unexpected else ""]
        lacks, has = (f"{names[:5]}{'..' if len(names) > 5 else ''}" for names in (missing, unexpected))
        faults = [f"lacks {lacks}"] * bool(missing) + [f"has {has} that the {what} doesn't know"] * bool(unexpected)
        raise ValueError(f"the {what} state dict {' and '.join(faults)}; {how}")


def _check(pairs: dict[str, tuple[Any, Any]]) -> None:
    for name, (target, entry) in pairs.items():
        if isinstance(target, Tensor) and target.is_meta:
            raise ValueError(f"{name} is on the meta device, it has no storage: call to_empty(device=..) on the module first")
        if isinstance(target, Tensor) and not isinstance(entry, FullTensor):
            raise ValueError(f"{name} is a {type(entry).__name__} in the state dict, but a tensor here: make it one with torch.as_tensor")
        if isinstance(entry, FullTensor) and isinstance(target, Tensor) and tuple(target.shape) != entry.shape:
            raise ValueError(
                f"{name} has shape {entry.shape} in the state dict, but {tuple(target.shape)} here: build the model that was saved"
            )


def _device(state: Mapping[str, Any]) -> torch.device:
    """Return the device of the tensors; the CPU if there are none."""
    return next((v.device for v in state.values() if isinstance(v, Tensor) and v.ndim and not v.is_meta), torch.device("cpu"))


def _with_states(model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> dict[str, Any]:
    """Return the optimizers' sharded state. torch makes the states of a new optimizer by a step. They are then set back to the values
    before that step."""
    new = " or ".join(type(optimizer).__name__ for optimizer in optimizers if is_new(optimizer))
    with undisturbed(optimizers):
        try:
            if new:
                with unstepped(optimizers):
                    torchs.get_optimizer_state_dict(model, optimizers)
            return torchs.get_optimizer_state_dict(model, optimizers)
        except TypeError as error:
            if not new:
                raise
            raise ValueError(f"{new} can't make its states without a closure ({error}): take a step before") from error
        except KeyError:
            _check_keys(optimizers)  # the step has made a state of no parameter
            raise


def _check_keys(optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    for optimizer in optimizers:
        other = next((key for key in optimizer.state if not isinstance(key, Tensor)), None)
        if other is not None:
            raise ValueError(
                f"{type(optimizer).__name__} has a state of no parameter, {other!r}, for which torch's state dicts have no name: "
                "vescale_ray.checkpoint stores it"
            )


def _flattened(given: Mapping[str, Any], groups: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return an optimizer state dict in torch's flat form ``{"state.NAME.KEY": .., "param_groups.NAME.KEY": ..}``. If it numbers the
    parameters, their names are those of ``groups``."""
    if "state" not in given:
        return {path: value for path, value in given.items() if not path.endswith(".param_names")}
    if "param_groups" not in given:
        raise ValueError(f"it has no 'param_groups', but {list(given)[:3]}: give what get_optimizer_state_dict() returns")
    if groups:
        given = _named(given, groups)
    flat: dict[str, Any] = {}
    for name, states in given["state"].items():
        flat |= _flat(f"state.{name}", states) if states else {}
    for group in given["param_groups"]:
        for name in group["params"]:
            flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key not in OF_THE_MODEL}
    return flat


def _named(given: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return ``given`` with the parameters' names, which ``groups`` have in the same order, in place of their numbers."""
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    if not all(isinstance(number, int) for number in numbers):
        return given
    here, there = ([len(group["params"]) for group in some] for some in (groups, given["param_groups"]))
    if here != there:
        raise ValueError(
            f"it has groups of {there} parameters, and the optimizer of {here}: build the optimizer with the groups that were saved"
        )
    names = dict(zip(numbers, (name for group in groups for name in group["params"]), strict=True))
    return {
        "state": {names.get(number, number): states for number, states in given["state"].items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in given["param_groups"]],
    }


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    """Return the leaves of nested dicts by their path."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: value}
    return {path: leaf for key, inner in value.items() for path, leaf in _flat(f"{prefix}.{key}", inner).items()}


def _nested(prefix: str, value: Any, flat: Mapping[str, Any]) -> Any:
    """Return ``value`` with its leaves from ``flat``."""
    if not isinstance(value, Mapping) or not value:
        return flat.get(prefix, value)
    return {key: _nested(f"{prefix}.{key}", inner, flat) for key, inner in value.items()}


def _check_groups(groups: Sequence[Mapping[str, Any]], items: Mapping[str, Any]) -> None:
    for group in groups:
        for key in group:
            first, *others = [name for name in group["params"] if f"param_groups.{name}.{key}" in items] or [None]
            wanted = items.get(f"param_groups.{first}.{key}")
            for name in others:
                found = items[f"param_groups.{name}.{key}"]
                if not isinstance(wanted, FullTensor) and not isinstance(found, FullTensor) and found != wanted:
                    raise ValueError(
                        f"{first!r} and {name!r} are in one parameter group here, but {key} is {wanted!r} and {found!r} in the state dict: "
                        f"build the optimizer with the groups that were saved"
                    )
