"""Speed of saves and verified loads, the wait of training, and bytes read and held, next to the raw disk, memcpy and torch's DCP.

    python benchmarks/checkpoint.py [--quick] [--json OUT] [--mib 1024] [--ranks 2] [--rounds 6] [--seconds 150] [--folder DIR]

*Speed.* Every round runs these one after the other in the same processes on the same DTensors. Writes: a raw O_DIRECT write with fsync
(from an ordinary buffer, as fio does, and from huge pages, the best case, which matters on a virtual machine's disk); our save; a memcpy of
the size of the rank's object and our asynchronous save (the wait, then the time to the commit); ``dcp.save``. Reads: the raw reads; our
load, with every block verified; ``dcp.load``. Files are dropped from the page cache before they are read. Ratios are taken within a round,
so that other load on the machine cancels. The table shows their median and half the distance of their quartiles. Rounds end after
``--rounds``, or after ``--seconds`` (at least two rounds).

*Bytes.* A checkpoint of Llama 3 8B's shapes with Adam's states, saved on 8 ranks, is planned to be read on 6 and on 16, from the manifest
without data. One of a small model is really read, and the store's bytes are counted.

*Memory.* A separate process measures the growth of peak resident memory in a save, an asynchronous save and a load. It excludes the tensors
and, for asynchronous saves, the buffer of the rank's size.

A memcpy of a very large buffer bypasses the cache (in glibc, above three quarters of its size, if that is large). This saves a third of the
traffic; many smaller copies do not. So the wait has two figures: with a rank's tensors in one buffer, and in 16 separate ones.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ranks import join
from benchmarks.reporting import figure, write

RATIOS: dict[str, tuple[str, str, str, str | None, str]] = {
    # name: (numerator, denominator, unit, goal, description)
    "save_vs_raw": ("raw_write", "save", "x", ">= 0.8", "save() against a raw O_DIRECT write with fsync"),
    "persist_vs_raw": ("raw_write", "persist", "x", ">= 0.8", "async_save() from its copy to its commit, against the same"),
    "save_vs_dcp": ("dcp_save", "save", "x", ">= 2.5", "save() against dcp.save()"),
    "async_vs_dcp": ("dcp_save", "async_total", "x", ">= 2.5", "async_save(), wait and commit included, against dcp.save()"),
    "stall_vs_memcpy": ("stall", "memcpy", "x", "<= 1.3", "what training waits for, against a memcpy of the buffer"),
    "apart_vs_memcpy": ("stall_apart", "memcpy", "x", None, "the same where each tensor is a buffer of its own"),
    "load_vs_raw": ("raw_read", "load", "x", ">= 0.85", "load(), every block verified, against a raw O_DIRECT read"),
    "save_vs_best_raw": ("raw_write_huge", "save", "x", None, "save() against a raw write from a buffer in huge pages"),
    "load_vs_best_raw": ("raw_read_huge", "load", "x", None, "load() against a raw read into one"),
    "load_vs_dcp": ("dcp_load", "load", "x", "> 1", "the same against dcp.load(), which verifies nothing"),
}
BUDGET_MIB = 16
"""Memory that a save or load may use besides tensors and buffer: buffers of 1 to 8 MiB, thread stacks, Python objects."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 MiB, 1 round: a check that it runs, not a figure")
    parser.add_argument("--mib", type=int, default=1024, help="bytes of all ranks together, in MiB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no round after so long")
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    mib, rounds = (32, 1) if options.quick else (options.mib, options.rounds)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="vescale-ckpt-bench-", dir=options.folder) as folder:
        total, seconds = speed(folder, mib, options.ranks, rounds, options.seconds)
        print(f"{total / (1 << 20):.0f} MiB over {options.ranks} processes, {len(seconds)} rounds, load average {os.getloadavg()[0]:.1f}\n")
        print(f"{'':18}{'median':>9}{'+-':>7}  {'goal':9}")
        for name, (above, below, unit, goal, what) in RATIOS.items():
            figures[name] = figure([s[above] / s[below] for s in seconds], "ratio", goal, what)
            row(name, figures[name], unit, what)
        for name in seconds[0]:
            if not name.startswith("stall"):
                figures[f"{name}_rate"] = figure([total / s[name] / 1e9 for s in seconds], "GB/s", None, None)
                row(name, figures[f"{name}_rate"], " GB/s", "")
        for name in ("stall", "stall_apart"):
            figures[f"{name}_seconds"] = figure([s[name] for s in seconds], "s", None, None)
            row(name, figures[f"{name}_seconds"], " s", "")
        print()
        for name, value, goal, what in [*planned_bytes(options.quick), *read_bytes(Path(folder, "small"), options.quick)]:
            figures[name] = figure([value], "ratio", goal, what)
            row(name, figures[name], "x", what)
        print()
        for name, growth, what in memory(folder, 32 if options.quick else min(512, mib // options.ranks)):
            figures[name] = figure([growth], "MiB", f"<= {BUDGET_MIB}", what)
            row(name, figures[name], " MiB", what)
    write(options.json, figures, mib=mib, ranks=options.ranks, rounds=len(seconds))
    return 0


def row(name: str, one: dict[str, Any], unit: str, what: str) -> None:
    print(f"{name:18}{one['value']:>9.3f}{one['spread']:>7.3f}{unit:5}  {one['goal'] or '':9}  {what}")


# ---------------------------------------------------------------------------------------------------------------------- speed


def speed(folder: str, mib: int, ranks: int, rounds: int, seconds: float) -> tuple[int, list[dict[str, float]]]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = str(Path(folder, "store"))
    arguments = (store, folder, mib, rounds, seconds, results)
    processes = [context.Process(target=rank_main, args=(r, ranks, *arguments), daemon=True) for r in range(ranks)]
    for process in processes:
        process.start()
    try:
        measured: tuple[int, list[dict[str, float]]] = results.get(timeout=120 + 3 * seconds)
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
    return measured


def rank_main(rank: int, world: int, store: str, folder: str, mib: int, rounds: int, seconds: float, results: Any) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from vescale_ray import checkpoint as ckpt
    from vescale_ray.checkpoint.format.digest import view_of
    from vescale_ray.checkpoint.format.pages import aligned_buffer, transfer_buffers
    from vescale_ray.checkpoint.format.staging import SlabPool

    torch.set_num_threads(1)
    join(store, rank, world)
    mesh = init_device_mesh("cpu", (world,))
    count = 16
    rows = world * max(1, mib * (1 << 20) // 4 // 4096 // count // world)
    state = {
        f"layers.{i}.weight": DTensor.from_local(torch.randn(rows // world, 4096), mesh, [Shard(0)], run_check=False) for i in range(count)
    }
    buffer = view_of(aligned_buffer(16 << 20).fill_(1 + rank))
    huge = view_of(transfer_buffers(1, 16 << 20, 1 << 40)[0].fill_(1 + rank))
    mine = sum(t.to_local().nbytes for t in state.values())
    # As fully_shard keeps them: a rank's parts adjacent in one buffer. Torch's DCP copies such views first, so it gets separate tensors.
    flat = torch.cat([t.to_local().reshape(-1) for t in state.values()])
    parts = flat.view(count, rows // world, 4096)
    together = {name: DTensor.from_local(parts[i], mesh, [Shard(0)], run_check=False) for i, name in enumerate(state)}
    pool = SlabPool()
    two = [pool.take(mine).buffer for _ in range(2)]

    def timed(work: Callable[[], object]) -> float:
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - began

    def forget(path: Path) -> None:
        """Drop a file from the page cache, on rank 0."""
        dist.barrier()
        if rank == 0:
            for file in path.rglob("*"):
                if file.is_file():
                    fd = os.open(file, os.O_RDONLY)
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(fd)
        dist.barrier()

    def clean(path: Path) -> None:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()

    def slowest(value: float) -> float:
        each = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(each, op=dist.ReduceOp.MAX)
        return float(each)

    beside = Path(folder, "async")
    saver = ckpt.Saver(beside)
    saver.prepare({"model": together})
    measured: list[dict[str, float]] = []
    started = time.perf_counter()
    for index in range(rounds + 1):
        if index > 2 and slowest(time.perf_counter() - started) > seconds:
            break
        raw, best, ours, theirs = (Path(folder, f"{name}-{index}") for name in ("raw", "best", "ours", "dcp"))
        if rank == 0:
            raw.mkdir(parents=True)
            best.mkdir()
        took: dict[str, float] = {}

        def save_beside(took: dict[str, float] = took, index: int = index) -> None:
            handle = saver.async_save({"model": together}, 2 * index + 1)
            took["stall"] = handle.stall_s
            handle.wait()
            took["persist"] = handle.persist_s or 0.0

        steps: list[tuple[str, Callable[[], object]]] = [
            ("raw_write", lambda raw=raw: raw_write(raw / str(rank), mine, buffer)),  # type: ignore[misc]
            ("raw_write_huge", lambda best=best: raw_write(best / str(rank), mine, huge)),  # type: ignore[misc]
            ("save", lambda ours=ours: ckpt.save({"model": together}, ours, 1)),  # type: ignore[misc]
            ("async_total", save_beside),  # the memcpy comes right before it
            ("dcp_save", lambda theirs=theirs: dcp.save(state, checkpoint_id=str(theirs))),  # type: ignore[misc]
        ]
        # The order changes each round, since a disk's speed depends on the work before.
        for name, work in steps[index % 5 :] + steps[: index % 5]:
            if name == "async_total":
                took["memcpy"] = timed(lambda: ctypes.memmove(two[0].data_ptr(), two[1].data_ptr(), mine))
            took[name] = timed(work)
            saver._writer.idle(60, tended=True)  # the saver reads back after its commit; the next figure must not include that
        apart = saver.async_save({"model": state}, 2 * index + 2)
        apart.wait()
        saver._writer.idle(60, tended=True)
        took["stall_apart"] = apart.stall_s
        for name in ("stall", "stall_apart", "persist"):
            took[name] = slowest(took[name])
        for path in (raw, best, ours, theirs):
            forget(path)
        clean(beside / "data")
        clean(beside / "commits")
        expected = [float(t.to_local().sum()) for t in state.values()]
        flat.zero_()
        loads: list[tuple[str, Callable[[], object]]] = [
            ("raw_read", lambda raw=raw: raw_read(raw / str(rank), mine, buffer)),  # type: ignore[misc]
            ("raw_read_huge", lambda best=best: raw_read(best / str(rank), mine, huge)),  # type: ignore[misc]
            ("load", lambda ours=ours: ckpt.load({"model": together}, ours)),  # type: ignore[misc]
            ("dcp_load", lambda theirs=theirs: dcp.load(state, checkpoint_id=str(theirs))),  # type: ignore[misc]
        ]
        for name, work in loads[index % 4 :] + loads[: index % 4]:
            if name == "dcp_load":
                for t in state.values():
                    t.to_local().zero_()
            took[name] = timed(work)
        for into in (state, together):
            assert [float(t.to_local().sum()) for t in into.values()] == expected, "a load gave other tensors"
        for path in (raw, best, ours, theirs):
            clean(path)
        measured.append(took)
    saver.close()
    total = torch.tensor([mine])
    dist.all_reduce(total)
    if rank == 0:
        results.put((int(total), measured[1:]))  # the first round warms up: imports, first touches
    dist.barrier()
    dist.destroy_process_group()


def raw_write(path: Path, size: int, view: memoryview) -> None:
    """Speed of the disk: O_DIRECT writes of one aligned buffer (made and touched before the clock starts), then fsync."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    os.posix_fallocate(fd, 0, size)
    for offset in range(0, size, len(view)):
        os.pwrite(fd, view[: min(len(view), size - offset)], offset)
    os.fsync(fd)
    os.close(fd)


def raw_read(path: Path, size: int, view: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    for offset in range(0, size, len(view)):
        os.preadv(fd, [view], offset)
    os.close(fd)


# ---------------------------------------------------------------------------------------------------------------------- bytes


def llama(layers: int, dim: int, ffn: int, kv: int, vocab: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the model's order."""
    found: list[tuple[str, tuple[int, ...]]] = [("embed.weight", (vocab, dim))]
    for i in range(layers):
        inner = {"wq": (dim, dim), "wk": (kv, dim), "wv": (kv, dim), "wo": (dim, dim), "w1": (ffn, dim), "w2": (dim, ffn), "w3": (ffn, dim)}
        found += [(f"layers.{i}.{name}.weight", shape) for name, shape in inner.items()]
        found += [(f"layers.{i}.{name}.weight", (dim,)) for name in ("attention_norm", "ffn_norm")]
    return [*found, ("norm.weight", (dim,)), ("output.weight", (vocab, dim))]


def shares(shapes: list[tuple[str, tuple[int, ...]]], world: int) -> list[list[tuple[str, int, int]]]:
    """Each rank's intervals if every layer's tensors, end to end, are cut evenly at multiples of 1024 elements."""
    units: dict[str, list[tuple[str, int]]] = {}
    for name, shape in shapes:
        numel = 1
        for n in shape:
            numel *= n
        units.setdefault(name.split(".")[1] if name.startswith("layers.") else name, []).append((name, numel))
    held: list[list[tuple[str, int, int]]] = [[] for _ in range(world)]
    for members in units.values():
        size = sum(numel for _, numel in members)
        each = -(-size // world // 1024) * 1024
        for rank in range(world):
            low, high, base = min(size, rank * each), min(size, (rank + 1) * each), 0
            for name, numel in members:
                start, end = max(low - base, 0), min(high - base, numel)
                held[rank].append((name, start, end) if end > start else (name, 0, 0))
                base += numel
    return held


KINDS = ("param", "exp_avg", "exp_avg_sq")


def planned_bytes(quick: bool) -> list[tuple[str, float, str, str]]:
    """Figures of the manifest alone, with pieces on the meta device and objects that do not exist."""
    import numpy as np
    import torch

    from vescale_ray.checkpoint import Checkpoint, Commit, ShardPiece, Vote
    from vescale_ray.checkpoint.commits import _assemble
    from vescale_ray.checkpoint.format.digest import block_bytes_for, root_of
    from vescale_ray.checkpoint.format.manifest import ObjectEntry
    from vescale_ray.checkpoint.format.object_layout import lay_out
    from vescale_ray.checkpoint.stores.opening import store_of

    class Piece(ShardPiece):
        def __post_init__(self) -> None:  # no data is wanted
            pass

    shapes = llama(4 if quick else 32, 4096, 14336, 1024, 128256)
    of = dict(shapes)
    votes = []
    empty = torch.empty(0)
    for rank, intervals in enumerate(shares(shapes, 8)):
        layout = lay_out([Piece(n, kind, a, b, of[n], torch.float32, empty) for kind in KINDS for n, a, b in intervals])
        block = block_bytes_for(layout.bytes, 8)
        sums = np.zeros(-(-layout.bytes // block), dtype="<u8")
        entry = ObjectEntry(f"data/a/r{rank:05d}.safetensors", rank, layout.bytes, block, sums, root_of(sums))
        votes.append(Vote("a", rank, 1, 0, entry, None, layout.placed))
    manifest = _assemble(votes, 1, 0, "a", 8, {}, {})
    checkpoint = Checkpoint(store_of("/nonexistent"), Commit(manifest.name, "", 0, 1), manifest)
    found = []
    for world in (6, 16):
        needed = planned = requests = 0
        for intervals in shares(shapes, world):
            ranges = [(n, k, a, b, torch.empty(b - a, device="meta")) for k in KINDS for n, a, b in intervals]
            plan = checkpoint.plan(ranges)
            needed, planned, requests = needed + plan.needed, planned + plan.planned, requests + plan.runs
        what = f"bytes read against needed, {needed / 1e9:.0f} GB in {requests} runs"
        found.append((f"reshard_8_to_{world}", planned / needed, "<= 1.05", what))
    return found


def read_bytes(root: Path, quick: bool) -> list[tuple[str, float, str, str]]:
    """Figures of a small model, saved on 8 ranks and read by 6: bytes that the store returned, against bytes needed."""
    import torch

    from vescale_ray import checkpoint as ckpt

    class Counting(ckpt.PosixStore):
        given = 0

        @contextmanager
        def open_read(self, key: str) -> Any:
            with super().open_read(key) as reader:
                whole = reader.read_into

                def read_into(offset: int, view: memoryview) -> int:
                    count = whole(offset, view)
                    self.given += count
                    return count

                reader.read_into = read_into  # type: ignore[method-assign]
                yield reader

    shapes = llama(1, 512, 1792, 128, 4096) if quick else llama(2, 1024, 3584, 256, 8192)
    full = {n: torch.randn(shape) for n, shape in shapes}
    attempt, votes = ckpt.new_attempt(), []
    for rank, intervals in enumerate(shares(shapes, 8)):
        pieces = [
            ckpt.ShardPiece(n, k, a, b, tuple(full[n].shape), torch.float32, full[n].view(-1)[a:b]) for k in KINDS for n, a, b in intervals
        ]
        votes.append(ckpt.write_shard(root, attempt, rank, pieces, step=1, epoch=0, world=8))
    ckpt.commit(root, votes, step=1, epoch=0, attempt=attempt, world=8, meta={})
    store = Counting(root)
    opened, needed = ckpt.open(store), 0
    for intervals in shares(shapes, 6):
        ranges = [(n, k, a, b, torch.empty(b - a)) for k in KINDS for n, a, b in intervals]
        needed += opened.read_ranges(ranges).needed
        assert all(torch.equal(out, full[n].view(-1)[a:b]) for n, _, a, b, out in ranges), "other tensors came back"
    return [("really_read_8_to_6", store.given / needed, "<= 1.05", f"the same, really read: {needed / 1e6:.0f} MB")]


# --------------------------------------------------------------------------------------------------------------------- memory


def memory(folder: str, mib: int) -> list[tuple[str, float, str]]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=measure_memory, args=(str(Path(folder, "memory")), mib << 20, results), daemon=True)
    process.start()
    try:
        grown: dict[str, float] = results.get(timeout=300)
        process.join(30)
    finally:
        process.kill()
    return [
        ("save_memory", grown["save"], f"save() of {mib} MiB: growth of the peak"),
        ("async_memory", grown["async"] - mib, "async_save(): the same, beyond its buffer"),
        ("load_memory", grown["load"], "load()"),
    ]


def measure_memory(folder: str, size: int, results: Any) -> None:
    import torch

    from vescale_ray import checkpoint as ckpt

    torch.set_num_threads(1)
    ckpt.save({"model": {"w": torch.ones(9 << 20, dtype=torch.uint8)}}, f"{folder}-warm", 1)  # imports, threads
    ckpt.load({"model": {"w": torch.ones(9 << 20, dtype=torch.uint8)}}, f"{folder}-warm")
    state = {"model": {"w": torch.ones(size, dtype=torch.uint8)}}

    def save_beside() -> None:
        with ckpt.Saver(folder) as saver:
            for step in range(2, 5):
                saver.async_save(state, step).wait()

    works: dict[str, Callable[[], object]] = {
        "save": lambda: ckpt.save(state, folder, 1),
        "load": lambda: ckpt.load(state, folder),
        "async": save_beside,
    }
    grown: dict[str, float] = {}
    for name, work in works.items():
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
        before = memory_of("VmRSS")
        work()
        grown[name] = memory_of("VmHWM") - before
    results.put(grown)


def memory_of(field: str) -> float:
    """A memory field of this process, in MiB."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(field))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    sys.exit(main())
