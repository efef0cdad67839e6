"""Muon on ragged shards against torch.optim.Muon on one process, bit for bit."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dtensor.layouts import Case, one_dim_mesh, ragged
from tests.ranks import run_gloo, run_threads
from vescale_ray.dtensor import RaggedDTensor
from vescale_ray.optim import Muon

SHAPES = ((1, 40), (40, 1), (7, 10), (33, 65), (65, 33), (32, 32), (32, 32), (16, 48), (48, 16), (64, 24), (3, 3))


def random_cases(world: int, seed: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Case]:
    """Random cuts at elements or rows, many with empty shards."""
    rng = random.Random(seed)
    made = []
    for shape in shapes:
        dims = rng.choice([1, 2]) if len(shape) == 2 else rng.randint(1, 3)
        units = math.prod(shape[:dims])
        points = sorted(
            rng.choice([rng.randint(0, units), 0, units]) if rng.random() < 0.4 else rng.randint(0, units) for _ in range(world - 1)
        )
        made.append(Case(shape, dims, tuple(b - a for a, b in zip([0, *points], [*points, units], strict=True))))
    return made


def start(shape: tuple[int, ...], index: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(index)) * 0.1


def gradient(shape: tuple[int, ...], index: int, step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + index + 77)) * 10.0 ** (index % 3 - 1)


def sharded(cases: list[Case], rank: int, mesh: Any) -> list[nn.Parameter]:
    return [nn.Parameter(ragged(case, start(case.shape, i), mesh, rank)) for i, case in enumerate(cases)]


def give_gradients(cases: list[Case], parameters: list[nn.Parameter], rank: int, step: int) -> None:
    for i, (case, p) in enumerate(zip(cases, parameters, strict=True)):
        p.grad = RaggedDTensor.from_spec(case.part(gradient(case.shape, i, step), rank).clone(), p._spec)  # type: ignore[attr-defined]


def alone(shapes: tuple[tuple[int, ...], ...], steps: int, **settings: Any) -> list[tuple[Tensor, Tensor]]:
    """torch.optim.Muon on whole tensors: (parameter, momentum) of each after ``steps``."""
    parameters = [nn.Parameter(start(shape, i)) for i, shape in enumerate(shapes)]
    theirs = torch.optim.Muon(parameters, lr=0.02, weight_decay=0.5, **settings)
    for step in range(steps):
        for i, p in enumerate(parameters):
            p.grad = gradient(tuple(p.shape), i, step)
        theirs.step()
    return [(p.detach(), theirs.state[p]["momentum_buffer"]) for p in parameters]


def steps_on_shards(rank: int, world: int, cases: list[Case], steps: int, settings: dict[str, Any]) -> list[tuple[Any, Any]]:
    parameters = sharded(cases, rank, one_dim_mesh(world))
    ours = Muon(parameters, lr=0.02, weight_decay=0.5, **settings)
    for step in range(steps):
        give_gradients(cases, parameters, rank, step)
        ours.step()
    return [(p.full_tensor().detach().numpy(), ours.state[p]["momentum_buffer"].full_tensor().numpy()) for p in parameters]


def equal(results: list[list[tuple[Any, Any]]], expected: list[tuple[Tensor, Tensor]]) -> None:
    for by_rank in results:
        for i, ((p, m), (q, n)) in enumerate(zip(by_rank, expected, strict=True)):
            assert torch.equal(torch.as_tensor(m), n), f"momentum of {i}"
            assert torch.equal(torch.as_tensor(p), q), f"parameter {i}, {tuple(q.shape)}"


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_ten_steps_at_random_cuts_equal_torchs_muon_bit_for_bit(world: int, nesterov: bool) -> None:
    for seed in range(2):
        cases = random_cases(world, seed)
        assert world == 1 or any(0 in c.counts for c in cases) and any(sum(n > 0 for n in c.counts) > 1 for c in cases)
        results = run_threads(world, steps_on_shards, cases, 10, {"nesterov": nesterov, "bucket_bytes": 4096 if seed else 1 << 26})
        equal(results, alone(SHAPES, 10, nesterov=nesterov))


def test_gloo_processes_equal_torchs_muon_bit_for_bit() -> None:
    results = run_gloo(3, steps_on_shards, random_cases(3, 5), 4, {"bucket_bytes": 4096}, timeout=120)
    equal(results, alone(SHAPES, 4))
