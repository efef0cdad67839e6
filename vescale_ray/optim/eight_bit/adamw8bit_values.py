"""The operands of a step of 8-bit AdamW."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Hyper(NamedTuple):
    """Scalars of one step of one parameter, as the formula needs them."""

    beta1: float
    beta2: float
    eps: float
    decay: float
    """1 - lr * weight_decay."""
    step_size: float
    """lr / (1 - beta1 ** t)."""
    root_correction: float
    """1 / sqrt(1 - beta2 ** t)."""


class Held(NamedTuple):
    """A rank's flat part of a parameter and its states. A step changes all but ``grad`` in place. Scales are per block, in order."""

    param: Tensor
    grad: Tensor
    m_code: Tensor
    m_scale: Tensor
    v_code: Tensor
    v_scale: Tensor

    def part(self, element: int, numel: int, block: int, blocks: int) -> Held:
        here, scales = slice(element, element + numel), slice(block, block + blocks)
        return Held(self.param[here], self.grad[here], self.m_code[here], self.m_scale[scales], self.v_code[here], self.v_scale[scales])
