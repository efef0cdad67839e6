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

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from vescale_ray.communication.collectives import in_parameter_order
from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor, RaggedShard, distribute_tensor
from vescale_ray.dtensor.transfer import MOVABLE, movable

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def get_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Return the model's parameters and buffers by name, sharded, or whole (``full_state_dict``)."""
    _check_model(model)
    return torchs.get_model_state_dict(model, options=_checked(options))


def get_optimizer_state_dict(model: nn.Module, optimizers: Optimizers, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Return the optimizers' state by parameter name: ``{"state": {name: {..}}, "param_groups": [..]}``, sharded or whole.

    An optimizer without state gets one, by a step with zero gradients and learning rate, as in torch. Whole states are gathered in the
    order of the model's parameters, because the optimizer's own order may differ by rank.
    """
    options, optimizers = _checked(options), _listed(optimizers)
    _rest(model, optimizers)
    if options is not None and options.full_state_dict:
        torchs.get_optimizer_state_dict(model, optimizers)  # creates missing states; gathers nothing
        for optimizer in optimizers:
            in_parameter_order(optimizer.state, model.parameters())
    return torchs.get_optimizer_state_dict(model, optimizers, options=options)


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
    source = _Source(model_state_dict, options, _device(mine))
    missing, unexpected = _fill(mine, source, options, "model")
    # Load the written values once more from the model itself: this runs the modules' hooks, and sets values that are not tensors.
    result = torchs.set_model_state_dict(model, {n: v for n, v in mine.items() if n not in missing}, options=StateDictOptions(strict=False))
    result.unexpected_keys.extend(unexpected)
    return result


def set_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, optim_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> None:
    """Load a state dict, by parameter names as :func:`get_optimizer_state_dict` returns it, into the optimizers.

    Raises:
        ValueError: as :func:`set_model_state_dict`.
    """
    options = _checked(options)
    optimizers = _listed(optimizers)
    _rest(model, optimizers)
    if not options.full_state_dict:
        torchs.set_optimizer_state_dict(model, optimizers, dict(optim_state_dict), options=options)
        return
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    mine = torchs.get_optimizer_state_dict(model, optimizers, options=flat)
    source = _Source(optim_state_dict, options, _device(mine), _flattened)
    _fill(mine, source, options, "optimizer")
    torchs.set_optimizer_state_dict(model, optimizers, mine, options=replace(flat, strict=options.strict))


def _fill(mine: dict[str, Any], source: _Source, options: StateDictOptions, what: str) -> tuple[list[str], list[str]]:
    """Write ``source`` into ``mine`` after checking names and shapes; return the missing and the unexpected names."""
    missing = [name for name in mine if name not in source.items]
    unexpected = [name for name in source.items if name not in mine]
    refusal = source.refusal
    try:
        if refusal is None:
            _refuse(options, what, missing, unexpected, none_fits=len(missing) == len(mine))
            _check({name: (mine[name], entry) for name, entry in source.items.items() if name in mine})
    except ValueError as error:
        refusal = error
    differ = not source.sends and _differ(mine, source.items, refusal)
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


def _differ(mine: Mapping[str, Any], items: Mapping[str, Any], refusal: ValueError | None) -> bool:
    """Return whether the ranks that share tensors of ``mine`` load different names or shapes, or only some refuse. Collective."""
    loaded = [(name, getattr(items[name], "shape", ())) for name in sorted(mine) if name in items]
    digest = _hash(repr((loaded, refusal is not None)).encode())
    meshes = [value.device_mesh for _, value in sorted(mine.items()) if isinstance(value, DTensor)]
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
    """Reshard the units by taking a state dict, because gathered units show the wrong parameters; check that all parameters are known."""
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


class _Source:
    """A full state dict: names, shapes and dtypes on every rank; the values on every rank, or on rank 0 only."""

    def __init__(
        self,
        given: Any,
        options: StateDictOptions,
        device: torch.device,
        flattened: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda given: given,
    ) -> None:
        self.given, self.device = given, device
        self.sends = options.broadcast_from_rank0 and dist.is_initialized() and dist.get_world_size() > 1
        self.first = not self.sends or dist.get_rank() == 0
        described: list[Any] = [None]
        refusal = None
        if self.first:
            try:
                if not isinstance(given, Mapping):
                    raise TypeError(f"it is a {type(given).__name__}, not a dict")
                self.given = flattened(given)
                described = [{n: _sendable(n, _described(n, v)) for n, v in self.given.items()}]
            except Exception as error:  # the other ranks must learn of this refusal
                described, refusal = [_Refused(str(error) or type(error).__name__)], error
        if self.sends:
            dist.broadcast_object_list(described, src=0, device=device)
        self.refusal: ValueError | None = None
        self.items: dict[str, Any] = {}
        if isinstance(described[0], _Refused):
            self.refusal = ValueError(f"the full state dict can't be loaded: {described[0].why}")
            self.refusal.__cause__ = refusal
        else:
            self.items = described[0]

    def into(self, name: str, target: Any) -> Any:
        """Write the value of ``name`` into ``target`` and return it; if ``target`` is not a tensor, return the value itself."""
        entry = self.items[name]
        if not isinstance(entry, _TensorEntry):
            return entry
        if not isinstance(target, Tensor):
            return self._whole(name, entry)
        with torch.no_grad():
            if not self.sends and isinstance(target, RaggedDTensor):
                target.copy_(self.given[name])  # only this rank's part goes to the device
                return target
            if isinstance(target, RaggedDTensor) and _over_all_ranks(target):
                target.copy_(RaggedDTensor.from_spec(self._part(name, entry, target), target._spec))
                return target
            full = self._whole(name, entry)
            if isinstance(target, DTensor) and not isinstance(target, RaggedDTensor):
                full = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
            target.copy_(full)
        return target

    def _part(self, name: str, entry: _TensorEntry, target: RaggedDTensor) -> Tensor:
        """Receive this rank's part from rank 0, whose tensor is all parts in rank order: one all-to-all in which only rank 0 sends."""
        placement = cast(RaggedShard, target.placements[0])
        size = 1 if entry.dtype in MOVABLE else entry.dtype.itemsize
        counts = [(end - start) * size for start, end in placement.intervals(entry.shape)]
        world, rank = len(counts), dist.get_rank()
        part = torch.empty(placement.local_shape(entry.shape, rank), dtype=entry.dtype, device=self.device)
        full = self.given[name].detach().to(self.device).contiguous() if self.first else part.new_empty(0)
        given, wanted = counts if self.first else [0] * world, [counts[rank], *[0] * (world - 1)]
        dist.all_to_all_single(movable(part.view(-1)), movable(full.view(-1)), wanted, given)
        return part

    def _whole(self, name: str, entry: _TensorEntry) -> Tensor:
        if not self.first:
            full = torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
        else:
            full = self.given[name].detach().to(self.device).contiguous()
        if self.sends:
            raw = full if full.dtype not in (torch.bool, torch.int16) and full.dtype.itemsize > 1 else full.view(torch.uint8)
            dist.broadcast(raw, src=0)
        return full


class _TensorEntry:
    """Shape and dtype of a tensor on another rank."""

    def __init__(self, value: Tensor) -> None:
        self.shape, self.dtype = tuple(value.shape), value.dtype


class _Refused:
    """The reason why rank 0 can't send its state dict."""

    def __init__(self, why: str) -> None:
        self.why = why


def _over_all_ranks(tensor: RaggedDTensor) -> bool:
    """Return whether the tensor's parts lie on all ranks, in rank order."""
    return tensor.device_mesh.ndim == 1 and tensor.device_mesh.mesh.tolist() == list(range(dist.get_world_size()))


def _sendable(name: str, value: Any) -> Any:
    try:
        pickle.dumps(value)  # broadcast_object_list pickles it, too
    except Exception as error:
        raise ValueError(f"{name!r} can't be pickled: {error}") from None
    return value


def _described(name: str, value: Any) -> Any:
    if isinstance(value, DTensor):
        raise ValueError(f"a full state dict holds plain tensors, but {name!r} is a {type(value).__name__}: set full_state_dict=False")
    if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_meta):
        raise ValueError(
            f"a full state dict holds dense tensors with values, but {name!r} is {value.layout} on {value.device}: give its values"
        )
    return _TensorEntry(value) if isinstance(value, Tensor) else value


