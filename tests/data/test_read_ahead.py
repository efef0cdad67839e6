"""Blocks are read before they are needed, within a bound on memory, from storages with latency and with errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.slow_files import slow_files
from tests.data.sources import VOCAB, as_bytes, dataset, ended, random_rows, random_texts, samples, windows_of, write_ipc, write_jsonl
from tests.data.sources import write_parquet as parquet
from tests.moto_server import moto_server
from vescale_ray.data.sources.read_ahead import ReadAhead
from vescale_ray.errors import BadInput


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def block(number: int) -> np.ndarray:
    return np.full(number + 1, number)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    most=st.integers(1, 40),
    calls=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 11), max_size=8)), max_size=20),
)
def test_any_calls_give_the_right_blocks_within_the_bound(sizes: list[int], most: int, calls: list[tuple[bool, list[int]]]) -> None:
    reader = ReadAhead(block, sizes, most)
    for is_expected, numbers in calls:
        blocks = [number % len(sizes) for number in numbers]
        if is_expected:
            reader.expect(islice(cycle(blocks), 3 * len(blocks)) if blocks else [])
        else:
            for number in blocks:
                assert reader.get(number).tolist() == block(number).tolist()
        assert reader.held_bytes <= most + max(sizes)


def test_expected_blocks_are_read_in_the_background_in_order() -> None:
    seen: list[int] = []
    reader = ReadAhead(lambda number: seen.append(number) or block(number), [10] * 20, 55)  # type: ignore[func-returns-value]
    reader.expect(iter([7, 3, 7, 9, 1, 4, 5, 6]))
    until(lambda: len(seen) == 5)
    assert sorted(seen) == [1, 3, 4, 7, 9], "what fits into 55 bytes"
    reader.get(9)
    assert reader.waited_s < 1 and len(seen) == 5
    reader.expect([9, 4, 8])
    until(lambda: len(seen) == 6)
    assert seen[5] == 8 and reader.held_bytes == 30
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "vescale-read-ahead"])


def test_an_error_is_raised_once_and_the_next_call_reads_again() -> None:
    failing = {2: 2}

    def read(number: int) -> np.ndarray:
        if failing.get(number, 0):
            failing[number] -= 1
            raise OSError("no answer")
        return block(number)

    reader = ReadAhead(read, [1] * 4, 10)
    reader.expect([1, 2, 3])
    until(lambda: failing[2] == 1)
    for _ in range(2):
        with pytest.raises(OSError, match="no answer"):
            reader.get(2)
    assert reader.get(2).tolist() == [2, 2, 2] and reader.get(3).tolist() == [3] * 4


def remote(tmp_path: Path, rows: int = 400, group: int = 20) -> dict[str, bytes]:
    """A Parquet file and its documents' tokens."""
    documents = random_rows(np.random.default_rng(0), rows)
    path = parquet(tmp_path / "a.parquet", pa.array(documents, pa.list_(pa.int32())), group)
    return {"/data/a.parquet": path.read_bytes()}


def test_a_row_group_is_one_ranged_read(tmp_path: Path) -> None:
    with slow_files(remote(tmp_path)) as system:
        made = dataset("slow://data/*.parquet", least=1)
        system.reads.clear()
        made.batch([0])
        assert len(system.reads) == 1
        _, start, end = system.reads[0]
        assert start is not None and end is not None and end - start < len(remote(tmp_path)["/data/a.parquet"]) / 10


