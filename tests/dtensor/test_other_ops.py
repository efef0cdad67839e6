"""Operations on ragged tensors that gather, fall back or are refused; gradients, new tensors, pending reductions."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from tests.dtensor.layouts import Case, cases, one_dim_mesh, ragged, values, whole
from tests.ranks import on_threads
from vescale_ray.dtensor import RaggedDTensor, RaggedFallbackWarning, RaggedShard, distribute_tensor

CASE = Case((6, 5), 2, (4, 0, 26))


GATHERING: dict[str, Callable[[Any], Any]] = {
    "t": lambda x: x.t(),
    "index": lambda x: x[1],
    "slice": lambda x: x[1:3],
    "softmax": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "argmax": lambda x: x.argmax(),
    "topk": lambda x: x.topk(2, dim=0)[0],
    "mm": lambda x: x.t() @ x,
    "std": lambda x: x.std(),
    "max dim": lambda x: x.max(1)[0],
    "sum merged": lambda x: x.sum(0),
    "cat": lambda x: torch.cat([x, x]),
    "flip": lambda x: x.flip(0),
    "tril": lambda x: x.tril(),
    "expand": lambda x: x.unsqueeze(0) + torch.zeros_like(x.expand(2, *x.shape)) if not isinstance(x, DTensor) else x.expand(2, *x.shape),
}


@on_threads(3)
def test_other_reading_operations_gather_and_are_right(rank: int, world: int) -> None:
    full = values(CASE.shape) * 0.25
    x = ragged(CASE, full, one_dim_mesh(world), rank)
    for name, op in GATHERING.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = op(x)
            assert torch.allclose(whole(found), op(full)), name


@on_threads(1)
def test_fallback_warns_once_and_unsupported_writes_raise(rank: int, world: int) -> None:
    full = values((6, 5))
    x = ragged(Case((6, 5), 1, (6,)), full, one_dim_mesh(world), rank)
    with pytest.warns(RaggedFallbackWarning, match="aten.cumsum.default has no ragged form: each call gathers"):
        x.cumsum(0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            x.cumsum(0)
        assert len(seen) == 1, "one warning for one operation"
    with patch.dict(os.environ, {"VE_RAGGED_STRICT": "1"}):
        with pytest.raises(RuntimeError, match=r"aten.cumsum.default has no ragged form.*shape \(6, 5\).*call full_tensor\(\)"):
            x.cumsum(0)
        assert torch.equal((x + 1).full_tensor(), full + 1)
    mutating: list[Callable[[], Any]] = [
        lambda: x.t_(),
        lambda: x.resize_(3, 3),
        lambda: x.index_fill_(0, torch.tensor([0]), 1.0),
        lambda: x.tril_(),
        lambda: x.cumsum_(0),
        lambda: x.squeeze_(),
        lambda: torch.cumsum(x, 0, out=x),
        lambda: x.set_(torch.ones(3)),  # type: ignore[call-overload]
    ]
    for write in mutating:
        with pytest.raises(
            RuntimeError, match=r"^a ragged tensor of .* can't be written .*full_tensor\(\) on all ranks alike and write that back"
        ):
            write()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RaggedFallbackWarning)
        views = [lambda: x[0], lambda: x.t(), lambda: x[1:3], lambda: x.transpose(0, 1)[0], lambda: x.diagonal(), lambda: x.narrow(0, 0, 1)]
        for view in views:
            with pytest.raises(RuntimeError, match="gathered copy, not a view"):
                view().normal_()
            with pytest.raises(RuntimeError, match="gathered copy, not a view"):
                torch._foreach_zero_([view()])
        writers: list[Callable[[RaggedDTensor], Any]] = [
            lambda y: y.mul_(2),
            lambda y: torch._foreach_mul_([y], 2.0),
            lambda y: y.to_local().mul_(2),
            lambda y: y.copy_(full * 2),
            lambda y: y.detach().mul_(2),
        ]
        for write_to in writers:
            y = ragged(Case((6, 5), 1, (6,)), full.clone(), x.device_mesh, rank)
            row, inner = y[1], y.t()[2:]
            assert torch.equal(whole(row), full[1]) and torch.equal(whole(inner + 0), full.t()[2:])
            write_to(y)
            reads: list[Callable[[Any], Any]] = [lambda view: view + 1, whole, lambda view: view.sum(), lambda view: view.to_local()]
            for view, read in itertools.product((row, inner), reads):
                with pytest.raises(RuntimeError, match="that was written since: take the view again"):
                    read(view)
            assert torch.equal(whole(y[1]), full[1] * 2)
        assert torch.equal(whole(x[1:3] * 2), full[1:3] * 2)
    assert torch.equal(x.full_tensor(), full), "what raised changed nothing"
    for mixed in (lambda: x + full, lambda: x.add_(full), lambda: torch._foreach_add([x], [full]), lambda: torch.equal(x, full)):
        with pytest.raises(ValueError, match=r"a plain tensor (of shape \(6, 5\) )?meets a ragged tensor"):
            mixed()
    for into in (lambda: full.copy_(x), lambda: full.add_(x), lambda: torch.add(x, x, out=full), lambda: torch._foreach_add_([full], [x])):
        with pytest.raises(ValueError, match=r"plain tensor of shape \(6, 5\).* do that before fully_shard|along with"):
            into()
    with pytest.raises(ValueError, match=r"copy_: a plain tensor of shape \(4, 5\) into a ragged tensor"):
        x.copy_(torch.ones(4, 5))
    with pytest.raises(ValueError, match="can't be written into"):
        x.add_(ragged(Case((2, 6, 5), 0, (1,)), torch.ones(2, 6, 5), x.device_mesh, 0))
    assert torch.equal(x.full_tensor(), full)


@on_threads(3)
def test_operands_on_different_meshes_raise(rank: int, world: int) -> None:
    one, two = one_dim_mesh(world), init_device_mesh("cpu", (1, world))
    x = ragged(CASE, values(CASE.shape), one, rank)
    y = distribute_tensor(values(CASE.shape), two, [Replicate(), CASE.placement])
    with pytest.raises(ValueError, match="operands on different meshes"):
        x + y


@settings(max_examples=8)
@given(cases())
@on_threads(lambda case: case.world)
def test_gradients_flow_through_elementwise_operations_and_sums(rank: int, world: int, case: Case) -> None:
    mesh, full, weight = one_dim_mesh(world), values(case.shape) * 0.25, values(case.shape, seed=5) * 0.25
    x, plain = ragged(case, full, mesh, rank).requires_grad_(), full.clone().requires_grad_()
    w = ragged(case, weight, mesh, rank)
    for t, factor in ((x, w), (plain, weight)):
        ((t * factor).tanh() + t.view(-1).view(t.shape) ** 2).sum().backward()
    assert x.grad is not None and plain.grad is not None
    assert torch.allclose(whole(x.grad), plain.grad, rtol=1e-6)
    x.grad = None
    y = x * 2
    (y.to_local() * w.to_local()).sum().backward()
    assert isinstance(x.grad, RaggedDTensor) and torch.equal(x.grad.full_tensor(), 2 * weight)
    x.grad = ragged(case, weight, mesh, rank)
    assert torch.equal(x.grad.full_tensor(), weight)


@on_threads(3)
def test_new_and_like_tensors_keep_the_layout_with_the_shape(rank: int, world: int) -> None:
    mesh = one_dim_mesh(world)
    x = ragged(CASE, values(CASE.shape), mesh, rank)
    other = x.new_zeros((2, 3))
    assert isinstance(other, DTensor) and other.placements == (Replicate(),) and other.to_local().shape == (2, 3)
    empty = torch.empty_like(x, dtype=torch.bfloat16, device="meta")
    assert isinstance(empty, RaggedDTensor) and empty.is_meta and empty.dtype == torch.bfloat16 and empty.placements == x.placements
    assert x.is_same_size(empty) and not x.is_pinned()
    assert x.contiguous() is x or torch.equal(x.contiguous().full_tensor(), x.full_tensor())
    assert x.stride() == (5, 1) and x.is_contiguous()
    assert "RaggedDTensor(shape=(6, 5), local elements [" in repr(x)
    assert RaggedDTensor.from_spec(torch.zeros(x.to_local().shape, dtype=torch.float64), x._spec).dtype == torch.float64
    assert isinstance(x.placements[0], RaggedShard)


@on_threads(4)
def test_pending_reductions_join_those_of_torchs_own(rank: int, world: int) -> None:
    """Join pending reductions of ragged tensors and of torch's own DTensors on the same mesh, in either order."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = values((4, 2)) + 3.0
    theirs = torch_distribute(full, mesh, [Shard(0), Shard(1)])
    ours = distribute_tensor(full * 2, mesh, [RaggedShard((0,), (1, 0)), Replicate()])
    for reduce in (torch.linalg.vector_norm, torch.sum):
        for first, second in ((theirs, ours), (ours, theirs)):
            a, b = reduce(first), reduce(second)
            expected = torch.stack([reduce(first.full_tensor()), reduce(second.full_tensor())])
            assert torch.allclose(whole(torch.stack([a, b])), expected)
            assert torch.allclose(whole(torch.cat([a.reshape(1), b.reshape(1)])), expected)
            assert torch.allclose(whole(a + b), expected.sum()) and torch.allclose(whole(torch.where(a < b, a, b)), expected.min())
            written = reduce(ours)
            written.mul_(reduce(theirs))
            assert torch.allclose(whole(written), expected.prod())
    total = torch.nn.utils.get_total_norm([theirs, ours])
    assert torch.allclose(whole(total), torch.cat([full, full * 2]).norm())


@on_threads(2)
def test_numbers_of_ragged_tensors_may_be_joined_in_a_list(rank: int, world: int) -> None:
    full = torch.arange(12.0).reshape(4, 3) - 3
    mesh = init_device_mesh("cpu", (world,))
    x: Any = distribute_tensor(full, mesh, [RaggedShard((0,), (3, 1))]).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for read in (
            lambda t: [t.norm(), t.sum(), t[3, 2]],  # an element is a gathered view
            lambda t: [t.detach().argmax(), t.count_nonzero()],
            lambda t: [(t > 7).any(), (t > 9).any(), t.isnan().any()],
        ):
            assert torch.equal(torch.tensor(read(x)), torch.tensor(read(full)))
    assert torch.equal(torch.ones(1).new_tensor([x.max()]), full.max()[None])
