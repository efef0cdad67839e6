"""Clip a step's gradients by their norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig


def clip(config: RunConfig, model: Any, optimizer: Any) -> list[Tensor]:
    """Clip the gradients that AdamW or SGD use. Returns their norm before that, and the norm of Muon's gradients if there are any.

    Muon's gradients are not clipped: its update does not depend on their size, and very small ones would vanish in Newton-Schulz.
    """
    from vescale_ray.optim import Muon, clip_grad_norm_, total_norm

    limit = config.train.grad_clip or float("inf")
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = getattr(optimizer, "optimizers", (optimizer,))
    muons = [p for part in parts if isinstance(part, Muon) for group in part.param_groups for p in group["params"]]
    exact = config.elastic.deterministic
    norm = clip_grad_norm_(trained, limit, leave_out=muons, exact=exact)
    grads = [p.grad for p in muons if p.grad is not None]
    return [norm, total_norm(grads, exact=exact)] if grads else [norm]