def test_latency_of_a_read_stalls_no_step_once_warm(tmp_path: Path) -> None:
    """A step of 20 ms uses 12 samples; a read takes 200 ms; a window of 3 blocks lasts about 0.6 s."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40 * 2049).tolist()
    column = pa.array([tokens[i : i + 2049] for i in range(0, len(tokens), 2049)], pa.list_(pa.int32()))
    with slow_files({"/data/a.parquet": parquet(tmp_path / "a.parquet", column, 1).read_bytes()}) as system:
        made = dataset("slow://data/a.parquet", seq_len=16, least=2048)
        order = made.order(0)
        system.latency = 0.2
        began = 0.0
        for step in range(100):
            if step == 10:
                began, made.reader.waited_s = time.perf_counter(), 0.0
            made.read_ahead(order, step * 12)
            found, _ = made.batch(order.ids(step * 12, 12))
            assert found.shape == (12, 16)
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        assert len(system.reads) >= 9, "it has read while it trained"
    assert made.reader.waited_s < 0.01 * seconds, f"{made.reader.waited_s:.3f} s of {seconds:.3f} s"


def test_a_storage_that_fails_is_an_oserror_and_damage_is_not(tmp_path: Path) -> None:
    content = remote(tmp_path)
    with slow_files(content) as system:
        made = dataset("slow://data/a.parquet", least=1)
        system.fails = 1
        with pytest.raises(
            OSError, match=r"slow:///data/a.parquet: bytes \d+ to \d+ can't be read \(the storage does not answer\)"
        ) as caught:
            made.batch([0])
        assert not isinstance(caught.value, BadInput)
        assert samples(made) == samples(dataset(str(tmp_path / "a.parquet"), least=1)), "it reads again"
        system().pipe_file("/data/a.parquet", content["/data/a.parquet"][:100])
        with pytest.raises(BadInput, match="slow:///data/a.parquet: only .* bytes could be read from byte .*; the file is truncated"):
            made.batch([0])


@pytest.mark.parametrize("heldout", [0.0, 0.2])
def test_training_in_order_reads_each_block_once_an_epoch(heldout: float, tmp_path: Path) -> None:
    with slow_files(remote(tmp_path)) as system:
        made = dataset("slow://data/a.parquet", least=1, heldout=heldout)
        order, blocks = made.order(0), len({start for start in made._starts.tolist() if start < made.num_samples})
        system.reads.clear()
        position = 0
        while position < made.num_samples:
            made.read_ahead(order, position)
            made.batch(order.ids(position, 7))
            position += 7
        assert len(system.reads) <= blocks + 6, "and some of the next epoch"


def write_all(folder: Path) -> dict[str, list[list[int]]]:
    """A file in each format, and its windows."""
    rng = np.random.default_rng(1)
    rows, texts = random_rows(rng, 150), random_texts(rng, 150)
    flat = np.array(ended(rows, None), dtype=np.uint16)
    flat.tofile(folder / "a.bin")
    np.save(folder / "a.npy", flat)
    parquet(folder / "a.parquet", pa.array(rows, pa.list_(pa.int32())), 25)
    write_ipc(folder / "a.arrow", pa.array(rows, pa.list_(pa.int32())), 25)
    write_ipc(folder / "b.arrow", pa.array(rows, pa.list_(pa.int32())), 25, stream=True)
    write_jsonl(folder / "a.jsonl", texts)
    (folder / "a.txt").write_text("\n".join(texts))
    groups = windows_of([ended(rows[i : i + 25], None) for i in range(0, 150, 25)], 64, 8)
    windows = windows_of([flat.tolist()], 1 << 40, 8)
    return {
        "a.bin": windows,
        "a.npy": windows,
        "a.parquet": groups,
        "a.arrow": groups,
        "b.arrow": groups,
        "a.jsonl": windows_of([ended(as_bytes(texts), 0)], 1 << 40, 8),
        "a.txt": windows_of([[*"\n".join(texts).encode(), 0]], 1 << 40, 8),
    }


def test_every_format_reads_the_same_from_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    expected = write_all(tmp_path)
    with moto_server() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("corpus")
        s3fs.S3FileSystem().put(str(tmp_path), "corpus/tokens", recursive=True)
        for name, windows in expected.items():
            text = name in ("a.jsonl", "a.txt")
            made = dataset(f"s3://corpus/tokens/{name}", vocab=None if text else VOCAB, least=1 << 30 if text else 64)
            made.read_ahead(made.order(0), 0)
            assert samples(made) == windows, name
            local = dataset([str(tmp_path / name)], vocab=None if text else VOCAB, least=1 << 30 if text else 64)
            assert made.identity() == local.identity()
        with pytest.raises(BadInput, match="data.corpus = s3://corpus/none.parquet: no such file"):
            dataset("s3://corpus/none.parquet")
    s3fs.S3FileSystem.clear_instance_cache()
