"""The plan of a move, executed on numpy arrays: every wanted element arrives, and no byte moves without need."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ray.workers.resharding import reshard, reshard_plan
from vescale_ray.workers.resharding.reshard import execute
from vescale_ray.workers.resharding.reshard_plan import ROUND_BYTES, Move, ReshardError, ReshardPlan
from vescale_ray.workers.resharding.shards import Span, strips_of

Tensors = list[tuple[str, str, tuple[int, ...], str]]

TENSORS: Tensors = [
    ("embed.weight", "param", (7, 5), "float32"),
    ("embed.weight", "exp_avg", (7, 5), "float32"),
    ("norm.weight", "param", (3,), "bfloat16"),
    ("scale", "param", (), "float32"),
    ("head.weight", "param", (4, 9), "bfloat16"),
    ("head.weight", "exp_avg_code", (4, 9), "uint8"),
    ("head.weight/exp_avg_scale", "state", (2, 3), "float32"),
]


ALIKE: Tensors = [
    *((name, kind, (7, 5), "float32") for name in ("embed.weight", "head.weight") for kind in ("param", "exp_avg", "exp_avg_sq")),
    ("norm.weight", "param", (3,), "bfloat16"),
    ("norm.weight", "exp_avg", (3,), "float32"),
]
"""Tensors whose states have the parameters' shapes."""


def plan(sources: Sequence[Sequence[Span]], wanted: Sequence[Sequence[Span]], *, round_bytes: int = ROUND_BYTES) -> ReshardPlan:
    return reshard_plan.plan([strips_of(spans) for spans in sources], [strips_of(spans) for spans in wanted], round_bytes=round_bytes)


