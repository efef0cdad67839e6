"""Muon's messages, the balance of its work, and the properties of its roots and buckets."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.dtensor.layouts import Case, one_dim_mesh
from tests.operations import Operations, collective
from tests.optim.test_muon import SHAPES, alone, equal, give_gradients, random_cases, sharded, steps_on_shards
from tests.ranks import run_gloo, run_threads
from vescale_ray.geometry import Block
from vescale_ray.optim import Muon
from vescale_ray.optim.matrix.exchange import Job, plan
from vescale_ray.optim.matrix.matrices import matrices
from vescale_ray.optim.matrix.newton_schulz import coefficients, flops
from vescale_ray.optim.matrix.roots import assign_buckets, assign_roots
from vescale_ray.planner import TensorSpec, plan_layout
from vescale_ray.planner.models.model_shapes import model_shapes

ROUNDS = coefficients("keller-jordan", 5)
EVEN = tuple((12 * k, 8) for k in (1, 2, 3, 5)) * 6


def even(shape: tuple[int, ...], world: int) -> Case:
    return Case(shape, 1, (shape[0] // world,) * world)


class Counted:
    """Counts bytes and calls of this thread's all-to-alls, by patching torch.distributed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_rank: dict[int, list[int]] = {}
        original = dist.all_to_all_single

        def counting(out: Any, buffer: Any, wanted: Any, given: Any, group: Any = None, async_op: bool = False) -> Any:
            rank = dist.get_rank()
            assert given[rank] == 0 and buffer.dtype is torch.bfloat16
            self.by_rank.setdefault(rank, []).append(sum(given) * buffer.element_size())
            return original(out, buffer, wanted, given, group=group, async_op=async_op)

        monkeypatch.setattr(dist, "all_to_all_single", counting)


def one_step(rank: int, world: int, cases: list[Case], settings: dict[str, Any]) -> tuple[int, tuple[int, ...], int]:
    parameters = sharded(cases, rank, one_dim_mesh(world))
    ours = Muon(parameters, **settings)
    give_gradients(cases, parameters, rank, 0)
    ours.step()
    (itinerary,) = ours.itineraries
    return itinerary.collectives, itinerary.sent_bytes(), len(itinerary.buckets)


@pytest.mark.parametrize(("world", "limit"), [(2, 1 << 26), (3, 1500), (4, 1500)])
def test_step_sends_ideal_bytes_in_two_collectives_per_bucket(world: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    results = run_threads(world, one_step, [even(shape, world) for shape in EVEN], {"bucket_bytes": limit})
    numel = sum(m * n for m, n in EVEN)
    ideal = 4 * numel / world * (1 - 1 / world)
    collectives, planned, buckets = results[0]
    assert [sum(counted.by_rank[r]) for r in range(world)] == list(planned), "the plan tells what is sent"
    assert abs(sum(planned) / world - ideal) <= 0.02 * ideal
    assert max(planned) <= 1.2 * ideal, "no rank sends much more than the others"
    assert all(len(calls) == collectives == 2 * buckets for calls in counted.by_rank.values())
    assert buckets > 1 if limit == 1500 else buckets == 1


def second_step(rank: int, world: int, cases: list[Case]) -> tuple[dict[str, int], int]:
    parameters = sharded(cases, rank, one_dim_mesh(world))
    ours = Muon(parameters, bucket_bytes=1500)
    for step in range(2):
        give_gradients(cases, parameters, rank, step)
        with Operations(collective) as collectives:
            ours.step()
    return dict(Counter(collectives.seen)), len(ours.itineraries[0].buckets)


def test_step_adds_one_all_reduce_and_no_barrier_to_its_exchange() -> None:
    for seen, buckets in run_gloo(2, second_step, [even(shape, 2) for shape in EVEN]):
        assert seen == {"allreduce_": 1, "send": 2 * buckets, "recv_": 2 * buckets} and buckets > 1


def test_uneven_cuts_send_less_as_roots_hold_their_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    world, counted = 4, Counted(monkeypatch)
    rng = random.Random(3)
    cases = []
    for shape in EVEN * 2:  # a planner lays tensors end to end, so that each is on one rank or two
        at, first = rng.randint(0, shape[0]), rng.randint(0, world - 2)
        cases.append(Case(shape, 1, tuple(at if r == first else shape[0] - at if r == first + 1 else 0 for r in range(world))))
    run_threads(world, one_step, cases, {})
    numel = sum(m * n for m, n in EVEN * 2)
    assert sum(map(sum, counted.by_rank.values())) / world < 0.6 * 4 * numel / world * (1 - 1 / world)


def test_whole_tensors_and_whole_experts_need_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    world, counted = 3, Counted(monkeypatch)
    cases = [Case((8, 6 + i % 3), 0, tuple(int(r == i % world) for r in range(world))) for i in range(9)]
    cases.append(Case((6, 4, 5), 1, (1, 2, 3)))
    results = run_threads(world, one_step, cases, {})
    assert not counted.by_rank
    collectives, planned, _ = results[0]
    assert collectives == 0 and sum(planned) == 0


def in_order(rank: int, world: int, cases: list[Case]) -> list[str]:
    parameters = sharded(cases, rank, one_dim_mesh(world))
    muon = Muon(parameters, bucket_bytes=1500)
    give_gradients(cases, parameters, rank, 0)
    (exchange,) = muon._routed().exchanges
    sends, seen = exchange._send, []

    def noted(buffer: Any, given: Any, wanted: Any, group: Any) -> Any:
        arriving, work = sends(buffer, given, wanted, group)

        class Noted:
            def wait(self) -> None:
                seen.append(f"wait {number}")
                work.wait()

        number = sum(entry.startswith("send") for entry in seen)
        seen.append(f"send {number}")
        return arriving, Noted()

    exchange._send = noted  # type: ignore[method-assign, assignment]
    muon.step()
    return seen


def test_next_bucket_is_sent_before_the_wait_for_the_last_one() -> None:
    world = 2
    for seen in run_threads(world, in_order, [even(shape, world) for shape in EVEN]):
        # Buckets 0 and 1 are sent. Only then bucket 0 is awaited, computed and sent back, and so on.
        assert seen[:8] == ["send 0", "send 1", "wait 0", "send 2", "send 3", "wait 1", "send 4", "wait 2"]
        assert sum(entry.startswith("wait") for entry in seen) == sum(entry.startswith("send") for entry in seen)


def test_whole_tensors_equal_torchs_muon_bit_for_bit() -> None:
    cases = [Case(shape, 0, tuple(int(r == i % 3) for r in range(3))) for i, shape in enumerate(SHAPES)]
    equal(run_threads(3, steps_on_shards, cases, 3, {}), alone(SHAPES, 3))


def llama(world: int, name: str = "llama-3-8b", block: Block | None = None) -> Any:
    """Jobs of a model's matrices as our planner places them."""
    shapes = model_shapes(name)
    jobs = []
    for unit in shapes.units:
        specs = [TensorSpec(p.name, p.shape, block, torch.float32) for p in unit.params]
        layout = plan_layout(specs, world)
        for _ in range(unit.count):
            for p in unit.params:
                if p.kind not in ("matrix", "expert") or len(p.shape) < 2:
                    continue
                start, intervals = 0, []
                for r in range(world):
                    numel = layout.units(p.name)[r]
                    intervals.append((start, start + numel))
                    start += numel
                scale = p.numel // start
                intervals = [(a * scale, b * scale) for a, b in intervals]
                jobs += [Job.of(len(jobs), span, intervals, ROUNDS, 1e-7) for span in matrices(p.shape, None, p.name)]
    return jobs


@pytest.mark.parametrize("world", [64, 128, pytest.param(256, marks=pytest.mark.slow)])
def test_the_work_of_llama_3_8b_is_balanced(world: int) -> None:
    roots = plan(llama(world), world).roots
    assert sum(roots.load) == sum(roots.cost) and len(roots.cost) == 224
    assert roots.balance <= (1.06 if world <= 64 else max(roots.lower_bound, 4 / 3))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 12), st.integers(0, 1 << 30))
