"""The order of samples: one permutation per epoch, addressed by position, with no other state."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ray.data.order.stream import SampleStream
from vescale_ray.errors import BadInput

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 255, 256, 257, 1000, 1021, 1024, 1025, 4096, 4097, 7919]
FIRST_OF_1000 = [855, 753, 303, 573, 206, 42, 227, 107]
FAR_OF_82766 = [26669, 24396, 46577, 46992]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_every_sample_comes_once_per_epoch(size: int, seed: int) -> None:
    stream = SampleStream(size, seed)
    for epoch in (0, 1, 5, 10**6):
        assert sorted(stream.ids(epoch * size, size).tolist()) == list(range(size))


@settings(max_examples=40)
@given(size=st.integers(1, 5000), seed=st.integers(0, 2**63), start=st.integers(0, 20000), counts=st.lists(st.integers(0, 100), max_size=6))
def test_reading_in_pieces_gives_the_sequence_of_one_read(size: int, seed: int, start: int, counts: list[int]) -> None:
    stream = SampleStream(size, seed)
    whole = stream.ids(start, sum(counts))
    pieces, at = [], start
    for count in counts:
        pieces.extend(SampleStream(size, seed).ids(at, count).tolist())  # a new object each time, so that no state is carried over
        at += count
    assert pieces == whole.tolist()


@settings(max_examples=40)
@given(size=st.integers(1, 300), seed=st.integers(0, 1000), used=st.integers(0, 2000))
def test_sample_counts_never_differ_by_more_than_one(size: int, seed: int, used: int) -> None:
    counts = Counter(SampleStream(size, seed).ids(0, used).tolist())
    assert max(counts.values(), default=0) - min((counts[i] for i in range(size)), default=0) <= 1


def test_one_position_far_away_costs_no_more_than_the_first() -> None:
    stream = SampleStream(10**12, 3)
    far = 10**17 + 7
    assert stream.ids(far, 3).tolist() == [stream.ids(far + i, 1)[0] for i in range(3)]
    assert ((0 <= stream.ids(far, 1000)) & (stream.ids(far, 1000) < 10**12)).all()


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    size = 1000
    stream = SampleStream(size, 0)
    epochs = [tuple(stream.ids(epoch * size, size).tolist()) for epoch in range(5)]
    seeds = [tuple(SampleStream(size, seed).ids(0, size).tolist()) for seed in range(5)]
    assert len({*epochs, *seeds}) == 9  # both contain epoch 0 of seed 0


def test_the_order_looks_random() -> None:
    size = 4096
    order = SampleStream(size, 0).ids(0, size).astype(float)
    expected = np.arange(size)
    assert abs(np.corrcoef(order, expected)[0, 1]) < 0.06  # 1/sqrt(n) is 0.016
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06
    # By chance about two of n neighbours stay neighbours.
    assert (np.abs(np.diff(order)) == 1).sum() < 12
    # A sample's place in one epoch does not predict its place in the next.
    second = SampleStream(size, 0).ids(size, size).astype(float)
    assert abs(np.corrcoef(np.argsort(order), np.argsort(second))[0, 1]) < 0.06


def test_every_order_of_three_samples_occurs_about_equally_often() -> None:
    counts = Counter(tuple(SampleStream(3, seed).ids(0, 3).tolist()) for seed in range(1200))
    assert len(counts) == 6
    assert all(130 < count < 280 for count in counts.values()), counts  # 200 expected, deviation 13


def test_order_is_pinned_to_that_of_earlier_versions() -> None:
    """A changed order would make resumed runs repeat and lose samples. A new order needs a new stream with a new name."""
    assert SampleStream(1000, 0).ids(0, 8).tolist() == FIRST_OF_1000
    assert SampleStream(82766, 7).ids(10**9, 4).tolist() == FAR_OF_82766


def test_epoch_changes_with_the_next_sample() -> None:
    stream = SampleStream(10, 0)
    assert [stream.epoch(n) for n in (0, 9, 10, 25)] == [0, 0, 1, 2]


def test_ids_are_int64_and_an_empty_request_is_empty() -> None:
    ids = SampleStream(10, 0).ids(3, 0)
    assert ids.dtype == np.int64 and ids.shape == (0,)


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, -1)])
def test_negative_positions_are_refused(start: int, count: int) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        SampleStream(10, 0).ids(start, count)


def test_a_stream_without_samples_is_bad_input() -> None:
    with pytest.raises(BadInput, match="too little text"):
        SampleStream(0, 0)
