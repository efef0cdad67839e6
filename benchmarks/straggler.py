"""Detection of slow workers: its delay, false alarms, and the gain of moving slots away from a slow worker.

    python benchmarks/straggler.py [--quick] [--steps 60] [--world 3] [--slots 12] [--cases none,sleep,stop] [--json OUT]

Two trainers live in the same gloo ranks and take turns step by step: one only reports (`elastic.straggler: report`), one relieves.

    none      the demo's model, one sequence per slot, without any disturbance
    stop      the same; from some step on, rank 1 is stopped (SIGSTOP, SIGCONT) for 60 ms of each 100 ms, whatever it does
    sleep     a tiny model, and every slot sleeps for 150 ms, as if it waited for a device, so that the ranks do not
              compete for processors; from some step on, each slot of rank 1 sleeps for 450 ms

    accused         ranks that were called slow but are not; must be 0
    found.steps     steps from the first slow one until the rank is called slow; found.s: seconds
    time.ratio      wall time of a step with relief over without, once slots have moved: median over rounds, spread half the quartiles'
                    distance; time.noise: before anything is slow. Slots stay if a move would gain less than a tenth: a
                    stopped process is also late in communication, which no assignment of slots changes
    cost            processor time of the detector, as a share of the step
    gate            both trainers have the same losses to within 1e-4, with different slot assignments; otherwise the case FAILED

The exit code is 1 if a gate failed, a slow rank was not found (in `sleep`: not relieved), or a rank that is not slow was accused. Other
load on the machine is no excuse: a rank that is not slower than its neighbours under load must not be accused either.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ranks import join, run_ranks
from benchmarks.reporting import figure, write

SLOW_RANK = 1
SLOT_S, SLOW_SLOT_S = 0.15, 0.45
TINY = ("model.dim=32", "model.layers=2", "model.ffn=64", "data.seq_len=32")
STOPPED_S, GOES_S = 0.06, 0.04
CASES = ("none", "sleep", "stop")
_STOPPER = """
import os, select, signal, sys, time
pid, stopped, goes = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
while not select.select([sys.stdin], [], [], goes)[0]:
    os.kill(pid, signal.SIGSTOP); time.sleep(stopped); os.kill(pid, signal.SIGCONT)
"""


def trainer(rank: int, world: int, slots: int, mode: str, corpus: Any, more: tuple[str, ...]) -> Any:
    from vescale_ray.config import load_config
    from vescale_ray.workers.trainer import Trainer

    keys = [f"train.slots={slots}", f"elastic.workers={world}", "train.steps=100000", "train.threads=1", "train.slot_batch=1"]
    keys += [f"elastic.straggler={mode}", *more]
    with as_file(files("vescale_ray.configs") / "demo.yaml") as path:
        made = Trainer(load_config(path, keys), rank, world, 0, "cpu", corpus)
    made.initialize()
    return made


class Brake:
    """The disturbance of this process's slots in the case ``way``."""

    def __init__(self, way: str, trainers: dict[str, Any]) -> None:
        self._way, self._sleep = way, SLOT_S
        self._stopper: subprocess.Popen[bytes] | None = None
        if way == "sleep":
            for made in trainers.values():
                made._losses = self._sleeping(made._losses)

    def on(self) -> None:
        """Start to slow them."""
        self._sleep = SLOW_SLOT_S
        if self._way == "stop":
            arguments = [str(os.getpid()), str(STOPPED_S), str(GOES_S)]
            self._stopper = subprocess.Popen([sys.executable, "-c", _STOPPER, *arguments], stdin=subprocess.PIPE)

    def off(self) -> None:
        if self._stopper is not None:
            self._stopper.communicate()  # closes its input, which ends it

    def _sleeping(self, losses: Any) -> Any:
        def slept(inputs: Any, targets: Any) -> Any:
            if inputs.numel() > 1:  # a filler is no slot
                time.sleep(self._sleep)
            return losses(inputs, targets)

        return slept


def watched(made: Any) -> list[float]:
    """Processor seconds of the trainer's detector, added up in the one element."""
    total = [0.0]
    stepped = made.pace.stepped

    def timed(*args: Any) -> Any:
        began = time.thread_time()
        view = stepped(*args)
        total[0] += time.thread_time() - began
        return view

    made.pace.stepped = timed
    return total


