"""RaggedShard with Shard, Replicate and Partial on other mesh dimensions: values, gradients, bytes, checkpoints, operations."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tests.dtensor.layouts import values
from tests.dtensor.test_redistribute import spy
from tests.ranks import on_processes, on_threads, run_threads
from vescale_ray.dtensor import RaggedDTensor, distribute_tensor, redistribute
from vescale_ray.dtensor.placement import RaggedShard

Index = torch.Tensor


@dataclass(frozen=True)
class Layout:
    """Placements on a 2-D mesh, and their oracle: the elements at a coordinate, from slices of an index tensor."""

    mesh: tuple[int, int]
    placements: tuple[Placement, ...]

    def part(self, index: Index, coordinate: tuple[int, int]) -> Index:
        """Elements at a coordinate. torch cuts first, in mesh order (torch.chunk), and the ragged cut comes last."""
        ragged = None
        for size, placement, c in zip(self.mesh, self.placements, coordinate, strict=True):
            if isinstance(placement, RaggedShard):
                ragged = (placement, c)
            elif isinstance(placement, Shard):
                pieces = index.chunk(size, placement.dim) if index.shape[placement.dim] else ()
                index = pieces[c] if c < len(pieces) else index.narrow(placement.dim, 0, 0)
        if ragged is not None:
            (placement, c), shape = ragged, index.shape
            merged = len(placement.dims)
            units, parts = math.prod(shape[:merged]), sum(placement.local_units)
            rows = index.reshape(units, *shape[merged:])
            start = units * sum(placement.local_units[:c]) // parts
            index = rows[start : start + units * placement.local_units[c] // parts]
        return index


def index_of(shape: tuple[int, ...]) -> Index:
    return torch.arange(math.prod(shape)).reshape(shape)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], mesh: tuple[int, int], ragged: bool) -> Layout:
    others: list[Placement] = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    placements = [draw(st.sampled_from(others)) for _ in mesh]
    if ragged:
        dim = draw(st.integers(0, 1))
        units = draw(st.lists(st.integers(0, 3), min_size=mesh[dim], max_size=mesh[dim]))
        assume(any(units))
        placements[dim] = RaggedShard(tuple(range(draw(st.integers(0, len(shape))))), units)
        layout = Layout(mesh, tuple(placements))
        for coordinate in ((i, j) for i in range(mesh[0]) for j in range(mesh[1])):  # units that do not fit the section are refused
            without = Layout(mesh, tuple(Replicate() if isinstance(p, RaggedShard) else p for p in placements))
            here = without.part(index_of(shape), coordinate).shape
            placement = placements[dim]
            assert isinstance(placement, RaggedShard)
            assume(math.prod(here[: len(placement.dims)]) % sum(placement.local_units) == 0)
        return layout
    return Layout(mesh, tuple(placements))


meshes = st.sampled_from([(2, 2), (2, 3), (4, 2), (1, 3), (3, 1), (2, 4)])
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=3).map(tuple)


@st.composite
def moves(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, Layout]:
    shape, mesh = draw(shapes), draw(meshes)
    return shape, draw(layouts(shape, mesh, True)), draw(layouts(shape, mesh, draw(st.booleans())))


def mesh_of(layout: Layout) -> DeviceMesh:
    return init_device_mesh("cpu", layout.mesh)


def here(mesh: DeviceMesh) -> tuple[int, int]:
    a, b = mesh.get_coordinate() or (0, 0)
    return int(a), int(b)


def make(full: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """Assemble the tensor from the oracle's parts."""
    local = layout.part(full, here(mesh)).clone(memory_format=torch.contiguous_format)
    if any(isinstance(p, RaggedShard) for p in layout.placements):
        return RaggedDTensor.from_local(local, mesh, layout.placements, shape=full.shape)
    return DTensor.from_local(local, mesh, layout.placements, shape=full.shape, stride=full.stride(), run_check=False)


def _move(rank: int, world: int, shape: tuple[int, ...], source: Layout, target: Layout, async_op: bool) -> None:
    mesh, full = mesh_of(source), values(shape)
    a = make(full, source, mesh)
    b = redistribute(a, target.placements, async_op=async_op)
    assert b.placements == target.placements
    assert isinstance(b, RaggedDTensor) == any(isinstance(p, RaggedShard) for p in target.placements)
    expected = target.part(full, here(mesh))
    got = b.to_local()
    assert got.shape == expected.shape and torch.equal(got, expected)
    assert torch.equal(a.to_local(), source.part(full, here(mesh)))


