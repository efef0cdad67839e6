"""Data sets that are objects of the caller: their samples, their order, and what is wrong with an object."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vescale_ray.config import DataSection
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.data.given_dataset import GivenDataset
from vescale_ray.errors import BadInput

KEYS: Any = DataSection(seq_len=4, vocab=100, heldout=0.25)
WIDE = [list(range(i, i + 5)) for i in range(20)]


def test_sample_predicts_next_tokens_and_last_ones_are_held_out() -> None:
    data = load_dataset(KEYS, given=WIDE)
    tokens, targets = data.batch([3, 0])
    assert tokens.tolist() == [[3, 4, 5, 6], [0, 1, 2, 3]] and targets.tolist() == [[4, 5, 6, 7], [1, 2, 3, 4]]
    assert (data.num_samples, data.heldout_samples, data.vocab, data.masked) == (15, 5, 100, False)
    assert data.heldout_batch([0])[0].tolist() == [[15, 16, 17, 18]]
    assert sorted(data.order(1).ids(0, 15).tolist()) == list(range(15)), "an epoch is a permutation"
    for ids in ([15], [-1]):
        with pytest.raises(IndexError):
            data.batch(ids)


@pytest.mark.parametrize("kind", [tuple, list, np.asarray, torch.tensor], ids=["tuple", "list", "array", "tensor"])
def test_each_form_of_a_sample_gives_the_same_batch_and_identity(kind: Any) -> None:
    expected, data = load_dataset(KEYS, given=WIDE), load_dataset(KEYS, given=[kind(one) for one in WIDE])
    assert all(torch.equal(one, other) for one, other in zip(data.batch([2, 7]), expected.batch([2, 7]), strict=True))
    assert data.identity() == expected.identity()


def test_pairs_have_targets_that_do_not_count() -> None:
    pairs = [(np.arange(4) + i, torch.tensor([-100, -100, i, i + 1])) for i in range(8)]
    data = load_dataset(KEYS, given=pairs)
    tokens, targets = data.batch([5])
    assert data.masked and tokens.tolist() == [[5, 6, 7, 8]] and targets.tolist() == [[-100, -100, 5, 6]]


@pytest.mark.parametrize("number", [0, 9, 19])
def test_identity_tells_other_samples_apart(number: int) -> None:
    other = [list(one) for one in WIDE]
    other[number][-1] = 99
    assert load_dataset(KEYS, given=other).identity() != load_dataset(KEYS, given=WIDE).identity()
    assert load_dataset(KEYS, given=WIDE[:-1]).identity() != load_dataset(KEYS, given=WIDE).identity()


def test_data_set_of_the_product_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcdefghij" * 10)
    corpus = load_dataset(DataSection(corpus=str(tmp_path / "text.txt"), seq_len=4))
    assert load_dataset(KEYS, given=corpus) is corpus
    copied = pickle.loads(pickle.dumps(corpus))
    assert copied.identity() == corpus.identity()
    with pytest.raises(BadInput, match=r"its samples have 4 tokens; set data.seq_len to 4, or give samples of 8"):
        load_dataset(KEYS.model_copy(update={"seq_len": 8}), given=corpus)


class Broken(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return {}[index]


class Unreachable(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise OSError("the storage is away")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (iter(WIDE), "a list_iterator can't be indexed; give an object with __len__ and __getitem__"),
        ([], "a list of 0 samples gives no training sample"),
        ([[1, 2, 3]], r"dataset\[0\] is int64 of shape \(3,\), not a list of integer token ids; give data.seq_len \+ 1 = 5 of them"),
        ([[0.5] * 5], r"dataset\[0\] is float64 of shape \(5,\)"),
        ([[1, [2]]], r"dataset\[0\] is float64 of shape \(0,\)"),
        (["words"], r"dataset\[0\] is a str, not a list of integer token ids"),
        ([{"input_ids": [1] * 5}], r"dataset\[0\] is a dict, not a list of integer token ids"),
        ("a.jsonl", r"dataset: a.jsonl is a path; name files in data.corpus, and leave dataset out"),
        ([*WIDE, [1, 2, 3, 4, 100]], r"dataset\[20\]: token 100 is not in 0..99; set data.vocab"),
        ([*WIDE, [1, 2, -100, 4, 5]], r"dataset\[20\]: token -100 is not in 0..99"),
        ([*WIDE, ([1] * 4, [2] * 4)], r"dataset\[20\]: only some samples are pairs"),
        ([([1] * 4, [2] * 3)], r"dataset\[0\] is int64 of shape \(3,\), not a list of integer token ids; give 4 of them"),
        (Broken(WIDE), r"dataset\[0\] raises KeyError: 0"),
    ],
)
def test_object_that_can_not_be_used_is_refused(given: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words) as refused:
        GivenDataset(given, KEYS.model_copy(update={"heldout": 0.0}))
    assert "\n" not in str(refused.value)


def test_error_of_the_storage_stays_one() -> None:
    with pytest.raises(OSError, match="the storage is away"):
        GivenDataset(Unreachable(WIDE), KEYS)


def test_number_of_token_ids_comes_from_configuration_or_object() -> None:
    class Named(list[Any]):
        vocab = np.int64(30)

    keys = KEYS.model_copy(update={"vocab": None})
    assert load_dataset(keys, given=Named(WIDE)).vocab == 30
    with pytest.raises(BadInput, match="data.vocab = null: a list does not state its number of token ids; set data.vocab"):
        load_dataset(keys, given=WIDE)
