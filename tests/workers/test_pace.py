"""Detection of slow ranks, and distribution of the slots: pure functions, against brute force and simulated clusters."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from vescale_ray.workers.monitoring import pace
from vescale_ray.workers.monitoring.pace import Pace, View, deal, even, seconds, spread


def cluster(
    watch: Pace, steps: int, of: Callable[[int, int], float], *, per_round: float = 0.01, rest: float = 0.02
) -> tuple[list[View], list[float]]:
    """Simulate a cluster in lockstep in which rank r takes ``of(step, r)`` seconds for a slot.

    Returns the view after each step, and the seconds of each step.
    """
    views, walls = [], []
    for step in range(steps):
        world = len(watch.view.shares)
        per_slot = [of(step, rank) for rank in range(world)]
        rounds = max(watch.view.shares)
        loop = sum(max(p for p, n in zip(per_slot, watch.view.shares, strict=True) if n > turn) + per_round for turn in range(rounds))
        walls.append(loop + rest)
        views.append(watch.stepped(step, per_slot, loop, loop + rest))
    return views, walls


def noisy(seed: int, slow: dict[int, float] | None = None, *, sigma: float = 0.2, usual: float = 0.1) -> Callable[[int, int], float]:
    """A loaded machine. Each time differs, 3 % of them are 20 times as long, and for stretches all times are tripled."""
    rng = random.Random(seed)
    stretches = [rng.random() < 0.2 for _ in range(1000)]

    def of(step: int, rank: int) -> float:
        odd = 20.0 if rng.random() < 0.03 else 1.0
        return usual * (slow or {}).get(rank, 1.0) * rng.lognormvariate(0.0, sigma) * odd * (3.0 if stretches[step // 30] else 1.0)

    return of


def later(of: Callable[[int, int], float], began: int, slow: dict[int, float]) -> Callable[[int, int], float]:
    return lambda step, rank: of(step, rank) * (slow.get(rank, 1.0) if step >= began else 1.0)


def slow_ranks(view: View) -> list[int]:
    return [rank for rank, since in enumerate(view.since) if since >= 0]


def test_all_slots_are_dealt_by_round_and_then_by_rank() -> None:
    rng = random.Random(1)
    for _ in range(200):
        shares = [rng.randint(1, 5) for _ in range(rng.randint(1, 6))]
        table = deal(shares)
        assert [len(slots) for slots in table] == shares
        rounds = itertools.zip_longest(*table)
        assert [slot for turn in rounds for slot in turn if slot is not None] == list(range(sum(shares)))
    for slots in range(1, 9):
        for world in range(1, slots + 1):
            assert deal(even(slots, world)) == tuple(tuple(range(rank, slots, world)) for rank in range(world))


def test_spread_is_optimal_with_at_least_one_slot_per_rank() -> None:
    rng = random.Random(2)
    for _ in range(200):
        world = rng.randint(1, 4)
        slots = rng.randint(world, 9)
        per_slot = [rng.choice([0.5, 1.0, 1.0, 1.1, 2.0, 3.0]) for _ in range(world)]
        per_round = rng.choice([0.0, 0.1, 0.5])
        every = (s for s in itertools.product(range(1, slots + 1), repeat=world) if sum(s) == slots)
        got = spread(slots, per_slot, per_round)
        assert sum(got) == slots and min(got) >= 1
        assert seconds(got, per_slot, per_round) == pytest.approx(min(seconds(s, per_slot, per_round) for s in every))
    assert spread(6, [1.0, 1.0, 1.0], 0.1) == (2, 2, 2)


@pytest.mark.parametrize("factor", [1.6, 2.0, 5.0])
@pytest.mark.parametrize("world", [2, 3, 4, 16])
@pytest.mark.fault("W14")
def test_straggler_is_found_with_its_factor_and_first_slow_step(world: int, factor: float) -> None:
    began = 50
    for seed in range(3):
        late = later(noisy(seed, sigma=0.05), began, {1: factor})
        views, _ = cluster(Pace(2 * world, world, relieve=False), 100, late)
        assert all(slow_ranks(view) == [] for view in views[:began])
        found = next(step for step, view in enumerate(views) if slow_ranks(view))
        # A window has 12 steps, or the steps of 2 s, and three quarters must be slow. A check follows each new quarter of a window.
        assert found - began <= 20, f"{found - began} steps"
        assert slow_ranks(views[-1]) == [1] and views[-1].factors[1] == pytest.approx(factor, rel=0.15)
        assert abs(views[-1].since[1] - began) <= 3


def test_noise_outliers_and_shared_slowdowns_accuse_no_rank() -> None:
    for seed in range(25):
        world = 2 + seed % 5
        views, _ = cluster(Pace(2 * world, world, relieve=True), 400, noisy(seed))
        assert {(slow_ranks(view) == [], view.shares) for view in views} == {(True, even(2 * world, world))}, seed


def test_straggler_is_found_despite_noise() -> None:
    for seed in range(15):
        world = 2 + seed % 5
        views, _ = cluster(Pace(2 * world, world, relieve=False), 200, noisy(seed, {1: 2.0}))
        assert slow_ranks(views[-1]) == [1], seed


def test_slowness_must_last_seconds_not_only_steps() -> None:
    """The steps take 25 ms. A neighbour takes the processor for a second, so 40 steps are slow."""
    views, _ = cluster(Pace(4, 2, relieve=True), 400, lambda s, r: 0.015 if r == 1 and 200 <= s < 230 else 0.005, per_round=0.0, rest=0.005)
    assert all(slow_ranks(view) == [] for view in views)
    views, _ = cluster(Pace(4, 2, relieve=False), 400, lambda s, r: 0.015 if r == 1 and s >= 200 else 0.005, per_round=0.0, rest=0.005)
    assert slow_ranks(views[-1]) == [1]


def test_slightly_slow_rank_keeps_its_current_verdict() -> None:
    def of(step: int, rank: int) -> float:
        return 0.1 * (1.0 if rank != 2 else 1.3 if step < 100 else 1.6 if step < 200 else 1.3 if step < 300 else 1.1)

    views, _ = cluster(Pace(6, 3, relieve=False), 400, of)
    assert [slow_ranks(views[step]) for step in (99, 199, 299, 399)] == [[], [2], [2], []]


def test_at_most_half_of_the_ranks_can_be_slow() -> None:
    views, _ = cluster(Pace(6, 3, relieve=False), 60, lambda s, r: 0.1 if r == 0 else 0.2)
    assert slow_ranks(views[-1]) == []
    views, _ = cluster(Pace(8, 4, relieve=False), 60, lambda s, r: 0.1 if r < 2 else 0.2)
    assert slow_ranks(views[-1]) == [2, 3]


def test_ranks_that_are_not_measured_are_never_judged() -> None:
    for missing in (0.0, float("nan"), float("inf")):
        views, _ = cluster(Pace(6, 3, relieve=True), 60, lambda s, r: (missing, 0.1, 0.3)[r])  # noqa: B023 - called at once
        assert set(views) == {View((), (-1, -1, -1), (2, 2, 2))}


@pytest.mark.parametrize(
    ("slots", "slow", "best"), [(12, {1: 3.0}, (6, 1, 5)), (6, {1: 3.0}, (3, 1, 2)), (12, {0: 4.0, 3: 4.0}, (1, 5, 5, 1))]
)
def test_relief_shortens_the_step_optimally_and_is_taken_back(slots: int, slow: dict[int, float], best: tuple[int, ...]) -> None:
    world = len(best)
    views, walls = cluster(Pace(slots, world, relieve=True), 600, lambda s, r: 0.1 * (slow.get(r, 1.0) if s < 300 else 1.0))
    fair = even(slots, world)
    assert views[0].shares == fair and views[15].shares == best and views[299].shares == best
    assert [r for r in range(world) if views[299].since[r] >= 0] == sorted(slow)
    per_slot = [0.1 * slow.get(r, 1.0) for r in range(world)]
    assert walls[299] / walls[5] == pytest.approx((seconds(best, per_slot, 0.01) + 0.02) / (seconds(fair, per_slot, 0.01) + 0.02))
    assert views[-1].shares == fair and walls[-1] < walls[5] and slow_ranks(views[-1]) == []


def test_relief_requires_enough_gain_and_more_slots_than_ranks() -> None:
    for slots, factor in ((6, 1.5), (3, 4.0)):
        views, _ = cluster(Pace(slots, 3, relieve=True), 100, later(lambda s, r: 0.1, 0, {0: factor}))
        assert slow_ranks(views[-1]) == [0] and {view.shares for view in views} == {even(slots, 3)}


@pytest.mark.parametrize("period", [15, 60, 400])
def test_intermittent_straggler_moves_slots_ever_less_often(period: int) -> None:
    views, _ = cluster(Pace(12, 3, relieve=True), 3000, lambda s, r: 0.1 * (3.0 if r == 0 and s // period % 2 else 1.0))
    changes = [step for step, (a, b) in enumerate(itertools.pairwise(views)) if a.shares != b.shares]
    # Two windows pass before the second change. The pause then doubles each time, up to 64 windows.
    assert len(changes) <= 2 + 5 + 3000 // (pace.LONGEST * pace.LEAST_STEPS), changes
    assert all(after - before >= pace.PATIENCE * pace.LEAST_STEPS for before, after in itertools.pairwise(changes))


def test_equal_measurements_give_equal_views_on_all_ranks() -> None:
    one, other = (cluster(Pace(12, 3, relieve=True), 500, noisy(3, {1: 2.5}))[0] for _ in range(2))
    assert one == other and len({view.shares for view in one}) > 1


def test_straggler_is_found_among_a_thousand_ranks() -> None:
    rng = random.Random(0)
    watch = Pace(2048, 1024, relieve=True)
    rows: list[Sequence[float]] = [[rng.uniform(0.95, 1.05) * (3.0 if rank == 700 else 1.0) for rank in range(1024)] for _ in range(14)]
    for step, row in enumerate(rows):
        watch.stepped(step, row, 6.0, 6.5)
    assert slow_ranks(watch.view) == [700] and watch.view.shares[700] == 1 and sum(watch.view.shares) == 2048
