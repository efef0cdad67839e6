"""Learning speed of optimizers and of FP8: held-out loss by step of the demo's model on the demo's corpus, with several seeds.

    python benchmarks/convergence.py [--quick] [--steps 1000] [--seeds 3] [--runs adamw,muon,adamw8bit] [--json OUT] [--plot PNG]
    python benchmarks/convergence.py --runs bf16,bf16_again,fp8,fp8_again,fp8_products

Each run uses the trainer (`vescale_ray.workers.trainer`) on one rank. Model, batches, warm-up, cosine decay and clipping are those of
`vescale_ray/configs/demo.yaml`; RUNS below sets the optimizer with its learning rate, or the dtype. All runs of a seed see the same samples
in the same order from the same initial values; a seed changes both. `bf16_again` is `bf16` with sums of gradients in another order, so its
ratio shows by how much rounding alone moves a result; it is the peer of `fp8_again`. There are three figures against a run's peer (FP32
AdamW, or BF16 AdamW for FP8), each formed within a seed:

    loss.ratio     final held-out loss over the peer's
    steps.ratio    the first evaluated step at which the held-out loss is at or below the peer's final one, over the peer's steps
    short.ratio    final held-out loss of a run whose whole schedule is `--short` of the steps (0.8), over the peer's of all steps: at most
                   1 means that the peer's result is reached in that part of its steps, decay included (only of runs marked so in RUNS)

Figures are medians over seeds; the spread is half of largest minus smallest. The exit code is 0 for any figures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ranks import join
from benchmarks.reporting import write

RUNS: dict[str, dict[str, Any]] = {
    # name: overrides of the demo's configuration, the peer (adamw if not given), and whether to also run a shorter schedule
    "adamw": {"keys": ["train.optimizer=adamw"]},
    # Rates from runs of 160 steps over 8 sequences, seed 0: adamw 1.5e-3 2.331, 3e-3 2.325, 6e-3 2.540 nats; muon, matrix_lr 3e-3
    # 2.308, 6e-3 2.248, 1.2e-2 2.210, 2.4e-2 2.211.
    "muon": {"keys": ["train.optimizer=muon", "train.matrix_lr=0.015"], "short": True},
    "adamw8bit": {"keys": ["train.optimizer=adamw8bit"]},
    "shampoo": {"keys": ["train.optimizer=shampoo"]},
    "soap": {"keys": ["train.optimizer=soap"], "short": True},
    "bf16": {"keys": ["train.param_dtype=bfloat16"]},
    "bf16_again": {"keys": ["train.param_dtype=bfloat16", "train.slots=3", "train.slot_batch=8"], "peer": "bf16"},
    "fp8": {"keys": ["train.param_dtype=bfloat16", "train.quantize=fp8"], "peer": "bf16"},
    "fp8_again": {
        "keys": ["train.param_dtype=bfloat16", "train.quantize=fp8", "train.slots=3", "train.slot_batch=8"],
        "peer": "bf16_again",
    },
    "fp8_products": {"keys": ["train.param_dtype=bfloat16", "train.quantize=fp8", "train.quantize_products=true"], "peer": "bf16"},
}
GOALS = {
    "muon.steps.ratio": "<= 0.80",
    "muon.short.ratio": "<= 1.00",
    "adamw8bit.loss.ratio": "<= 1.005",
    "fp8.loss.ratio": "<= 1.005",
    "fp8_again.loss.ratio": "<= 1.005",
    "fp8_products.loss.ratio": "<= 1.01",
}


def train(keys: list[str], steps: int, seed: int, every: int, corpus: Any, threads: int, samples: int) -> dict[str, Any]:
    """One run: training loss per step, (step, held-out loss) every ``every`` steps and at the end, seconds."""
    import torch

    from vescale_ray.config import load_config
    from vescale_ray.workers.trainer import Trainer

    with as_file(files("vescale_ray.configs") / "demo.yaml") as path:
        fixed = [f"run.seed={seed}", f"train.steps={steps}", f"train.threads={threads}", f"data.eval_samples={samples}"]
        config = load_config(path, [*fixed, *keys])
    trainer = Trainer(config, 0, 1, 0, "cpu", corpus)
    trainer.initialize()
    losses, heldout, began = [], [(0, trainer.evaluate()[0])], time.monotonic()
    while trainer.completed < steps:
        losses.append(trainer.step().loss)
        if trainer.completed % every == 0 or trainer.completed == steps:
            heldout.append((trainer.completed, trainer.evaluate()[0]))
    seconds = time.monotonic() - began
    trainer.close()
    assert torch.isfinite(torch.tensor(losses)).all(), f"{keys}: the loss is not finite"
    return {"keys": keys, "seed": seed, "steps": steps, "train": losses, "heldout": heldout, "seconds": seconds}


def peer_of(name: str) -> str:
    return str(RUNS[name].get("peer", "adamw"))


def figures_of(curves: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios to each run's peer, seed by seed."""
    found: dict[str, list[float]] = {}
    final = {(c["name"], c["seed"], c["part"]): c["heldout"][-1][1] for c in curves}
    for curve in curves:
        name, seed = curve["name"], curve["seed"]
        peer = final.get((peer_of(name), seed, 1.0))
        if curve["part"] == 1.0:
            found.setdefault(f"{name}.loss", []).append(curve["heldout"][-1][1])
        if peer is None or name == peer_of(name):
            continue
        if curve["part"] != 1.0:
            found.setdefault(f"{name}.short.ratio", []).append(curve["heldout"][-1][1] / peer)
            continue
        found.setdefault(f"{name}.loss.ratio", []).append(curve["heldout"][-1][1] / peer)
        reached = next((step for step, loss in curve["heldout"] if loss <= peer), None)
        # Never reached: count it as more than all steps, so that a median shows it.
        found.setdefault(f"{name}.steps.ratio", []).append(reached / curve["steps"] if reached is not None else float("inf"))
    return {
        key: {
            "value": statistics.median(values),
            "spread": (max(values) - min(values)) / 2,
            "unit": "nats per byte" if key.endswith(".loss") else "ratio",
            "goal": GOALS.get(key),
            "peer": None if key.endswith(".loss") else peer_of(key.split(".")[0]),
            "seeds": values,
        }
        for key, values in found.items()
    }


