"""Random documents in every format, a configuration for them, and the tokens that a data set must give, computed from the documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import torch

from vescale_ray.config import parse_config
from vescale_ray.config.data_section import DataSection
from vescale_ray.data.block_dataset import BlockDataset
from vescale_ray.data.dataset_loading import load_dataset

VOCAB = 1000
WORDS = ["shard", "worker", "ring", "step", "buddy", "loss", "naïve", "日本", "plan", "\n"]
Rows = list[list[int]]


def random_rows(rng: np.random.Generator, count: int, longest: int = 40) -> Rows:
    """Lists of token ids, some of them empty."""
    return [rng.integers(0, VOCAB, rng.integers(0, longest)).tolist() for _ in range(count)]


def random_texts(rng: np.random.Generator, count: int) -> list[str]:
    """Texts with line ends and characters of several bytes, some of them empty."""
    return [" ".join(WORDS[i] for i in rng.integers(0, len(WORDS), rng.integers(0, 20))) for _ in range(count)]


def keys(corpus: str | list[str] | None, **changes: Any) -> DataSection:
    """The section ``data`` with a vocabulary of 1000, samples of 8 tokens, and no held-out part."""
    data = {"corpus": corpus, "seq_len": 8, "heldout": 0.0, "vocab": VOCAB, "shuffle_blocks": 3, **changes}
    return parse_config({"data": data}).data


def dataset(corpus: str | list[str], least: int = 64, **changes: Any) -> BlockDataset:
    made = load_dataset(keys(corpus, **changes), least=least)
    assert isinstance(made, BlockDataset)
    return made


def write_parquet(path: Path, column: pa.Array, rows: int = 50, **options: Any) -> Path:
    pq.write_table(pa.table({"text": column, "other": list(range(len(column)))}), path, row_group_size=rows, **options)
    return path


def write_ipc(path: Path, column: pa.Array, rows: int = 50, stream: bool = False, compression: str | None = None) -> Path:
    table = pa.table({"other": list(range(len(column))), "text": column})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def write_jsonl(path: Path, texts: Sequence[str | None]) -> Path:
    path.write_text("".join(json.dumps({"n": n, "text": text}, ensure_ascii=n % 2 == 0) + "\n" for n, text in enumerate(texts)))
    return path


def ended(rows: Sequence[Sequence[int]], end: int | None) -> list[int]:
    """The tokens of all rows, each with the end token."""
    return [token for row in rows for token in [*row, *([] if end is None else [end])]]


def as_bytes(texts: Sequence[str]) -> Rows:
    return [list(text.encode()) for text in texts]


def windows_of(parts: Sequence[Sequence[int]], least: int, seq_len: int) -> list[list[int]]:
    """The windows of ``seq_len + 1`` tokens that samples are, in the order of their ids. ``parts``: tokens of each row group."""
    blocks: list[list[int]] = [[]]
    for part in parts:
        blocks[-1].extend(part)
        if len(blocks[-1]) >= least:
            blocks.append([])
    return [block[i : i + seq_len + 1] for block in blocks for i in range(0, len(block) - seq_len, seq_len)]


def samples(made: BlockDataset) -> list[list[int]]:
    """All training samples by id, then all held-out ones, each with its last target."""
    found = []
    for read, count in ((made.batch, made.num_samples), (made.heldout_batch, made.heldout_samples)):
        tokens, targets = read(np.arange(count))
        assert tokens.dtype == targets.dtype == torch.int64 and tokens.shape == targets.shape == (count, made.seq_len)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        found += torch.cat([tokens, targets[:, -1:]], dim=1).tolist()
    return found


def train_tokenizer(path: Path, texts: list[str]) -> Any:
    """Save a small byte-level BPE tokenizer with the special token ``<|end|>``, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    made.save(str(path))
    return made
