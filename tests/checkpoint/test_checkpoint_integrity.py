"""Damage is found everywhere and reported with object, block and tensor. No value of a manifest is used without a check."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.checkpoint.checkpoint_support import adam_like, assert_equals, bits, memory_folder, random_bits, random_layout, save_in_process
from vescale_ray import checkpoint as ckpt

BLOCK = 4096


@pytest.fixture
def root():
    with memory_folder() as folder:
        yield folder


def flip(path: Path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def objects_of(root: Path) -> list[Path]:
    return sorted(root.glob("data/*/*.safetensors"))


def what_lies_at(path: Path, byte: int, intervals, tensors) -> str:
    """The oracle, from the stock safetensors header and the order in which this rank gave its pieces."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    if byte < 8 + length:
        return "header"
    header = json.loads(raw[8 : 8 + length])
    for section, entry in header.items():
        if section == "__metadata__":
            continue
        first, last = (8 + length + n for n in entry["data_offsets"])
        if not first <= byte < last:
            continue
        if section.startswith("__pad__"):
            return "padding"
        kind, group = section.rsplit(".g", 1)
        members = [(n, s, e) for n, k, s, e in intervals if k == kind and group_of(n, tensors) == int(group)]
        position = first
        for name, start, end in members:
            position += (end - start) * tensors[name, kind].dtype.itemsize
            if byte < position:
                return name if kind == "param" else f"{name} ({kind})"
    raise AssertionError(f"byte {byte} of {path} is in no section")


def group_of(name: str, tensors) -> int:
    signatures: list[object] = []
    names = list(dict.fromkeys(n for n, _ in tensors))
    for n in names:
        signature = tuple((k, t.dtype) for (m, k), t in tensors.items() if m == n)
        if signature not in signatures:
            signatures.append(signature)
        if n == name:
            return signatures.index(signature)
    raise KeyError(name)


