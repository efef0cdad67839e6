"""Shampoo over blocks that are never cut: each rank preconditions its own blocks, without communication.

For every block, with gradient g at step t (conventions of Shi et al., arXiv 2309.06497; after Gupta et al., arXiv 1802.09568)::

    left  = b left  + w g g^T          b = factor_beta, w = 1 - b (sums with w = 1, if b = 1)
    right = b right + w g^T g
    every precondition_frequency steps: left_root = (left / (1 - b^t)) ^ (-1 / root), same for right_root
    f = m / (1 - beta1^t)              m = beta1 m + (1 - beta1) g
    u = left_root f right_root, scaled to the norm of the grafted optimizer's update of the block
    p = p (1 - lr weight_decay) - lr u

Shi et al.'s PyTorch Shampoo cuts its blocks from a rank's part under FSDP2, so its result depends on the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_ray.geometry import Block
from vescale_ray.optim.base import sqrt_
from vescale_ray.optim.matrix.kronecker import DEFAULT_BLOCK, BlockView, Factors, KroneckerOptimizer, inverse_root, own
from vescale_ray.optim.parameters import check_number

GRAFTING = ("adamw", "rmsprop", "sgd", None)


class Shampoo(KroneckerOptimizer):
    """Shampoo for matrices, AdamW for the rest (vectors, embeddings and heads by name, 4 dimensions and more).

    Args:
        params: parameters, param groups, or ``model.named_parameters()``. No shard may cut a block: pass the result of
            :meth:`block_policy` to ``fully_shard``. Each matrix of a 3-dimensional parameter counts separately.
        lr, betas, eps, weight_decay: as in AdamW; betas[0] also serves the momentum, and eps the grafted update.
        block: ``Block.tile(r, c)``, ``Block.rows(r)``, ``Block.tensor()`` or their text.
        precondition_frequency: steps between roots.
        start_preconditioning_step: first step with preconditioning; steps before it are the grafted optimizer's. None:
            ``precondition_frequency``.
        grafting: source of each block's step size: "adamw", "rmsprop" (no bias correction of v), "sgd" (the momentum's), None: u's own.
        root: root of both factors; 4 is Shampoo's, 2 the more aggressive choice.
        factor_beta: decay of the factors; None: betas[1]; 1: sums.
        factor_eps: constant added to eigenvalues.
        nonfinite: ``propagate``, ``skip`` or ``raise``: see :class:`~vescale_ray.optim.base.BlockOptimizer`.

    With square blocks, the state takes these bytes per parameter: 8 factors, 8 roots, 4 momentum, 4 grafting (adamw, rmsprop).

    Raises:
        ValueError: a parameter is cut inside a block, is on the meta device, or was replaced by ``fully_shard``; or a hyperparameter
            is out of range.
    """

    _block_states = ("left_root", "right_root")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        block: Block | str = DEFAULT_BLOCK,
        precondition_frequency: int = 10,
        start_preconditioning_step: int | None = None,
        grafting: str | None = "adamw",
        root: float = 4.0,
        factor_beta: float | None = None,
        factor_eps: float = 1e-12,
        nonfinite: str = "propagate",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "block": block,
            "precondition_frequency": precondition_frequency,
            "start_preconditioning_step": start_preconditioning_step,
            "grafting": grafting,
            "root": root,
            "factor_beta": factor_beta,
            "factor_eps": factor_eps,
        }
        super().__init__(params, defaults, nonfinite)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["grafting"] not in GRAFTING:
            raise ValueError(f"grafting = {group['grafting']!r}: give one of {', '.join(map(repr, GRAFTING))}")
        check_number(group, "factor_eps")
        check_number(group, "root")
        if not group["root"] > 0:
            raise ValueError(f"root = {group['root']}: give a positive number (4: the inverse fourth root)")
        start = group["start_preconditioning_step"]
        if start is not None and not (isinstance(start, int) and start >= 1):
            raise ValueError(f"start_preconditioning_step = {start}: give at least 1, or None")

    def _element_states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") if group["grafting"] in ("adamw", "rmsprop") else ("exp_avg",)

    def _step_block(self, block: BlockView, group: dict[str, Any], step: int, flat: dict[str, Tensor], factors: Factors) -> Tensor:
        beta1, beta2 = map(float, group["betas"])
        grad = block.elements(flat["grad"]).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        left, right = self._move_factors(block, grad, group, factors)
        momentum = block.elements(flat["exp_avg"])
        momentum.copy_(own(momentum).mul_(beta1).add_(grad * (1 - beta1)))
        filtered = momentum / (1 - beta1**step)
        grafted = filtered
        if group["grafting"] in ("adamw", "rmsprop"):
            squares = block.elements(flat["exp_avg_sq"])
            squares.copy_(own(squares).mul_(beta2).add_((grad * grad).mul_(1 - beta2)))
            scale = squares / (1 - beta2**step if group["grafting"] == "adamw" else 1.0)
            sqrt_(scale)
            grafted = filtered / scale.add_(float(group["eps"]))
        frequency = int(group["precondition_frequency"])
        start = frequency if group["start_preconditioning_step"] is None else int(group["start_preconditioning_step"])
        if step < start:
            return grafted.clone()
        left_root, right_root = block.left(factors["left_root"]), block.right(factors["right_root"])
        if step == start or step % frequency == 0:
            beta = float(beta2 if group["factor_beta"] is None else group["factor_beta"])
            correction = 1.0 if beta == 1.0 else 1 - beta**step
            for stored, factor in ((left_root, left), (right_root, right)):
                self._refresh(stored, inverse_root(factor / correction, float(group["root"]), float(group["factor_eps"])))
        update = own(left_root) @ filtered @ own(right_root)
        if group["grafting"] is None:
            return update
        return update.mul_((_norm(grafted) / (_norm(update) + 1e-16)).to(torch.float32))


def _norm(x: Tensor) -> Tensor:
    return x.double().square().sum().sqrt()
