"""What every optimizer here does with the parameters that it is given: takes this rank's part, and refuses what would train in vain."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_ray.redistribute import arrived


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part, without autograd, sharing memory."""
    return arrived(tensor._local_tensor).detach() if isinstance(tensor, DTensor) else tensor.detach()


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
