"""Storage order of tensors that are cut by columns, against torch's own indexing, element by element."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.checkpoint_support import bits, flip, memory_folder, random_bits
from tests.resident import peak_growth
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.format.manifest import Extents, TensorEntry
from vescale_ray.checkpoint.format.manifest_codec import decode, seal, unseal
from vescale_ray.checkpoint.format.manifest_fields import ManifestError
from vescale_ray.checkpoint.format.tiling import MOST_TILES, ROWS, Runs, Tiling, between, rows_of, runs_between
from vescale_ray.checkpoint.reading import compare, read_plan, reader
from vescale_ray.checkpoint.reading.compare import diff
from vescale_ray.checkpoint.reading.read_plan import Range, ReadBlock, Segment
from vescale_ray.geometry import Box, boxes, intervals

Parts = dict[int, list[int]]


@st.composite
def tiled(draw: st.DrawFn, count: int = 1) -> tuple[tuple[int, ...], list[Parts]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=4)))
    found = []
    for _ in range(count):
        parts: Parts = {}
        for dim in range(1, len(shape)):
            if draw(st.booleans()):
                edges = sorted(draw(st.sets(st.integers(0, shape[dim]), max_size=3)) | {0, shape[dim]})
                parts[dim] = [b - a for a, b in itertools.pairwise(edges)]
        found.append(parts)
    return shape, found


def in_order(shape: tuple[int, ...], parts: Parts) -> torch.Tensor:
    """Row-major index of each element in stored order, tile by tile. It is found by slicing a tensor of indices."""
    whole = torch.arange(math.prod(shape)).view(shape)
    edges = [[0, *itertools.accumulate(parts.get(d, [n]))] for d, n in enumerate(shape)]
    tiles = itertools.product(*(itertools.pairwise(e) for e in edges))
    return torch.cat([whole[tuple(slice(a, b) for a, b in tile)].reshape(-1) for tile in tiles])


def gathered(source: torch.Tensor, runs: Runs) -> torch.Tensor:
    out = torch.full((int(runs[1].sum()),), -1)
    for first, length, at in zip(*(column.tolist() for column in runs), strict=True):
        out[at : at + length] = source[first : first + length]
    return out


@given(tiled(), st.data())
def test_every_range_maps_to_the_positions_of_slicing(case: tuple[tuple[int, ...], list[Parts]], data: st.DataObject) -> None:
    shape, (parts,) = case
    order, tiling = in_order(shape, parts), Tiling.of(shape, parts)
    assert tiling.problem(shape) is None
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    assert torch.equal(gathered(order, tiling.stored(shape, start, end)), torch.arange(start, end))
    assert torch.equal(gathered(torch.arange(numel), tiling.by_rows(shape, start, end)), order[start:end])
    assert Tiling.from_json(tiling.to_json()) == tiling


@given(tiled(2), st.data())
def test_runs_between_two_tilings_match_indexing(case: tuple[tuple[int, ...], list[Parts]], data: st.DataObject) -> None:
    shape, (one, other) = case
    start = data.draw(st.integers(0, math.prod(shape)))
    end = data.draw(st.integers(start, math.prod(shape)))
    runs = between(shape, Tiling.of(shape, one), Tiling.of(shape, other), start, end)
    assert torch.equal(gathered(in_order(shape, other), runs), in_order(shape, one)[start:end])
    # The estimate that cuts a plan is never too small, and grows with the end.
    counts = [runs_between(shape, Tiling.of(shape, one), Tiling.of(shape, other), start, stop) for stop in range(start + 1, end + 1)]
    assert counts == sorted(counts) and (not counts or len(runs[0]) <= counts[-1])


@given(tiled(), st.data())
def test_row_range_of_a_tile_is_one_interval_in_tiled_order(case: tuple[tuple[int, ...], list[Parts]], data: st.DataObject):
    shape, (parts,) = case
    edges = [[0, *itertools.accumulate(parts.get(d, [n]))] for d, n in enumerate(shape)]
    tile = [data.draw(st.sampled_from(list(itertools.pairwise(e)))) for e in edges]
    offsets, section = tuple(a for a, _ in tile), tuple(b - a for a, b in tile)
    start = data.draw(st.integers(0, math.prod(section)))
    end = data.draw(st.integers(start, math.prod(section)))
    held = [(tuple(o + w for o, w in zip(offsets, within, strict=True)), sizes) for within, sizes in boxes(section, start, end)]
    tiling = Tiling.of(shape, parts)
    found = tiling.held(shape, held)
    assert found is not None and len(found) <= 1
    index = torch.arange(math.prod(shape)).view(shape)
    wanted = [i for o, s in held for i in index[tuple(slice(a, a + n) for a, n in zip(o, s, strict=True))].reshape(-1).tolist()]
    assert [int(i) for a, b in found for i in in_order(shape, parts)[a:b]] == wanted
    assert [i for a, b in rows_of(shape, tiling, found) for i in range(a, b)] == wanted
    assert intervals(shape, held) == _merged(rows_of(shape, tiling, found))


def _merged(runs):  # type: ignore[no-untyped-def]
    found: list[tuple[int, int]] = []
    for start, end in runs:
        found = [*found[:-1], (found[-1][0], end)] if found and found[-1][1] == start else [*found, (start, end)]
    return found


@given(tiled(), st.data())
def test_box_interval_maps_into_every_other_tiling(case: tuple[tuple[int, ...], list[Parts]], data: st.DataObject) -> None:
    shape, (parts,) = case
    offsets = tuple(data.draw(st.integers(0, n)) for n in shape)
    sizes = tuple(data.draw(st.integers(0, n - o)) for o, n in zip(offsets, shape, strict=True))
    around = Tiling.around(shape, (offsets, sizes))
    found = around.held(shape, [(offsets, sizes)])
    index = torch.arange(math.prod(shape)).view(shape)
    wanted = index[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].reshape(-1)
    assert found is not None and len(found) == (1 if math.prod(sizes) else 0)
    assert [i for a, b in rows_of(shape, around, found) for i in range(a, b)] == wanted.tolist()
    for start, end in found:
        runs = between(shape, around, Tiling.of(shape, parts), start, end)
        assert torch.equal(gathered(in_order(shape, parts), runs), wanted)


def test_trivial_or_too_many_tiles_fall_back_to_row_order() -> None:
    assert Tiling.of((4, 6), {1: [6]}) == Tiling.of((1, 6), {1: [3, 3]}) == Tiling.of((4, 0), {1: [0, 0]}) == ROWS
    assert Tiling.of((4, 6), {1: [0, 3, 3, 0]}) == Tiling(((1, ((3, 2),)),))
    assert Tiling.of((2, MOST_TILES + 1), {1: [1] * (MOST_TILES + 1)}) == ROWS
    assert Tiling.of((4, 6), {1: [3, 3]}).held((4, 6), [((0, 2), (4, 2))]) is None, "across two tiles"


@pytest.mark.parametrize(
    "cuts",
    [((0, ((2, 2),)),), ((2, ((2, 2),)),), ((1, ((3, 1),)),), ((1, ()),), ((1, ((0, 2), (6, 1))),), ((1, ((3, 2),)), (1, ((3, 2),)))],
)
def test_tiles_that_do_not_fit_the_shape_are_reported(cuts) -> None:  # type: ignore[no-untyped-def]
    assert Tiling(cuts).problem((4, 6)) is not None


@pytest.mark.parametrize("raw", [5, [1], [[1]], [[1, 5]], [[1, [[3]]]], [[1, [[3, 2.0]]]], [["1", [[3, 2]]]], [[True, [[3, 2]]]], {"a": 1}])
def test_malformed_tile_list_is_refused(raw) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="tiles"):
        Tiling.from_json(raw)


def test_a_large_table_is_mapped_by_columns_of_numbers() -> None:
    shape = (200_000, 64)
    tiling = Tiling.of(shape, {1: [8] * 8})
    first, length, at = tiling.stored(shape, 0, math.prod(shape))
    assert len(first) == 1_600_000 and int(length.sum()) == math.prod(shape) and bool((np.diff(at) == 8).all())


# ------------------------------------------------------------------------------------------------- saved, read, and compared


def save_tiled(
    root: Path, full: torch.Tensor, orders: list[Parts], cuts: list[int], *, step: int = 1, copied: bool = False, kind: str = "param"
) -> ckpt.Commit:
    """Save a tensor with one rank for each order, between two tensors that are stored by rows.

    Each rank holds its interval in its own order, or the whole tensor if ``copied``.
    """
    attempt, shape, votes = ckpt.new_attempt(), tuple(full.shape), []
    flat, edges = full.reshape(-1), [0, *cuts, full.numel()]
    for rank, parts in enumerate(orders):
        start, end = (0, full.numel()) if copied else (edges[rank], edges[rank + 1])
        data = flat[in_order(shape, parts)][start:end].clone()
        side = torch.arange(3.0) + rank
        votes.append(
            ckpt.write_shard(
                root,
                attempt,
                rank,
                [
                    ckpt.ShardPiece("a", "param", 3 * rank, 3 * rank + 3, (3 * len(orders),), torch.float32, side),
                    ckpt.ShardPiece("w", "param", start, end, shape, full.dtype, data, copied, Tiling.of(shape, parts)),
                    ckpt.ShardPiece("z", "param", 3 * rank, 3 * rank + 3, (3 * len(orders),), torch.float32, side),
                ],
                step=step,
                epoch=0,
                block_bytes=4096,
            )
        )
    votes = [ckpt.Vote.from_json(vote.to_json()) for vote in votes]
    return ckpt.commit(root, votes, step=step, epoch=0, attempt=attempt, world=len(orders), meta={})


@settings(max_examples=30)
@given(tiled(3), st.data())
def test_tensor_saved_in_any_order_reads_in_any_other_order(case: tuple[tuple[int, ...], list[Parts]], data: st.DataObject) -> None:
    """If the ranks' orders agree, the tensor is stored in that order; otherwise it is stored by rows."""
    shape, (one, other, third) = case
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.int64]))
    full = random_bits(shape, dtype, data.draw(st.integers(0, 99)))
    orders = [one, other] if data.draw(st.booleans()) else [one, one]
    whole = {1} if orders == [one, one] else {}
    # Intervals of two different orders tile a tensor only if one of them is the whole tensor.
    cut = data.draw(st.integers(0, full.numel())) if whole else data.draw(st.sampled_from([0, full.numel()]))
    with memory_folder() as folder:
        save_tiled(folder, full, orders, [cut])
        checkpoint = ckpt.open(folder)
        assert bits(checkpoint.read("w")) == bits(full)
        start = data.draw(st.integers(0, full.numel()))
        end = data.draw(st.integers(start, full.numel()))
        assert bits(checkpoint.read_range("w", start, end)) == bits(full.reshape(-1)[start:end])
        out = torch.zeros(end - start, dtype=dtype)
        with patch.object(read_plan, "MOST_PARTS", data.draw(st.sampled_from([1, 5, 1 << 17]))):
            plan = checkpoint.read_ranges([Range("w", "param", start, end, out, Tiling.of(shape, third))])
        assert bits(out) == bits(full.reshape(-1)[in_order(shape, third)][start:end])
        assert plan.needed == (end - start) * dtype.itemsize
        if dtype == torch.float32:
            wide = torch.zeros(end - start, dtype=torch.float64)
            checkpoint.read_ranges([("w", "param", start, end, wide)], cast=True)
            assert torch.equal(wide.nan_to_num(7), full.reshape(-1)[start:end].double().nan_to_num(7))


