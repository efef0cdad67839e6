"""The settings of a group's gradients, which the user makes with the methods of ``FSDPModule``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vescale_ray.compat.fsdp import ReduceScatter


@dataclass(eq=False)
class GradientSettings:
    """The settings of one group.

    Attributes:
        divide_factor: None: the number of data-parallel ranks, with those that exchange tokens (expert parallelism).
        holds: whether backward adds gradients up and does not reduce them, or did so since the last reduction, on any rank. Their buffer
            has the reduce dtype then, also on ranks that had no gradient before.
        sum_only: never use AVG.
        ordered: whether to sum in a fixed order, over the ranks and over the reductions of a step.
        contributes: whether this rank's gradients count. If not, it joins the reductions with zeros.
        staging: bytes of each of the two buffers in which a reduction casts gradients; None: the default of the planner.
        all_reduce: whether backward also sums over the replicas (HSDP).
        all_reduce_stream: stream of ``all_reduce_hook``; None: the current stream.
    """

    divide_factor: float | None = None
    holds: bool = False
    sum_only: bool = False
    ordered: bool = False
    contributes: bool = True
    custom_scatter: ReduceScatter | None = None
    staging: int | None = None
    all_reduce: bool = True
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_stream: Any = None
