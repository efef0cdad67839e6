"""Before a step all ranks agree on the set of gradients and on the finite flag."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.dtensor.layouts import Case, hsdp, one_dim_mesh, ragged
from tests.ranks import on_threads, run_gloo, run_threads
from vescale_ray.dtensor import RaggedDTensor, distribute_tensor
from vescale_ray.optim.agree import Agreement, Decision, DisagreementError

CASES = (Case((6, 4), 1, (2, 0, 4)), Case((5, 3), 1, (0, 5, 0)), Case((4,), 1, (1, 1, 2)))


def parameters(rank, world):
    mesh = one_dim_mesh(world)
    made = [nn.Parameter(ragged(case, torch.ones(case.shape), mesh, rank)) for case in CASES]
    for p in made:
        p.grad = RaggedDTensor.from_spec(torch.ones_like(p._local_tensor), p._spec)
    return made


EVERYWHERE = [(r, 1) for r in range(3)]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ([], Decision((True, True, True), (), True)),
        (EVERYWHERE, Decision((True, False, True), (), True)),
        ([(2, 0)], Decision((False, True, True), (0,), True)),
        ([(1, 0)], Decision((True, True, True), (), True)),  # rank 1 holds none of it and has no say
        ([(0, 1), (2, 1)], Decision((True, True, True), (), True)),  # only rank 1 holds it
        ([(1, 1)], Decision((True, False, True), (), True)),  # the others hold none, so their gradients do not count
        ([(0, 2), (1, 2)], Decision((True, True, False), (2,), True)),
    ],
)
@on_threads(3)
def test_all_ranks_decide_alike_on_a_gradient_missing_on_some(rank, world, where, expected):
    made = parameters(rank, world)
    for r, index in where:
        if rank == r:
            made[index].grad = None
    assert Agreement(made).decide() == expected


def poisoned(rank, world, who, value):
    made = parameters(rank, world)
    if rank == who and value is not None:
        made[2].grad._local_tensor[0] = value
    agreement = Agreement(made)
    return agreement.decide().finite, agreement.decide(check_finite=False).finite


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, None])
@pytest.mark.parametrize("who", [0, 2])
def test_all_ranks_learn_of_nan_or_inf_and_ignore_large_values(who, value):
    finite = value is None or math.isfinite(value)
    assert run_threads(3, poisoned, who, value) == [(finite, True)] * 3


def on_two_dims(rank, world):
    mesh = init_device_mesh("cpu", (2, 2))
    p = nn.Parameter(distribute_tensor(torch.ones(8, 2), mesh, list(hsdp(Case((8, 2), 1, (3, 5))))))
    plain = nn.Parameter(torch.ones(3))
    p.grad = RaggedDTensor.from_spec(torch.full_like(p._local_tensor, math.nan if rank == 3 else 1.0), p._spec)
    return Agreement([plain, p]).decide()


def test_agreement_covers_replicas_and_lone_plain_tensors():
    assert run_threads(4, on_two_dims) == [Decision((False, True), (), False)] * 4
    lonely = nn.Parameter(torch.ones(2))
    assert Agreement([lonely]).decide() == Decision((False,), (), True)
    lonely.grad = torch.tensor([1.0, math.nan])
    assert Agreement([lonely]).decide() == Decision((True,), (), False)


@on_threads(3)
def test_agreement_refuses_ranks_with_different_parameters(rank, world):
    made = parameters(rank, world)
    with pytest.raises(DisagreementError, match="hold different parameters .* on every rank"):
        Agreement(made[: 2 if rank else 3]).decide()


def stays_away(rank, world):
    made = parameters(rank, world)
    Agreement(made).decide()  # with all ranks
    agreement = Agreement(made, timeout=1.0)
    begin = time.monotonic()
    if rank:
        with pytest.raises(DisagreementError, match=r"did not agree on this optimizer step within \d+ s .* equally often"):
            agreement.decide()
    else:
        time.sleep(2)
    return time.monotonic() - begin


def test_wait_for_an_absent_rank_is_bounded():
    assert max(run_gloo(3, stays_away, timeout=40)) < 20
