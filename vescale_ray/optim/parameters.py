"""What every optimizer here checks of the parameters that it is given."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def refuse_replaced(param_group: dict[str, Any]) -> None:
    """Make ``param_group["params"]`` a list; refuse parameters that ``fully_shard`` has replaced: they would train nothing.

    Raises:
        ValueError: naming how many parameters are such originals.
    """
    params = param_group["params"]
    params = [params] if isinstance(params, Tensor) else list(params)
    tensors = [p[1] if isinstance(p, tuple) else p for p in params]
    stale = sum(bool(getattr(p, "_vescale_replaced", False)) for p in tensors)
    if stale:
        raise ValueError(
            f"{stale} of {len(tensors)} parameters are not in the model any more, since fully_shard replaced them by sharded ones: "
            f"build the optimizer after fully_shard, from model.parameters()"
        )
    param_group["params"] = params
