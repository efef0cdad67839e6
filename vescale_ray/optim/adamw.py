"""AdamW: torch's own, with checks for replaced parameters and for incomplete state dicts."""

from __future__ import annotations

from typing import Any

import torch

from vescale_ray.optim.parameters import take_sharded
from vescale_ray.optim.state_loading import StrictLoading


class AdamW(StrictLoading, torch.optim.AdamW):
    """``torch.optim.AdamW`` with two checks.

    It refuses parameters that ``fully_shard`` has replaced, because training them has no effect. It refuses state dicts that lack
    existing states, because they would silently reset them (``StrictLoading``).

    Raises:
        ValueError: some parameters are such originals; the message gives their number.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        take_sharded(param_group, self.param_groups)
        super().add_param_group(param_group)