def plot(curves: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(7, 4.2))
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(c["name"] for c in curves))}
    for curve in curves:
        steps, losses = zip(*curve["heldout"][1:], strict=True)
        style = "-" if curve["part"] == 1.0 else "--"
        label = f"{curve['name']}" + ("" if curve["part"] == 1.0 else f", schedule of {curve['part']:g}")
        axes.plot(
            steps, losses, style, color=colours[curve["name"]], alpha=0.8, label=label if curve["seed"] == curves[0]["seed"] else None
        )
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(path, dpi=110, bbox_inches="tight")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="30 steps, 1 seed: does it run")
    parser.add_argument("--steps", type=int, default=None, help="of a whole schedule; 1000")
    parser.add_argument("--seeds", type=int, default=None, help="3")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--runs", default="adamw,muon,adamw8bit")
    parser.add_argument("--set", action="append", default=[], metavar="NAME:KEY=VALUE", help="change a run: muon:train.matrix_lr=0.01")
    parser.add_argument("--short", type=float, default=0.8, help="part of the steps that short schedules have; 0: none")
    parser.add_argument("--every", type=int, default=None, help="steps between evaluations; a fortieth of them")
    parser.add_argument("--samples", type=int, default=384, help="held-out samples of an evaluation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--merge", type=Path, nargs="*", help="train nothing: take the curves of these results, made side by side")
    options = parser.parse_args()
    if options.merge:
        parts = [json.loads(path.read_text()) for path in options.merge]
        return finish([curve for part in parts for curve in part["curves"]], options, parts[0]["settings"])
    steps = options.steps or (30 if options.quick else 1000)
    seeds = options.seeds or (1 if options.quick else 3)
    every = options.every or max(1, steps // 40)
    runs = {name: {**RUNS[name], "keys": list(RUNS[name]["keys"])} for name in options.runs.split(",")}
    for change in options.set:
        name, _, key = change.partition(":")
        runs[name]["keys"].append(key)

    import torch.distributed as dist

    from vescale_ray.config import load_config
    from vescale_ray.data.dataset_loading import load_dataset
    with as_file(files("vescale_ray.configs") / "demo.yaml") as path:
        data = load_config(path).data
    corpus = load_dataset(data)
    curves: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        join(os.path.join(folder, "store"), 0, 1)
        print(f"{'run':<14}{'schedule':>9}{'seed':>6}{'held-out':>10}{'bits/byte':>10}{'train':>8}{'s/step':>8}")
        for seed in range(options.first_seed, options.first_seed + seeds):
            for name, run in runs.items():
                for part in (1.0, options.short) if run.get("short") and options.short else (1.0,):
                    curve = train(run["keys"], round(part * steps), seed, every, corpus, options.threads, options.samples)
                    curves.append({"name": name, "part": part, **curve})
                    last = curve["heldout"][-1][1]
                    mean = statistics.fmean(curve["train"][-20:])
                    pace = curve["seconds"] / curve["steps"]
                    print(f"{name:<14}{part:>9g}{seed:>6}{last:>10.4f}{last / 0.693147:>10.4f}{mean:>8.3f}{pace:>8.3f}", flush=True)
        dist.destroy_process_group()
    settings = {"steps": steps, "every": every, "samples": options.samples, "threads": options.threads}
    return finish(curves, options, settings)


def _finite(entry: Any) -> Any:
    """The entry, with null for numbers that JSON lacks."""
    if isinstance(entry, list):
        return [_finite(one) for one in entry]
    return None if isinstance(entry, float) and not math.isfinite(entry) else entry


def finish(curves: list[dict[str, Any]], options: argparse.Namespace, settings: dict[str, Any]) -> int:
    figures = figures_of(curves)
    print(f"\n{'figure':<24}{'value':>9}{'+-':>8}  goal")
    for key, figure in figures.items():
        print(f"{key:<24}{figure['value']:>9.4f}{figure['spread']:>8.4f}  {figure['goal'] or ''}")
    seeds = sorted({curve["seed"] for curve in curves})
    written = {key: {name: _finite(entry) for name, entry in figure.items()} for key, figure in figures.items()}
    rounded = [{**c, "train": [round(x, 4) for x in c["train"]]} for c in curves]
    write(options.json, written, settings={**settings, "seeds": seeds}, curves=rounded)
    if options.plot:
        plot(curves, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