def test_mixed_rank_orders_are_stored_by_rows_without_loss(tmp_path: Path) -> None:
    full = random_bits((6, 8), torch.float32, 1)
    # The first rank has the left half by tiles, in one interval; the second has the right half by rows, one interval each.
    attempt, votes, halves = ckpt.new_attempt(), [], Tiling.of((6, 8), {1: [4, 4]})
    left = [ckpt.ShardPiece("w", "param", 0, 24, (6, 8), torch.float32, full[:, :4].reshape(-1), tiling=halves)]
    right = [ckpt.ShardPiece("w", "param", 8 * r + 4, 8 * r + 8, (6, 8), torch.float32, full[r, 4:].clone()) for r in range(6)]
    for rank, pieces in enumerate((left, right)):
        votes.append(ckpt.write_shard(tmp_path, attempt, rank, pieces, step=1, epoch=0))
    ckpt.commit(tmp_path, votes, step=1, epoch=0, attempt=attempt, world=2, meta={})
    checkpoint = ckpt.open(tmp_path)
    assert bits(checkpoint.read("w")) == bits(full) and checkpoint.manifest.by_name["w"].tiling == ROWS
    assert json.loads(unseal(Path(checkpoint.commit.path).read_bytes())[0])["format"] == "rcp/1"


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("equal", [True, False])
def test_copies_are_compared_across_different_orders(tmp_path: Path, same: bool, equal: bool) -> None:
    full = random_bits((6, 8), torch.int64, 2)
    orders: list[Parts] = [{1: [4, 4]}, {1: [4, 4]} if same else {1: [2, 6]}]
    if equal:
        save_tiled(tmp_path, full, orders, [], copied=True)
        assert bits(ckpt.open(tmp_path).read("w")) == bits(full)
        return
    attempt, votes = ckpt.new_attempt(), []
    for rank, parts in enumerate(orders):
        data = (full + rank * (torch.arange(48).view(6, 8) == 29)).reshape(-1)[in_order((6, 8), parts)]
        piece = ckpt.ShardPiece("w", "param", 0, 48, (6, 8), torch.int64, data, True, Tiling.of((6, 8), parts))
        votes.append(ckpt.write_shard(tmp_path, attempt, rank, [piece], step=1, epoch=0))
    with pytest.raises(ckpt.CommitRefused, match="both hold elements"):
        ckpt.commit(tmp_path, votes, step=1, epoch=0, attempt=attempt, world=2, meta={})


