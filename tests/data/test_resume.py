"""Resume from one integer: each kind of data set gives the same samples at any position, in any process and for any number of workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.data.chats import said, write_folder, write_rows
from tests.data.sources import VOCAB, keys, random_rows, random_texts, train_tokenizer, write_ipc, write_jsonl, write_parquet
from vescale_ray.config import parse_config
from vescale_ray.controller.driver import preflight
from vescale_ray.data.dataset import Dataset, check_same_data
from vescale_ray.data.dataset_loading import load_dataset
from vescale_ray.data.mixture import MixtureOrder
from vescale_ray.data.order.block_order import BlockOrder
from vescale_ray.data.order.shares import Shares
from vescale_ray.data.order.stream import SampleStream
from vescale_ray.errors import BadInput
from vescale_ray.workers.monitoring.pace import deal

IDS, SLOTS, SLOT_BATCH = pa.list_(pa.int32()), 6, 3


def tokens(folder: Path, kind: str) -> dict[str, Any]:
    rows = random_rows(np.random.default_rng(0), 150)
    flat = np.array(sum(rows, []), dtype=np.uint16)
    match kind:
        case "parquet":
            path = write_parquet(folder / "a.parquet", pa.array(rows, IDS), 20)
        case "arrow":
            path = write_ipc(folder / "a.arrow", pa.array(rows, IDS), 20)
        case "npy":
            np.save(path := folder / "a.npy", flat)
        case _:
            flat.tofile(path := folder / "a.bin")
    return {"corpus": str(path)}


def text(folder: Path, kind: str) -> dict[str, Any]:
    texts = random_texts(np.random.default_rng(0), 150)
    if kind == "bytes":
        (folder / "a.txt").write_text("\n".join(texts))
        return {"corpus": str(folder / "a.txt"), "vocab": None}
    train_tokenizer(folder / "tokenizer.json", texts)
    given = {"tokenizer": str(folder / "tokenizer.json"), "end_token": "<|end|>", "vocab": None}
    if kind == "jsonl":
        return {**given, "corpus": str(write_jsonl(folder / "a.jsonl", texts))}
    return {**given, "corpus": str(write_parquet(folder / "b.parquet", pa.array(texts), 20))}


def chat(folder: Path) -> dict[str, Any]:
    write_folder(folder / "model")
    talks = [said(f"user: {n}", "assistant: " + "yes " * (1 + n % 7)) for n in range(60)]
    rows = write_rows(folder / "rows.jsonl", ({"messages": talk} for talk in talks))
    return {"corpus": rows, "format": "chat", "tokenizer": str(folder / "model" / "tokenizer.json"), "vocab": None}


def mixture(folder: Path) -> dict[str, Any]:
    sources = [{**tokens(folder, kind), "weight": weight} for kind, weight in (("parquet", 0.6), ("npy", 0.3), ("arrow", 0.1))]
    return {"corpus": None, "mixture": sources}


SOURCES: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{kind: partial(tokens, kind=kind) for kind in ("parquet", "arrow", "npy", "bin")},
    **{f"{kind} text": partial(text, kind=kind) for kind in ("bytes", "jsonl", "parquet")},
    "chat": chat,
    "mixture": mixture,
}


def step_of(made: Dataset, order: Any, step: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step in the order of the slots, as ``world`` workers read it."""
    read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for mine in deal(tuple(len(range(rank, SLOTS, world)) for rank in range(world))):
        made.read_ahead(order, step * SLOTS * SLOT_BATCH)
        for slot in mine:
            read[slot] = made.batch(order.ids((step * SLOTS + slot) * SLOT_BATCH, SLOT_BATCH))
    inputs, targets = zip(*(read[slot] for slot in range(SLOTS)), strict=True)
    return torch.cat(inputs), torch.cat(targets)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_run_resumes_at_20_random_steps_with_any_workers(kind: str, tmp_path: Path) -> None:
    given = SOURCES[kind](tmp_path)

    def opened() -> Dataset:
        return load_dataset(keys(**given), least=64)

    made = opened()
    order = made.order(3)
    steps = 3 * made.num_samples // (SLOTS * SLOT_BATCH) + 2
    whole = [step_of(made, order, step, 1) for step in range(steps)]
    if kind != "mixture":
        assert sorted(order.ids(0, made.num_samples).tolist()) == list(range(made.num_samples)), "an epoch uses each sample once"
    rng = np.random.default_rng(1)
    for start in rng.integers(0, steps, 20).tolist():
        again = opened()
        order = again.order(3)
        for step in range(start, min(start + 3, steps)):
            found, wanted = step_of(again, order, step, int(rng.integers(1, SLOTS + 1))), whole[step]
            assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("kind", SOURCES)
def test_a_worker_reads_the_data_of_the_driver(kind: str, tmp_path: Path) -> None:
    data = {"vocab": VOCAB, "seq_len": 8, "heldout": 0.1, "shuffle_blocks": 3, **SOURCES[kind](tmp_path)}
    found = preflight.foresee(parse_config({"run": {"dir": str(tmp_path)}, "data": data}))
    sent = parse_config(json.loads(json.dumps(found.config.model_dump(mode="json"))))
    check_same_data(load_dataset(sent.data), dict(found.stream))


def test_a_worker_with_other_files_is_refused(tmp_path: Path) -> None:
    rows = random_rows(np.random.default_rng(0), 150)
    write_parquet(tmp_path / "a.parquet", pa.array(rows, IDS), 20)

    def opened() -> Dataset:
        return load_dataset(keys(str(tmp_path)), least=64)

    begun = json.loads(json.dumps({**opened().identity(), "run.seed": 7}))
    check_same_data(opened(), begun)
    write_parquet(tmp_path / "b.parquet", pa.array(rows, IDS), 20)
    with pytest.raises(BadInput, match="data.corpus: the data here is not that with which the run began: files have"):
        check_same_data(opened(), begun)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["samples", "blocks", "mixture"])
def test_ten_million_samples_are_a_permutation(kind: str) -> None:
    total, chunk = 10_000_000, 1 << 20
    samples = np.full(10_000, total // 10_000, dtype=np.int64)
    samples[::2] += 7
    samples[1::2] -= 7

    def made() -> Any:
        if kind == "samples":
            return SampleStream(total, 5)
        blocks = BlockOrder(samples, 5, 16)
        if kind == "blocks":
            return blocks
        return MixtureOrder([blocks, SampleStream(total, 6)], np.array([0, total, 2 * total]), Shares([0.5, 0.5]))

    order, length = made(), 2 * total if kind == "mixture" else total
    seen = np.zeros(length, dtype=np.uint8)
    points = sorted(np.random.default_rng(0).integers(0, length - 1000, 20).tolist())
    kept: dict[int, Any] = {}
    for start in range(0, length, chunk):
        ids = order.ids(start, min(chunk, length - start))
        seen[ids] += 1
        kept |= {at: ids[at - start : at - start + 1000].copy() for at in points if start <= at < start + len(ids)}
    assert (seen == 1).all()
    for at, expected in kept.items():
        assert (made().ids(at, len(expected)) == expected).all()
