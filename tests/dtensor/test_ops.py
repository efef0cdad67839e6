"""Every operation on ragged tensors gives the results of plain tensors, or raises an error that names the alternative."""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from tests.dtensor.layouts import Case, cases, one_dim_mesh, pairs, ragged, values, whole
from tests.ranks import on_threads, run_threads
from vescale_ray.dtensor import RaggedDTensor, RaggedFallbackWarning

CASE = Case((6, 5), 2, (4, 0, 26))


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in "abs neg exp expm1 sin tanh sigmoid sign ceil round isnan isfinite square relu erf log1p sgn logical_not frac atan".split()
} | {
    "add scalar": lambda x: x + 1.5,
    "rsub": lambda x: 2 - x,
    "pow": lambda x: x**2,
    "clamp": lambda x: x.clamp(-2, 2),
    "gt": lambda x: x > 0,
    "masked_fill": lambda x: x.masked_fill(x > 0, 7.0),
    "where scalar": lambda x: torch.where(x > 0, x, -x),
    "to double": lambda x: x.to(torch.float64),
    "to half": lambda x: x.bfloat16(),
    "clone": lambda x: x.clone(),
    "clone channels": lambda x: x.clone(memory_format=torch.contiguous_format),
    "detach": lambda x: x.detach(),
    "zeros_like": torch.zeros_like,
    "full_like": lambda x: torch.full_like(x, 3, dtype=torch.int32),
    "ones_like": torch.ones_like,
    "nan_to_num": torch.nan_to_num,
    "gelu": torch.nn.functional.gelu,
    "int division": lambda x: x // 2,
    "0-dim operand": lambda x: x * torch.tensor(0.5, dtype=torch.float64),
    "0-dim operand left": lambda x: torch.tensor(2.0) - x,
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "new_full": lambda x: x.new_full(x.shape, 2.0),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.25),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1, value=-0.5),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.1),
    "frexp": lambda x: torch.frexp(x)[0],
    "view flat": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(1, -1, 1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x.unsqueeze(-1).squeeze(-1),
    "flatten": lambda x: x.flatten(),
    "isclose": lambda x: torch.isclose(x, x),
}


@settings(max_examples=12)
@given(cases())
@pytest.mark.filterwarnings("error::vescale_ray.dtensor.RaggedFallbackWarning")
@on_threads(lambda case: case.world)
def test_elementwise_operations_stay_ragged_and_equal_plain_ones(rank: int, world: int, case: Case) -> None:
    full = values(case.shape) * 0.25
    x = ragged(case, full, one_dim_mesh(world), rank)
    for name, op in UNARY.items():
        if name == "reshape" and not full.numel():
            continue
        expected, found = op(full), op(x)
        assert isinstance(found, RaggedDTensor), name
        assert found.dtype == expected.dtype and found.shape == expected.shape, name
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-6, atol=1e-6, equal_nan=True, msg=name)
    assert torch.equal(x.full_tensor(), full), "an out-of-place operation changed its operand"


BINARY: dict[str, Callable[[Any, Any], Any]] = {name: getattr(operator, name) for name in "add sub mul truediv lt ge eq ne".split()} | {
    name: getattr(torch, name) for name in "maximum minimum atan2 fmax logaddexp copysign hypot".split()
}


