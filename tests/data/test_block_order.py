"""The order of samples in blocks: a permutation per epoch, exact at any position, with few blocks at a time."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ray.data.order.block_order import BlockOrder
from vescale_ray.errors import BadInput

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def owners(samples: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The block of each id."""
    return np.repeat(np.arange(len(samples)), samples)[ids]


@settings(max_examples=60)
@given(samples=sizes, seed=st.integers(0, 2**63), window=st.integers(1, 9), epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(samples: list[int], seed: int, window: int, epoch: int) -> None:
    order, total = BlockOrder(np.array(samples), seed, window), sum(samples)
    assert sorted(order.ids(epoch * total, total).tolist()) == list(range(total))


def test_a_million_samples_are_a_permutation() -> None:
    samples = np.random.default_rng(0).integers(1, 1900, 1_000)
    order = BlockOrder(samples, 3, 16)
    total = order.num_samples
    assert total == samples.sum() > 900_000
    ids = np.concatenate([order.ids(start, min(1 << 17, total - start)) for start in range(0, total, 1 << 17)])
    assert (np.bincount(ids, minlength=total) == 1).all()


@settings(max_examples=60)
@given(samples=sizes, seed=st.integers(0, 1000), window=st.integers(1, 9), start=st.integers(0, 3000), counts=st.lists(st.integers(0, 90)))
def test_a_resume_at_any_position_continues_the_sequence(samples: list[int], seed: int, window: int, start: int, counts: list[int]) -> None:
    whole = BlockOrder(np.array(samples), seed, window).ids(start, sum(counts))
    pieces, at = [], start
    for count in counts:
        pieces.extend(BlockOrder(np.array(samples), seed, window).ids(at, count).tolist())
        at += count
    assert pieces == whole.tolist()


@settings(max_examples=60)
@given(samples=sizes, seed=st.integers(0, 1000), window=st.integers(1, 9), start=st.integers(0, 3000))
def test_blocks_are_announced_window_by_window(samples: list[int], seed: int, window: int, start: int) -> None:
    """The announced blocks are windows of an epoch; the samples from the position on use them one window after another."""
    order, counts = BlockOrder(np.array(samples), seed, window), np.array(samples)
    offset = start % order.num_samples
    whole = list(islice(order.blocks(start - offset), len(samples)))
    assert sorted(whole) == list(range(len(samples))), "an epoch announces each block once"
    used, at = owners(counts, order.ids(start - offset, order.num_samples)), 0
    for first in range(0, len(whole), window):
        inside = whole[first : first + window]
        size = int(counts[inside].sum())
        assert set(used[at : at + size].tolist()) == set(inside)
        if at <= offset < at + size:
            assert list(islice(order.blocks(start), len(samples) - first)) == whole[first:]
            assert order.stays_until(start) == start - offset + at + size
        at += size


def test_a_window_holds_few_blocks_and_mixes_them() -> None:
    samples = np.full(100, 50)
    order = BlockOrder(samples, 0, 8)
    blocks = owners(samples, order.ids(0, 5000))
    for window in range(12):
        inside = blocks[window * 400 : (window + 1) * 400]
        assert len(set(inside.tolist())) == 8
        assert np.abs(np.diff(inside.astype(int))).mean() > 0.5
        assert len(set(inside[:40].tolist())) > 4
    assert sorted(set(blocks[4800:].tolist())) == sorted(set(range(100)) - set(blocks[:4800].tolist()))


def test_epochs_and_seeds_have_their_own_order() -> None:
    samples = np.full(10, 10)
    epochs = [tuple(BlockOrder(samples, 0, 3).ids(epoch * 100, 100).tolist()) for epoch in range(4)]
    seeds = [tuple(BlockOrder(samples, seed, 3).ids(0, 100).tolist()) for seed in range(4)]
    windows = [tuple(BlockOrder(samples, 0, window).ids(0, 100).tolist()) for window in (1, 2, 10)]
    assert len({*epochs, *seeds, *windows}) == 10


def test_wrong_orders_are_refused() -> None:
    with pytest.raises(BadInput, match="0 samples"):
        BlockOrder(np.array([], dtype=np.int64), 0, 1)
    with pytest.raises(BadInput, match="seed = -1"):
        BlockOrder(np.array([1]), -1, 1)
    with pytest.raises(ValueError, match="at least 1"):
        BlockOrder(np.array([1, 0]), 0, 1)
    with pytest.raises(ValueError, match="at least 0"):
        BlockOrder(np.array([1]), 0, 1).ids(-1, 1)
