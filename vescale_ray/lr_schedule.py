"""The learning rate as a pure function of the step, with no state to save or restore."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from vescale_ray.config.sections import TrainSection

_LEFT: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Remaining fraction of the difference between the highest and the lowest rate, by form of the decay and decayed fraction of the steps."""


def lr_at(step: int, train: TrainSection) -> float:
    """Return the learning rate of 0-based ``step``: a linear warm-up that ends at ``lr``, then ``schedule``.

    ``cosine`` and ``linear`` decay to ``lr * min_lr_ratio`` from the end of the warm-up; ``constant`` stays at ``lr``. ``wsd`` stays there
    and decays in the last ``decay_steps`` steps, in the form ``decay_type``.
    The first step already trains (at ``lr / warmup_steps``); the last step of the run uses exactly the lowest rate.

    Raises:
        ValueError: ``step`` is negative.
    """
    if step < 0:
        raise ValueError(f"step = {step}: steps count from 0")
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    stable = train.schedule == "wsd"
    decay = _final_steps(train) if stable else train.steps - 1 - train.warmup_steps
    progress = min(1.0, (step - (train.steps - 1 - decay)) / decay) if decay > 0 else 1.0
    if progress <= 0.0:
        return train.lr
    lowest = train.lr * train.min_lr_ratio
    return lowest + (train.lr - lowest) * _LEFT[train.decay_type if stable else train.schedule](progress)


def _final_steps(train: TrainSection) -> int:
    """Return the steps of the final decay; the last step before them has the highest rate."""
    wanted = max(1, train.steps // 10) if train.decay_steps is None else train.decay_steps
    return min(wanted, train.steps - train.warmup_steps)