@settings(max_examples=8)
@given(pairs(), st.integers(0, 15))
@pytest.mark.filterwarnings("error::vescale_ray.dtensor.RaggedFallbackWarning")
@on_threads(lambda pair: pair[0].world)
def test_operands_are_brought_to_the_layout_of_the_first(rank: int, world: int, pair: tuple[Case, Case], trail: int) -> None:
    a, b = pair
    mesh, left, right = one_dim_mesh(world), values(a.shape, seed=1) + 0.5, values(b.shape, seed=2) + 0.25
    x, y = ragged(a, left, mesh, rank), ragged(b, right, mesh, rank)
    # A third operand that broadcasts: some trailing dimensions, some of them of size 1.
    small = values(tuple(1 if (trail >> i) & 1 else n for i, n in enumerate(a.shape[len(a.shape) - trail % 4 :])), seed=3) + 0.125
    others: list[tuple[Any, Tensor]] = [(y, right), (torch_distribute(right, mesh, [Replicate()], src_data_rank=None), right)]
    if a.shape:
        others += [(torch_distribute(right, mesh, [Shard(0)], src_data_rank=None), right)]
    others += [(DTensor.from_local(right / world, mesh, [Partial()], run_check=False), right)]
    others += [(torch_distribute(small, mesh, [Replicate()], src_data_rank=None), small)]
    others += [(ragged(Case(small.shape, 0, (*([0] * (world - 1)), 1)), small, mesh, rank), small)]
    for (name, op), (other, plain) in itertools.product(BINARY.items(), others):
        if name in ("add", "maximum", "lt") or other is y:
            reduced = any(p.is_partial() for p in other.placements)  # a sum over ranks rounds, and SIMD tails may
            if reduced and name == "lt":
                continue
            found = op(x, other)
            assert isinstance(found, RaggedDTensor) and found.placements == x.placements, name
            tolerance = {"rtol": 1e-5, "atol": 1e-5} if reduced or name in ("atan2", "logaddexp", "hypot") else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(found.full_tensor(), op(left, plain), msg=name, **tolerance)
            torch.testing.assert_close(whole(op(other, x)), op(plain, left), msg=name, **tolerance)
    for other, plain in others:
        target = x.clone()
        assert target.mul_(other) is target
        assert torch.allclose(target.full_tensor(), left * plain, rtol=1e-5)
        assert target.copy_(other) is target
        assert torch.allclose(target.full_tensor(), plain.expand(a.shape), rtol=1e-5)


@on_threads(3)
def test_in_place_and_out_write_into_the_same_local_memory(rank: int, world: int) -> None:
    mesh, full = one_dim_mesh(world), values(CASE.shape) * 0.25
    x, plain = ragged(CASE, full, mesh, rank), full.clone()
    storage = x.to_local().data_ptr() if x.to_local().numel() else 0
    other, other_plain = ragged(CASE, full + 1, mesh, rank), full + 1
    steps: list[Callable[[Any, Any], Any]] = [
        lambda t, o: t.add_(o, alpha=0.5),
        lambda t, o: t.mul_(2),
        lambda t, o: t.lerp_(o, 0.1),
        lambda t, o: t.addcdiv_(o, o.abs() + 1, value=-0.1),
        lambda t, o: t.addcmul_(o, o, value=0.1),
        lambda t, o: t.clamp_(-50, 50),
        lambda t, o: t.floor_divide_(0.5).add_(o),
        lambda t, o: t.detach_(),
        lambda t, o: t.masked_fill_(o > 3, 1.25),
        lambda t, o: t.sqrt_().nan_to_num_(1.0),
        lambda t, o: t.div_(torch.tensor(3.0)),
        lambda t, o: t.copy_(o),
        lambda t, o: t.view(-1).sub_(0.5).view(t.shape),
        lambda t, o: torch.maximum(t, o, out=t),
        lambda t, o: torch.mul(o, 3.0, out=t),
        lambda t, o: t.fill_(2.5),
        lambda t, o: t.fill_(torch.tensor(1.5)),
        lambda t, o: t.zero_(),
    ]
    for i, step in enumerate(steps):
        found = step(x, other)
        step(plain, other_plain)
        assert found is x or i == 12, "in place gives the same object"
        assert torch.equal(x.full_tensor(), plain), i
    assert storage == (x.to_local().data_ptr() if x.to_local().numel() else 0), "in place keeps the memory"