def test_documented_format_suffices_to_read_tiles(tmp_path: Path) -> None:
    """The test follows docs/reference/checkpoint-format.md (section 2, tiles) with only json, numpy and hashlib."""
    full = random_bits((5, 7, 6), torch.int32, 3)
    save_tiled(tmp_path, full, [{1: [3, 4], 2: [2, 2, 2]}] * 3, [60, 100])
    raw = next(tmp_path.glob("commits/*.json")).read_bytes()
    assert hashlib.sha256(raw[:-65]).hexdigest().encode() == raw[-65:-1]
    manifest = json.loads(raw[:-65])
    assert manifest["format"] == "rcp/2"
    entry = next(t for t in manifest["tensors"] if t["fqn"] == "w")
    columns = manifest["groups"][entry["group"]]["kinds"][0]
    stored = np.zeros(entry["numel"], np.int32)
    for start, end, obj, offset in zip(columns["start"], columns["end"], columns["object"], columns["offset"], strict=True):
        low, high = max(start, entry["base"]), min(end, entry["base"] + entry["numel"])
        data = Path(tmp_path, manifest["objects"][obj]["key"]).read_bytes()[offset : offset + (end - start) * 4]
        if low < high:
            stored[low - entry["base"] : high - entry["base"]] = np.frombuffer(data, np.int32)[low - start : high - start]
    sizes = {dim: [size for size, count in runs for _ in range(count)] for dim, runs in entry["tiles"]}
    whole, position = np.zeros(entry["shape"], np.int32), 0
    edges = [[0, *itertools.accumulate(sizes.get(dim, [n]))] for dim, n in enumerate(entry["shape"])]
    for tile in itertools.product(*(itertools.pairwise(e) for e in edges)):
        box = tuple(slice(a, b) for a, b in tile)
        count = whole[box].size
        whole[box] = stored[position : position + count].reshape(whole[box].shape)
        position += count
    assert np.array_equal(whole, full.numpy())


