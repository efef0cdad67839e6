"""The engine's own work per step, ours against torch's: 100 units of 16-element parameters, with collectives that do nothing.

    python benchmarks/host_overhead.py [--units 100] [--rounds 30] [--json OUT]

Both systems live in one process on torch's "fake" process group, so that only hooks, bookkeeping and kernel launches are timed. Each round
runs every system in rotated order. Ratios to FSDP2 are formed inside a round; figures are their medians and half the distance between the
quartiles. ``fsdp2_again`` is the noise. A step is forward and backward, without an optimizer; gradients are dropped after it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.reporting import figure, write

SYSTEMS = ("fsdp2", "fsdp2_again", "ours")


def build(system: str, units: int) -> Callable[[], None]:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    from vescale_ray.fsdp import fully_shard

    torch.manual_seed(0)
    how = fully_shard if system == "ours" else torch_fully_shard
    model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(units)))
    for layer in model:
        how(layer)
    how(model)
    x = torch.randn(2, 4)

    def step() -> None:
        model(x).sum().backward()
        for p in model.parameters():
            p.grad = None

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--world", type=int, default=4, help="ranks that the process group pretends to have")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world)
    run = {system: build(system, options.units) for system in SYSTEMS}
    for _ in range(5):
        for step in run.values():
            step()
    rows: list[dict[str, float]] = []
    for index in range(options.rounds):
        row = {}
        for k in range(len(SYSTEMS)):
            system = SYSTEMS[(k + index) % len(SYSTEMS)]
            start = time.process_time()
            for _ in range(3):
                run[system]()
            row[system] = (time.process_time() - start) / 3
        rows.append(row)
    dist.destroy_process_group()

    print(f"{options.units} units of 16 elements, {options.world} pretended ranks, {options.rounds} rounds; CPU time of one thread")
    print(f"{'system':14}{'ms a step':>10}{'us a unit':>11}{'ratio':>8}{'+-':>7}")
    figures = {}
    for system in SYSTEMS:
        ms = figure([row[system] * 1e3 for row in rows], "ms")
        ratio = figure([row[system] / row["fsdp2"] for row in rows], "ratio", "<= 0.7" if system == "ours" else None)
        figures[f"{system}.ms"], figures[f"{system}.ratio"] = ms, ratio
        unit = ms["value"] * 1e3 / options.units
        print(f"{system:14}{ms['value']:>10.2f}{unit:>11.1f}{ratio['value']:>8.3f}{ratio['spread']:>7.3f}")
    write(options.json, figures, units=options.units, world=options.world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
