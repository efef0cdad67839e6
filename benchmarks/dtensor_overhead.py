"""Dispatch overhead of a step over many small parameters: ragged tensors against FSDP2's DTensors.

    python benchmarks/dtensor_overhead.py [--quick] [--parameters 200] [--json OUT]

Both hold the same numbers in the same shapes, ours under a RaggedShard, FSDP2's as Shard(0) DTensors. There is one rank and one torch
thread, so that Python is measured, not communication. Each round runs every case with both, in alternating order. A ratio is formed inside
a round; the figure is the median of the ratios, the spread half the distance of their quartiles. ``peer_again`` repeats FSDP2's
measurement: the deviation of its ratio from 1 is noise. An equality gate comes first: after the same steps the parameters are equal. Time
is CPU time of the process. The exit code is 0 for any figures, 1 if the gate fails.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ranks import join
from benchmarks.reporting import figure, write

GOAL = "<= 1.0"


def build(count: int, mesh: Any) -> dict[str, list[Any]]:
    """The same parameters, with gradients, as ``ours`` and as ``peer``."""
    import torch
    from torch import nn
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor import distribute_tensor as torch_distribute

    from vescale_ray import RaggedDTensor, RaggedShard

    generator = torch.Generator().manual_seed(0)
    made: dict[str, list[Any]] = {"ours": [], "peer": []}
    values, grads = torch.empty(count * 128), torch.empty(count * 128)  # flat, as the engine keeps them
    end = 0
    for i in range(count):
        shape = (8, 16) if i % 4 else (16,)
        full, grad = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        p = nn.Parameter(torch_distribute(full.clone(), mesh, [Shard(0)]))
        p.grad = torch_distribute(grad.clone(), mesh, [Shard(0)])
        made["peer"].append(p)
        views = [flat[end : end + full.numel()].view(shape).copy_(value) for flat, value in ((values, full), (grads, grad))]
        end += full.numel()
        ragged = [RaggedDTensor.from_local(view, mesh, [RaggedShard((0,), (1,))], shape=shape) for view in views]
        q = nn.Parameter(ragged[0])
        q.grad = ragged[1]
        made["ours"].append(q)
    return made


def cases(params: list[Any], name: str) -> dict[str, Callable[[], Any]]:
    """The operations to time. ``Flat`` exists for ours alone; its peer is the same optimizer over FSDP2's DTensors."""
    import torch

    from vescale_ray.optim import Flat

    optim, clip = torch.optim, torch.nn.utils.clip_grad_norm_

    def flat(**options: Any) -> Callable[[], Any]:
        return Flat(params, optim.AdamW, **options).step if name == "ours" else optim.AdamW(params, **options).step

    return {
        "AdamW foreach": optim.AdamW(params, lr=1e-4, foreach=True).step,
        "Flat AdamW foreach": flat(lr=1e-4, foreach=True),
        "Flat AdamW fused": flat(lr=1e-4, fused=True),
        "AdamW fused": optim.AdamW(params, lr=1e-4, fused=True).step,
        "SGD momentum foreach": optim.SGD(params, lr=1e-4, momentum=0.9, foreach=True).step,
        "SGD foreach": optim.SGD(params, lr=1e-4, foreach=True).step,
        "Adam for-loop": optim.Adam(params, lr=1e-4, foreach=False).step,
        "SGD for-loop": optim.SGD(params, lr=1e-4, foreach=False).step,
        "clip_grad_norm_": lambda: clip(params, 1e9),
        "zero_grad": lambda: torch._foreach_zero_([p.grad for p in params]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="15 rounds")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rounds = options.rounds or (15 if options.quick else 60)

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        join(os.path.join(folder, "store"), 0, 1)
        made = build(options.parameters, init_device_mesh("cpu", (1,)))
        runs = {name: cases(params, name) for name, params in made.items()}
        worst = 0.0
        for case in list(runs["ours"])[:-1]:  # all but the last, which clears the gradients
            for name in runs:
                for _ in range(2):
                    runs[name][case]()
        for a, b in zip(made["ours"], made["peer"], strict=True):
            worst = max(worst, float((a.detach().to_local() - b.detach().to_local()).abs().max()))
        print(f"gate: after the same steps the parameters differ by {worst:.1e}" + ("" if worst <= 1e-6 else "  FAILED"))
        if worst > 1e-6:
            return 1
        figures: dict[str, Any] = {}
        print(f"{'case':<24}{'ours ms':>9}{'FSDP2 ms':>9}{'ratio':>8}{'+-':>7}{'noise':>8}{'+-':>7}")
        for case in runs["ours"]:
            samples: list[dict[str, float]] = []
            gc.disable()
            for i in range(rounds):
                order = ("ours", "peer", "peer_again") if i % 2 else ("peer_again", "peer", "ours")
                samples.append({name: _seconds(runs["peer" if name != "ours" else name][case]) for name in order})
            gc.enable()
            ratio = figure([s["ours"] / s["peer"] for s in samples], "ratio", GOAL)
            noise = figure([s["peer_again"] / s["peer"] for s in samples], "ratio")
            ms = {name: figure([s[name] * 1e3 for s in samples], "ms") for name in ("ours", "peer")}
            figures |= {f"{case}.ratio": ratio, f"{case}.noise": noise, f"{case}.ours_ms": ms["ours"], f"{case}.peer_ms": ms["peer"]}
            print(
                f"{case:<24}{ms['ours']['value']:>9.2f}{ms['peer']['value']:>9.2f}{ratio['value']:>8.3f}{ratio['spread']:>7.3f}"
                f"{noise['value']:>8.3f}{noise['spread']:>7.3f}"
            )
        dist.destroy_process_group()
    write(options.json, figures)
    return 0


def _seconds(run: Callable[[], Any]) -> float:
    """CPU seconds of one call, the better of two."""
    best = float("inf")
    for _ in range(2):
        began = time.process_time()
        run()
        best = min(best, time.process_time() - began)
    return best


if __name__ == "__main__":
    sys.exit(main())
