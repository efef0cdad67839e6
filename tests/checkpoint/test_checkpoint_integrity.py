"""Damage is found everywhere and reported with object, block and tensor. No value of a manifest is used without a check."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.checkpoint.checkpoint_support import adam_like, assert_equals, bits, flip, random_bits, random_layout, save_in_process
from vescale_ray import checkpoint as ckpt

BLOCK = 4096


def objects_of(root: Path) -> list[Path]:
    return sorted(root.glob("data/*/*.safetensors"))


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


def test_read_of_a_damaged_block_raises_and_fills_nothing(root):
    tensors = {("a", "param"): random_bits((2048,), torch.float32, 1), ("b", "param"): random_bits((2048,), torch.float32, 2)}
    save_in_process(root, tensors, [[("a", "param", 0, 2048), ("b", "param", 0, 2048)]], block_bytes=BLOCK)
    flip(objects_of(root)[0], 4096 + 2048 * 4 + 100)  # a byte of b
    checkpoint = ckpt.open(root)
    assert torch.equal(checkpoint.read("a").view(torch.int32), tensors["a", "param"].view(torch.int32))
    out = torch.full((2048,), 7.0)
    with pytest.raises(ckpt.CheckpointCorrupt) as caught:
        checkpoint.read_ranges([("b", "param", 0, 2048, out)])
    assert caught.value.block == 3 and caught.value.tensors == ("b",) and caught.value.object.endswith("r00000.safetensors")
    assert "block 3 (holds b)" in str(caught.value) and "\n" not in str(caught.value)
    assert bool((out == 7.0).all())


def test_verify_finds_a_flipped_bit_in_a_manifest_or_its_seal(root):
    tensors = adam_like(seed=6)
    first = save_in_process(root, tensors, random_layout(tensors, 2, seed=1), step=1)
    second = save_in_process(root, tensors, random_layout(tensors, 2, seed=2), step=2)
    manifest = Path(second.path)
    rng = random.Random(1)
    size = manifest.stat().st_size
    # Flips include the seal's hexadecimal digits, where 'a' and 'A' differ by one bit.
    for byte in [0, *range(size - 66, size), *(rng.randrange(size) for _ in range(25))]:
        mask = 1 << rng.randrange(8)
        flip(manifest, byte, mask)
        report = ckpt.verify(root)
        assert [p.object for p in report.problems] == [f"commits/{second.name}.json"] and report.problems[0].tensors == ("manifest",)
        found = ckpt.latest(root)
        assert found is not None and found.name == first.name
        flip(manifest, byte, mask)


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