@settings(max_examples=30)
@given(moves(), st.booleans(), st.booleans())
def test_redistribution_on_two_dims_sends_only_needed_elements(move: tuple[Any, Layout, Layout], backwards: bool, async_op: bool) -> None:
    shape, source, target = move
    if backwards:
        source, target = target, source
    world = math.prod(source.mesh)
    with spy() as seen:
        run_threads(world, _move, shape, source, target, async_op)
    # A rank receives each element that it needs and lacks once; no other elements are sent.
    index = index_of(shape)
    sent = sum(n for name, _, n in seen if name == "all_to_all_single")
    must = 0
    for coordinate in ((i, j) for i in range(source.mesh[0]) for j in range(source.mesh[1])):
        have = set(source.part(index, coordinate).flatten().tolist())
        must += len(set(target.part(index, coordinate).flatten().tolist()) - have)
    if {name for name, _, _ in seen} == {"all_to_all_single"}:
        assert sent == must
        assert len(seen) <= world, "one collective"
    if must == 0:
        assert not any(n > 0 for _, _, n in seen)


def _gradient(rank: int, world: int, shape: tuple[int, ...], source: Layout, target: Layout) -> None:
    mesh, full, weight = mesh_of(source), values(shape, seed=1), values(shape, seed=2)
    leaf = make(full, source, mesh)
    leaf.requires_grad_()
    moved = redistribute(leaf, target.placements)
    (moved.to_local() * target.part(weight, here(mesh))).sum().backward()
    assert isinstance(leaf.grad, DTensor) and leaf.grad.placements == source.placements
    assert torch.equal(leaf.grad.to_local(), source.part(weight, here(mesh)))


@settings(max_examples=12)
@given(moves(), st.booleans())
def test_gradients_flow_through_two_dimensional_redistribution(move: tuple[Any, Layout, Layout], backwards: bool) -> None:
    shape, source, target = move
    if backwards:
        source, target = target, source
    run_threads(math.prod(source.mesh), _gradient, shape, source, target)


