"""Units may return their parameters, and views of them: learned queries, prompts, positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.towers import filled
from tests.fsdp.transformer import full
from tests.ranks import on_processes, on_threads
from vescale_ray import fully_shard

WIDTH = 6


class Queries(nn.Module):
    def __init__(self, returned: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(4, WIDTH))
        self.returned = returned

    def forward(self) -> Any:
        return self.returned(self.table)


class Model(nn.Module):
    recompute = False

    def __init__(self, returned: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.queries, self.block, self.head = Queries(returned), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = checkpoint(self.queries, use_reentrant=False) if self.recompute else self.queries()
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(found) if leaf is not None]
        x = self.block(x)  # its parameters are gathered into memory that the queries have left
        return self.head(x * sum(tensor.square().mean() for tensor in tensors))


def detached(table: torch.Tensor) -> torch.Tensor:
    return table.detach()


RETURNED: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda table: table,
    "rows": lambda table: table[:3],
    "expanded": lambda table: table[None].expand(5, 4, WIDTH),
    "transposed": lambda table: table.T,
    "nested": lambda table: {"all": table, "rows": [table[1], (table, None)]},
    "detached": detached,
}


def check(returned: str, recompute: bool, frozen: bool) -> None:
    ours, alone = (filled(Model(RETURNED[returned]), 2, 0.3) for _ in "ab")
    for model in (ours, alone):
        model.recompute = recompute
        model.queries.requires_grad_(not frozen)
    for unit in (ours.queries, ours.block, ours):
        fully_shard(unit)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, alone)]
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            torch.testing.assert_close(ours(x), alone(x))
        for model, optimizer in zip((ours, alone), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for (name, p), q in zip(ours.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach(), msg=name)


@pytest.mark.parametrize(("recompute", "frozen"), [(True, False), (False, True)], ids=["recomputed", "frozen"])
@pytest.mark.parametrize("returned", RETURNED)
@on_threads(2)
def test_a_unit_may_return_its_parameters(rank: int, world: int, returned: str, frozen: bool, recompute: bool) -> None:
    check(returned, recompute, frozen)


@on_processes(2)
def test_gloo_units_may_return_their_parameters(rank: int, world: int) -> None:
    for returned in RETURNED:
        check(returned, recompute=False, frozen=False)