def test_a_flipped_bit_anywhere_is_found_and_named(root):
    tensors = adam_like(seed=5)
    held = random_layout(tensors, 3, seed=5)
    save_in_process(root, tensors, held, block_bytes=BLOCK)
    rng = random.Random(0)
    seen = set()
    for rank, path in enumerate(objects_of(root)):
        size = path.stat().st_size * 8
        fixed = [0, 7 * 8, 8 * 8 + 3, 4096 * 8 - 1, 4096 * 8, size - 1]
        length = int.from_bytes(path.read_bytes()[:8], "little")
        header = json.loads(path.read_bytes()[8 : 8 + length])
        fixed += [(8 + length + entry["data_offsets"][0]) * 8 + 5 for name, entry in header.items() if name != "__metadata__"]
        for bit in fixed + [rng.randrange(size) for _ in range(30)]:
            flip(path, bit)
            report = ckpt.verify(root)
            assert len(report.problems) == 1 and not report.ok, bit
            problem = report.problems[0]
            assert problem.object == path.relative_to(root).as_posix()
            assert problem.block == bit // 8 // BLOCK
            held_there = what_lies_at(path, bit // 8, held[rank], tensors)
            assert held_there in problem.tensors, (bit, problem)
            seen.add(held_there.split(" ")[0])
            flip(path, bit)
    assert {"header", "padding", "embed.weight", "counts", "frozen.weight"} <= seen
    assert ckpt.verify(root).ok


def test_read_of_a_damaged_block_raises_and_fills_nothing(root):
    tensors = {("a", "param"): random_bits((2048,), torch.float32, 1), ("b", "param"): random_bits((2048,), torch.float32, 2)}
    save_in_process(root, tensors, [[("a", "param", 0, 2048), ("b", "param", 0, 2048)]], block_bytes=BLOCK)
    flip(objects_of(root)[0], (4096 + 2048 * 4 + 100) * 8)  # a byte of b
    checkpoint = ckpt.open(root)
    assert torch.equal(checkpoint.read("a").view(torch.int32), tensors["a", "param"].view(torch.int32))
    out = torch.full((2048,), 7.0)
    with pytest.raises(ckpt.CheckpointCorrupt) as caught:
        checkpoint.read_ranges([("b", "param", 0, 2048, out)])
    assert caught.value.block == 3 and caught.value.tensors == ("b",) and caught.value.object.endswith("r00000.safetensors")
    assert "block 3 (holds b)" in str(caught.value) and "\n" not in str(caught.value)
    assert bool((out == 7.0).all())


def test_verify_finds_a_flipped_bit_in_a_manifest_or_aux_object(root):
    tensors = adam_like(seed=6)
    first = save_in_process(root, tensors, random_layout(tensors, 2, seed=1), step=1)
    second = save_in_process(root, tensors, random_layout(tensors, 2, seed=2), step=2)
    manifest = Path(second.path)
    rng = random.Random(1)
    size = manifest.stat().st_size
    # Flips include the seal's hexadecimal digits, where 'a' and 'A' differ by one bit.
    for byte in [0, *range(size - 66, size), *(rng.randrange(size) for _ in range(25))]:
        bit = byte * 8 + rng.randrange(8)
        flip(manifest, bit)
        report = ckpt.verify(root)
        assert [p.object for p in report.problems] == [f"commits/{second.name}.json"] and report.problems[0].tensors == ("manifest",)
        found = ckpt.latest(root)
        assert found is not None and found.name == first.name
        flip(manifest, bit)
    aux = sorted(root.glob(f"data/{second.attempt}/*.aux.json"))[1]
    flip(aux, 3)
    problems = ckpt.verify(root).problems
    assert [(p.object, p.tensors) for p in problems] == [(aux.relative_to(root).as_posix(), ("aux",))]
    with pytest.raises(ckpt.CheckpointCorrupt, match="r00001.aux.json"):
        ckpt.open(root).aux(1)
    assert ckpt.open(root).aux(0) == {"rank": 0}


@pytest.mark.parametrize("harm", ["missing", "truncated", "one byte short", "appended", "empty", "aux missing"])
def test_a_missing_or_cut_object_makes_latest_go_back(root, harm, caplog):
    tensors = adam_like(seed=7)
    first = save_in_process(root, tensors, random_layout(tensors, 2, seed=1), step=1)
    second = save_in_process(root, adam_like(seed=8), random_layout(tensors, 3, seed=2), step=2)
    victim = sorted(root.glob(f"data/{second.attempt}/*.safetensors"))[1]
    if harm == "missing":
        victim.unlink()
    elif harm == "aux missing":
        victim = victim.with_suffix(".aux.json")
        victim.unlink()
    elif harm == "appended":
        victim.write_bytes(victim.read_bytes() + b"x")
    else:
        size = {"truncated": 5000, "one byte short": victim.stat().st_size - 1, "empty": 0}[harm]
        os.truncate(victim, size)
    key = victim.relative_to(root).as_posix()
    with caplog.at_level(logging.WARNING):
        found = ckpt.latest(root)
    assert found is not None and found.name == first.name
    assert second.name in caplog.text and key in caplog.text
    assert [c.problem is None for c in ckpt.ls(root)] == [True, False]
    assert_equals(root, tensors)
    report = ckpt.verify(root)
    assert not report.ok and key in {p.object for p in report.problems}
    with pytest.raises(ckpt.CheckpointCorrupt, match=key):
        ckpt.open(root, second.name)


def test_a_hole_of_the_right_length_is_found(root):
    """An interrupted write into reserved space leaves such a hole: all sizes are right, but the bytes are zeros."""
    tensors = {("w", "param"): random_bits((64, 64), torch.float32, 1)}
    save_in_process(root, tensors, random_layout(tensors, 1, seed=0), block_bytes=BLOCK)
    path = objects_of(root)[0]
    raw = bytearray(path.read_bytes())
    raw[2 * BLOCK : 4 * BLOCK] = bytes(2 * BLOCK)
    path.write_bytes(raw)
    assert ckpt.latest(root) is not None  # the sizes are right, so only reading finds the hole
    assert [(p.block, p.tensors) for p in ckpt.verify(root).problems] == [(2, ("w",)), (3, ("w",))]
    with pytest.raises(ckpt.CheckpointCorrupt, match="block 2"):
        ckpt.open(root).read("w")


def test_objects_swapped_between_ranks_are_found(root):
    tensors = {("w", "param"): random_bits((64, 64), torch.float32, 1)}
    save_in_process(root, tensors, [[("w", "param", 0, 2048)], [("w", "param", 2048, 4096)]])
    a, b = objects_of(root)
    a.rename(root / "x")
    b.rename(a)
    (root / "x").rename(b)
    assert len(ckpt.verify(root).problems) >= 2


def test_stock_safetensors_reads_our_objects(root):
    tensors = adam_like(seed=9)
    held = random_layout(tensors, 3, seed=4)
    commit = save_in_process(root, tensors, held)
    for rank, path in enumerate(objects_of(root)):
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "rcp/1" and file.metadata()["attempt"] == commit.attempt
            for section in file.keys():
                if section.startswith("__pad__"):
                    assert not file.get_tensor(section).any()
                    continue
                kind, group = section.rsplit(".g", 1)
                expected = b"".join(
                    bits(tensors[n, k].reshape(-1)[s:e]) for n, k, s, e in held[rank] if k == kind and group_of(n, tensors) == int(group)
                )
                got = file.get_tensor(section)
                assert bits(got) == expected
                assert got.dtype == next(t.dtype for (n, k), t in tensors.items() if k == kind and group_of(n, tensors) == int(group))
        header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
        data_start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert all((data_start + e["data_offsets"][0]) % 4096 == 0 for n, e in header.items() if n[0] != "_")


def test_documented_format_suffices_to_read_a_tensor(root):
    """The test follows docs/reference/checkpoint-format.md with only json, base64 and hashlib."""
    tensors = adam_like(seed=10)
    save_in_process(root, tensors, random_layout(tensors, 4, seed=4))
    raw = sorted(root.glob("commits/*.json"))[-1].read_bytes()
    body, seal = raw[:-65], raw[-65:-1]
    assert hashlib.sha256(body).hexdigest().encode() == seal
    manifest = json.loads(body)
    for (name, kind), full in tensors.items():
        entry = next(t for t in manifest["tensors"] if t["fqn"] == name)
        columns = next(k for k in manifest["groups"][entry["group"]]["kinds"] if k["kind"] == kind)
        size = full.dtype.itemsize
        got = b""
        for start, end, obj, offset in zip(columns["start"], columns["end"], columns["object"], columns["offset"], strict=True):
            low, high = max(start, entry["base"]), min(end, entry["base"] + entry["numel"])
            if low < high:
                data = Path(root, manifest["objects"][obj]["key"]).read_bytes()
                got += data[offset + (low - start) * size : offset + (high - start) * size]
        assert got == bits(full)
        assert entry["shape"] == list(full.shape)
    sums = base64.b64decode(manifest["objects"][0]["sums"])
    assert len(sums) == 8 * -(-manifest["objects"][0]["bytes"] // BLOCK)


def edits():
    def edit(path, value):
        def apply(m):
            *walk, last = path
            for step in walk:
                m = m[step]
            m[last] = value(m[last]) if callable(value) else value

        return apply

    param = ("groups", 0, "kinds", 0)
    return {
        "unknown major version": edit(("format",), "rcp/3"),
        "tiles in a format that has none": edit(("tensors", 0, "tiles"), [[1, [[2, 2]]]]),
        "path traversal in a key": edit(("objects", 0, "key"), lambda k: "data/../../etc/r00000.safetensors"),
        "absolute key": edit(("objects", 0, "key"), "/etc/passwd"),
        "another attempt's object": edit(("objects", 0, "key"), "data/other/r00000.safetensors"),
        "aux outside": edit(("aux", 0, "key"), "commits/e0000-s000000000001.json"),
        "huge tensor": edit(("tensors", 0, "shape"), [1 << 61]),
        "huge group": edit(("groups", 0, "numel"), 1 << 61),
        "overlapping extents": edit((*param, "start", 1), lambda s: s - 1),
        "gap between extents": edit((*param, "end", 0), lambda e: e - 1),
        "extent beyond its object": edit((*param, "offset", 0), 1 << 40),
        "negative offset": edit((*param, "offset", 0), -4096),
        "unaligned offset": edit((*param, "offset", 0), lambda o: o + 1),
        "two extents on the same bytes": edit(("groups", 0, "kinds", 1, "offset"), lambda _: None),
        "object that does not exist": edit((*param, "object", 0), 99),
        "integer too large": edit((*param, "end", 0), 1 << 70),
        "fractions": edit((*param, "start", 0), 0.0),
        "columns of different lengths": edit((*param, "offset"), lambda o: o[:-1]),
        "unknown dtype": edit((*param, "dtype"), "float7"),
        "dtype that is not a dtype": edit((*param, "dtype"), "load"),
        "larger dtype": edit((*param, "dtype"), "float64"),
        "duplicate tensor": edit(("tensors", 1, "fqn"), "embed.weight"),
        "base out of order": edit(("tensors", 1, "base"), 0),
        "alias of nothing": edit(("aliases",), {"x": "nothing"}),
        "world without objects": edit(("world",), 1 << 40),
        "block of 0 bytes": edit(("objects", 0, "block_bytes"), 0),
        "huge block": edit(("objects", 0, "block_bytes"), 1 << 40),
        "sums cut off": edit(("objects", 0, "sums"), ""),
        "sums exchanged": edit(("objects", 0, "sums"), lambda s: base64.b64encode(bytes(len(base64.b64decode(s)))).decode()),
        "no base64": edit(("objects", 0, "sums"), "!!!!"),
        "unknown codec": edit(("objects", 0, "codec"), "zstd"),
        "unknown algorithm": edit(("objects", 0, "algorithm"), "crc32"),
        "object size": edit(("objects", 0, "bytes"), 0),
        "another step's name": edit(("step",), 77),
        "text for a number": edit(("epoch",), "0"),
        "no groups": edit(("groups",), []),
        "null tensors": edit(("tensors",), None),
    }


@pytest.mark.parametrize("name", list(edits()))
def test_inconsistent_manifest_with_a_valid_seal_is_refused(root, name):
    tensors = adam_like(seed=11)
    commit = save_in_process(root, tensors, random_layout(tensors, 2, seed=3), step=5)
    path = Path(commit.path)
    document = json.loads(path.read_bytes()[:-65])
    if name == "two extents on the same bytes":
        kinds = document["groups"][0]["kinds"]
        kinds[1]["offset"] = list(kinds[0]["offset"])
        kinds[1]["start"], kinds[1]["end"], kinds[1]["object"] = kinds[0]["start"], kinds[0]["end"], kinds[0]["object"]
    else:
        edits()[name](document)
    body = json.dumps(document).encode() + b"\n"
    path.write_bytes(body + hashlib.sha256(body).hexdigest().encode() + b"\n")
    assert ckpt.latest(root) is None
    (damaged,) = ckpt.ls(root)
    assert damaged.problem and "manifest is unusable" in damaged.problem and "\n" not in damaged.problem
    with pytest.raises(ckpt.CheckpointCorrupt, match=commit.name):
        ckpt.open(root, commit.name)
    with pytest.raises(ckpt.NoCheckpoint, match="damaged: " + commit.name):
        ckpt.open(root)


@pytest.mark.parametrize("content", [b"", b"\n", b"{}", b"x" * 65, b"[]\n", b"\xff" * 200])
def test_garbage_under_a_commits_name_is_skipped(root, content):
    tensors = {("w", "param"): torch.zeros(3)}
    first = save_in_process(root, tensors, [[("w", "param", 0, 3)]], step=1)
    for body in (content, content + hashlib.sha256(content).hexdigest().encode() + b"\n"):
        Path(root, "commits/e0009-s000000000009.json").write_bytes(body)
        found = ckpt.latest(root)
        assert found is not None and found.name == first.name


def test_renamed_commits_and_foreign_files_are_never_the_newest(root):
    tensors = {("w", "param"): torch.zeros(3)}
    first = save_in_process(root, tensors, [[("w", "param", 0, 3)]], step=1)
    shutil.copy(first.path, root / "commits/e0009-s000000000009.json")
    for foreign in ("commits/notes.txt", "commits/e9-s9.json", "commits/e0010-s000000000009.json.bak", "commits/.tmp-1"):
        Path(root, foreign).write_text("hello")
    found = ckpt.latest(root)
    assert found is not None and found.name == first.name
    assert [c.name for c in ckpt.ls(root)] == [first.name, "e0009-s000000000009"]


def test_unknown_fields_of_a_later_minor_version_are_ignored(root):
    tensors = {("w", "param"): random_bits((9,), torch.float32, 1)}
    commit = save_in_process(root, tensors, random_layout(tensors, 2, seed=0))
    path = Path(commit.path)
    document = json.loads(path.read_bytes()[:-65])
    document.update(format="rcp/1.3", novelty={"a": 1})
    document["objects"][0]["etag"] = "x"
    body = json.dumps(document).encode() + b"\n"
    path.write_bytes(body + hashlib.sha256(body).hexdigest().encode() + b"\n")
    assert_equals(root, tensors)
