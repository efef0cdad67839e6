"""Cost of the metrics in a training step: the work itself, timed, over the time of a step; and alternating steps with and without it.

    python benchmarks/metrics_cost.py [--quick] [--rounds 20] [--world 2] [--json OUT]

The benchmark uses the demo's model and batch (`vescale_ray/configs/demo.yaml`), and an optimizer step with a copy for the buddy, on gloo.
The goal is at most 0.5 % of a step. The noise of a step on a shared machine is several times that, so the two are measured apart:

    worker.cpu       CPU seconds that a worker's training thread spends in a step for the metrics alone: the meter's calls, the
                     contexts around waits, bytes of the copies, the resident memory, the figures' part of the message to
                     the controller (pickled with them less pickled without); each REPEATS times a round, on the live trainer
    worker.ratio     that over the CPU seconds of a step of this rank (its own thread, the slots' compute included)
    controller.cpu   CPU seconds of the controller for the reports of all workers of a step: the books, the line in metrics.jsonl, a
                     snapshot. It is another process, so it delays no step, but on shared cores it takes part of them.
    controller.ratio that over the CPU seconds of a step of all ranks together
    controller.added CPU seconds that figures by rank add to it (the same reports without them subtracted)
    scrape.ratio     CPU seconds of a scrape over those of training between two scrapes, every 10 s
    wall.ratio       wall time of a step with the metrics' work over one without (the meter and its contexts replaced by nothing), the same
                     trainer, blocks of BLOCK steps in turns A B B A: median over rounds, spread half the quartiles' distance
    wall.noise       the same of two blocks that both have it
    cpu.ratio, cpu.noise  the same of CPU seconds of the training thread, which other processes disturb less

The exit code is 0 for any figures.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ranks import join, run_ranks
from benchmarks.reporting import figure, write

GOAL = "< 0.005"
REPEATS = 200
BLOCK = 4
WARM = 3
SCRAPE_S = 10.0
PARTS = ("meter", "contexts", "copies", "message", "resident")


def config_of(world: int, folder: str) -> Any:
    from vescale_ray.config import load_config

    keys = [f"elastic.workers={world}", "train.threads=1", "train.steps=1000000", f"run.dir={folder}", "run.name=cost"]
    keys.append("metrics.peak_flops=1e12")
    with as_file(files("vescale_ray.configs") / "demo.yaml") as path:
        return load_config(path, keys)


class Nothing:
    """A meter that measures nothing."""

    def __init__(self) -> None:
        self.data_s, self.skipped = 0.0, False

    def begin(self) -> None: ...
    def computed(self, _: float) -> None: ...
    def stepping(self) -> None: ...
    def stepped(self) -> None: ...

    def end(self, _: float) -> Any:
        from vescale_ray.workers.messages import Usage

        return Usage()


@contextmanager
def uncounted(_: str) -> Iterator[None]:
    yield


def cpu_of(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """CPU seconds of this thread for one call."""
    began = time.thread_time()
    for _ in range(repeats):
        work()
    return (time.thread_time() - began) / repeats


def metrics_work(trainer: Any, snapshots: Any, record: Any) -> dict[str, float]:
    """CPU seconds of each part of a step's work for the metrics, on this live trainer."""
    from vescale_ray.communication import wait_notes
    from vescale_ray.workers.messages import Stepped, Ticket, Usage
    from vescale_ray.workers.monitoring.process import resident_bytes

    meter = trainer._meter

    def meter_calls() -> None:
        meter.begin()
        for _ in range(3):  # rounds of slots: each reads the clock once more
            meter.data_s += time.perf_counter() - time.perf_counter()
        meter.computed(0.05)
        meter.stepping()
        meter.stepped()
        meter.end(0.06)

    def contexts() -> None:
        for kind in ("all_reduce", "peer_copy", "step_end"):
            with wait_notes.counted(kind):
                pass

    usage = replace(trainer.usage, memory={**trainer.usage.memory, "copies": snapshots.nbytes})
    told = Stepped(Ticket(1, 1), record, time.time(), {"peer_copy": 0.001}, usage)
    bare = replace(told, usage=Usage())
    return {
        "meter": cpu_of(meter_calls),
        "contexts": cpu_of(contexts),
        "copies": cpu_of(lambda: replace(trainer.usage, memory={**trainer.usage.memory, "copies": snapshots.nbytes})),
        "resident": cpu_of(resident_bytes),
        "message": max(0.0, cpu_of(lambda: pickle.dumps(told)) - cpu_of(lambda: pickle.dumps(bare))),
    }