def _checked(options: StateDictOptions | None) -> StateDictOptions:
    options = options if options is not None else StateDictOptions()
    if not isinstance(options, StateDictOptions):
        raise TypeError(f"options must be a StateDictOptions, as StateDictOptions(full_state_dict=True), not {options!r}")
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError("broadcast_from_rank0 sends full tensors: set full_state_dict=True as well")
    return options


def _refuse(options: StateDictOptions, what: str, missing: list[str], unexpected: list[str], none_fits: bool) -> None:
    if options.strict and (missing or unexpected):
        how = "load what fits with StateDictOptions(strict=False)"
        if none_fits:
            how = f"rename its entries, as the {what} calls them" if unexpected else "set broadcast_from_rank0=True if rank 0 has one"
        raise ValueError(
            f"the {what} state dict lacks {missing[:5]}{'..' if len(missing) > 5 else ''} and has {unexpected[:5]}"
            f"{'..' if len(unexpected) > 5 else ''} that the {what} doesn't know; {how}"
        )


def _check(pairs: dict[str, tuple[Any, Any]]) -> None:
    for name, (target, entry) in pairs.items():
        if isinstance(target, Tensor) and target.is_meta:
            raise ValueError(f"{name} is on the meta device, it has no storage: call to_empty(device=..) on the module first")
        if isinstance(target, Tensor) and not isinstance(entry, _TensorEntry):
            raise ValueError(f"{name} is a {type(entry).__name__} in the state dict, but a tensor here: make it one with torch.as_tensor")
        if isinstance(entry, _TensorEntry) and isinstance(target, Tensor) and tuple(target.shape) != entry.shape:
            raise ValueError(
                f"{name} has shape {entry.shape} in the state dict, but {tuple(target.shape)} here: build the model that was saved"
            )


def _device(state: Mapping[str, Any]) -> torch.device:
    """Return the device of the tensors; the CPU if there are none."""
    return next((v.device for v in state.values() if isinstance(v, Tensor) and v.ndim and not v.is_meta), torch.device("cpu"))


def _flattened(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer state dict in torch's flat form ``{"state.NAME.KEY": .., "param_groups.NAME.KEY": ..}``."""
    if "state" not in given:
        return dict(given)
    if "param_groups" not in given:
        raise ValueError(f"it has no 'param_groups', but {list(given)[:3]}: give what get_optimizer_state_dict() returns")
    flat = {f"state.{name}.{key}": value for name, states in given["state"].items() for key, value in states.items()}
    for group in given["param_groups"]:
        for name in group["params"]:
            flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return flat
