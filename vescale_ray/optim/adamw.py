"""AdamW: torch's, refusing parameters that it would train in vain, and state dicts that would silently reset it."""

from __future__ import annotations

from typing import Any

import torch

from vescale_ray.optim.loading import StrictLoading
from vescale_ray.optim.parameters import take_sharded


class AdamW(StrictLoading, torch.optim.AdamW):
    """``torch.optim.AdamW``, with two checks: parameters that ``fully_shard`` has replaced are refused, and so are state dicts without the
    states that are there (``StrictLoading``).

    Raises:
        ValueError: naming how many parameters are such originals.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        take_sharded(param_group)
        super().add_param_group(param_group)
