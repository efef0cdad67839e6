"""Compile a model's units before a worker's first order, so that no rank waits for a joiner that compiles.

The units' inputs are found by a forward of the whole model on the meta device. Then one unit of each kind is sharded over one rank, and
computes forward and backward on zeros. torch keeps the code for all units of that kind, at every world size.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_ray.compat.core import tree_leaves, tree_map_only
from vescale_ray.models.unit_selection import select_units
from vescale_ray.workers.building.model_building import Blank, sharding_of
from vescale_ray.workers.building.unit_forward import set_forward

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig

_log = logging.getLogger(__name__)

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def compile_units(config: RunConfig, device: torch.device, blank: Blank) -> None:
    """Compile the units of ``blank``, which stays as it is. Needs a process group of one rank.

    Raises:
        Exception: the model cannot run on the meta device, or a unit cannot run on zeros. The first step compiles the rest.
    """
    began = time.perf_counter()
    calls = calls_of(config, blank.model)
    for unit, args, kwargs in calls:
        _run_alone(config, device, blank, copy.deepcopy(unit), args, kwargs)
    _log.info("kinds of units compiled: %d, in %.1f s", len(calls), time.perf_counter() - began)


def calls_of(config: RunConfig, model: nn.Module) -> list[Call]:
    """Return, for each kind of unit, one unit and the arguments of its forward in a slot, on the meta device. Units of a kind share
    compiled code: they have the same class, sizes and arguments."""
    found: dict[Any, Call] = {}

    def note(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sizes = tuple((name, *_form(p)) for name, p in unit.named_parameters())
        given = repr(tree_map_only(Tensor, _form, (args, kwargs)))
        found.setdefault((type(unit), sizes, given), (unit, *tree_map_only(Tensor, _detached, (args, kwargs))))

    hooks = [unit.register_forward_pre_hook(note, with_kwargs=True) for unit in select_units(model, config.model.units)]
    try:
        tokens = torch.zeros(config.train.slot_batch, config.data.seq_len, dtype=torch.int64, device="meta")
        model(tokens, **({"position_ids": tokens} if config.data.document_mask else {}))
    finally:
        for hook in hooks:
            hook.remove()
    return list(found.values())


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _run_alone(config: RunConfig, device: torch.device, blank: Blank, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    from vescale_ray.expert_parallel import experts_of
    from vescale_ray.fsdp import fully_shard

    sharding = sharding_of(config, init_device_mesh(device.type, (1,)))
    experts = list(experts_of(unit).values()) if config.train.expert_parallel > 1 else []
    set_forward(unit, config, blank.compiler, around=experts)
    for module in dict.fromkeys((*experts, unit)):
        fully_shard(module, reshard_after_forward=config.train.reshard_after_forward, **sharding)
    if any(tensor.is_meta for tensor in (*unit.parameters(), *unit.buffers())):
        unit.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*unit.parameters(), *unit.buffers()):
            tensor.zero_()
    args, kwargs = tree_map_only(Tensor, lambda t: torch.zeros_like(t, device=device).requires_grad_(t.requires_grad), (args, kwargs))
    results = [one for one in tree_leaves(unit(*args, **kwargs)) if isinstance(one, Tensor) and one.requires_grad]
    if results:
        torch.autograd.backward(results, [torch.zeros_like(one) for one in results])