def _use(rank: int, world: int, shape: tuple[int, ...], layout: Layout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    mesh, full, other = mesh_of(layout), values(shape, seed=3), values(shape, seed=4)
    me = here(mesh)
    a, b = make(full, layout, mesh), make(other, layout, mesh)
    assert isinstance(a, RaggedDTensor)
    assert torch.equal(a.full_tensor(), full)
    assert torch.equal(distribute_tensor(full, mesh, layout.placements).to_local(), layout.part(full, me))
    assert torch.equal((a * 2 + b).to_local(), layout.part(full * 2 + other, me))
    for norm in (1, 2, math.inf):
        if full.numel():
            expected = torch.linalg.vector_norm(full, norm)
            assert torch.allclose(torch.linalg.vector_norm(a, norm).full_tensor(), expected)
            assert torch.allclose(torch._foreach_norm([a, b], norm)[0].full_tensor(), expected)
    assert torch.equal(a.sum().full_tensor(), full.sum())
    assert bool((a == a).all()) and torch.equal(a, a) and bool(torch.equal(a, b)) == bool(torch.equal(full, other))
    for dim in range(len(shape)):
        if shape[dim]:
            row = other.narrow(dim, 0, 1)
            plain = DTensor.from_local(row, mesh, [Replicate()] * 2, run_check=False)
            assert torch.equal((a + plain).to_local(), layout.part(full + row, me)), dim
    target = torch.zeros_like(a)
    target.copy_(full)
    assert torch.equal(target.to_local(), layout.part(full, me))
    if len(shape) > 1:
        assert torch.equal(torch.sum(a, -1).full_tensor(), full.sum(-1))  # type: ignore[attr-defined]
        assert torch.equal(torch.sum(a, -1, keepdim=True).full_tensor(), full.sum(-1, keepdim=True))  # type: ignore[attr-defined]
        assert torch.equal(a.reshape(shape[0], -1).full_tensor(), full.reshape(shape[0], -1)) if shape[0] else True  # type: ignore[attr-defined]
    chunks = []
    flat = []
    for chunk in a.__create_chunk_list__():
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        assert math.prod(sizes) > 0 or not math.prod(shape)
        flat += index_of(shape)[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].flatten().tolist()
        chunks.append((offsets, sizes))
    assert flat == layout.part(index_of(shape), me).flatten().tolist() or not math.prod(shape)
    return chunks


@settings(max_examples=15)
@given(st.data())
@pytest.mark.filterwarnings("ignore:.*has no ragged form")
def test_operations_and_chunks_are_right_on_two_mesh_dimensions(data: st.DataObject) -> None:
    shape, mesh = data.draw(shapes), data.draw(meshes)
    layout = data.draw(layouts(shape, mesh, True))
    chunks = run_threads(math.prod(mesh), _use, shape, layout)
    # Replicas write equal boxes. Different boxes never overlap, and together they are the tensor.
    held = torch.zeros(shape, dtype=torch.int64)
    for offsets, sizes in {box for rank in chunks for box in rank}:
        held[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    assert bool((held == 1).all())


def _linear(rank: int, world: int) -> None:
    ragged, shape = RaggedShard((0,), (1, 0, 2)), (6, 4)
    mesh = init_device_mesh("cpu", (2, 3))
    local = torch.full((2 * (1, 0, 2)[here(mesh)[1]], 4), 1.0 + here(mesh)[0])
    pending = RaggedDTensor.from_local(local, mesh, [Partial(), ragged], shape=shape)
    twice = pending * 2 + pending
    twice.add_(pending).mul_(0.5)
    torch._foreach_add_([twice], [pending])
    torch._foreach_mul_([twice], 2.0)
    assert twice.placements == (Partial(), ragged)
    assert torch.equal(twice.to_local(), local * 6)  # ((2 + 1 + 1) / 2 + 1) * 2
    zeros = torch.zeros_like(pending)
    assert zeros.placements == (Replicate(), ragged)


def test_linear_operations_on_a_pending_sum_send_nothing() -> None:
    with spy() as seen:
        run_threads(6, _linear)
    assert seen == []


@on_threads(6)
def test_sum_pending_on_another_dimension_is_reduced_when_needed(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 3))
    ragged, shape = RaggedShard((0,), (1, 0, 2)), (6, 4)
    row, column = here(mesh)
    parts = [values(shape, seed=s) for s in (5, 6)]
    total = parts[0] + parts[1]

    def part(full: torch.Tensor) -> torch.Tensor:
        return Layout((2, 3), (Replicate(), ragged)).part(full, (row, column))

    def pending() -> RaggedDTensor:
        return RaggedDTensor.from_local(part(parts[row]).clone(), mesh, [Partial(), ragged], shape=shape)

    settled = pending().redistribute(placements=[Replicate(), ragged])
    assert torch.equal(settled.to_local(), part(total))
    assert torch.equal(pending().full_tensor(), total)
    assert torch.equal((pending() * 2 + pending()).full_tensor(), total * 3)
    held = torch.zeros_like(settled)
    # A nonlinear operation reduces first.
    assert torch.equal((pending() * pending()).full_tensor(), total * total)
    assert torch.equal(pending().abs().full_tensor(), total.abs())  # type: ignore[attr-defined]
    assert torch.equal((pending() + settled).full_tensor(), total * 2)
    assert torch.allclose(torch.linalg.vector_norm(pending()).full_tensor(), torch.linalg.vector_norm(total))
    assert torch.equal(torch._foreach_abs([pending()])[0].full_tensor(), total.abs())
    held.copy_(pending())
    assert torch.equal(held.to_local(), part(total))
    with pytest.raises(RuntimeError, match="redistribute it to .* first"):
        pending().abs_()
    with pytest.raises(ValueError, match="no checkpoint can hold"):
        pending().__create_chunk_list__()
    # Gradients of contributions to a pending sum are whole.
    local = part(parts[row]).clone().requires_grad_()
    made = RaggedDTensor.from_local(local, mesh, [Partial(), ragged], shape=shape)
    (made.redistribute(placements=[Replicate(), ragged]).to_local() * part(total)).sum().backward()
    assert local.grad is not None and torch.equal(local.grad, part(total))
    # Any tensor can become pending again.
    for op in ("sum", "avg", "max", "min", "product"):
        for placements in ([Partial(op), ragged], [Replicate(), Partial(op)], [Partial(op), Partial(op)]):
            again = settled.redistribute(placements=placements)
            assert again.placements == tuple(placements)
            assert torch.allclose(again.full_tensor(), total), (op, placements)
            back = torch.zeros_like(settled)
            back.copy_(again)
            assert torch.allclose(back.to_local(), part(total)), (op, placements)


def _reduce_scatter_first(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    pending = DTensor.from_local(torch.full((4, 2), rank + 1.0), mesh, [Partial(), Partial()], run_check=False)
    target = RaggedDTensor.from_local(torch.zeros(2, 2), mesh, [Replicate(), RaggedShard((0,), (1, 1))], shape=(4, 2))
    target.copy_(pending)
    assert torch.equal(target.to_local(), torch.full((2, 2), 10.0))


def test_pending_sum_with_replicas_is_scattered_before_reducing() -> None:
    with spy() as seen:
        run_threads(4, _reduce_scatter_first)
    assert {name for name, _, _ in seen} <= {"reduce_scatter_single", "reduce_scatter_tensor"}


@on_threads(4)
def test_units_must_fit_every_section(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    # 7 rows over 2 ranks give sections of 4 and 3 rows. Halves fit only the first; all ranks refuse alike.
    with pytest.raises(ValueError, match=r"shape \(3, 2\) has 3 units"):
        distribute_tensor(torch.ones(7, 2), mesh, [RaggedShard((0,), (1, 1)), Shard(0)])
    fits = distribute_tensor(values((7, 2)), mesh, [RaggedShard((0, 1), (1, 1)), Shard(0)])
    assert torch.equal(fits.full_tensor(), values((7, 2)))
    assert fits.redistribute(placements=[Replicate(), Shard(-1)]).placements == (Replicate(), Shard(1))


def _move_dtype(mesh: DeviceMesh, full: torch.Tensor, source: Layout, target: Layout, async_op: bool) -> None:
    moved = make(full, source, mesh).redistribute(placements=target.placements, async_op=async_op)
    assert torch.equal(moved.to_local(), target.part(full, here(mesh))), (source, target)


@on_processes(4)
def test_gloo_processes_redistribute_over_two_mesh_dimensions(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    ragged, other = RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (5, 3))
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool):
        full = values((8, 4), dtype)
        for source in ((ragged, Shard(0)), (ragged, Shard(1)), (Shard(0), other), (Replicate(), ragged)):
            for target in ((other, Shard(1)), (Shard(0), Shard(0)), (Shard(1), ragged), (ragged, Replicate()), (Replicate(), Replicate())):
                for async_op in (False, True):
                    _move_dtype(mesh, full, Layout((2, 2), source), Layout((2, 2), target), async_op)

    for op in ("sum", "avg", "max", "product"):
        mine = torch.full((2 * (1, 3)[here(mesh)[1]], 4), rank // 2 + 1.0)
        pending = RaggedDTensor.from_local(mine, mesh, [Partial(op), ragged], shape=(8, 4))
        expected = {"sum": 3.0, "avg": 1.5, "max": 2.0, "product": 2.0}[op]
        assert torch.equal(pending.full_tensor(), torch.full((8, 4), expected)), op
    for layout in (Layout((2, 2), (ragged, Shard(0))), Layout((2, 2), (Shard(1), other)), Layout((2, 2), (Replicate(), ragged))):
        torch.manual_seed(5)
        drawn = torch.zeros(8, 4).uniform_()
        torch.manual_seed(5 + rank // 2 if layout.placements[0].is_replicate() else 5)  # the seed of the first replica counts
        a = make(torch.zeros(8, 4), layout, mesh).uniform_()
        assert torch.equal(a.to_local(), layout.part(drawn, here(mesh))), "the values of one device"
        again = copy.deepcopy(a)
        assert again.placements == a.placements and torch.equal(again.to_local(), a.to_local())


@on_processes(3)
def test_asynchronous_redistribution_returns_before_late_ranks(rank: int, world: int) -> None:
    """Rank 1 is late. The others' calls must return before it comes, and the result must be right when used."""
    import time

    mesh = init_device_mesh("cpu", (world,))
    full = values((6, 4))
    a = distribute_tensor(full, mesh, [RaggedShard((0,), (1, 2, 3))])
    early = []
    for target in ([RaggedShard((0,), (3, 2, 1))], [Shard(1)], [Replicate()], [RaggedShard((), (0, 0, 1))]):
        dist.barrier()
        if rank == 1:
            time.sleep(0.3)
        start = time.monotonic()
        b = a.redistribute(placements=target, async_op=True)
        early.append(time.monotonic() - start < 0.15)
        assert torch.equal((b + b).full_tensor(), full * 2)  # the first use waits
        c = a.redistribute(placements=target, async_op=True)
        assert torch.equal(c.full_tensor(), full)
        torch._foreach_mul_([d := a.redistribute(placements=target, async_op=True)], 3.0)
        assert torch.equal(d.full_tensor(), full * 3)
    assert all(early)


@on_threads(8)
def test_several_dimensions_can_change_on_a_submesh(rank: int, world: int) -> None:
    """A mesh that is part of the world has no process group of all its ranks. A change on two dimensions takes one step for each."""
    shape = (12, 6)
    mesh, full = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"], values(shape)
    kinds: list[tuple[Placement, ...]] = [
        (RaggedShard((0,), (1, 2)), Shard(1)),
        (Shard(0), RaggedShard((0,), (2, 1))),
        (RaggedShard((0, 1), (1, 3)), Shard(0)),
        (Replicate(), RaggedShard((0,), (1, 0))),
        (RaggedShard((0,), (1, 1)), Replicate()),
        (Shard(1), Shard(0)),
    ]
    for source, target in itertools.permutations([Layout((2, 2), kind) for kind in kinds], 2):
        for async_op in (False, True):
            moved = redistribute(make(full, source, mesh), target.placements, async_op=async_op)
            assert moved.placements == target.placements
            assert torch.equal(moved.to_local(), target.part(full, here(mesh)))
        leaf, weight = make(full, source, mesh), values(shape, seed=2)
        leaf.requires_grad_()
        (redistribute(leaf, target.placements).to_local() * target.part(weight, here(mesh))).sum().backward()
        assert isinstance(leaf.grad, DTensor)
        assert torch.equal(leaf.grad.to_local(), source.part(weight, here(mesh)))
