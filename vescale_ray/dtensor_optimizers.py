"""Optimizers of torch's that need whole matrices, and would be slow or wrong on ragged tensors: refused, with the remedy.

They are known by torch's own hook on all optimizers' steps; nothing of torch is replaced. Element-wise optimizers work as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vescale_ray.dtensor_spec import ragged_mesh_dim

_INSTEAD: dict[Any, str] = {}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    _INSTEAD[torch.optim.Muon] = "vescale_ray.optim.Muon"


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise TypeError for torch's matrix optimizers over ragged parameters, before they write anything."""
    instead = _INSTEAD.get(type(optimizer))
    if instead is None:
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p, DTensor) and ragged_mesh_dim(p.placements) is not None:
                held = p.placements[ragged_mesh_dim(p.placements) or 0]
                raise TypeError(
                    f"torch.optim.{type(optimizer).__name__} needs whole matrices, but a parameter of shape {tuple(p.shape)} is sharded "
                    f"with {held}: use {instead}, which takes the same arguments"
                )


register_optimizer_step_pre_hook(_refuse)
