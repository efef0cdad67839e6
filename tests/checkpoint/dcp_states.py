"""States as torch's DCP stores them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    Metadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from tests.checkpoint.checkpoint_support import (
    bits,
    dcp_index,
)
from tests.checkpoint.test_checkpoint_state import Net, adam, train


def trained(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(seed)
    optimizer = adam(net)
    train(net, optimizer, 2)
    return net, optimizer


def torch_state(net: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    chosen = StateDictOptions(**options)
    return {"model": get_model_state_dict(net, options=chosen), "optim": get_optimizer_state_dict(net, optimizer, options=chosen)}


def same_optimizers(a: torch.optim.Optimizer, net_a: nn.Module, b: torch.optim.Optimizer, net_b: nn.Module) -> None:
    for ours, theirs in zip(net_a.parameters(), net_b.parameters(), strict=True):
        left, right = a.state.get(ours, {}), b.state.get(theirs, {})
        assert left.keys() == right.keys()
        for key in left:
            assert bits(left[key]) == bits(right[key]), key


def stock(place: Path, **more: Any) -> Metadata:
    dcp.save({"model": {"w": torch.arange(12.0).view(4, 3)}, **more}, checkpoint_id=place, no_dist=True)
    return dcp_index(place)