@on_threads(2)
def test_zero_dim_tensors_promote_as_plain_ones_do(rank: int, world: int) -> None:
    mesh = one_dim_mesh(world)
    case, full = Case((), 0, (0, 1)), torch.tensor(3.0, dtype=torch.float32)
    x = ragged(case, full, mesh, rank)
    others: list[Any] = [torch.tensor(2.0, dtype=torch.float64), torch.tensor(2, dtype=torch.int64), 2, 2.5]
    for other in others:
        for op in (operator.add, operator.mul, torch.maximum if isinstance(other, Tensor) else operator.sub):
            expected, found = op(full, other), op(x, other)
            assert found.dtype == expected.dtype and torch.equal(found.full_tensor(), expected)
    assert x.clone().fill_(torch.tensor(7.0)).full_tensor() == 7.0
    assert x.masked_fill(x > 2, torch.tensor(4.0)).full_tensor() == 4.0 and (x.clone().fill_(x * 2)).full_tensor() == 6.0
    big = ragged(Case((4,), 1, (1, 3)), torch.arange(4.0), mesh, rank)
    assert (big * x).full_tensor().tolist() == [0.0, 3.0, 6.0, 9.0]
    assert (big.bfloat16() * x).dtype == torch.bfloat16, "a 0-dim operand does not promote"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RaggedFallbackWarning)
        assert float(x) == 3.0 and x.item() == 3.0


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum dtype": lambda x: x.sum(dtype=torch.float64),
    "sum keepdim": lambda x: x.sum(tuple(range(x.ndim)), keepdim=True),
    "mean": lambda x: x.mean(),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1),
    "norm 3": lambda x: x.norm(3),
    "norm inf": lambda x: torch.linalg.vector_norm(x, math.inf),
    "norm -inf": lambda x: torch.linalg.vector_norm(x, -math.inf),
    "norm -2": lambda x: torch.linalg.vector_norm(x.abs() + 1, -2),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0),
    "norm double": lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
    "int sum": lambda x: (x > 0).sum(),
    "any": lambda x: (x > 1e6).any(),
    "all": lambda x: x.isfinite().all(),
    "prod": lambda x: (x.sign() * 1.0 + 0.5).prod(),
}


LAST_DIM: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "mean keepdim": lambda x: x.mean(-1, keepdim=True),
    "amax": lambda x: x.amax(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "square mean": lambda x: x.square().mean(dim=-1),
    "any": lambda x: (x > 0).any(-1),
    "prod": lambda x: x.prod(-1),
}


@settings(max_examples=15)
@given(cases())
@on_threads(lambda case: case.world)
def test_reductions_equal_plain_ones_even_with_empty_ranks(rank: int, world: int, case: Case) -> None:
    full = values(case.shape) * 0.25
    x = ragged(case, full, one_dim_mesh(world), rank)
    if full.numel():
        for name, op in REDUCTIONS.items():
            expected, found = op(full), op(x)
            assert isinstance(found, DTensor) and not isinstance(found, RaggedDTensor), name
            assert found.shape == expected.shape and found.dtype == expected.dtype, name
            assert torch.allclose(found.full_tensor(), expected, rtol=1e-5, atol=1e-5), name
        for scalar in (x.sum(), x.sum().detach(), (x.sum() * 2) / 2, x.mean() * full.numel()):
            assert math.isclose(scalar.item(), full.sum().item(), rel_tol=1e-5, abs_tol=1e-4), "not only this rank's contribution"
        assert math.isclose(float(x.norm()), full.norm().item(), rel_tol=1e-5)
        assert bool(x.isfinite().all()) and bool(x.max() == full.max().item())
        assert torch.allclose(torch._foreach_norm([x, x * 2], math.inf)[1].full_tensor(), 2 * full.abs().max())
        negative = torch._foreach_norm([x.abs() + 1], -1)[0]
        assert torch.allclose(negative.full_tensor(), torch.linalg.vector_norm(full.abs() + 1, -1))
        assert [t.full_tensor().item() for t in torch._foreach_max([x, -x])] == [full.max(), -full.min()]
        assert x.bfloat16().mean().dtype == torch.bfloat16
    if case.dims < len(case.shape) and len(case.shape) > 1 and case.shape[-1]:
        for name, op in LAST_DIM.items():
            expected, found = op(full), op(x)
            assert isinstance(found, RaggedDTensor), "a reduction over inner dimensions needs no communication"
            assert found.dtype == expected.dtype and found.shape == expected.shape
            assert torch.allclose(found.full_tensor(), expected, rtol=1e-6), name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RaggedFallbackWarning)
        if case.shape and case.shape[0]:
            assert torch.allclose(whole(x.sum(0)), full.sum(0), rtol=1e-5)
        assert torch.allclose(whole(x.sum()), full.sum())
        if not full.numel():
            with pytest.raises((RuntimeError, IndexError)):
                x.amax()