def test_roots_meet_grahams_bound_and_each_matrix_has_one_bucket(costs: list[int], world: int, seed: int) -> None:
    rng = random.Random(seed)
    held = [{r: rng.randint(1, 9) for r in rng.sample(range(world), rng.randint(1, world))} for _ in costs]
    if all(len(ranks) == 1 for ranks in held) and world > 1:  # if all are whole, they stay in place
        held[0] = {0: 1, 1: 1}
    roots = assign_roots(costs, held, world)
    load = [0] * world
    for i, root in enumerate(roots.root):
        load[root] += costs[i]
    assert tuple(load) == roots.load
    # By Graham, list scheduling ends by mean + (1 - 1/W) * the largest item. The slack for locality comes on top.
    mean = sum(costs) / world
    assert max(load) <= max(1.05 * mean, mean + (1 - 1 / world) * max(costs)) + 1e-9
    buckets = assign_buckets(roots, [8 * c for c in costs], 4000)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(costs)))
    assert all(buckets)


def test_each_buckets_largest_load_is_below_1_35_times_the_mean() -> None:
    itinerary = plan(llama(8), 8, bucket_bytes=512 << 20)
    assert len(itinerary.buckets) >= 4
    for bucket in itinerary.buckets:
        load = [0] * 8
        for i in bucket:
            load[itinerary.roots.root[i]] += itinerary.roots.cost[i]
        assert max(load) * 8 / sum(load) < 1.35


def test_locality_takes_the_holder_of_most_where_balance_allows() -> None:
    costs, held = [5] * 8, [{i // 2: 3, (i // 2 + 1) % 4: 1} for i in range(8)]
    assert assign_roots(costs, held, 4).root == (0, 0, 1, 1, 2, 2, 3, 3)
    assert assign_roots([10] * 4, [{0: 2, 1: 1}] * 4, 4).balance == 1.0, "but not at the cost of balance"
    mixed = [*[{0: 1}] * 3, *[{1: 1, 2: 1}] * 5]
    assert assign_roots([10] * 8, mixed, 4).balance == 1.0, "whole matrices move too, where others do and it is faster"
    assert assign_roots([10] * 4, [{0: 1}] * 4, 4).root == (0, 0, 0, 0), "where all are whole, nothing is sent"


def test_flops_match_the_matrix_products_by_hand() -> None:
    # Two products with the short side squared, s*s*l: with X^T and with X. One product A A: s^3. Each term has two operations.
    assert flops(3, 7, 5) == 5 * (2 * 3 * 3 * 7 + 2 * 3 * 3 * 3 + 2 * 3 * 3 * 7)
    assert flops(7, 3, 1) == flops(3, 7, 1)


def test_random_cuts_include_empty_shards_and_mid_row_cuts() -> None:
    cases = random_cases(4, 0)
    assert any(0 in c.counts for c in cases) and any(c.dims == 2 and any(n % c.shape[1] for n in c.counts) for c in cases)