@pytest.mark.parametrize(
    "tiles",
    [
        [[1, [[2, 2]]]],
        [[0, [[3, 2]]]],
        [[5, [[4, 2]]]],
        [[1, [[4, 1 << 61]]]],
        [[1, [[-4, 2], [16, 1]]]],
        [[1, [["4", 2]]]],
        [[1]],
        7,
        {"1": 2},
        "",
        None,
    ],
)
def test_tiles_that_contradict_a_tensor_are_refused(tmp_path: Path, tiles: object) -> None:
    commit = save_tiled(tmp_path, random_bits((6, 8), torch.float32, 4), [{1: [4, 4]}] * 2, [24])
    document = json.loads(unseal(Path(commit.path).read_bytes())[0])
    next(t for t in document["tensors"] if t["fqn"] == "w")["tiles"] = tiles
    with pytest.raises(ManifestError, match="tiles"):
        decode(seal(json.dumps(document).encode()))


def test_tensor_cut_in_columns_takes_one_interval_per_rank(tmp_path: Path) -> None:
    full = random_bits((2048, 64), torch.bfloat16, 5)
    save_tiled(tmp_path, full, [{1: [8] * 8}] * 8, [k * 2048 * 8 for k in range(1, 8)])
    checkpoint = ckpt.open(tmp_path)
    (extents,) = checkpoint.manifest.groups[checkpoint.manifest.by_name["w"].group].kinds
    assert len(extents.start) == 8
    # Read by rows, the tensor has 16384 parts, all in one run of each object; they are copied together.
    asked = [("w", "param", 0, full.numel(), torch.zeros(full.numel(), dtype=full.dtype))]
    plan = checkpoint.plan(asked)
    done = checkpoint.read_ranges(asked)
    assert (done.needed, done.planned, done.runs, done.requests) == (plan.needed, plan.planned, plan.runs, plan.requests)
    assert plan.runs == plan.requests == 8
    assert sum(len(segment.copies) for segment in plan.segments) == 2048 * 8
    assert [len(list(segment.blocks())) for segment in plan.segments] == [1] * 8