@settings(max_examples=8)
@given(pairs())
@on_threads(lambda pair: pair[0].world)
def test_comparisons_answer_the_same_on_every_rank(rank: int, world: int, pair: tuple[Case, Case]) -> None:
    a, b = pair
    mesh, full = one_dim_mesh(world), values(a.shape)
    x, y = ragged(a, full, mesh, rank), ragged(b, full, mesh, rank)
    assert torch.equal(x, y) and torch.equal(x, torch_distribute(full, mesh, [Replicate()], src_data_rank=None))
    assert torch.allclose(x, y)
    if full.numel():
        different = full.clone()
        different.reshape(-1)[-1] += 1
        other = ragged(b, different, mesh, rank)
        assert not torch.equal(x, other) and not torch.allclose(x, other)
        assert not bool((x == other).all()) and bool((x != other).any())
    assert not torch.equal(x, ragged(Case((99,), 1, (99, *([0] * (world - 1)))), torch.ones(99), mesh, rank))


@settings(max_examples=8)
@given(st.integers(1, 5).flatmap(lambda world: st.lists(cases(world), min_size=1, max_size=4)))
@pytest.mark.filterwarnings("error::vescale_ray.dtensor.RaggedFallbackWarning")
@on_threads(lambda layouts: layouts[0].world)
def test_foreach_operations_equal_plain_ones_in_every_element(rank: int, world: int, layouts: list[Case]) -> None:
    mesh = one_dim_mesh(world)
    plain = [values(c.shape, seed=i) * 0.25 for i, c in enumerate(layouts)]
    xs: Any = [ragged(c, t, mesh, rank) for c, t in zip(layouts, plain, strict=True)]
    ops: list[Callable[[Any], Any]] = [
        lambda t: torch._foreach_mul(t, 2.0),
        lambda t: torch._foreach_add(t, t, alpha=0.5),
        lambda t: torch._foreach_sqrt(torch._foreach_abs(t)),
        lambda t: torch._foreach_addcdiv(t, t, torch._foreach_add(torch._foreach_abs(t), 1.0), value=-0.1),
        lambda t: torch._foreach_addcmul(t, t, t, [0.1] * len(t)),
        lambda t: torch._foreach_lerp(t, torch._foreach_neg(t), 0.3),
        lambda t: torch._foreach_mul(t, torch.tensor(0.5)),
        lambda t: torch._foreach_mul(t, [torch.tensor(float(i)) for i in range(len(t))]),
        lambda t: torch._foreach_maximum(t, 0.1),
        lambda t: torch._foreach_pow(t, 2),
    ]
    for i, op in enumerate(ops):
        for found, expected in zip(op(xs), op(plain), strict=True):
            assert isinstance(found, RaggedDTensor) and torch.equal(found.full_tensor(), expected), i
    torch._foreach_mul_(xs, 1.5)
    torch._foreach_mul_(plain, 1.5)
    torch._foreach_add_(xs, torch._foreach_neg(xs), alpha=0.25)
    torch._foreach_add_(plain, torch._foreach_neg(plain), alpha=0.25)
    torch._foreach_copy_(xs, [x * 2 for x in xs])
    torch._foreach_copy_(plain, [p * 2 for p in plain])
    torch._foreach_copy_(xs, [p + 1 for p in plain])  # each rank takes its part of whole plain tensors
    torch._foreach_copy_(plain, [p + 1 for p in plain])
    for x, p in zip(xs, plain, strict=True):
        assert torch.equal(x.full_tensor(), p)
    for found, expected in zip(torch._foreach_norm(xs), torch._foreach_norm(plain), strict=True):
        assert torch.allclose(found.full_tensor(), expected, rtol=1e-6)
    # Lists that also hold torch's DTensors, and gradients with another layout.
    mixed: Any = [*xs, torch_distribute(torch.ones(3), mesh, [Replicate()], src_data_rank=None)]
    results = torch._foreach_mul(mixed, 3.0)
    assert [type(r) for r in results] == [type(m) for m in mixed]
    assert torch.equal(whole(results[-1]), torch.full((3,), 3.0)) and torch.equal(whole(results[0]), plain[0] * 3)
    norms = torch._foreach_norm(mixed)
    assert math.isclose(norms[-1].full_tensor().item(), math.sqrt(3), rel_tol=1e-6)
    replicated: Any = [torch_distribute(p, mesh, [Replicate()], src_data_rank=None) for p in plain]
    torch._foreach_add_(xs, replicated)
    for x, p in zip(xs, plain, strict=True):
        assert torch.equal(x.full_tensor(), p + p)


