"""Allocate storage for modules built on the meta device; for sharded modules, only the shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def on_meta(module: nn.Module) -> bool:
    """Return whether a parameter or buffer of ``module`` has no storage."""
    return any(t.is_meta for t in [*module.parameters(), *module.buffers()])


def materialize(module: nn.Module, device: torch.device | None = None, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
    """Give every parameter and buffer on the meta device uninitialized storage; the others stay unchanged.

    It uses the module's ``_apply``, as ``to_empty`` does, so that units of ``fully_shard`` (ours and torch's) notice. Tied parameters stay
    tied, and optimizers that hold the old parameters get the new ones.

    Args:
        device: target device; by default the device of a DTensor's mesh, or the CPU.
    """
    before = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))

    def give(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=_place(tensor, device)) if tensor.is_meta else tensor

    module._apply(give)
    _tie(module, before, buffers)
    after = dict(module.named_parameters(remove_duplicate=False))
    new = {id(old): after[name] for name, old in before.items() if after[name] is not old}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for index, old in enumerate(group["params"]):
                if id(old) in new:
                    group["params"][index] = new[id(old)]
                    if old in optimizer.state:
                        optimizer.state[new[id(old)]] = optimizer.state.pop(old)


def _place(tensor: torch.Tensor, device: torch.device | None) -> torch.device:
    if device is not None:
        return device
    if not isinstance(tensor, DTensor):
        return torch.device("cpu")
    kind = tensor.device_mesh.device_type
    return torch.device(kind, torch.get_device_module(kind).current_device()) if kind != "cpu" else torch.device("cpu")


def _tie(module: nn.Module, parameters: dict[str, nn.Parameter], buffers: dict[str, torch.Tensor]) -> None:
    """Restore tied names: ``_apply`` makes a new tensor for every name, so names that shared one get the first name's tensor."""
    first: dict[int, torch.Tensor] = {}
    for name, old in [*parameters.items(), *buffers.items()]:
        owner_name, _, own = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        table = owner._parameters if name in parameters else owner._buffers
        now = table[own]
        if now is not None and first.setdefault(id(old), now) is not now:
            table[own] = first[id(old)]  # type: ignore[assignment]
