"""AdamW: torch's, refusing parameters that it would train in vain."""

from __future__ import annotations

from typing import Any

import torch


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, with one check: parameters that ``fully_shard`` has replaced are refused.

    An optimizer built before ``fully_shard`` holds the original parameters: it would step without an error and train nothing.

    Raises:
        ValueError: naming how many parameters are such originals.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        tensors = [p[1] if isinstance(p, tuple) else p for p in params]
        stale = sum(bool(getattr(p, "_vescale_replaced", False)) for p in tensors)
        if stale:
            raise ValueError(
                f"{stale} of {len(tensors)} parameters are not in the model any more, since fully_shard replaced them by sharded ones: "
                f"build the optimizer after fully_shard, from model.parameters()"
            )
        param_group["params"] = params
        super().add_param_group(param_group)
