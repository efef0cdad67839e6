"""Hooks of a unit's modules that save and load sharded parameters, and rebuild the master shard after loading."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from vescale_ray.dtensor.arguments import check_saved_part
from vescale_ray.dtensor.ragged_dtensor import RaggedDTensor
from vescale_ray.dtensor.spec import enclose, ragged_mesh_dim, wrap
from vescale_ray.fsdp.communication.debug import agree
from vescale_ray.fsdp.layouts.group_parameter import local_of
from vescale_ray.fsdp.layouts.phases import Phase, PhaseError
from vescale_ray.fsdp.units.unit import Unit


def watch_state_dicts(unit: Unit) -> None:
    """Register the hooks with the modules that hold the unit's parameters."""
    unit_ref = weakref.ref(unit)
    holders = {id(m): m for group in unit.groups for param in group.params for ref, _ in param.owners if (m := ref()) is not None}

    def to_sharded(what: str) -> Unit | None:
        owner = unit_ref()
        if owner is None:
            return None
        if owner.phase is not Phase.RESTING:
            raise PhaseError(
                f"unit {owner.name!r} is in phase {owner.phase.value}: its state can't be {what} in the middle of a step: do it between "
                f"steps; after an exception, call reset_iter_state() on the root"
            )
        owner.reshard()
        return owner

    def before_save(*_: Any) -> None:
        to_sharded("saved")

    def after_save(module: nn.Module, saved: dict[str, Any], prefix: str, *_: Any) -> None:
        # detach() of a DTensor whose local part is a view of a buffer reports storage at that part's offset: make it anew.
        for name in module._parameters:
            value = saved.get(prefix + name)
            if type(value) is DTensor and value.storage_offset() and not isinstance(value, nn.Parameter):  # keep_vars=True gives it
                saved[prefix + name] = enclose(DTensor, local_of(value), value._spec)

    def before_load(module: nn.Module, given: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in module._parameters:
            value = given.get(prefix + name)
            if type(value) is DTensor:
                check_saved_part(value.device_mesh, value.placements, value.shape)
            if type(value) is DTensor and ragged_mesh_dim(value.placements) is not None:
                # torch's set_model_state_dict makes it for a parameter on the meta device, of the whole tensor.
                held = local_of(value)
                given[prefix + name] = held if held.shape == value.shape else wrap(RaggedDTensor, held, value._spec)
        # If only some ranks load, old and new values mix. The first forward counts the loads, debug mode compares later ones.
        owner = to_sharded("loaded")
        if owner is None or owner.schedule is None:
            return
        for place in {group.place for group in owner.groups}:
            agree(f"load of a state dict into {owner.name!r}", place.shard_group, place.device)
        if owner.schedule.running:
            raise PhaseError(
                f"a forward or backward around unit {owner.name!r} is under way: its state can't be loaded in the middle of a step: do "
                f"it between steps; after an exception, call reset_iter_state() on the root"
            )

    def after_load(*_: Any) -> None:
        owner = unit_ref()
        if owner is not None:
            owner.loads += 1
            for group in owner.groups:
                group.adopt()
                group.refresh()

    for holder in holders.values():
        holder.register_state_dict_pre_hook(before_save)
        holder.register_state_dict_post_hook(after_save)
        holder.register_load_state_dict_pre_hook(before_load)
        holder.register_load_state_dict_post_hook(after_load)