@on_threads(3)
def test_random_values_are_those_of_one_device_in_every_layout(rank: int, world: int) -> None:
    mesh = one_dim_mesh(world)
    draws: list[Callable[[Tensor, torch.Generator], Tensor]] = [
        lambda t, g: t.uniform_(generator=g),
        lambda t, g: t.normal_(1.0, 2.0, generator=g),
        lambda t, g: t.bernoulli_(0.3, generator=g),
        lambda t, g: t.exponential_(generator=g),
        lambda t, g: t.random_(0, 100, generator=g),
        lambda t, g: torch.nn.init.trunc_normal_(t, std=0.02, generator=g),
        lambda t, g: torch.nn.init.kaiming_uniform_(t, generator=g),
    ]
    for i, draw in enumerate(draws):
        x, plain = ragged(CASE, torch.zeros(CASE.shape), mesh, rank), torch.zeros(CASE.shape)
        assert draw(x, torch.Generator().manual_seed(i)) is x
        draw(plain, torch.Generator().manual_seed(i))
        assert torch.equal(x.full_tensor(), plain), i


@on_threads(1)
def test_random_like_draws_as_one_device_does(rank: int, world: int) -> None:
    mesh = one_dim_mesh(world)
    x = ragged(Case((6, 5), 1, (6,)), torch.zeros(6, 5), mesh, rank)
    for op in (torch.rand_like, torch.randn_like, lambda t: torch.randint_like(t, 0, 9), lambda t: torch.rand_like(t, dtype=torch.float64)):
        torch.manual_seed(3)
        found = op(x)
        torch.manual_seed(3)
        assert isinstance(found, RaggedDTensor) and torch.equal(found.full_tensor(), op(torch.zeros(6, 5)))


def _random_replicas(rank: int, world: int) -> list[float]:
    x = ragged(Case((50,), 1, (10, 40)), torch.full((50,), 0.5), one_dim_mesh(world), rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RaggedFallbackWarning)
        drawn: DTensor = torch.bernoulli(x)  # type: ignore[assignment]
    return drawn.to_local().tolist()


def test_replicated_random_results_are_equal_on_every_rank() -> None:
    first, second = run_threads(2, _random_replicas)
    assert first == second and 0 < sum(first) < 50
