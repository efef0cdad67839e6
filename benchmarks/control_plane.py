"""The controller's own time at world sizes that no machine here holds: the real control loop, with simulated workers.

    python benchmarks/control_plane.py [--worlds 16,1024,10240] [--json OUT]

Only the processes are simulated. The loop, its policies, the run's log and the metrics are those of a run, and so are the messages. Each
worker completes a step a second; a round hears a tenth of them. Figures, each with its goal at 10,240 workers:

- ``round_ms``: a round of the loop in which a tenth of the workers report a step (median; 50 ms). ``round_most_ms``: the slowest of them,
  which writes the step's line and refreshes the workers' figures.
- ``rescale_ms``: from the round in which the last survivor of a lost worker has left its generation to the orders for the next one (1 s).
- ``scrape_ms``: CPU time of the /metrics page after a round in which everything has changed (50 ms); ``scrape_kib``: its size.
- ``peak_mib``: resident memory of this process at its peak (1 GiB).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.reporting import figure, write
from tests.controller.stage import Stage, WorkerGroup
from vescale_ray.controller import states
from vescale_ray.controller.http.exposition import exposition
from vescale_ray.controller.protocol import RunState, StateSource, World
from vescale_ray.controller.worker_group.worker_news import Heard, Lost, News
from vescale_ray.workers.messages import Origin, Stepped, StepRecord, Ticket, Usage, WorkerInfo, WorkerPhase, WorkerReport
from vescale_ray.workers.monitoring.pace import View
from vescale_ray.workers.resharding.held_state import HeldState

PER_NODE = 8
TENTHS = 10
TICKET = Ticket(7, 1)
WAITED = ("all_gather", "reduce_scatter", "all_reduce", "peer_copy", "step_end")
KINDS = ("master", "gradients", "gathered", "optimizer", "copies")


class Simulated(WorkerGroup):
    """Workers of which each round hears a tenth, each with the step that it has completed since."""

    def __init__(self, world: int) -> None:
        self.names = [f"w{rank:05d}" for rank in range(world)]
        super().__init__(*(WorkerReport(w, TICKET, WorkerPhase.TRAINING, 40, (), (), None, 1 << 30, beats=1) for w in self.names))
        self.infos |= {
            w: WorkerInfo(w, rank, rank, f"node-{rank // PER_NODE}", f"host-{rank // PER_NODE}", "cuda:0", 1.0, address=f"h{rank}:1")
            for rank, w in enumerate(self.names)
        }
        self.turn, self.item = 0, 0
        self.simulating_s = 0.0
        """Time of the simulation itself, which is subtracted."""

    def pump(self, seconds: float) -> list[News]:
        began = time.perf_counter()
        try:
            return self._round()
        finally:
            self.simulating_s += time.perf_counter() - began

    def _round(self) -> list[News]:
        world, step = len(self.names), 41 + self.turn // TENTHS
        self.now += 0.1
        self.turn += 1
        self.item += 1
        record = record_of(step, world)
        mine = self.names[self.turn % TENTHS :: TENTHS]
        if self.ended:
            mine = []
        for rank, worker in enumerate(mine):
            usage = Usage(
                waited=dict.fromkeys(WAITED, 0.01 + 1e-06 * rank),
                phases={"data": 0.01, "forward_backward": 0.9},
                memory=dict.fromkeys(KINDS, 1 << 30),
                device_memory={"allocated": 1 << 34, "reserved": 1 << 35, "peak_allocated": 1 << 35, "capacity": 80 << 30},
                peak_flops=1e15,
                token_flops=1 << 30,
            )
            item = Stepped(TICKET, replace(record, seconds=1.0 + 1e-5 * rank), time.time(), {}, usage)
            self.reports[worker] = WorkerReport(
                worker, TICKET, WorkerPhase.TRAINING, step, ((self.item, item),), (), None, 1 << 30, beats=4 * step
            )
        news, self.news = self.news, []
        return [*news, *(Heard(self.reports[worker]) for worker in mine)]


def record_of(step: int, world: int) -> StepRecord:
    """The step's result, which is the same on all ranks but for their seconds."""
    seconds = tuple(0.9 + 1e-6 * (rank % 97) + 1e-4 * step for rank in range(world))
    view = View(tuple(1.0 + 1e-3 * (rank % 7) for rank in range(world)), (-1,) * world, (2,) * world)
    return StepRecord(
        index=step - 1,
        loss=2.0,
        tokens=4096 * world,
        ids=tuple(range(2 * world)),
        grad_norm=1.0,
        lr=1e-3,
        seconds=1.0,
        flags=0,
        world=world,
        generation=TICKET.generation,
        memory=(1 << 30,) * world,
        slot_seconds=seconds,
        pace=view,
    )


