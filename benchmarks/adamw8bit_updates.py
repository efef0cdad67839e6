"""Distance of 8-bit Adam's updates from FP32's if the rows of a block differ in size: the cost of one scale for several rows.

    python benchmarks/adamw8bit_updates.py [--quick] [--seeds 3] [--json OUT]

Gradients are normal, each row multiplied by its size: log-normal with sigma 1, 2, 4, or spread evenly over 4 decades. They are dense, or
nine of ten rows are zero in each step, as in an embedding. Parameters are reset to 0 after each step, so that only the update remains.
There are two figures against `torch.optim.AdamW` on the same gradients, over 300 steps of a 256 x 256 matrix:

    largest    the largest update of any element in any step, over FP32's largest
    distance   of the last 20 updates from FP32's, relative to their norm

`nearest` is the same optimizer with the nearest code for m, even if it is much larger than the number. `dynamic` uses the dynamic map, its
zero replaced, for the root of v. `plain` uses the dynamic map unchanged. Figures are medians over seeds; the spread is half of largest
minus smallest. The exit code is 0 for any figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from benchmarks.reporting import write
from vescale_ray import Block
from vescale_ray.optim import AdamW8bit
from vescale_ray.optim.eight_bit import adamw8bit
from vescale_ray.optim.eight_bit.codec import dynamic_values, root_codebook, signed_codebook

ROWS, COLS = 256, 256
BLOCKS: dict[str, Any] = {"256": 256, "1024": 1024, "tile 32x32": Block.tile(32, 32), "rows 32": Block.rows(32)}
SIZES = {"sigma 1": 1.0, "sigma 2": 2.0, "sigma 4": 4.0, "4 decades": None}


class Searched:
    """A map whose values are too close for the optimizer's own tables, with the same interface."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.midpoints = values, (values[1:] + values[:-1]) / 2

    def decode(self, codes: Tensor) -> Tensor:
        return self.values[codes.long()]

    def encode(self, x: Tensor) -> Tensor:
        return torch.bucketize(x, self.midpoints).to(torch.uint8)


def row_sizes(kind: str, generator: torch.Generator) -> Tensor:
    sigma = SIZES[kind]
    if sigma is None:
        return 10 ** (-4 * torch.rand(ROWS, 1, generator=generator))
    return torch.exp(sigma * torch.randn(ROWS, 1, generator=generator))


def compare(kind: str, block: Any, sparse: bool, steps: int, seed: int) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(seed)
    sizes = row_sizes(kind, generator)
    params = [nn.Parameter(torch.zeros(ROWS, COLS)) for _ in range(2)]
    optimizers = (AdamW8bit(params[:1], lr=1.0, weight_decay=0.0, block=block), torch.optim.AdamW(params[1:], lr=1.0, weight_decay=0.0))
    largest, apart, norm = [0.0, 0.0], 0.0, 0.0
    for step in range(steps):
        grad = torch.randn(ROWS, COLS, generator=generator) * sizes
        if sparse:
            grad *= torch.rand(ROWS, 1, generator=generator) > 0.9
        for k, (param, optimizer) in enumerate(zip(params, optimizers, strict=True)):
            param.data.zero_()
            param.grad = grad.clone()
            optimizer.step()
            largest[k] = max(largest[k], param.abs().max().item())
        if step >= steps - 20:
            apart += (params[0] - params[1]).square().sum().item()
            norm += params[1].square().sum().item()
    return largest[0] / largest[1], (apart / norm) ** 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 60 steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    seeds, steps = (1, 60) if options.quick else (options.seeds, 300)
    torch.set_num_threads(1)
    replaced = dynamic_values(False)
    replaced[0] = replaced[1] / 2
    root, signed = root_codebook(torch.device("cpu")), signed_codebook(torch.device("cpu"))
    maps: dict[str, tuple[Any, Any]] = {  # maps for the root of v, and for m
        "ours": (root, signed),
        "nearest": (root, Searched(dynamic_values(True))),
        "dynamic": (Searched(replaced), signed),
        "plain": (Searched(dynamic_values(False)), signed),
    }
    figures: dict[str, Any] = {}
    print(f"{'rows':<12}{'gradients':<10}{'block':<12}{'map':<9}{'largest':>10}{'+-':>8}{'distance':>10}{'+-':>8}")
    for kind in SIZES:
        for sparse in (False, True):
            for block_name, block in BLOCKS.items():
                for map_name, (of_v, of_m) in maps.items():
                    if map_name != "ours" and block_name != "tile 32x32":
                        continue
                    adamw8bit.root_codebook = lambda device, of_v=of_v: of_v  # type: ignore[assignment]
                    adamw8bit.signed_codebook = lambda device, of_m=of_m: of_m  # type: ignore[assignment]
                    runs = [compare(kind, block, sparse, steps, seed) for seed in range(seeds)]
                    shown = [figure([run[i] for run in runs]) for i in range(2)]
                    name = f"{kind}.{'sparse' if sparse else 'dense'}.{block_name}.{map_name}"
                    figures[f"{name}.largest"] = {**shown[0], "goal": "<= 2.0"}
                    figures[f"{name}.distance"] = {**shown[1], "goal": "<= 0.2"}
                    numbers = "".join(f"{f['value']:>10.3g}{f['spread']:>8.2g}" for f in shown)
                    print(f"{kind:<12}{'sparse' if sparse else 'dense':<10}{block_name:<12}{map_name:<9}{numbers}", flush=True)
    adamw8bit.root_codebook, adamw8bit.signed_codebook = root_codebook, signed_codebook
    write(options.json, figures)
    return 0


def figure(values: list[float]) -> dict[str, Any]:
    spread = (max(values) - min(values)) / 2
    return {"value": statistics.median(values), "spread": spread, "unit": "ratio", "peer": "torch.optim.AdamW"}


if __name__ == "__main__":
    sys.exit(main())
