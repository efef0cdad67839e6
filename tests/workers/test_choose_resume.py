"""The choice of the state from which survivors resume: a pure decision over the states that they report."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ray.workers.resharding.held_state import HeldState, choose_resume


def _held(world: int, step: int, generation: int = 1, *, incomplete: dict[int, set[int]] | None = None) -> dict[str, list[HeldState]]:
    """Held states after exchange ``step``: rank r is worker "r" and holds the shards of r and r - 1.

    ``incomplete`` maps a rank to the shards of step + 1 that it holds.
    """
    held = {}
    for rank in range(world):
        held_states = [HeldState(generation, world, step, tuple(sorted({rank, (rank - 1) % world})))]
        if incomplete and rank in incomplete:
            held_states.append(HeldState(generation, world, step + 1, tuple(sorted(incomplete[rank]))))
        held[str(rank)] = held_states
    return held


def test_single_death_resumes_at_last_copied_step_from_buddy() -> None:
    for world in range(2, 7):
        for dead in range(world):
            held = _held(world, step=9)
            del held[str(dead)]
            resume = choose_resume(held, prefer=held)
            assert resume is not None and (resume.step, resume.world) == (9, world)
            assert resume.suppliers[dead] == str((dead + 1) % world)


def test_two_deaths_are_survived_unless_they_were_neighbours() -> None:
    for world in range(3, 7):
        for a, b in itertools.combinations(range(world), 2):
            held = _held(world, step=4)
            del held[str(a)], held[str(b)]
            neighbours = (a + 1) % world == b or (b + 1) % world == a
            assert (choose_resume(held) is None) == neighbours


def test_death_mid_exchange_resumes_new_step_only_if_complete() -> None:
    # Rank 1 dies in the exchange of step 10, but its bytes reached rank 2. Each other rank holds its own shards.
    held = _held(3, step=9, incomplete={0: {0}, 2: {1, 2}})
    del held["1"]
    resume = choose_resume(held)
    assert resume is not None and resume.step == 10
    # Rank 1's bytes did not arrive, so the run goes one step back.
    held = _held(3, step=9, incomplete={0: {0, 2}, 2: {2}})
    del held["1"]
    resume = choose_resume(held)
    assert resume is not None and resume.step == 9


def test_death_while_a_generation_is_filled_resumes_the_old_one() -> None:
    # Generation 1 (world 3) lost rank 0. Generation 2 (world 2) began, but its rank 1 (worker "2") died before all its shards had copies.
    held = {"1": [HeldState(1, 3, 7, (0, 1)), HeldState(2, 2, 7, (0,))], "3": [HeldState(1, 3, 7, (2,))]}
    resume = choose_resume(held)
    assert resume is not None and (resume.generation, resume.world, resume.step) == (1, 3, 7)


def test_later_of_two_generations_at_one_step_is_resumed() -> None:
    held = {"a": [HeldState(1, 2, 5, (0, 1)), HeldState(2, 1, 5, (0,))]}
    resume = choose_resume(held)
    assert resume is not None and resume.generation == 2


def test_leaver_supplies_only_shards_that_no_member_holds() -> None:
    held = _held(4, step=3)
    resume = choose_resume(held, prefer=["0", "1", "2"])  # worker 3 leaves; worker 0 holds its shards
    assert resume is not None and resume.workers == ("0", "1", "2") and resume.suppliers[3] == "0"
    parked = {str(rank): [HeldState(1, 4, 3, (rank,))] for rank in range(4)}  # no copies, so worker 3 must give its own shards
    resume = choose_resume(parked, prefer=["0", "1", "2"])
    assert resume is not None and resume.workers == ("0", "1", "2", "3")


def test_choose_resume_returns_none_without_held_state() -> None:
    assert choose_resume({}) is None
    assert choose_resume({"a": []}) is None


@settings(max_examples=300)
@given(st.data())
def test_chosen_step_is_the_newest_that_its_suppliers_cover(data: st.DataObject) -> None:
    workers = [f"w{i}" for i in range(data.draw(st.integers(1, 5)))]
    worlds = {1: data.draw(st.integers(1, 4)), 2: data.draw(st.integers(1, 4))}
    held_state = st.builds(
        lambda g, step, ranks: HeldState(g, worlds[g], step, tuple(sorted(r % worlds[g] for r in ranks))),
        st.sampled_from([1, 2]),
        st.integers(0, 3),
        st.sets(st.integers(0, 3), min_size=1),
    )
    held = {w: data.draw(st.lists(held_state, max_size=4)) for w in workers}
    resume = choose_resume(held, prefer=workers[:2])
    have = {(h.generation, h.step, r) for held_states in held.values() for h in held_states for r in h.ranks}
    full = {(g, s) for g in worlds for s in range(4) if all((g, s, r) in have for r in range(worlds[g]))}
    if resume is None:
        assert not full
        return
    assert resume.step == max(s for _, s in full)
    assert set(resume.suppliers) == set(range(worlds[resume.generation]))
    for rank, worker in resume.suppliers.items():
        assert any(h.generation == resume.generation and h.step == resume.step and rank in h.ranks for h in held[worker])