def measure(world: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        worker_group = Simulated(world)
        begun = World(TICKET, tuple(worker_group.names), StateSource(Origin.MEMORY, 40))
        config = {"elastic_workers": world, "elastic_max_workers": world, "train_slots": 2 * world, "train_steps": 10**6}
        stage = Stage(worker_group, Path(folder), filled=True, state=RunState.RUNNING, world=begun, config=config)
        stage.loop.commands.want(world, "manual")
        for info in worker_group.infos.values():
            assert info is not None
            stage.executor.generation.worker_started(info)
        loop = stage.loop
        for _ in range(2 * TENTHS):
            loop.step()
        taken = []
        for _ in range(rounds):
            began, simulated = time.perf_counter(), worker_group.simulating_s
            loop.step()
            taken.append(time.perf_counter() - began - (worker_group.simulating_s - simulated))
        scrapes = []
        for _ in range(5):
            for _ in range(TENTHS):
                loop.step()
            began_cpu = time.process_time()
            body, _ = exposition(stage.run.publisher.snapshot, "")
            scrapes.append(time.process_time() - began_cpu)
        # The loss of one worker: the others have left, and hold the state together.
        lost, step = worker_group.names[world // 2], stage.run.stats.step
        worker_group.ended[lost] = worker_group.now
        del worker_group.reports[lost]
        worker_group.news.append(Lost(lost, worker_group.infos[lost], "its process died"))
        for rank, worker in enumerate(worker_group.names):
            if worker != lost:
                held = (HeldState(TICKET.generation, world, step, (rank, (rank - 1) % world)),)
                worker_group.reports[worker] = WorkerReport(worker, TICKET, WorkerPhase.PARKED, step, (), held, None, 1 << 30)
        began = time.perf_counter()
        while not worker_group.orders:
            loop.step()
        rescale = time.perf_counter() - began
        assert isinstance(loop.state, states.Running) and len(worker_group.orders[0]) == world - 1
    return {
        "round_ms": 1e3 * statistics.median(taken),
        "round_most_ms": 1e3 * max(taken),
        "rescale_ms": 1e3 * rescale,
        "scrape_ms": 1e3 * statistics.median(scrapes),
        "scrape_kib": len(body) / 1024,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="16,1024,10240")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--one", type=int, default=0, help="measure one world size in this process, and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.rounds)))
        return 0
    found: dict[str, Any] = {}
    for world in map(int, options.worlds.split(",")):
        command = [sys.executable, __file__, "--one", str(world), "--rounds", str(options.rounds)]
        figures = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        found |= {f"{name}_{world}": value for name, value in figures.items()}
        print(f"{world:6d} workers: " + ", ".join(f"{name} {value:.1f}" for name, value in figures.items()))
    if options.json is not None:
        units = {"ms": "ms", "kib": "KiB", "mib": "MiB"}
        figures_by_world = {name: figure([value], units[name.split("_")[-2]], peer=None) for name, value in found.items()}
        write(options.json, figures_by_world, worlds=options.worlds, rounds=options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