def rank_main(rank: int, world: int, store: str, slots: int, way: str, steps: int, onset: int, out: Any) -> None:
    import torch
    import torch.distributed as dist

    from vescale_ray.data.sources.corpus import load_corpus

    torch.set_num_threads(1)
    join(store, rank, world)
    more = TINY if way == "sleep" else ()
    corpus = load_corpus("stdlib", 32 if more else 128, 0.05)
    trainers = {mode: trainer(rank, world, slots, mode, corpus, more) for mode in ("report", "relieve")}
    brake, watch = Brake(way, trainers), watched(trainers["relieve"])
    names, rows = list(trainers), []
    for index in range(steps):
        if index == onset and way != "none" and rank == SLOW_RANK:
            brake.on()
        row: dict[str, Any] = {}
        for name in names[index % 2 :] + names[: index % 2]:
            dist.barrier()
            began = time.perf_counter()
            record = trainers[name].step()
            dist.barrier()
            row[name] = (time.perf_counter() - began, record.loss, record.pace)
        rows.append(row)
    brake.off()
    out.put((rank, {"rows": rows, "watch": watch[0]}))
    dist.barrier()
    for made in trainers.values():
        made.close()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="40 steps, 10 before the first slow one")
    parser.add_argument("--steps", type=int, default=None, help="of each trainer")
    parser.add_argument("--world", type=int, default=3)
    parser.add_argument("--slots", type=int, default=12)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    steps, onset = options.steps or (40 if options.quick else 60), 10 if options.quick else 20
    figures: dict[str, Any] = {}
    failed = False
    for way in options.cases.split(","):
        found = run_ranks(rank_main, options.world, options.slots, way, steps, onset)
        rows, slow = found[0]["rows"], set() if way == "none" else {SLOW_RANK}
        views = {name: [row[name][2] for row in rows] for name in ("report", "relieve")}
        accused = {rank for known in views.values() for view in known for rank, since in enumerate(view.since) if since >= 0} - slow
        apart = max(abs(row["relieve"][1] / row["report"][1] - 1.0) for row in rows)
        cost = max(one["watch"] for one in found) / sum(row["relieve"][0] for row in rows)
        failed |= bool(accused) or apart > 1e-4
        figures |= {
            f"{way}.accused": {"value": len(accused), "spread": 0, "unit": "ranks", "goal": 0, "peer": None},
            f"{way}.cost": {"value": cost, "spread": 0, "unit": "parts of the step", "goal": "< 0.001", "peer": None},
            f"{way}.gate": {"value": apart, "spread": 0, "unit": "largest relative difference of a loss", "goal": "<= 1e-4", "peer": None},
        }
        plain = statistics.median(row["report"][0] for row in rows[2:onset]) * 1e3
        print(f"{way}: step {plain:.0f} ms undisturbed, {len(accused)} ranks accused wrongly", end=", ")
        print(f"detector {cost:.2e} of the step, losses within {apart:.1e}", flush=True)
        if not slow:
            continue
        when = {name: next((i for i, view in enumerate(known) if view.since[SLOW_RANK] >= 0), None) for name, known in views.items()}
        moved = next((i for i, view in enumerate(views["relieve"]) if len(set(view.shares)) > 1), None)
        latency = [at - onset + 1 for at in when.values() if at is not None]
        seconds = [sum(row[name][0] for row in rows[onset : at + 1]) for name, at in when.items() if at is not None]
        if len(latency) < len(when) or (moved is None and way == "sleep"):
            print(f"{way}: found in step {when}, slots moved in step {moved}: FAILED")
            failed = True
            continue
        factor = views["report"][-1].factors[SLOW_RANK]
        print(f"{way}: found after {latency} steps, {', '.join(f'{one:.1f}' for one in seconds)} s; {factor:.2f} times as slow", end="; ")
        figures |= {f"{way}.found.steps": figure(latency, "steps", None, None), f"{way}.found.s": figure(seconds, "s", None, None)}
        if moved is None:
            print("no spread was expected to shorten the step by a tenth", flush=True)
            continue
        after = rows[moved + 1 :]
        ratio = figure([row["relieve"][0] / row["report"][0] for row in after], "ratio", None, "report")
        before = figure([row["relieve"][0] / row["report"][0] for row in rows[2:onset]], "ratio", None, "report")
        figures |= {f"{way}.time.ratio": ratio, f"{way}.time.noise": before}
        slowed = statistics.median(row["report"][0] for row in after) * 1e3
        shares = views["relieve"][-1].shares
        print(f"step {slowed:.0f} ms without relief, {ratio['value']:.3f} +- {ratio['spread']:.3f} of that with slots {shares}", end="; ")
        print(f"before: {before['value']:.3f} +- {before['spread']:.3f}", flush=True)
    write(options.json, figures, world=options.world, slots=options.slots)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