def _even(tensors: Tensors, world: int) -> list[list[Span]]:
    """The tensors, laid end to end and cut into equal parts."""
    total = sum(math.prod(shape) for _, _, shape, _ in tensors)
    each = -(-total // world)
    return _cut(tensors, [min(total, each * rank) for rank in range(1, world)])


def _cut(tensors: Tensors, cuts: Sequence[int]) -> list[list[Span]]:
    """The tensors, laid end to end and cut at the given positions: a layout of ``len(cuts) + 1`` ranks."""
    layout: list[list[Span]] = []
    total = sum(math.prod(shape) for _, _, shape, _ in tensors)
    for begin, end in zip([0, *cuts], [*cuts, total], strict=True):
        base, spans = 0, []
        for name, kind, shape, dtype in tensors:
            numel = math.prod(shape)
            start, stop = max(0, begin - base), min(numel, end - base)
            spans.append(Span(name, kind, shape, dtype, *((start, stop) if stop > start else (0, 0))))
            base += numel
        layout.append(spans)
    return layout


def _cut_alike(tensors: Tensors, cuts: Sequence[int]) -> list[list[Span]]:
    """Like :func:`_cut`, but with cuts at the same elements of all kinds of a tensor."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for name, kind, _, dtype in tensors:
        kinds.setdefault(name, []).append((kind, dtype))
    params = [tensor for tensor in tensors if tensor[1] == "param"]
    whole = sum(math.prod(shape) for _, _, shape, _ in params)
    return [
        [span._replace(kind=kind, dtype=dtype) for span in spans for kind, dtype in kinds[span.name]]
        for spans in _cut(params, [min(cut, whole) for cut in cuts])
    ]


def _carry_out(planned: ReshardPlan, sources: Sequence[Sequence[Span]], wanted: Sequence[Sequence[Span]]) -> list[list[np.ndarray]]:
    """Execute the plan. Element i of a tensor has the value i; unfilled elements are -1. Fails if an element is written twice."""
    have = [[np.arange(s.start, s.end) for s in spans] for spans in sources]
    got = [[np.full(s.numel, -1) for s in spans] for spans in wanted]
    for move in [*planned.local, *(m for moves in planned.rounds for m in moves)]:
        target = got[move.dst][move.dst_piece][move.dst_offset : move.dst_offset + move.numel]
        source = have[move.src][move.src_piece][move.src_offset : move.src_offset + move.numel]
        assert target.shape == source.shape == (move.numel,)
        assert (target == -1).all(), "an element is written twice"
        held, want = sources[move.src][move.src_piece], wanted[move.dst][move.dst_piece]
        assert (held.name, held.kind) == (want.name, want.kind)
        target[:] = source
    return got


def _bytes_not_at_home(sources: Sequence[Sequence[Span]], wanted: Sequence[Sequence[Span]]) -> int:
    size = {"float32": 4, "bfloat16": 2, "uint8": 1}
    total = 0
    for rank, spans in enumerate(wanted):
        own = {(s.name, s.kind, i) for s in (sources[rank] if rank < len(sources) else []) for i in range(s.start, s.end)}
        total += sum(size[s.dtype] for s in spans for i in range(s.start, s.end) if (s.name, s.kind, i) not in own)
    return total


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[list[Span]], list[list[Span]], int]:
    """Old layout of 1..5 ranks with random cuts, each rank's shards on one to three workers; new layout of 1..5 ranks."""
    tensors, cut = draw(st.sampled_from([(TENSORS, _cut), (ALIKE, _cut), (ALIKE, _cut_alike)]))
    total = sum(math.prod(shape) for _, _, shape, _ in tensors)
    cuts = st.lists(st.integers(0, total), max_size=4).map(sorted)
    old, new = cut(tensors, draw(cuts)), cut(tensors, draw(cuts))
    workers = draw(st.integers(max(1, len(new)), 7))
    sources: list[list[Span]] = [[] for _ in range(workers)]
    for shard in old:
        for worker in draw(st.sets(st.integers(0, workers - 1), min_size=1, max_size=3)):
            sources[worker].extend(shard)
    wanted = new + [[] for _ in range(workers - len(new))]
    return sources, wanted, draw(st.sampled_from([16, 64, 1 << 20]))


@settings(max_examples=150)
@given(situations())
def test_plan_delivers_each_element_and_moves_only_missing_ones(
    situation: tuple[list[list[Span]], list[list[Span]], int],
) -> None:
    sources, wanted, limit = situation
    planned = plan(sources, wanted, round_bytes=limit)
    for spans, arrays in zip(wanted, _carry_out(planned, sources, wanted), strict=True):
        for span, array in zip(spans, arrays, strict=True):
            np.testing.assert_array_equal(array, np.arange(span.start, span.end))
    assert planned.moved_bytes == planned.lower_bound == _bytes_not_at_home(sources, wanted)
    for moves in planned.rounds:
        assert all(move.src != move.dst for move in moves)
        for rank in range(len(sources)):
            assert sum(m.nbytes for m in moves if m.src == rank) <= limit
            assert sum(m.nbytes for m in moves if m.dst == rank) <= limit


def _waits(planned: ReshardPlan, ranks: int) -> tuple[float, float]:
    """Time of the whole move, and the longest wait of a rank for its partners within a round, both in units of a full round.

    Each idle round before is subtracted from a wait. A rank is busy in a round for as long as its sends or its receives take.
    """
    limit = max(sum(m.nbytes for m in moves if m.dst == r) for moves in planned.rounds for r in range(ranks))
    free, idle, longest = [0.0] * ranks, [0] * ranks, 0.0
    for moves in planned.rounds:
        partners: dict[int, set[int]] = {}
        busy: dict[int, list[int]] = {}
        for move in moves:
            for one, other, way in ((move.src, move.dst, 0), (move.dst, move.src, 1)):
                partners.setdefault(one, set()).add(other)
                busy.setdefault(one, [0, 0])[way] += move.nbytes
        ends = {}
        for rank, others in partners.items():
            starts = max(free[other] for other in others)
            longest = max(longest, starts - free[rank] - idle[rank])
            ends[rank] = max(free[rank], starts) + max(busy[rank]) / limit
        idle = [0 if rank in ends else idle[rank] + 1 for rank in range(ranks)]
        for rank, end in ends.items():
            free[rank] = end
    return max(free), longest


@pytest.mark.parametrize("lost", [(), (9,), (0,), (5, 6), (20, 21, 22, 23)], ids=["grows", "one lost", "the first lost", "two", "a node"])
def test_ranks_transfer_in_parallel_in_moves_of_many_rounds(lost: tuple[int, ...]) -> None:
    """Receivers used to have their rounds one after another: 900 rounds with 64 ranks of 13 GB each.

    A rank waited minutes for others within one round. Its collective timed out again and again, until the run failed.
    """
    old, rounds = 24, 40
    kinds = ("param", "exp_avg", "exp_avg_sq")
    tensors: Tensors = [(f"layers.{k}.weight", kind, (400, 100), "float32") for k in range(48) for kind in kinds]
    whole = 48 * 40_000
    cuts = [whole * k // old for k in range(1, old)]
    held = _cut_alike(tensors, cuts)
    living = [rank for rank in range(old) if rank not in lost]
    # Each rank has the copy of the rank four before it, which is on another node.
    sources = [held[rank] + held[rank - 4] for rank in living]
    new = len(living) if lost else old + 6
    wanted = _cut_alike(tensors, [whole * k // new for k in range(1, new)])
    sources += [[] for _ in range(new - len(living))]
    limit = whole * 12 // old // rounds
    planned = plan(sources, wanted, round_bytes=limit)
    assert planned.moved_bytes == planned.lower_bound
    busiest = max(
        max(sum(m.nbytes for moves in planned.rounds for m in moves if side(m) == rank) for rank in range(new))
        for side in (lambda m: m.src, lambda m: m.dst)
    )
    took, waited = _waits(planned, new)
    print(f"{len(planned.rounds)} rounds of {busiest / limit:.1f}, over after {took:.1f}, the longest wait {waited:.1f}", end=" ")
    assert 50 < busiest / limit <= len(planned.rounds) < 1.1 * busiest / limit
    assert took < 1.1 * busiest / limit and waited < 2.0


def test_rank_idle_in_a_round_waits_a_bound_longer_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle rank comes before the others, which have the time limit of a collective for each round."""
    rounds = [(0, 1), (1, 0), (0, 2), (0, 1), (0, 1), (1, 2), (2, 0)]
    moves = tuple((Move(src, dst, 0, 0, 0, 0, 1, "float32"),) for src, dst in rounds)
    waited: dict[int, list[int]] = {}
    told = b'{"states": [[1, 3, 5]], "have": [], "want": [], "scalars": null}\n'
    monkeypatch.setattr(reshard, "all_gather_bytes", lambda payload, group: [told] * 3)
    monkeypatch.setattr(reshard, "plan", lambda *about, **how: ReshardPlan(moves, (), 0, 0))
    for me in range(3):
        monkeypatch.setattr(reshard, "_my_index", lambda group, me=me: me)
        seen = waited.setdefault(me, [])
        monkeypatch.setattr(reshard, "_exchange", lambda *about, rounds, seen=seen: seen.append(rounds))
        execute([], None)
    assert waited == {0: [1, 1, 1, 1, 1, 1, 2], 1: [1, 1, 1, 2, 1, 1, 1], 2: [1, 2, 3, 1, 2, 3, 1]}


def test_tensors_with_equal_cuts_are_planned_together() -> None:
    old, new = _cut_alike(ALIKE, [40]), _cut_alike(ALIKE, [20, 50])
    assert [len(strips_of(spans)) for spans in old] == [3, 3] and [len(spans) for spans in old] == [8, 8]
    planned = plan([*old, []], new)
    apart = plan([*old, []], [[s._replace(dtype=s.dtype) for s in reversed(spans)] for spans in new])  # the other kinds one after another
    assert planned.moved_bytes == apart.moved_bytes == planned.lower_bound == apart.lower_bound


def test_unchanged_layout_moves_nothing() -> None:
    layout = _even(TENSORS, 3)
    planned = plan(layout, layout)
    assert planned.moved_bytes == 0 and planned.rounds == ()


def test_surviving_buddy_of_a_world_of_two_moves_nothing() -> None:
    old = _even(TENSORS, 2)
    planned = plan([old[0] + old[1]], _even(TENSORS, 1))
    assert planned.moved_bytes == 0


def test_a_lost_shard_is_named() -> None:
    old = _even(TENSORS, 3)
    with pytest.raises(ReshardError, match=r"param of embed\.weight: element 0 of 35 is held by no worker"):
        plan([[], old[1], old[2]], _even(TENSORS, 3))


def test_replicas_get_equal_parts_and_gaps_are_still_found() -> None:
    layout = _even(TENSORS, 2)
    planned = plan([layout[0], layout[1], [], []], [*layout, *layout])
    assert planned.moved_bytes == planned.lower_bound == sum(span.nbytes for part in layout for span in part)
    assert {(move.src, move.dst) for moves in planned.rounds for move in moves} == {(0, 2), (1, 3)}
    with pytest.raises(ReshardError, match="the new layout ends at element"):
        plan([layout[0], layout[1]], [layout[0], layout[0]])


def test_a_layout_that_leaves_out_or_repeats_elements_is_refused() -> None:
    short = [[Span("w", "param", (4, 4), "float32", 0, 7)], [Span("w", "param", (4, 4), "float32", 8, 16)]]
    with pytest.raises(ReshardError, match="leaves out or repeats elements around 7"):
        plan(short, short)
    twice = [[Span("w", "param", (4, 4), "float32", 0, 9)], [Span("w", "param", (4, 4), "float32", 8, 16)]]
    with pytest.raises(ReshardError, match="leaves out or repeats"):
        plan(twice, twice)
    unfinished = [[Span("w", "param", (4, 4), "float32", 0, 15)]]
    with pytest.raises(ReshardError, match="ends at element 15 of 16"):
        plan(unfinished, unfinished)


def test_the_state_of_another_model_or_optimizer_is_refused() -> None:
    here = [[Span("w", "param", (4, 4), "float32", 0, 16)]]
    with pytest.raises(ReshardError, match="exp_avg of w.*the model or optimizer has changed"):
        plan([[Span("w", "exp_avg", (4, 4), "float32", 0, 16)]], here)
    with pytest.raises(ReshardError, match="held as .*2, 8.*wanted as"):
        plan([[Span("w", "param", (2, 8), "float32", 0, 16)]], here)
    with pytest.raises(ReshardError, match="held as .*bfloat16, wanted as .*float32: the model or optimizer has changed"):
        plan([[Span("w", "param", (4, 4), "bfloat16", 0, 16)]], here)
    both = [[*here[0], Span("w", "exp_avg", (4, 4), "float32", 0, 16)]]
    with pytest.raises(ReshardError, match="exp_avg of w, the new one does not: the model or optimizer has changed"):
        plan(both, here)
    with pytest.raises(ReshardError, match="exp_avg of w: element 0 of 16 is held by no worker"):
        plan(here, both)
