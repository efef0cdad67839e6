"""Mixtures: exact shares at every position, each source in its own epochs, resume from one integer, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.sources import VOCAB, keys, random_rows, train_tokenizer, write_jsonl, write_parquet
from vescale_ray.config import parse_config
from vescale_ray.data.block_dataset import BlockDataset
from vescale_ray.data.dataset import Dataset
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.data.mixture import Mixture, MixtureOrder
from vescale_ray.data.order.block_order import BlockOrder
from vescale_ray.data.order.shares import LONGEST, Shares
from vescale_ray.data.order.stream import SampleStream
from vescale_ray.errors import BadInput

IDS = pa.list_(pa.int32())
weights_of = st.lists(st.one_of(st.integers(1, 40), st.decimals("0.01", 1, places=2).map(float)), min_size=1, max_size=9)


def mixture(sources: list[dict[str, Any]], least: int = 64, **changes: Any) -> Mixture:
    made = load_dataset(keys(None, mixture=sources, **changes), least=least)
    assert isinstance(made, Mixture)
    return made


def refused(sources: list[dict[str, Any]], **changes: Any) -> str:
    with pytest.raises(BadInput) as caught:
        mixture(sources, **changes)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    return text


@pytest.fixture
def three(tmp_path: Path) -> list[dict[str, Any]]:
    """Sources of about 800, 150 and 30 samples. Each token tells its source: it is below 100, 200 or 300."""
    rng, found = np.random.default_rng(0), []
    for number, (count, weight) in enumerate([(400, 0.5), (80, 0.3), (15, 0.2)]):
        rows = pa.array([(rng.integers(0, 100, 17) + 100 * number).tolist() for _ in range(count)], IDS)
        found.append({"corpus": str(write_parquet(tmp_path / f"{number}.parquet", rows, 20)), "weight": weight})
    return found


@settings(max_examples=80, deadline=None)
@given(weights=weights_of, far=st.integers(0, 2**50))
def test_shares_are_within_one_sample_at_every_prefix(weights: list[float], far: int) -> None:
    shares = Shares(weights)
    first = shares.sources(0, min(shares.period, 3000))
    prefix = np.cumsum(first[:, None] == np.arange(len(weights)), axis=0)
    due = np.arange(1, len(first) + 1)[:, None] * (shares.counts / shares.period)
    assert np.abs(prefix - due).max() < 1
    for position in (far, far + 1, shares.period, 7 * shares.period - 1):
        taken = shares.taken(position)
        assert sum(taken) == position
        assert all(abs(n * shares.period - position * int(w)) < shares.period for n, w in zip(taken, shares.counts, strict=True))
        after, source = shares.taken(position + 1), int(shares.sources(position, 1)[0])
        assert [b - a for a, b in zip(taken, after, strict=True)] == [int(i == source) for i in range(len(weights))]


def test_the_period_is_the_smallest_that_the_weights_allow() -> None:
    assert Shares([0.7, 0.3]).counts.tolist() == Shares([70, 30]).counts.tolist() == Shares([2.1, 0.9]).counts.tolist() == [7, 3]
    assert Shares([5.0]).counts.tolist() == [1]
    rough = Shares([1 / 3, 2 / 3, 123456789e-9])
    assert rough.period == LONGEST
    assert np.abs(rough.counts / LONGEST - np.array([1 / 3, 2 / 3, 123456789e-9]) / (1 + 123456789e-9)).max() < 1 / LONGEST


def test_the_sequence_is_pinned_to_that_of_earlier_versions() -> None:
    """A changed sequence would make resumed runs repeat and lose samples."""
    assert Shares([0.5, 0.3, 0.2]).sources(0, 20).tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2] * 2
    assert Shares([1, 1, 1, 1]).sources(2, 5).tolist() == [2, 3, 0, 1, 2]
    assert Shares([97, 2, 1]).sources(0, 100).nonzero()[0].tolist() == [33, 66, 99]


def test_a_million_positions_take_each_source_in_permutations() -> None:
    total, counts = 1_000_000, (300_000, 40_000, 2_000)
    rng = np.random.default_rng(1)
    orders: list[Any] = [SampleStream(counts[0], 5)]
    for count in counts[1:]:
        samples = rng.integers(1, count // 50, 100)
        samples[-1] += max(0, count - samples.sum())
        orders.append(BlockOrder(samples, 6, 16))
    sizes = [order.num_samples for order in orders]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    shares = Shares([0.62, 0.35, 0.03])
    order = MixtureOrder(orders, starts, shares)
    ids = np.concatenate([order.ids(at, min(1 << 18, total - at)) for at in range(0, total, 1 << 18)])
    source = np.searchsorted(starts, ids, side="right") - 1
    for number, size in enumerate(sizes):
        mine = ids[source == number] - starts[number]
        whole = mine[: len(mine) // size * size].reshape(-1, size)
        assert len(whole) >= (2, 8, 14)[number]
        assert (np.sort(whole, axis=1) == np.arange(size)).all()
        rest = mine[whole.size :]
        assert len(np.unique(rest)) == len(rest)
        seen = np.cumsum(source == number)
        for prefix in rng.integers(1, total, 1000).tolist():
            assert abs(int(seen[prefix - 1]) * 100 - prefix * (62, 35, 3)[number]) < 100
    for at in rng.integers(0, total - 1000, 20).tolist():
        assert (MixtureOrder(orders, starts, Shares([0.62, 0.35, 0.03])).ids(at, 1000) == ids[at : at + 1000]).all()


def _sequence(made: Dataset, start: int, counts: list[int]) -> torch.Tensor:
    order, parts = made.order(3), []
    for count in counts:
        made.read_ahead(order, start)
        parts.append(made.batch(order.ids(start, count))[0])
        start += count
    return torch.cat(parts)


def test_batches_are_of_their_sources_and_resume_exactly(three: list[dict[str, Any]]) -> None:
    made = mixture(three)
    sizes = [source.num_samples for source in made.sources]
    whole = _sequence(made, 0, [10] * 60)
    sources = whole[:, 0] // 100
    assert (whole // 100 == sources[:, None]).all(), "a sample is of one source"
    assert torch.bincount(sources).tolist() == [300, 180, 120]
    assert sources.tolist() == made.shares.sources(0, 600).tolist()
    for number, size in enumerate(sizes):
        mine = whole[sources == number]
        assert len(set(map(tuple, mine[:size].tolist()))) == min(len(mine), size), "an epoch of a source repeats nothing"
        if len(mine) >= 2 * size:
            assert sorted(mine[:size].tolist()) == sorted(mine[size : 2 * size].tolist())
            assert mine[:size].tolist() != mine[size : 2 * size].tolist()
    assert 120 > 2 * sizes[2], "the small source repeats"
    rng = np.random.default_rng(2)
    for at in rng.integers(0, 500, 20).tolist():
        counts = rng.integers(1, 30, 5).tolist()
        counts = counts[: int(np.searchsorted(np.cumsum(counts), 600 - at)) or 1]
        again = _sequence(mixture(three), at, counts)
        assert torch.equal(again, whole[at : at + len(again)])


def test_held_out_samples_of_all_sources_are_never_trained(three: list[dict[str, Any]]) -> None:
    made = mixture(three, heldout=0.25)
    held, _ = made.heldout_batch(range(made.heldout_samples))
    trained, _ = made.batch(range(made.num_samples))
    assert len(held) == made.heldout_samples and set((held[:, 0] // 100).tolist()) == {0, 1, 2}
    assert not set(map(tuple, held.tolist())) & set(map(tuple, trained.tolist()))
    tokens, _ = made.heldout_batch([5, len(held) - 1, 5])
    assert torch.equal(tokens, held[[5, -1, 5]])
    assert made.batch([])[0].shape == (0, 8)
    for wrong in ([made.num_samples], [-1, 0]):
        with pytest.raises(IndexError, match="there are"):
            made.batch(wrong)


def test_read_ahead_reads_the_blocks_of_each_source(three: list[dict[str, Any]]) -> None:
    made = mixture(three, shuffle_blocks=1)
    order = made.order(3)
    made.read_ahead(order, 123)
    for number, (source, taken) in enumerate(zip(made.sources, made.shares.taken(123), strict=True)):
        assert isinstance(source, BlockDataset)
        own = order.orders[number]
        assert isinstance(own, BlockOrder)
        next_block = next(own.blocks(taken))
        source.reader.get(next_block)
        before = source.reader.read_bytes
        source.reader.get(next_block)
        assert source.reader.read_bytes == before and next_block in source.reader._expected


def test_local_text_and_files_of_text_mix_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 400)
    lines = write_jsonl(tmp_path / "b.jsonl", ["b" * 50] * 10)
    made = mixture([{"corpus": str(tmp_path / "a.txt"), "weight": 1}, {"corpus": str(lines), "weight": 3}], vocab=None)
    tokens = _sequence(made, 0, [40])
    assert made.vocab == 256 and (tokens == ord("a")).all(dim=1).sum() == 10 and (tokens == ord("b")).any(dim=1).sum() == 30


def test_sources_have_keys_of_their_own(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parquet = write_parquet(tmp_path / "a.parquet", pa.array(random_rows(rng, 90), IDS))
    rng.integers(0, VOCAB, 900).astype(np.uint32).tofile(tmp_path / "b.data")
    flat = {"corpus": str(tmp_path / "b.data"), "format": "bin", "dtype": "uint32"}
    made = mixture([{"corpus": str(parquet), "end_token": 7}, flat])
    assert [source.describe()["type"] for source in made.sources] == ["list<element: int32>", "uint32"]
    assert made.shares.counts.tolist() == [1, 1], "weights are equal unless given"


def test_a_source_without_weight_is_left_out(three: list[dict[str, Any]]) -> None:
    made = mixture([*three, {"corpus": "/no/such/file", "weight": 0}])
    assert len(made.sources) == 3


CHANGES = {
    "weights": lambda three: [{**three[0], "weight": 0.6}, *three[1:]],
    "order": lambda three: [three[1], three[0], three[2]],
    "fewer": lambda three: three[:2],
    "other": lambda three: [*three[:2], {**three[1], "weight": 0.2}],
    "end": lambda three: [{**three[0], "end_token": 3}, *three[1:]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_mixture_is_another_identity(change: str, three: list[dict[str, Any]]) -> None:
    before = mixture(three).identity()
    assert before == mixture([{**one, "weight": 10 * one["weight"]} for one in three]).identity(), "only the proportion counts"
    after = mixture(CHANGES[change](three)).identity()
    differing = {key for key in before if key in after and before[key] != after[key]}
    expected = {"end": "data.mixture.0.end_token", "other": "data.mixture.2.corpus"}.get(change, "data.mixture")
    assert expected in differing


def test_a_mixture_and_its_only_corpus_differ_in_identity(three: list[dict[str, Any]]) -> None:
    alone, mixed = load_dataset(keys(three[0]["corpus"]), least=64).identity(), mixture(three).identity()
    assert alone["data.corpus"] != mixed["data.corpus"]


def test_mistakes_in_a_mixture_name_the_source(three: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "empty.parquet").write_bytes(b"")
    assert "data.mixture.1: data.corpus" in refused([three[0], {"corpus": str(tmp_path / "empty.parquet")}])
    assert "empty.parquet is empty" in refused([three[0], {"corpus": str(tmp_path / "empty.parquet")}])
    assert refused([{"corpus": f"{tmp_path}/none.parquet"}]).startswith(f"data.mixture.0: data.corpus = {tmp_path}/none.parquet: no such")
    short = write_parquet(tmp_path / "short.parquet", pa.array([[1, 2]], IDS))
    assert "data.mixture.1: " in refused([three[0], {"corpus": str(short)}])
    assert "no column of that name" in refused([three[0], {**three[1], "column": "tokens"}])
    assert "weight 1e-07 is less than 0.000010 of the sum of weights" in refused([three[0], {**three[1], "weight": 1e-7}])


def test_bytes_and_token_ids_do_not_mix(three: list[dict[str, Any]], tmp_path: Path) -> None:
    lines = {"corpus": str(write_jsonl(tmp_path / "a.jsonl", ["some words"] * 20))}
    said = refused([three[0], lines])
    assert said.startswith("data.mixture.0 holds token ids, but data.mixture.1 holds bytes: ") and "set data.tokenizer" in said
    train_tokenizer(tmp_path / "tokenizer.json", ["some words"])
    made = mixture([three[0], lines], tokenizer=str(tmp_path / "tokenizer.json"), end_token="<|end|>")
    assert made.vocab == VOCAB


def test_memory_is_divided_by_need_and_weight(tmp_path: Path) -> None:
    rows = pa.array([np.zeros(100_000, np.int32)] * 20, IDS)
    large = [{"corpus": str(write_parquet(tmp_path / f"{n}.parquet", rows, 2)), "weight": w} for n, w in enumerate([3, 1])]
    said = refused(large, shuffle_blocks=2, readahead_mb=2)
    assert "data.readahead_mb = 2 is too little: two windows of data.shuffle_blocks = 2 blocks of each of 2 sources take 4 MB" in said
    made = mixture(large, shuffle_blocks=2, readahead_mb=6)
    most = [source.reader._most for source in made.sources if isinstance(source, BlockDataset)]
    assert 0 <= (6 << 20) - sum(most) <= 2
    assert most[0] - 1_600_000 == pytest.approx(3 * (most[1] - 1_600_000), rel=1e-4)


def test_a_mixture_survives_the_way_through_yaml_and_json(three: list[dict[str, Any]]) -> None:
    config = parse_config({"data": {"mixture": three, "vocab": VOCAB, "eval": {"wiki": {"corpus": "a.txt"}}}})
    assert parse_config(config.model_dump(mode="json")) == config
