"""What every optimizer here checks of the parameters that it is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


def listed(params: Any) -> tuple[list[Any], list[str]]:
    """The parameters of a group as torch's optimizers take them (one, several, or pairs of name and parameter), unchanged, and a
    name for each to be used in messages."""
    given: Iterable[Any] = [params] if isinstance(params, Tensor) else params
    entries = list(given)
    if isinstance(params, set):
        raise TypeError("parameters in a set have no order, which every rank has to share: give a list")
    return entries, [e[0] if isinstance(e, tuple) else f"parameter {i}" for i, e in enumerate(entries)]


def refuse_replaced(entries: Sequence[Any]) -> None:
    """Raise ValueError for parameters that ``fully_shard`` has replaced: their optimizer would train nothing, silently."""
    tensors = [e[1] if isinstance(e, tuple) else e for e in entries]
    stale = sum(bool(getattr(p, "_vescale_replaced", False)) for p in tensors)
    if stale:
        raise ValueError(
            f"{stale} of {len(tensors)} parameters are not in the model any more, since fully_shard replaced them by sharded ones: "
            f"build the optimizer after fully_shard, from model.parameters()"
        )
