"""How fast are a save and a verified load, next to raw disk bandwidth and to torch's distributed checkpoint?

    python benchmarks/checkpoint_io.py [--quick] [--json OUT] [--mib 1024] [--ranks 2] [--rounds 5] [--folder DIR]

Every round does, one after the other in the same processes on the same DTensors: a raw O_DIRECT write with fsync, our save,
``dcp.save``; then a raw read, our load (every block verified), ``dcp.load``. Files are dropped from the page cache before they
are read. The ratios of each round are taken within the round, so that other load on the machine cancels; the table shows
their median and range.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.reporting import write

GOALS = {
    "save_vs_raw": (">= 0.8", "raw O_DIRECT write + fsync"),
    "save_vs_dcp": (">= 2.5", "torch dcp.save"),
    "load_vs_raw": (">= 0.85", "raw O_DIRECT read"),
    "load_vs_dcp": ("> 1", "torch dcp.load (which verifies nothing)"),
}


def rank_main(rank: int, world: int, store: str, folder: str, mib: int, rounds: int, results: Any) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from vescale_ray import checkpoint as ckpt
    from vescale_ray.checkpoint.digest import aligned_buffer, view_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=300))
    mesh = init_device_mesh("cpu", (world,))
    count = 8
    rows = world * max(1, mib * (1 << 20) // 4 // 4096 // count // world)
    state = {
        f"layers.{i}.weight": DTensor.from_local(torch.randn(rows // world, 4096), mesh, [Shard(0)], run_check=False) for i in range(count)
    }
    buffer = view_of(aligned_buffer(16 << 20).fill_(1 + rank))
    mine = sum(t.to_local().nbytes for t in state.values())

    def timed(work: Callable[[], object]) -> float:
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - began

    def forget(path: Path) -> None:
        """Out of the page cache, by rank 0."""
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

    seconds: list[dict[str, float]] = []
    for index in range(rounds + 1):
        raw, ours, theirs = (Path(folder, f"{name}-{index}") for name in ("raw", "ours", "dcp"))
        if rank == 0:
            raw.mkdir(parents=True)
        took: dict[str, float] = {}
        took["raw_write"] = timed(lambda raw=raw: raw_write(raw / str(rank), mine, buffer))  # type: ignore[misc]
        took["save"] = timed(lambda ours=ours: ckpt.save({"model": state}, ours, 1))  # type: ignore[misc]
        took["dcp_save"] = timed(lambda theirs=theirs: dcp.save(state, checkpoint_id=str(theirs)))  # type: ignore[misc]
        for path in (raw, ours, theirs):
            forget(path)
        expected = [float(t.to_local().sum()) for t in state.values()]
        took["raw_read"] = timed(lambda raw=raw: raw_read(raw / str(rank), mine, buffer))  # type: ignore[misc]
        for name, work in (
            ("load", lambda ours=ours: ckpt.load({"model": state}, ours)),
            ("dcp_load", lambda theirs=theirs: dcp.load(state, checkpoint_id=str(theirs))),
        ):
            for t in state.values():
                t.to_local().zero_()
            took[name] = timed(work)  # type: ignore[arg-type]
            assert [float(t.to_local().sum()) for t in state.values()] == expected, f"{name} gave other tensors"
        for path in (raw, ours, theirs):
            clean(path)
        seconds.append(took)
    total = torch.tensor([mine])
    dist.all_reduce(total)
    if rank == 0:
        results.put((int(total), seconds[1:]))  # the first round warms up: imports, first touches
    dist.barrier()
    dist.destroy_process_group()


def raw_write(path: Path, size: int, view: memoryview) -> None:
    """What the disk gives: O_DIRECT writes of one aligned buffer (made and touched before the clock starts), then fsync."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 MiB, 2 rounds: a check that it runs, not a figure")
    parser.add_argument("--mib", type=int, default=256, help="bytes of all ranks together, in MiB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    mib, rounds = (64, 2) if arguments.quick else (arguments.mib, arguments.rounds)
    with tempfile.TemporaryDirectory(prefix="vescale-ckpt-bench-", dir=arguments.folder) as folder:
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        store = str(Path(folder, "store"))
        ranks = [
            context.Process(target=rank_main, args=(r, arguments.ranks, store, folder, mib, rounds, results), daemon=True)
            for r in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        total, seconds = results.get(timeout=60 + 30 * (rounds + 1) * max(1, mib // 256))
        for process in ranks:
            process.join(30)
    report(total, seconds, arguments.ranks, arguments.json)


def report(total: int, seconds: list[dict[str, float]], ranks: int, out: str | None) -> None:
    ratios = {
        "save_vs_raw": [s["raw_write"] / s["save"] for s in seconds],
        "save_vs_dcp": [s["dcp_save"] / s["save"] for s in seconds],
        "load_vs_raw": [s["raw_read"] / s["load"] for s in seconds],
        "load_vs_dcp": [s["dcp_load"] / s["load"] for s in seconds],
    }
    figures: dict[str, Any] = {}
    print(f"{total / (1 << 20):.0f} MiB over {ranks} processes, {len(seconds)} rounds, load average {os.getloadavg()[0]:.1f}\n")
    print(f"{'':14}{'median':>10}{'min':>10}{'max':>10}  goal")
    for name, values in ratios.items():
        goal, peer = GOALS[name]
        middle = statistics.median(values)
        figures[name] = {"value": middle, "spread": [min(values), max(values)], "unit": "ratio", "goal": goal, "peer": peer}
        print(f"{name:14}{middle:9.2f}x{min(values):9.2f}x{max(values):9.2f}x  {goal}, against {peer}")
    print()
    for name in seconds[0]:
        rates = [total / s[name] / 1e9 for s in seconds]
        middle = statistics.median(rates)
        figures[f"{name}_rate"] = {"value": middle, "spread": [min(rates), max(rates)], "unit": "GB/s", "goal": None, "peer": None}
        print(f"{name:14}{middle:10.2f}{min(rates):10.2f}{max(rates):10.2f}  GB/s")
    write(Path(out) if out else None, figures)


if __name__ == "__main__":
    main()
