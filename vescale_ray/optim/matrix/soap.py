"""SOAP over blocks that are never cut: Adam in the eigenbasis of Shampoo's factors, without communication.

For every block, with gradient g at step t [Vyas et al., arXiv 2409.11321]. The order of operations and the space of m follow Shi et
al.'s eigenvalue-corrected Shampoo. Vyas et al.'s code instead uses the basis of the step before, and skips the first update::

    left  = b left  + (1 - b) g g^T        right = b right + (1 - b) g^T g          b = factor_beta
    before start_preconditioning_step: no bases, which makes this AdamW
    at it: left_basis = eigenvectors of left, largest eigenvalue first               (and the same on the right)
    then every precondition_frequency steps: left_basis = Q of QR(left left_basis)
    m = beta1 m + (1 - beta1) g                                                      in the parameter's own space
    v = beta2 v + (1 - beta2) (left_basis^T g right_basis)^2                         in the current basis; not rotated later
    n = (left_basis^T m right_basis / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    p = p (1 - lr weight_decay) - lr left_basis n right_basis^T

Columns of a basis keep their places in a refresh, so v needs no permutation. The first step can't be preconditioned. In the
eigenbasis of its own factors a gradient is diagonal, and v would scale the remaining rounding noise up to full updates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_ray.geometry import Block
from vescale_ray.optim.base import sqrt_
from vescale_ray.optim.matrix.kronecker import DEFAULT_BLOCK, BlockView, Factors, KroneckerOptimizer, eigenbasis, own, refined_basis


class SOAP(KroneckerOptimizer):
    """SOAP for matrices, AdamW for the rest (vectors, embeddings and heads by name, 4 dimensions and more).

    Args:
        params: parameters, param groups, or ``model.named_parameters()``. No shard may cut a block: pass the result of
            :meth:`block_policy` to ``fully_shard``. Each matrix of a 3-dimensional parameter counts separately.
        lr, betas, eps, weight_decay: as in AdamW.
        block: ``Block.tile(r, c)``, ``Block.rows(r)``, ``Block.tensor()`` or their text.
        precondition_frequency: steps between refreshes of the bases.
        start_preconditioning_step: first step with preconditioning, at least 2; None: ``precondition_frequency``, or 2 if that is 1.
        factor_beta: decay of the factors; None: betas[1].
        nonfinite: ``propagate``, ``skip`` or ``raise``: see :class:`~vescale_ray.optim.base.BlockOptimizer`.

    With square blocks, the state takes these bytes per parameter: 8 factors, 8 bases, 8 moments.

    Raises:
        ValueError: a parameter is cut inside a block, is on the meta device, or was replaced by ``fully_shard``; or a hyperparameter
            is out of range.
    """

    _block_states = ("left_basis", "right_basis")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        block: Block | str = DEFAULT_BLOCK,
        precondition_frequency: int = 10,
        start_preconditioning_step: int | None = None,
        factor_beta: float | None = None,
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
            "factor_beta": factor_beta,
        }
        super().__init__(params, defaults, nonfinite)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        start = group["start_preconditioning_step"]
        if start is not None and not (isinstance(start, int) and start >= 2):
            raise ValueError(
                f"start_preconditioning_step = {start}: give at least 2 (after one gradient its basis leaves only noise), or None"
            )

    def _element_states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _step_block(self, block: BlockView, group: dict[str, Any], step: int, flat: dict[str, Tensor], factors: Factors) -> Tensor:
        beta1, beta2 = map(float, group["betas"])
        grad = block.elements(flat["grad"]).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        left, right = self._move_factors(block, grad, group, factors)
        left_basis, right_basis = block.left(factors["left_basis"]), block.right(factors["right_basis"])
        frequency = int(group["precondition_frequency"])
        start = max(2, frequency) if group["start_preconditioning_step"] is None else int(group["start_preconditioning_step"])
        if step == start:
            for stored, factor in ((left_basis, left), (right_basis, right)):
                self._refresh(stored, eigenbasis(factor))
        elif step > start and step % frequency == 0:
            for stored, factor in ((left_basis, left), (right_basis, right)):
                self._refresh(stored, refined_basis(factor, own(stored)))
        bases = (own(left_basis), own(right_basis)) if step >= start else None
        momentum, squares = block.elements(flat["exp_avg"]), block.elements(flat["exp_avg_sq"])
        momentum.copy_(own(momentum).mul_(beta1).add_(grad * (1 - beta1)))
        turned = _into(grad, bases)
        squares.copy_(own(squares).mul_(beta2).add_((turned * turned).mul_(1 - beta2)))
        scale = squares / (1 - beta2**step)
        sqrt_(scale)
        update = _into(own(momentum), bases).div_(1 - beta1**step).div_(scale.add_(float(group["eps"])))
        return update if bases is None else bases[0] @ update @ bases[1].T


def _into(x: Tensor, bases: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return ``x`` in the coordinates of the bases, or ``x`` itself if there are no bases yet."""
    return x if bases is None else bases[0].T @ x @ bases[1]
