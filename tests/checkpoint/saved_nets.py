"""A saved network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.test_checkpoint_state import Net, adam, train
from vescale_ray import checkpoint as ckpt


def saved_net(root: Path, **kwargs: Any) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(0, **kwargs)
    optimizer = adam(net)
    train(net, optimizer, 2)
    ckpt.save({"model": net, "optimizer": optimizer, "stream": {"consumed": 5}}, root, 2)
    return net, optimizer
