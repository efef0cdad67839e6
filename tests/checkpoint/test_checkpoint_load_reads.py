"""The bytes, requests and memory of a load, and its answers to damaged or unreachable objects."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.checkpoint_support import bits, damage, flip, peak_growths, random_bits, random_layout, save_in_process
from tests.checkpoint.saved_nets import saved_net
from tests.checkpoint.test_checkpoint_state import Net
from tests.ranks import on_processes
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.commits import _assemble
from vescale_ray.checkpoint.format.digest import block_bytes_for, root_of
from vescale_ray.checkpoint.format.manifest import ObjectEntry
from vescale_ray.checkpoint.format.object_layout import PlacedPiece
from vescale_ray.checkpoint.reading import loading

# --------------------------------------------------------------------------------------------- how much is read, and how


def llama_votes(writers: int, layers: int = 32) -> tuple[list[ckpt.Vote], dict[str, tuple[int, ...]]]:
    """Votes of ``writers`` ranks for Llama-3-8B's float32 weights, each layer cut evenly. The 32 GB need not be written."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (128256, 4096)}
    units = [["embed"]]
    for i in range(layers):
        layer = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096), "n1": (4096,)}
        layer |= {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336), "n2": (4096,)}
        shapes |= {f"{i}.{name}": shape for name, shape in layer.items()}
        units.append([f"{i}.{name}" for name in layer])
    shapes |= {"norm": (4096,), "head": (128256, 4096)}
    units.append(["norm", "head"])
    votes = []
    for rank, held in enumerate(even_cuts(units, shapes, writers)):
        offset, pieces = 4096, []
        for name, start, end in held:
            pieces.append(PlacedPiece(name, "param", "float32", shapes[name], start, end, offset))
            offset += 4 * (end - start)
        size = -(-offset // 4096) * 4096
        sums = np.zeros(-(-size // (1 << 20)), dtype="<u8")
        entry = ObjectEntry(f"data/a/r{rank:05d}.safetensors", rank, size, 1 << 20, sums, root_of(sums))
        votes.append(ckpt.Vote("a", rank, 1, 0, entry, None, tuple(pieces)))
    return votes, shapes


def even_cuts(units: list[list[str]], shapes: dict[str, tuple[int, ...]], world: int) -> list[list[tuple[str, int, int]]]:
    held: list[list[tuple[str, int, int]]] = [[] for _ in range(world)]
    for names in units:
        total = sum(math.prod(shapes[name]) for name in names)
        for rank in range(world):
            low, high, base = rank * total // world, (rank + 1) * total // world, 0
            for name in names:
                numel = math.prod(shapes[name])
                start, end = max(low - base, 0), min(high - base, numel)
                if end > start:
                    held[rank].append((name, start, end))
                base += numel
    return held


@pytest.mark.parametrize(("writers", "readers"), [(8, 6), (8, 16)])
def test_resharded_8b_load_plans_at_most_five_percent_extra(tmp_path, writers, readers):
    votes, shapes = llama_votes(writers)
    manifest = _assemble(votes, 1, 0, "a", writers, {}, {})
    checkpoint = ckpt.Checkpoint(ckpt.PosixStore(tmp_path), ckpt.Commit(manifest.name, "", 0, 1), manifest)
    units: dict[str, list[str]] = {}
    for name in shapes:
        units.setdefault(name.split(".")[0] if "." in name else ("embed" if name == "embed" else "last"), []).append(name)
    needed = planned = 0
    for held in even_cuts(list(units.values()), shapes, readers):
        plan = checkpoint.plan([(name, "param", start, end, torch.empty(end - start, device="meta")) for name, start, end in held])
        assert plan.needed == 4 * sum(end - start for _, start, end in held)
        assert plan.planned == sum(s.bytes for s in plan.segments) and plan.requests == len(plan.segments)
        needed, planned = needed + plan.needed, planned + plan.planned
    assert needed == 4 * sum(map(math.prod, shapes.values()))
    assert planned <= 1.05 * needed, planned / needed


def test_resharded_small_load_reads_at_most_five_percent_extra(tmp_path):
    """Compare the bytes that the store read with those requested: 5 million parameters with Adam's states in 4 units, 7 MB a rank."""
    layer: dict[str, tuple[int, ...]] = {"up": (1300, 480), "down": (480, 1300), "norm": (480,)}
    shapes = {f"{unit}.{name}": shape for unit in range(4) for name, shape in layer.items()}
    units = [[name for name in shapes if name.startswith(f"{unit}.")] for unit in range(4)]
    kinds = ("param", "exp_avg", "exp_avg_sq")
    full = {(name, kind): random_bits(shape, torch.float32, i) for i, (name, shape) in enumerate(shapes.items()) for kind in kinds}
    attempt, votes = ckpt.new_attempt(), []
    for rank, held in enumerate(even_cuts(units, shapes, 8)):
        pieces = [
            ckpt.ShardPiece(n, k, a, b, shapes[n], torch.float32, full[n, k].reshape(-1)[a:b].clone()) for k in kinds for n, a, b in held
        ]
        votes.append(ckpt.write_shard(tmp_path, attempt, rank, pieces, step=1, epoch=0, world=8))
    ckpt.commit(tmp_path, votes, step=1, epoch=0, attempt=attempt, world=8, meta={})
    read = 0

    class Counting(ckpt.PosixStore):
        @contextmanager
        def open_read(self, key: str) -> Iterator[Any]:
            with super().open_read(key) as reader:
                whole = reader.read_into

                def read_into(offset: int, view: memoryview) -> int:
                    nonlocal read
                    read += (count := whole(offset, view))
                    return count

                reader.read_into = read_into  # type: ignore[method-assign]
                yield reader

    checkpoint, needed = ckpt.open(Counting(tmp_path)), 0
    for held in even_cuts(units, shapes, 6):
        ranges = [(n, k, a, b, torch.empty(b - a)) for k in kinds for n, a, b in held]
        checkpoint.read_ranges(ranges)
        for name, kind, start, end, out in ranges:
            assert bits(out) == bits(full[name, kind].reshape(-1)[start:end])
            needed += out.nbytes
    assert needed == sum(tensor.nbytes for tensor in full.values()) and read <= 1.05 * needed, read / needed


def test_block_size_follows_object_size_and_bounds_checksums(tmp_path):
    for nbytes in (1, 5000, 7 << 20, 97 << 20, 512 << 20, 12 << 30, 1 << 40):
        for world in (1, 2, 8, 64, 1024, 1 << 20):
            block = block_bytes_for(nbytes, world)
            assert block % 4096 == 0 and 1 << 12 <= block <= 1 << 20
            count = -(-nbytes // block)
            assert block == 1 << 20 or (count <= 8192 and (count == 1 or count * world <= 65536)), (nbytes, world)
    assert (block_bytes_for(12 << 30, 8), block_bytes_for(94 << 20, 1024)) == (1 << 20, 1 << 20), "as large as they always were"
    for save in (ckpt.save, lambda *given: ckpt.Saver(given[1]).save(*given[:1], *given[2:])):
        save({"model": {"w": torch.ones(100_000)}}, tmp_path, 1)
        assert ckpt.open(tmp_path).manifest.objects[0].block_bytes == 4096


def test_load_reports_bytes_needed_planned_and_requests(root):
    saved_net(root)
    loaded = ckpt.load({"model": Net(1)}, root)
    weights = sum(t.numel() * t.element_size() for name, t in Net(1).state_dict().items() if name != "head.weight")
    assert loaded.read.needed == weights <= loaded.read.planned and loaded.read.requests >= 1


def test_small_gaps_are_read_along_and_large_ones_are_not(tmp_path):
    tensors = {("w", "param"): random_bits((1 << 20,), torch.uint8, 3)}
    save_in_process(tmp_path, tensors, random_layout(tensors, 1, seed=1), block_bytes=4096)
    checkpoint = ckpt.open(tmp_path)

    def plan(*ranges: tuple[int, int]) -> ckpt.ReadPlan:
        return checkpoint.plan([("w", "param", a, b, torch.empty(b - a, dtype=torch.uint8)) for a, b in ranges])

    block = 4096
    near = plan((0, 40 * block), (42 * block, 80 * block))
    assert near.runs == 2 and near.requests == 1 and near.planned == 80 * block
    far = plan((0, 40 * block), (45 * block, 80 * block))
    assert far.requests == 2 and far.planned == 75 * block


class Flaky:
    """A store whose reads damage each block in transit, the first ``times`` times."""

    def __init__(self, store: Any, times: int) -> None:
        self.store, self.times, self.seen, self.reads = store, times, {}, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def open_read(self, key: str) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def opened() -> Any:
            with self.store.open_read(key) as inner:

                class Reader:
                    def read_into(_, offset: int, view: memoryview) -> int:
                        count = inner.read_into(offset, view)
                        self.reads += 1
                        self.seen[key, offset] = self.seen.get((key, offset), 0) + 1
                        if self.seen[key, offset] <= self.times:
                            view[0] ^= 1
                        return count

                yield Reader()

        return opened()


def test_a_block_that_differs_is_read_once_more_by_every_stream(tmp_path):
    tensors = {("w", "param"): random_bits((300_000,), torch.float32, 3)}
    save_in_process(tmp_path, tensors, random_layout(tensors, 3, seed=1))
    out = torch.zeros(300_000)
    once = Flaky(ckpt.PosixStore(tmp_path), 1)
    told: list[int] = []
    plan = ckpt.open(once).read_ranges([("w", "param", 0, 300_000, out)], budget_bytes=64 << 10, progress=lambda: told.append(1))
    assert len(told) == len(plan.segments) > 3, "each piece that has come is told of"
    assert bits(out) == bits(tensors["w", "param"]) and once.reads == 2 * len(once.seen) and len(once.seen) > 30
    out.zero_()
    with pytest.raises(ckpt.CheckpointCorrupt, match="r00000.safetensors, block 1|r00000.safetensors, block 0"):
        ckpt.open(Flaky(ckpt.PosixStore(tmp_path), 99)).read_ranges([("w", "param", 0, 300_000, out)], budget_bytes=64 << 10)
    assert not out.any(), "nothing unverified arrives"


@on_processes(3)
def test_damage_seen_by_one_rank_makes_all_ranks_fall_back(rank, world, tmp_path):
    """Each rank loads its own rows alone, so that one rank alone meets the damage."""
    for step in (1, 2):
        made = ckpt.save({"model": {"w": torch.full((64, 1024), float(step))}}, tmp_path, step, timeout_s=20).commit
    if rank == 0:
        damage(tmp_path, made, -5000)  # in the last rows, which the last rank reads
    dist.barrier()
    target = {"w": distribute_tensor(torch.zeros(64, 1024), init_device_mesh("cpu", (world,)), [Shard(0)])}
    loaded = ckpt.load({"model": target}, tmp_path)
    assert (loaded.step, loaded.skipped) == (1, (made.name,)) and bool((target["w"].full_tensor() == 1).all())


def test_load_hitting_damage_reports_a_partly_filled_state(root, caplog):
    """The last block is damaged.

    Without an older checkpoint the error says that the state is partly filled; else the older one loads whole.
    """
    first, second = ({"w": torch.randn(3_000_000), "v": torch.randn(5)} for _ in range(2))
    ckpt.save({"model": first}, root, 1)
    target = {"w": torch.zeros(3_000_000), "v": torch.zeros(5)}
    for step in (1, 2):
        if step == 2:
            ckpt.save({"model": second}, root, 2)
        newest = ckpt.latest(root)
        assert newest is not None
        victim = damage(root, newest, 12_000_000)
        if step == 1:
            with pytest.raises(
                ckpt.CheckpointCorrupt, match="another checksum; the state now holds parts of it: load again before using it"
            ):
                ckpt.load({"model": target}, root)
            flip(victim, 12_000_000)
    loaded = ckpt.load({"model": target}, root)
    assert loaded.step == 1 and len(loaded.skipped) == 1 and "going back to checkpoint" in caplog.text
    assert all(torch.equal(target[name], first[name]) for name in first)


NOT_NOW = {"no permission": errno.EACCES, "no file descriptor left": errno.EMFILE, "no memory": errno.ENOMEM}


@pytest.mark.parametrize("what", ["manifest", "data", "aux"])
@pytest.mark.parametrize("why", NOT_NOW)
def test_load_never_skips_an_unreachable_newest_checkpoint(monkeypatch, what, why):
    """Going back would lose sound steps. Only a person may permit it, or raise a limit."""
    root = store = ckpt.MemoryStore()
    for step in (1, 2):
        ckpt.save({"model": {"w": torch.full((3,), float(step))}}, root, step)
    newest = ckpt.ls(root)[1]
    data = f"data/{newest.attempt}/r00000"
    ending = {"manifest": newest.key, "data": f"{data}.safetensors", "aux": f"{data}.aux.json"}[what]
    real = store.get

    def refusing(key):
        if key == ending:
            raise OSError(NOT_NOW[why], os.strerror(NOT_NOW[why]), key)
        return real(key)

    target = {"w": torch.zeros(3)}
    monkeypatch.setattr(store, "get", refusing)
    with pytest.raises(OSError, match=f"{ending} is out of reach: .*; it may be intact, so no older checkpoint is loaded") as caught:
        ckpt.load({"model": target}, root)
    assert caught.value.errno == NOT_NOW[why] and not target["w"].any()
    assert [c.step for c in ckpt.ls(root)] == [1, 2], "it is listed all the same"
    if what == "manifest":
        for call in (lambda: ckpt.latest(root), lambda: ckpt.open(root), lambda: ckpt.open(root, newest.name)):
            with pytest.raises(OSError, match="out of reach"):
                call()
    monkeypatch.undo()
    assert ckpt.load({"model": target}, root).step == 2


def test_a_budget_below_one_block_is_refused(root):
    saved_net(root)
    with pytest.raises(ValueError, match="budget_bytes is 100, less than a block of the checkpoint: give at least"):
        ckpt.load({"model": Net(1)}, root, budget_bytes=100)


def load_twice(root, size, budget):
    target = {f"w{i}": torch.ones(size // 16) for i in range(4)}
    ckpt.save({"model": target}, root, 1)
    for tensor in target.values():
        tensor.zero_()
    yield
    ckpt.load({"model": target}, root, budget_bytes=budget)
    assert all(bool((t == 1).all()) for t in target.values())
    yield
    other = ckpt.open(root).to_state_dict(budget_bytes=budget)
    assert all(bool((t == 1).all()) for t in other.values())
    yield


@pytest.mark.parametrize("budget", [pytest.param(2 << 20, marks=pytest.mark.slow), 32 << 20])
def test_a_load_takes_its_budget_beside_the_tensors(tmp_path, budget):
    loaded, given = peak_growths(load_twice, tmp_path, 160 << 20, budget)
    assert loaded <= budget + (48 << 20), (loaded, "in place: no more than the budget and the threads' stacks")
    assert given <= (160 << 20) + budget + (48 << 20), (given, "into new tensors: those, and the budget")


def test_rank_skips_a_commit_object_that_differs_from_rank_0s(root, monkeypatch):
    """One host has a stale copy of the folder, in which the name stands for another commit."""
    older = ckpt.save({"model": {"w": torch.ones(5)}}, root, 1).commit
    newer = ckpt.save({"model": {"w": torch.full((5,), 2.0)}}, root, 2).commit
    told = dataclasses.replace(newer, sha256="0" * 64)
    monkeypatch.setattr(loading, "_candidates", lambda store, named: [told, older])
    w = torch.zeros(5)
    loaded = ckpt.load({"model": {"w": w}}, root)
    assert loaded.commit == older and loaded.skipped == (newer.name,) and w.tolist() == [1.0] * 5
    monkeypatch.setattr(loading, "_candidates", lambda store, named: [told])
    with pytest.raises(ckpt.CheckpointCorrupt, match="rank 0 sees another commit object than rank 0"):
        ckpt.load({"model": {"w": w.zero_()}}, root)
    assert w.tolist() == [0.0] * 5
