"""QK-clip scales rows of heads by the published formula, equally on every shard."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dtensor.layouts import Case, one_dim_mesh, ragged, whole
from tests.ranks import run_threads
from vescale_ray.optim import qk_clip_

HEADS, KV, D, ROWS = 4, 2, 6, 3
LOGITS = torch.tensor([50.0, 400.0, 90.0, 100.0])  # the largest over all ranks


def clipped(rank: int, world: int, q: Case, k: Case, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mesh = one_dim_mesh(world)
    query = nn.Parameter(ragged(q, torch.ones(q.shape), mesh, rank))
    key = nn.Parameter(ragged(k, torch.ones(k.shape), mesh, rank))
    eta = qk_clip_(query, key, seen if rank == 1 else seen / 2)
    return eta, whole(query).detach(), whole(key).detach()


@pytest.mark.parametrize("cut", [(1, 0, 11), (4, 4, 4), (5, 60, 7)])
def test_heads_beyond_tau_scale_with_their_group_at_any_cut(cut: tuple[int, int, int]) -> None:
    q = Case((12, D), 2 if sum(cut) == 72 else 1, cut)
    k = Case((6, D), 1, (1, 0, 5))
    for eta, query, key in run_threads(3, clipped, q, k, LOGITS):
        assert eta.tolist() == [0.25, 1.0]
        expected_q = torch.ones(12, D)
        expected_q[:6] *= math.sqrt(0.25)
        expected_k = torch.ones(6, D)
        expected_k[:3] *= math.sqrt(0.25)
        assert torch.equal(query, expected_q) and torch.equal(key, expected_k)


def test_the_largest_logit_after_clipping_is_tau() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, D) * 30
    query, key = nn.Parameter(torch.randn(HEADS * ROWS, D)), nn.Parameter(torch.randn(KV * ROWS, D))

    def largest() -> Tensor:
        q, k = (x @ query.T).view(20, HEADS, ROWS), (x @ key.T).view(20, KV, ROWS).repeat_interleave(HEADS // KV, dim=1)
        return torch.einsum("qhd,khd->hqk", q, k).amax(dim=(1, 2)).detach()

    before = largest()
    assert before.max() > 100
    qk_clip_(query, key, before, tau=100.0, alpha=0.3)
    torch.testing.assert_close(largest().view(KV, -1).amax(1), torch.full((KV,), 100.0), rtol=1e-5, atol=0)


def test_mla_rotary_rows_and_value_rows_scale_apart() -> None:
    query, key = nn.Parameter(torch.ones(2 * 5, 4)), nn.Parameter(torch.ones(2 * 7, 4))  # per head 3 + 2 rotary rows; 3 + 4 value rows
    qk_clip_(query, key, torch.tensor([400.0, 1.0]), rope_rows=2, value_rows=4)
    assert query[:, 0].tolist() == [0.5] * 3 + [0.25] * 2 + [1.0] * 5
    assert key[:, 0].tolist() == [0.5] * 3 + [1.0] * 11


def broken(rank: int, world: int, value: float) -> str:
    q, k = Case((12, D), 1, (4, 4, 4)), Case((6, D), 1, (2, 2, 2))
    seen = LOGITS.clone()
    if rank == 2:
        seen[3] = value
    mesh = one_dim_mesh(world)
    query, key = (nn.Parameter(ragged(c, torch.ones(c.shape), mesh, rank)) for c in (q, k))
    with pytest.raises(ValueError, match="head 3 is not finite") as caught:
        qk_clip_(query, key, seen)
    assert bool((whole(query) == 1).all())
    return str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_logit_on_one_rank_stops_all_ranks(value: float) -> None:
    assert len(set(run_threads(3, broken, value))) == 1


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_alpha_shares_the_scaling_out_between_query_and_key(alpha: float) -> None:
    query, key = nn.Parameter(torch.ones(6, D)), nn.Parameter(torch.ones(6, D))
    eta = qk_clip_(query, key, torch.tensor([50.0, 1600.0, 100.0]), alpha=alpha)
    assert eta.tolist() == [1.0, 1 / 16, 1.0]
    for matrix, share in ((query, alpha), (key, 1 - alpha)):
        assert matrix[:, 0].tolist() == [1.0] * 2 + [16.0**-share] * 2 + [1.0] * 2


def test_a_key_that_can_not_be_scaled_leaves_the_query_as_it_is() -> None:
    query, key = nn.Parameter(torch.ones(12, D)), nn.Parameter(torch.ones(D, 6).T)
    with pytest.raises(ValueError, match="not contiguous"):
        qk_clip_(query, key, torch.full((6,), 400.0))
    assert bool((query == 1).all())


@pytest.mark.parametrize("changes", [{"tau": 0.0}, {"alpha": 2.0}, {"rope_rows": 3}, {"value_rows": 1}, {"logits": torch.ones(5)}])
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    logits = changes.pop("logits", LOGITS)
    with pytest.raises(ValueError, match="give"):
        qk_clip_(nn.Parameter(torch.ones(12, D)), nn.Parameter(torch.ones(6, D)), logits, **changes)
