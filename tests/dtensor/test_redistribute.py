"""Redistribution between any two placements: values, gradients, bytes sent."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _StridedShard

from tests.dtensor.layouts import Case, cases, one_dim_mesh, pairs, ragged, values
from tests.ranks import on_processes, on_threads, run_gloo, run_threads
from vescale_ray.dtensor import RaggedDTensor, RaggedShard, distribute_tensor, local_interval

MOVERS: tuple[str, ...] = ("all_to_all_single", "all_gather_single", "all_gather_into_tensor", "broadcast", "all_reduce")
MOVERS += ("reduce_scatter_single", "reduce_scatter_tensor")


@contextmanager
def spy() -> Iterator[list[tuple[str, int, int]]]:
    """Record (collective, this thread's rank, elements it sends to other ranks), and run the collectives as usual."""
    seen: list[tuple[str, int, int]] = []

    def recorded(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = -1
            if name == "all_to_all_single":
                rank, splits = dist.get_rank(kwargs["group"]), args[3]
                sent = sum(n for r, n in enumerate(splits) if r != rank)
            seen.append((name, dist.get_rank(), sent))
            return real(*args, **kwargs)

        return call

    patches = [patch.object(dist, n, recorded(n, getattr(dist, n))) for n in MOVERS if hasattr(dist, n)]
    for p in patches:
        p.start()
    try:
        yield seen
    finally:
        for p in patches:
            p.stop()


@settings(max_examples=20)
@given(pairs())
@on_threads(lambda pair: pair[0].world)
def test_ragged_layout_moves_to_another_and_to_the_whole(rank: int, world: int, pair: tuple[Case, Case]) -> None:
    source, target = pair
    mesh, full = one_dim_mesh(world), values(source.shape)
    a = ragged(source, full, mesh, rank)
    b = a.redistribute(placements=[target.placement])
    assert isinstance(b, RaggedDTensor) and b.placements == (target.placement,)
    assert b.to_local().shape == target.part(full, rank).shape and torch.equal(b.to_local(), target.part(full, rank))
    assert torch.equal(a.full_tensor(), full) and torch.equal(b.full_tensor(), full)
    start, end = a.local_interval()
    assert torch.equal(full.reshape(-1)[start:end], a.to_local().reshape(-1))


def _bytes(rank: int, world: int, source: Case, target: Case) -> None:
    ragged(source, values(source.shape), one_dim_mesh(world), rank).redistribute(placements=[target.placement])


@settings(max_examples=20)
@given(pairs())
def test_ragged_move_is_one_all_to_all_of_elements_it_reassigns(pair: tuple[Case, Case]) -> None:
    source, target = pair
    with spy() as seen:
        run_threads(source.world, _bytes, source, target)
    unit_a, unit_b = math.prod(source.shape[source.dims :]), math.prod(target.shape[target.dims :])
    before = [r for r, n in enumerate(source.counts) for _ in range(n * unit_a)]
    after = [r for r, n in enumerate(target.counts) for _ in range(n * unit_b)]
    if before == after:
        assert seen == []
        return
    assert sorted(name for name, _, _ in seen) == ["all_to_all_single"] * source.world
    for _, rank, sent in seen:
        assert sent == sum(a == rank != b for a, b in zip(before, after, strict=True))


def _whole(rank: int, world: int, case: Case) -> None:
    mesh, full = one_dim_mesh(world), values(case.shape)
    assert torch.equal(ragged(case, full, mesh, rank).full_tensor(), full)


def _reduced(rank: int, world: int, case: Case) -> None:
    mesh, full = one_dim_mesh(world), values(case.shape)
    target = ragged(case, torch.zeros(case.shape), mesh, rank)
    target.copy_(DTensor.from_local(full, mesh, [Partial()], run_check=False))
    assert torch.equal(target.to_local(), case.part(full * world, rank))


@settings(max_examples=15)
@given(cases())
def test_gathering_or_reducing_is_one_collective_without_padding(case: Case) -> None:
    unit = math.prod(case.shape[case.dims :])
    parts = [n * unit for n in case.counts]
    for body, sends in ((_whole, lambda r: parts[r] * (case.world - 1)), (_reduced, lambda r: sum(parts) - parts[r])):
        with spy() as seen:
            run_threads(case.world, body, case)
        assert len(seen) == (case.world if sum(parts) and case.world > 1 else 0)
        for name, rank, sent in seen:
            if name == "all_to_all_single":
                assert sent == sends(rank)
            else:  # the other collectives carry equal parts, or all from one rank
                assert len(set(parts)) == 1 or sorted(parts)[:-1] == [0] * (case.world - 1), name


def _with_torchs(rank: int, world: int, case: Case, dim: int) -> int:
    mesh, full = one_dim_mesh(world), values(case.shape)
    a = ragged(case, full, mesh, rank)
    placements: list[Placement] = [Replicate()] + ([Shard(dim)] if case.shape else [])
    for placement in placements:
        there = a.redistribute(placements=[placement])
        assert not isinstance(there, RaggedDTensor) and there.placements == (placement,) and there.shape == full.shape
        theirs = torch_distribute(full, mesh, [placement], src_data_rank=None)
        assert torch.equal(there.to_local(), theirs.to_local()), placement
        back = distribute_tensor(full, mesh, [case.placement]) if placement.is_replicate() else _back(there, case)
        assert torch.equal(back.to_local(), case.part(full, rank)), placement
        for gone in (there, there * 1):  # the way back is the same call for a computed tensor
            back = gone.redistribute(placements=[case.placement])
            assert type(back) is RaggedDTensor and torch.equal(back.to_local(), case.part(full, rank)), placement
    return 0


def _back(tensor: DTensor, case: Case) -> RaggedDTensor:
    """Copy by assignment, because torch's DTensor.redistribute does not know ragged targets."""
    target = RaggedDTensor.from_local(
        torch.full(case.part(values(case.shape), tensor.device_mesh.get_local_rank()).shape, -99.0),
        tensor.device_mesh,
        [case.placement],
        shape=case.shape,
    )
    target.copy_(tensor)
    return target


@settings(max_examples=20)
@given(cases(), st.data())
def test_ragged_converts_to_and_from_torchs_shard_and_replicate(case: Case, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, max(len(case.shape) - 1, 0)))
    run_threads(case.world, _with_torchs, case, dim)


def _partial(rank: int, world: int, case: Case, op: str) -> None:
    mesh = one_dim_mesh(world)
    mine = [values(case.shape, seed=r) for r in range(world)]
    pending = DTensor.from_local(mine[rank], mesh, [Partial(op)], run_check=False)
    stacked = torch.stack(mine)
    expected = {"sum": stacked.sum(0), "avg": stacked.sum(0) / world, "max": stacked.amax(0), "min": stacked.amin(0)}[op]
    target = RaggedDTensor.from_local(torch.zeros_like(case.part(expected, rank)), mesh, [case.placement], shape=case.shape)
    target.copy_(pending)
    assert torch.allclose(target.to_local(), case.part(expected, rank))


@settings(max_examples=15)
@given(cases(), st.sampled_from(["sum", "avg", "max", "min"]))
def test_a_pending_reduction_lands_reduced(case: Case, op: str) -> None:
    with spy() as seen:
        run_threads(case.world, _partial, case, op)
    if op in ("sum", "avg"):  # never an all-reduce of the whole tensor
        assert not any(name == "all_reduce" for name, _, _ in seen)


@settings(max_examples=12)
@given(pairs())
@on_threads(lambda pair: pair[0].world)
def test_gradients_flow_back_through_every_conversion(rank: int, world: int, pair: tuple[Case, Case]) -> None:
    source, target = pair
    mesh, full, weight = one_dim_mesh(world), values(source.shape, seed=1), values(source.shape, seed=2)
    weight_ragged = ragged(target, weight, mesh, rank)

    local = source.part(full, rank).clone().requires_grad_()
    a = RaggedDTensor.from_local(local, mesh, [source.placement], shape=source.shape)
    b = a.redistribute(placements=[target.placement])
    (b.to_local() * weight_ragged.to_local()).sum().backward()  # the ranks' losses add up to (full * weight).sum()
    assert local.grad is not None and torch.equal(local.grad, source.part(weight, rank))

    leaf = ragged(source, full, mesh, rank).requires_grad_()
    (leaf.full_tensor() * weight).sum().backward()  # every rank computes the same loss
    assert isinstance(leaf.grad, RaggedDTensor) and leaf.grad.placements == leaf.placements
    assert torch.equal(leaf.grad.to_local(), source.part(weight, rank))

    if source.shape:
        leaf = ragged(source, full, mesh, rank).requires_grad_()
        shard = leaf.redistribute(placements=[Shard(0)])
        mine = torch_distribute(weight, mesh, [Shard(0)], src_data_rank=None).to_local()
        (shard.to_local() * mine).sum().backward()
        assert isinstance(leaf.grad, RaggedDTensor) and torch.equal(leaf.grad.to_local(), source.part(weight, rank))


@on_threads(3)
def test_partial_grad_placements_reduce_gradients_over_ranks(rank: int, world: int) -> None:
    """Each rank multiplies the whole by its own weight. The gradient is a sum over ranks, which full_tensor must be told."""
    mesh, case = one_dim_mesh(world), Case((5, 3), 1, (1, 0, 4))
    weights = [values((5, 3), seed=r) for r in range(world)]
    leaf = ragged(case, values((5, 3)), mesh, rank).requires_grad_()
    (leaf.full_tensor(grad_placements=[Partial()]) * weights[rank]).sum().backward()
    assert leaf.grad is not None
    expected = torch.stack(weights).sum(0)
    assert torch.equal(leaf.grad.full_tensor(), expected)  # type: ignore[attr-defined]


def _every_dtype_on_gloo(rank: int, world: int) -> list[str]:
    mesh = one_dim_mesh(world)
    done = []
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    kinds += [torch.bool, torch.complex64, torch.float8_e4m3fn]
    even, uneven = Case((6, 2), 1, (2, 2, 2)), Case((6, 2), 1, (1, 2, 3))
    lopsided, owned, elements = Case((6, 2), 2, (0, 1, 11)), Case((6, 2), 1, (0, 6, 0)), Case((6, 2), 2, (5, 0, 7))
    for dtype in kinds:
        full = values((6, 2), torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else dtype).to(dtype)
        for source in (even, uneven, lopsided, owned, elements):
            a = ragged(source, full, mesh, rank)
            raw = full.view(torch.uint8)
            assert torch.equal(a.full_tensor().view(torch.uint8), raw), (dtype, source)
            for target in (uneven, owned, elements):
                b = a.redistribute(placements=[target.placement])
                assert torch.equal(b.to_local().contiguous().view(torch.uint8), target.part(full, rank).contiguous().view(torch.uint8))
            for dim in (0, 1):
                c = a.redistribute(placements=[Shard(dim)])
                mine = full.chunk(3, dim)
                expected = mine[rank] if rank < len(mine) else full.narrow(dim, 0, 0)
                assert torch.equal(c.to_local().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), (dtype, dim)
        done.append(str(dtype))
    for case in (even, uneven, lopsided, owned):
        pending = DTensor.from_local(torch.full((6, 2), rank + 1.0), mesh, [Partial("avg")], run_check=False)
        mean = ragged(case, torch.zeros(6, 2), mesh, rank)
        mean.copy_(pending)
        assert torch.equal(mean.to_local(), torch.full_like(mean.to_local(), 2.0))
    return done


def test_every_dtype_moves_on_gloo_between_processes() -> None:
    assert len(run_gloo(3, _every_dtype_on_gloo)[0]) == 12


def _meta(rank: int, world: int) -> None:
    mesh = one_dim_mesh(world)
    a = RaggedDTensor.from_local(torch.empty(rank + 1, 2, device="meta"), mesh, [RaggedShard((0,), (1, 2, 3))], shape=(6, 2))
    assert a.is_meta and a.full_tensor().shape == (6, 2) and a.full_tensor().is_meta
    assert a.redistribute(placements=[RaggedShard((0,), (2, 2, 2))]).to_local().shape == (2, 2)
    assert a.redistribute(placements=[Shard(1)]).to_local().shape[0] == 6


def test_meta_tensors_have_every_shape_and_send_nothing() -> None:
    with spy() as seen:
        run_threads(3, _meta)
    assert seen == []


@on_threads(3)
def test_bad_input_raises_value_error_with_value_and_rule(rank: int, world: int) -> None:
    mesh = one_dim_mesh(world)
    other = init_device_mesh("cpu", (world, 1))
    placement, strided = RaggedShard((0,), (1, 2, 3)), _StridedShard(0, split_factor=2)
    a = ragged(Case((6, 2), 1, (1, 2, 3)), values((6, 2)), mesh, rank)
    mine = torch.ones(rank + 1, 2)
    for says, bad in (
        ("units for 2 ranks", lambda: a.redistribute(placements=[RaggedShard((0,), (1, 2))])),
        ("not a multiple of 5", lambda: a.redistribute(placements=[RaggedShard((0,), (1, 2, 2))])),
        ("can't redistribute to _NormP", lambda: a.redistribute(placements=[_NormPartial(2)])),
        ("pending reduction", lambda: distribute_tensor(torch.ones(6, 2), other, [placement, Partial()])),
        ("no dimension 2", lambda: a.redistribute(placements=[Shard(2)])),
        ("only placements on the same mesh", lambda: a.redistribute(other, [Replicate(), Replicate()])),
        ("needs placements", lambda: a.redistribute()),
        ("2 placements for a mesh of 1", lambda: a.redistribute(placements=[Replicate(), Replicate()])),
        ("holds \\(.*\\)", lambda: RaggedDTensor.from_local(torch.ones(9, 2), mesh, [placement], shape=(6, 2))),
        ("must be contiguous", lambda: RaggedDTensor.from_local(torch.ones(2, 6).t(), mesh, [RaggedShard((0,), (1, 1, 1))], shape=(18, 2))),
        ("row-major", lambda: RaggedDTensor.from_local(mine, mesh, [placement], shape=(6, 2), stride=(1, 6))),
        ("plain local part", lambda: RaggedDTensor.from_local(a, mesh, [placement], shape=(6, 2))),
        ("hold 0 RaggedShard", lambda: RaggedDTensor.from_local(torch.ones(6, 2), mesh, [Replicate()], shape=(6, 2))),
        ("hold 2 RaggedShard", lambda: distribute_tensor(torch.ones(6, 2), other, [placement, RaggedShard((0,), (1,))])),
        ("only Replicate, Partial and Shard", lambda: distribute_tensor(torch.ones(6, 2), other, [placement, strided])),
        ("no dimension -3", lambda: distribute_tensor(torch.ones(6, 2), other, [placement, Shard(-3)])),
        ("use redistribute", lambda: distribute_tensor(a, mesh, [RaggedShard((0,), (2, 2, 2))])),
        ("use its redistribute", lambda: distribute_tensor(a, mesh, [Replicate()])),
        ("leaf tensors", lambda: distribute_tensor(torch.ones(6, 2, requires_grad=True) * 1, mesh, [placement])),
        ("not one interval", lambda: local_interval(torch_distribute(torch.ones(6, 2), mesh, [Shard(1)]))),
    ):
        with pytest.raises(ValueError, match=says):
            bad()
    # The ranks disagree. Every rank gets an error, which names the first rank that differs from it.
    disagreeing = mine.double() if rank == 0 else mine
    with pytest.raises(ValueError, match=r"the rank at \(1,\) of the mesh gave .*: give the same"):
        RaggedDTensor.from_local(disagreeing, mesh, [placement], shape=(6, 2), run_check=True)


@on_threads(3)
def test_local_interval_locates_every_contiguous_local_part(rank: int, world: int) -> None:
    mesh = one_dim_mesh(world)
    for rows in (1, 5, 6, 7):
        full = values((rows, 3))
        for tensor in (full, torch_distribute(full, mesh, [Replicate()]), torch_distribute(full, mesh, [Shard(0)])):
            start, end = local_interval(tensor)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(full.reshape(-1)[start:end], local.reshape(-1))
    case = Case((7, 3), 2, (3, 0, 18))
    assert local_interval(ragged(case, values((7, 3)), mesh, rank)) == [(0, 3), (3, 3), (3, 21)][rank]


@on_threads(3)
def test_distribute_tensor_takes_the_values_of_the_source_rank(rank: int, world: int) -> None:
    mesh = one_dim_mesh(world)
    mine = torch.full((6, 2), float(rank))
    placement = RaggedShard((0,), (1, 2, 3))
    assert torch.equal(distribute_tensor(mine, mesh, [placement]).full_tensor(), torch.zeros(6, 2))
    assert torch.equal(distribute_tensor(mine, mesh, [placement], src_data_rank=2).full_tensor(), torch.full((6, 2), 2.0))
    own = distribute_tensor(mine, mesh, [placement], src_data_rank=None)
    assert torch.equal(own.to_local(), torch.full((rank + 1, 2), float(rank)))
    assert torch.equal(mine, torch.full((6, 2), float(rank))), "the argument is left alone"


@on_processes(2)
def test_a_read_on_one_rank_says_that_all_must_call_it(rank: int, world: int) -> None:
    """A rank that gathers or reduces alone waits until the group's timeout."""
    for read in (lambda t: t.full_tensor(), lambda t: t.norm().item(), lambda t: t.redistribute(placements=[Shard(1)])):
        mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=1)), "cpu")
        tensor = distribute_tensor(torch.ones(6, 2), mesh, [RaggedShard((0,), (1, 2))], src_data_rank=None)
        if rank == 0:
            with pytest.raises(RuntimeError) as error:
                read(tensor)
            assert re.search(r"waited for the other ranks .* on all ranks, in the same order", "".join(error.value.__notes__))
        dist.barrier()