def rank_main(rank: int, world: int, store: str, rounds: int, out: Any) -> None:
    import torch
    import torch.distributed as dist

    from vescale_ray.communication import wait_notes
    from vescale_ray.data.sources.corpus import load_corpus
    from vescale_ray.workers.resharding.memory_snapshots import Snapshots
    from vescale_ray.workers.trainer import Trainer

    torch.set_num_threads(1)
    join(store, rank, world)
    config = config_of(world, "/nowhere")
    trainer = Trainer(config, rank, world, 1, "cpu", load_corpus("stdlib", config.data.seq_len, config.data.heldout))
    trainer.initialize()
    snapshots = Snapshots(1, node=str(rank))
    snapshots.begin(trainer)
    real, counted, nothing = trainer._meter, wait_notes.counted, Nothing()

    def steps(count: int, *, metrics: bool) -> tuple[float, float]:
        """Wall and CPU seconds of a step."""
        trainer._meter, wait_notes.counted = (real, counted) if metrics else (nothing, uncounted)
        dist.barrier()
        began, used = time.perf_counter(), time.thread_time()
        for _ in range(count):
            last.append(trainer.step(settle=snapshots.settle))
            snapshots.after_step(trainer)
        dist.barrier()
        wall, cpu = (time.perf_counter() - began) / count, (time.thread_time() - used) / count
        trainer._meter, wait_notes.counted = real, counted
        return wall, cpu

    last: list[Any] = []
    steps(WARM, metrics=True)
    rows = []
    for index in range(rounds):
        order = ("with", "without", "without", "with", "again") if index % 2 else ("without", "with", "with", "without", "again")
        found: dict[str, list[tuple[float, float]]] = {}
        for name in order:
            found.setdefault(name, []).append(steps(BLOCK, metrics=name != "without"))
        row = {f"work.{part}": seconds for part, seconds in metrics_work(trainer, snapshots, last[-1]).items()}
        for name, taken in found.items():
            row |= {f"{name}.wall": statistics.mean(wall for wall, _ in taken), f"{name}.cpu": statistics.mean(cpu for _, cpu in taken)}
        rows.append(row)
        last = last[-1:]
        dist.barrier()
    usage = replace(trainer.usage, memory={**trainer.usage.memory, "copies": snapshots.nbytes})
    out.put((rank, {"rows": rows, "usage": usage, "record": last[-1]}))
    dist.barrier()
    snapshots.clear()
    trainer.close()
    dist.destroy_process_group()