def test_planning_memory_is_bounded_for_narrow_columns_and_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = random_bits((100_000, 8), torch.bfloat16, 15)
    save_tiled(tmp_path, full, [{1: [2] * 4}] * 4, [k * 200_000 for k in range(1, 4)])
    checkpoint = ckpt.open(tmp_path)
    monkeypatch.setattr(read_plan, "MOST_PARTS", 1 << 12)
    out = torch.zeros(full.numel(), dtype=full.dtype)
    plans: list[Any] = []
    peak = peak_growth(lambda: plans.append(checkpoint.read_ranges([("w", "param", 0, full.numel(), out)])))
    assert bits(out) == bits(full.reshape(-1)) and plans[0].needed == full.nbytes
    assert peak < 24 << 20, f"{peak} bytes; 400,000 parts would take 75 MB at once"


def test_range_of_very_many_tiles_is_planned_in_few_batches() -> None:
    shape, numel = (4, MOST_TILES), 4 * MOST_TILES
    entry = TensorEntry("w", shape, 0, 0, Tiling.of(shape, {1: [1] * MOST_TILES}))
    one = np.zeros(1, np.int64)
    extents = Extents("param", torch.uint8, one, one + numel, one, one)
    for order in (ROWS, Tiling.of(shape, {1: [2] * (MOST_TILES // 2)}), entry.tiling):
        asked = Range("w", "param", 0, numel, torch.zeros(numel, dtype=torch.uint8), order)
        turns = [batch for ((batch, *_),) in read_plan.batches([(asked, entry, extents)])]
        assert len(turns) < 8 and [turn.start for turn in turns[1:]] == [turn.end for turn in turns[:-1]] and turns[-1].end == numel


@pytest.mark.parametrize(
    ("shape", "asked", "stored"),
    [
        ((9000, 256), ((0, 0), (9000, 1)), {}),
        ((9000, 256), ((0, 0), (9000, 4)), {1: [4] * 64}),
        ((9000, 256), ((0, 3), (9000, 4)), {1: [4] * 64}),
        ((8, 512, 64), ((0, 64, 0), (8, 64, 64)), {2: [8] * 8}),
    ],
)
def test_a_narrow_box_takes_no_more_memory_than_a_wide_one(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], asked: Box, stored: Parts
) -> None:
    """A range of one column has as many parts as rows, not as few as the full rows that its elements would fill."""
    monkeypatch.setattr(read_plan, "MOST_PARTS", 1 << 10)
    numel, order = math.prod(shape), Tiling.around(shape, asked)
    entry, one = TensorEntry("w", shape, 0, 0, Tiling.of(shape, stored)), np.zeros(1, np.int64)
    extents = Extents("param", torch.uint8, one, one + numel, one, one)
    held = order.held(shape, [asked])
    assert held is not None and len(held) == 1
    start, end = held[0]
    wanted = Range("w", "param", start, end, torch.zeros(end - start, dtype=torch.uint8), order)
    pieces = [piece for batch in read_plan.batches([(wanted, entry, extents)]) for piece, *_ in batch]
    parts = [len(between(shape, order, entry.tiling, piece.start, piece.end)[0]) for piece in pieces]
    assert [piece.start for piece in pieces] == [start, *(piece.end for piece in pieces[:-1])] and pieces[-1].end == end
    assert max(parts) <= 1 << 10 and len(parts) <= 1 + sum(parts) // 1000


def test_very_many_rank_intervals_are_planned_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with different orders leave one interval for each row."""
    monkeypatch.setattr(read_plan, "MOST_PARTS", 1 << 10)
    entry, start = TensorEntry("w", (10_000,), 0, 0), np.arange(5000) * 2
    extents = Extents("param", torch.uint8, start, start + 2, start // 2 % 2, start // 4 * 2)
    asked = Range("w", "param", 0, 10_000, torch.zeros(10_000, dtype=torch.uint8))
    assert [batch[0][0].end for batch in read_plan.batches([(asked, entry, extents)])] == [2048, 4096, 6144, 8192, 10_000]


@pytest.mark.parametrize(("times", "to"), [(3, torch.float32), (1, torch.float64), (3, torch.float64)])
def test_parts_are_taken_from_a_last_block_of_any_length(times: int, to: torch.dtype) -> None:
    """Our objects end on a page boundary; another program's manifest may not."""
    raw = bytearray(range(100)) + bytearray(3)
    numbers = np.frombuffer(raw[:96], np.float32)
    out = torch.zeros(2 * times, dtype=to)
    reader._put(torch.frombuffer(raw, dtype=torch.uint8), out, torch.float32, ReadBlock(0, 16, 0, 8, times, 24, 8))
    assert out.tolist() == [float(numbers[4 + 6 * k + i]) for k in range(times) for i in range(2)]


def test_diff_of_equally_tiled_checkpoints_reads_no_equal_block(tmp_path: Path) -> None:
    full = random_bits((64, 64), torch.int32, 6)
    one, same, rows, other = (tmp_path / name for name in ("one", "same", "rows", "other"))
    changed = full.clone()
    changed[17, 40] += 1
    save_tiled(one, full, [{1: [32, 32]}] * 2, [2048])
    save_tiled(same, full, [{1: [32, 32]}] * 2, [2048])
    save_tiled(rows, full, [{}] * 2, [2048])
    save_tiled(other, changed, [{1: [32, 32]}] * 2, [2048])
    by_blocks, read = diff(ckpt.open(one), ckpt.open(same)), diff(ckpt.open(one), ckpt.open(rows))
    assert by_blocks.equal and not by_blocks.bytes_read and read.equal and read.bytes_read >= 2 * 64 * 64 * 4
    (found,) = diff(ckpt.open(one), ckpt.open(other)).changed
    assert (found.name, found.differing) == ("w", 1)


@pytest.mark.parametrize("places", [1, 256])
def test_diff_of_tiled_checkpoints_reads_a_differing_block_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: int) -> None:
    """If compared by rows, a piece of the tensor would touch every tile, and its blocks would be read again for each piece."""
    full = random_bits((256, 64), torch.int32, 16)
    changed = full.clone()
    changed[:places, 40] ^= 1
    changed[0, :: 64 // places if places < 64 else 1] ^= 2
    cuts = [k * 256 * 8 for k in range(1, 8)]
    for name, tensor in (("one", full), ("other", changed)):
        save_tiled(tmp_path / name, tensor, [{1: [8] * 8}] * 8, cuts)
    monkeypatch.setattr(compare, "_PIECE", 4096)
    found = diff(ckpt.open(tmp_path / "one"), ckpt.open(tmp_path / "other"))
    assert [(one.name, one.differing) for one in found.changed] == [("w", int((full != changed).sum()))]
    pieces = 1 if places == 1 else 4
    assert found.bytes_read <= 2 * (pieces * 4096 * 4 + 8 * 4096), found.bytes_read


def test_damage_in_a_tile_is_named_by_its_tensor(tmp_path: Path) -> None:
    full = random_bits((64, 64), torch.int32, 7)
    save_tiled(tmp_path, full, [{1: [32, 32]}] * 2, [2048])
    path = sorted(tmp_path.glob("data/*/r00001.safetensors"))[0]
    flip(path, path.read_bytes().find(full[3, 32:64].numpy().tobytes()) + 5, 4)
    with pytest.raises(ckpt.CheckpointCorrupt, match="holds w"):
        ckpt.open(tmp_path).read("w")


# ----------------------------------------------------------------------------------------------------- copies, put together


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 3), st.integers(1, 2)), max_size=12))
def test_blocks_list_every_copy_once_in_order(steps: list[tuple[int, int, int, int]]) -> None:
    """Rows at equal distances, with other rows between them."""
    rows, source, target = [], 0, 0
    for gap, request, way, size in steps:
        source, target = source + gap, target + (way - 1) * 2
        rows.append((source, request, max(0, target), size))
    segment = Segment(0, 0, 4096, np.array(rows, np.int64).reshape(-1, 4))
    found = [
        (b.source + i * b.source_step, b.request, b.target + i * b.target_step, b.bytes) for b in segment.blocks() for i in range(b.times)
    ]
    assert found == rows
    assert replace(segment, bytes=1).bytes == 1
