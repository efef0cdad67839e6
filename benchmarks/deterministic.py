"""Cost and correctness of `elastic.deterministic`: steps of the trainer with and without it, interleaved.

    python benchmarks/deterministic.py [--quick] [--rounds 15] [--world 4] [--json OUT]

The benchmark uses the demo's model and batch (`vescale_ray/configs/demo.yaml`) with AdamW, 8-bit Adam and Muon, all with gradient clipping.
Slots are one, two and four times the workers, and a step reduces as many times. Two trainers live in the same processes and process group
and take turns step by step, in alternating order. A third one, plain like the first, gives the noise. Per case:

    time.ratio     wall time of a step, deterministic over plain: median over rounds, spread half the quartiles' distance
    time.noise     plain again over plain
    gate           the final deterministic weights equal those of a run on one rank, bit for bit; otherwise the case FAILED

The exit code is 1 if a gate failed, and 0 for any figures.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ranks import join, run_ranks
from benchmarks.reporting import figure, write

OPTIMIZERS = ("adamw", "adamw8bit", "muon")
SLOTS_PER_RANK = (1, 2, 4)
SYSTEMS = {"plain": False, "deterministic": True, "again": False}
GOAL = "<= 1.25"
WARM = 2
"""Leading rounds that are not counted."""


def trainer(rank: int, world: int, optimizer: str, slots: int, deterministic: bool, corpus: Any, steps: int) -> Any:
    from vescale_ray.config import load_config
    from vescale_ray.workers.trainer import Trainer

    keys = [f"train.optimizer={optimizer}", f"train.slots={slots}", f"elastic.workers={world}", f"train.steps={steps}"]
    with as_file(files("vescale_ray.configs") / "demo.yaml") as path:
        config = load_config(path, [*keys, "train.threads=1", f"elastic.deterministic={str(deterministic).lower()}"])
    made = Trainer(config, rank, world, 0, "cpu", corpus)
    made.initialize()
    return made


def digest(made: Any) -> str:
    """Digest of all parameters, unsharded. Collective."""
    found = hashlib.sha256()
    for _, parameter in sorted(made.model.named_parameters()):
        found.update(parameter.detach().full_tensor().numpy().tobytes())
    return found.hexdigest()


def rank_main(rank: int, world: int, store: str, optimizer: str, slots: int, rounds: int, out: Any) -> None:
    import torch
    import torch.distributed as dist

    from vescale_ray.data.sources.corpus import load_corpus

    torch.set_num_threads(1)
    join(store, rank, world)
    corpus = load_corpus("stdlib", 128, 0.05)
    steps = rounds + WARM
    chosen = {"deterministic": True} if world == 1 else SYSTEMS
    trainers = {name: trainer(rank, world, optimizer, slots, on, corpus, steps) for name, on in chosen.items()}
    order, rows = list(trainers), []
    for index in range(steps):
        row = {}
        for name in order[index % len(order) :] + order[: index % len(order)]:
            dist.barrier()
            began = time.perf_counter()
            trainers[name].step()
            dist.barrier()
            row[name] = time.perf_counter() - began
        rows.append(row)
    out.put((rank, {"rows": rows[WARM:], "bits": digest(trainers["deterministic"])}))
    dist.barrier()
    for made in trainers.values():
        made.close()
    dist.destroy_process_group()


def run_case(world: int, optimizer: str, slots: int, rounds: int) -> tuple[list[dict[str, float]], str]:
    """Seconds of the slowest rank for each system, per round; and the digest."""
    found = run_ranks(rank_main, world, optimizer, slots, rounds)
    rows = [{key: max(rank["rows"][i][key] for rank in found) for key in found[0]["rows"][i]} for i in range(rounds)]
    return rows, found[0]["bits"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rounds = options.rounds or (5 if options.quick else 15)
    figures: dict[str, Any] = {}
    failed = False
    print(f"{'case':<18}{'plain ms':>10}{'ordered ms':>12}{'ratio':>8}{'+-':>7}{'noise':>8}  bits")
    for optimizer in OPTIMIZERS:
        for times in SLOTS_PER_RANK:
            slots, name = times * options.world, f"{optimizer}.slots{times}"
            rows, bits = run_case(options.world, optimizer, slots, rounds)
            same = bits == run_case(1, optimizer, slots, rounds)[1]
            failed |= not same
            ratio = figure([row["deterministic"] / row["plain"] for row in rows], "ratio", GOAL, "plain")
            noise = figure([row["again"] / row["plain"] for row in rows], "ratio", None, "plain")
            figures |= {f"{name}.time.ratio": ratio, f"{name}.time.noise": noise}
            figures[f"{name}.gate"] = {"value": same, "spread": 0, "unit": "bits equal to one rank's", "goal": True, "peer": None}
            medians = {key: statistics.median(row[key] for row in rows) * 1e3 for key in SYSTEMS}
            print(
                f"{name:<18}{medians['plain']:>10.1f}{medians['deterministic']:>12.1f}{ratio['value']:>8.3f}{ratio['spread']:>7.3f}"
                f"{noise['value']:>8.3f}  {'equal to one rank' if same else 'NOT those of one rank: FAILED'}",
                flush=True,
            )
    write(options.json, figures, world=options.world)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
