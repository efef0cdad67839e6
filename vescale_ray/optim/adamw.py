"""AdamW: torch's, refusing parameters that it would train in vain."""

from __future__ import annotations

from typing import Any

import torch

from vescale_ray.optim.parameters import listed, refuse_replaced


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, with one check: parameters that ``fully_shard`` has replaced are refused.

    An optimizer built before ``fully_shard`` holds the original parameters: it would step without an error and train nothing.

    Raises:
        ValueError: naming how many parameters are such originals.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        param_group["params"], _ = listed(param_group["params"])
        refuse_replaced(param_group["params"])
        super().add_param_group(param_group)
