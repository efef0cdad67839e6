"""A model of which each call uses a part."""

from __future__ import annotations

import torch
from torch import nn

# -- parameters with special fates -----------------------------------------------------------------------------------------


class Branches(nn.Module):
    """One parameter is never used, one frozen, one without elements; there are two dtypes."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(20, 7)
        self.unused = nn.Linear(20, 7)
        self.frozen = nn.Linear(20, 20)
        self.frozen.requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x):
        return self.used(self.frozen(x))
