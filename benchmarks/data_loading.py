"""Speed of reading tokenized Parquet from the page cache on one core, against a plain scan by pyarrow, and stalls with a slow storage.

    python benchmarks/data_loading.py [--quick] [--rounds 7] [--json OUT]

A file of 64 million tokens (`--quick`: 16) in documents of 200 to 2,000 tokens is written once, by dtype, and read once so that it lies in
the page cache. Times are seconds of CPU of all threads, on one core. Per round, interleaved, and per dtype:

    scan           pyarrow reads the column, row group by row group, with one thread, and nothing is done with it
    loader         a data set gives all samples of an epoch in shuffled order, in batches of 16 x 2,048 tokens as int64 tensors
    ratio          loader over scan, in tokens a CPU second: what is left after the shuffle, checks and copies

The stall is measured apart: the same data set behind a file system with 200 ms a read, batches at the pace of a step of 100 ms. It is the
part of the time, after the first 10 steps, in which a step waits for a block.

The exit code is 0 for any figures.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.reporting import figure, write

SEQ_LEN, BATCH, VOCAB = 2048, 16, 50_257
GOAL_RATE, GOAL_STALL = ">= 20", "< 1 %"
LATENCY_S, STEP_S = 0.2, 0.1


def write_tokens(path: Path, tokens: int, dtype: str) -> None:
    """Write documents of skewed token ids in row groups of about a million tokens, as a tokenizer's output is."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    lengths = rng.integers(200, 2000, tokens // 1100)
    values = (rng.zipf(1.2, int(lengths.sum())) % VOCAB).astype(dtype)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    pq.write_table(pa.table({"tokens": pa.ListArray.from_arrays(offsets, values)}), path, row_group_size=1000)


def data_set(corpus: str) -> Any:
    from vescale_ray.data.dataset_loading import load_dataset

    keys = SimpleNamespace(corpus=corpus, format="auto", column="tokens", dtype="uint16", tokenizer=None, end_token=None, vocab=VOCAB)
    more = SimpleNamespace(mixture=None, seq_len=SEQ_LEN, heldout=0.0, damaged="stop", shuffle_blocks=8, readahead_mb=512)
    return load_dataset(SimpleNamespace(**vars(keys), **vars(more)))


def scan(path: Path) -> float:
    """Tokens a CPU second of a plain scan."""
    import pyarrow.parquet as pq

    began, tokens = time.process_time(), 0
    file = pq.ParquetFile(path, memory_map=True)
    for group in range(file.num_row_groups):
        tokens += sum(len(chunk.flatten()) for chunk in file.read_row_group(group, ["tokens"], use_threads=False).column(0).chunks)
    return tokens / (time.process_time() - began)


def load(path: Path) -> float:
    """Tokens a CPU second of an epoch of the loader."""
    made = data_set(str(path))
    order, samples = made.order(0), made.num_samples
    began = time.process_time()
    for start in range(0, samples, BATCH):
        made.read_ahead(order, start)
        made.batch(order.ids(start, min(BATCH, samples - start)))
    return samples * SEQ_LEN / (time.process_time() - began)


def stall(path: Path, steps: int) -> float:
    """Part of the time in which a step waits, with ``LATENCY_S`` a read."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Slow(MemoryFileSystem):
        protocol = "slow"
        latency = 0.0

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.removeprefix("slow://").strip("/")

        def cat_file(self, *args: Any, **kwargs: Any) -> bytes:
            time.sleep(type(self).latency)
            return super().cat_file(*args, **kwargs)

    fsspec.register_implementation("slow", Slow, clobber=True)
    Slow().pipe_file("/tokens.parquet", path.read_bytes())
    made = data_set("slow://tokens.parquet")
    order, Slow.latency = made.order(0), LATENCY_S
    began = 0.0
    for step in range(steps + 10):
        if step == 10:
            began, made.reader.waited_s = time.perf_counter(), 0.0
        made.read_ahead(order, step * BATCH)
        made.batch(order.ids(step * BATCH, BATCH))
        time.sleep(STEP_S)
    return made.reader.waited_s / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 million tokens, 3 rounds")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 7)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import torch

    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    print(f"{'case':<10}{'scan Mtok/s':>14}{'loader Mtok/s':>16}{'ratio':>8}{'+-':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("uint16", "int32"):
            path = Path(folder, f"{dtype}.parquet")
            write_tokens(path, 16_000_000 if options.quick else 64_000_000, dtype)
            scan(path)
            rows = [(scan(path), load(path)) for _ in range(rounds)]
            plain = figure([row[0] / 1e6 for row in rows], "million tokens a CPU second", None, None)
            ours = figure([row[1] / 1e6 for row in rows], "million tokens a CPU second", GOAL_RATE, "pyarrow")
            ratio = figure([row[1] / row[0] for row in rows], "ratio", None, "pyarrow")
            figures |= {f"{dtype}.scan": plain, f"{dtype}.loader": ours, f"{dtype}.ratio": ratio}
            print(f"{dtype:<10}{plain['value']:>14.1f}{ours['value']:>16.1f}{ratio['value']:>8.3f}{ratio['spread']:>7.3f}", flush=True)
        stalls = [stall(Path(folder, "uint16.parquet"), 100 if options.quick else 300) for _ in range(1 if options.quick else 3)]
        figures["latency.stall"] = figure([100 * one for one in stalls], "% of the time", GOAL_STALL, None)
        print(f"stall with {LATENCY_S * 1000:.0f} ms a read: {figures['latency.stall']['value']:.3f} % of the time")
    write(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