def controller_work(found: list[dict[str, Any]], rounds: int) -> list[dict[str, float]]:
    """CPU seconds of the controller for the reports of one step, and for a scrape."""
    from vescale_ray.controller.failures.budget import Budget, Limits
    from vescale_ray.controller.http.exposition import exposition
    from vescale_ray.controller.protocol import StateSource, World
    from vescale_ray.controller.state.generation_log import GenerationLog
    from vescale_ray.controller.state.publisher import Observed, Publisher
    from vescale_ray.controller.state.run_log import RunLog
    from vescale_ray.runfolder import RunFolder
    from vescale_ray.workers.messages import Origin, Stepped, Ticket, Usage

    names = tuple(f"w{rank}" for rank in range(len(found)))

    def recorded(folder: str, *, figures: bool) -> tuple[Callable[[], None], Publisher]:
        config = config_of(len(found), folder)
        world = World(Ticket(1, 1), names, StateSource(Origin.FRESH, 0))
        log = RunLog(RunFolder(config.run_folder).create(), "id", config.train.steps, world.source)
        generation, budget = GenerationLog(log, config), Budget(Limits.of(config.elastic))
        publisher = Publisher(log, config, 1, 1, Observed(len(names), budget))
        generation.open(world, {}, "layouts")
        record = replace(found[0]["record"], generation=1)

        def step() -> None:
            index = log.stats.step
            for name, rank in zip(names, found, strict=True):
                told = replace(record, index=index)
                item = Stepped(world.ticket, told, time.time(), {"peer_copy": 0.001}, rank["usage"] if figures else Usage())
                generation.workers.heard(name, time.time(), 1 << 30)
                generation.stepped(name, item)
            seen = Observed(len(names), budget, figures=generation.workers.figures(), newest=generation.newest)
            publisher.publish(seen)

        return step, publisher

    rows = []
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        (full, publisher), (bare, _) = recorded(one, figures=True), recorded(other, figures=False)
        for _ in range(rounds):
            row = {"full": cpu_of(full), "bare": cpu_of(bare)}
            row["scrape"] = cpu_of(lambda: exposition(publisher.snapshot, ""), 20)
            rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 20)
    found = run_ranks(rank_main, options.world, rounds)
    rows = [row for rank in found for row in rank["rows"]]
    books = controller_work(found, max(5, rounds // 4))
    step_cpu = [row["with.cpu"] for row in rows]
    work = [sum(seconds for name, seconds in row.items() if name.startswith("work.")) for row in rows]
    all_cpu = statistics.median(step_cpu) * options.world
    walls = ("with.wall", "without.wall", "again.wall")
    slowest = [{key: max(rank["rows"][i][key] for rank in found) for key in walls} for i in range(rounds)]
    figures: dict[str, Any] = {
        "step.wall": figure([row["with.wall"] for row in slowest], "s", None, None),
        "step.cpu": figure(step_cpu, "s", None, None),
        "worker.cpu": figure(work, "s", None, None),
        **{f"worker.cpu.{part}": figure([row[f"work.{part}"] for row in rows], "s", None, None) for part in PARTS},
        "worker.ratio": figure([spent / cpu for spent, cpu in zip(work, step_cpu, strict=True)], "ratio", GOAL, None),
        "controller.cpu": figure([row["full"] for row in books], "s", None, None),
        "controller.added": figure([row["full"] - row["bare"] for row in books], "s", None, None),
        "controller.ratio": figure([row["full"] / all_cpu for row in books], "ratio", None, None),
        "controller.added.ratio": figure([(row["full"] - row["bare"]) / all_cpu for row in books], "ratio", GOAL, None),
        "scrape.cpu": figure([row["scrape"] for row in books], "s", None, None),
        "scrape.ratio": figure([row["scrape"] / (SCRAPE_S * options.world) for row in books], "ratio", GOAL, None),
        "cpu.ratio": figure([row["with.cpu"] / row["without.cpu"] for row in rows], "ratio", None, "without"),
        "cpu.noise": figure([row["again.cpu"] / row["with.cpu"] for row in rows], "ratio", None, "with"),
        "wall.ratio": figure([row["with.wall"] / row["without.wall"] for row in slowest], "ratio", None, "without"),
        "wall.noise": figure([row["again.wall"] / row["with.wall"] for row in slowest], "ratio", None, "with"),
    }
    for name, one in figures.items():
        scale, unit = (1e6, "us") if one["unit"] == "s" else (1, "")
        print(f"{name:<24}{one['value'] * scale:>12.5g} +- {one['spread'] * scale:<10.3g}{unit:<4}{one['goal'] or ''}")
    write(options.json, figures, world=options.world, rounds=rounds, block=BLOCK, repeats=REPEATS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
