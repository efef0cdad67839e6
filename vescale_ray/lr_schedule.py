"""The learning rate as a pure function of the step, with no state to save or restore."""

from __future__ import annotations

import math
from typing import Protocol


class ScheduleConfig(Protocol):
    """The part of ``TrainSection`` that the schedule reads."""

    @property
    def steps(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def min_lr_ratio(self) -> float: ...


def lr_at(step: int, train: ScheduleConfig) -> float:
    """Learning rate of 0-based ``step``: linear warm-up that ends at ``lr``, then half a cosine down to ``lr * min_lr_ratio``.

    The first step already trains (at ``lr / warmup_steps``); the last step of the run uses exactly the lowest rate.

    Raises:
        ValueError: ``step`` is negative.
    """
    if step < 0:
        raise ValueError(f"step = {step}: steps count from 0")
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    decay_steps = train.steps - 1 - train.warmup_steps
    progress = min(1.0, (step - train.warmup_steps) / decay_steps) if decay_steps > 0 else 1.0
    lowest = train.lr * train.min_lr_ratio
    return lowest + 0.5 * (train.lr - lowest) * (1.0 + math.cos(math.pi * progress))
