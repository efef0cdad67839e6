"""The options of a unit, which the user sets with ``fully_shard`` and the methods of ``FSDPModule``."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass
class UnitOptions:
    """The options of one unit.

    Attributes:
        reshard_after_forward: None: reshard unless the unit turns out to be the root.
        gradient_sync: whether the user wants backward to reduce gradients.
        hold_gradients: whether gradients add up unsharded without gradient sync. If not, they are reduced and add up as shards.
        reduce_unused: whether parameters that no rank used get zero gradients.
        contributes: whether this rank's gradients count (``set_contributes``).
        max_reductions: units whose reduce-scatters may run while backward goes on.
        forward_prefetch: units to prefetch when this one's forward starts; empty: the unit that ran next in the last forward.
        backward_prefetch: units to prefetch when this one's backward starts; empty: the unit that ran before it.
        ignored: the parameters to ignore, each with whether the unit's modules held it. Empty after the first forward.
    """

    reshard_after_forward: bool | None
    hold_gradients: bool
    ignored: dict[nn.Parameter, bool] = field(default_factory=dict)
    reshard_after_backward: bool = True
    gradient_sync: bool = True
    reduce_unused: bool = False
    contributes: bool = True
    max_reductions: int = 1
    forward_prefetch: list[weakref.ref[Any]] = field(default_factory=list)
    backward_prefetch: list[weakref.ref[Any]] = field(default_factory=list)

    @property
    def reduces(self) -> bool:
        """True if backward reduces gradients."""
        return self.gradient_sync or not self.hold_gradients
