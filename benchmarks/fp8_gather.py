"""Bytes and time of gathers in FP8, against gathers in BF16 of the same engine, in the same processes.

    python benchmarks/fp8_gather.py [--ranks 2,4] [--emulated 64,256,1024] [--rounds 15] [--width 1024] [--emulated-width 4096]
        [--models llama-3-8b,gpt-oss-20b,deepseek-v3] [--json OUT]

The model is a tower of square matrices with few tokens, so that communication counts. Rounds alternate between BF16, FP8 and BF16 again;
figures are ratios of FP8's step to BF16's, and the second BF16 shows the noise. ``sent`` are the bytes that a rank gives to all-gathers in
one step, in forward and in backward. On emulated ranks one process trains, and a modelled link takes the time of collectives. Tiles have
128 x 128 elements. Many ranks share them, and each all-gather then follows a small all-reduce, whose bytes do not count as ``sent``.

``--models``: the layers of these models are gathered once on emulated ranks. The figure is all bytes on the wire, those all-reduces
included, relative to BF16's. Stacks have at most 8 experts, so that a layer fits in memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ranks import join, run_ranks
from benchmarks.reporting import figure, write

LAYERS, TOKENS = 6, 16
MOST_EXPERTS = 8
"""Experts of a model's layer that are gathered."""
LINK_SCALE = 300.0
"""Factor on the emulated link's times: the model is small and runs on a CPU core, so the link is as much slower than an H100's."""


def build(width: int, quantized: bool) -> Any:
    """A sharded tower of ``LAYERS`` matrices that computes in BF16."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from vescale_ray import Fp8Block, fully_shard

    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(LAYERS)))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = (lambda name, param: Fp8Block()) if quantized else None
    for layer in model:
        fully_shard(layer, mp_policy=precision, quantize_policy=policy)
    return fully_shard(model, mp_policy=precision)


def stepper(model: Any, width: int) -> Callable[[], None]:
    """One step of training on fixed data."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(TOKENS, width)

    def step() -> None:
        model(data).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sent_by(model: Any) -> int:
    """Bytes that a rank gives to all-gathers in a step: once in forward and once in backward."""
    from vescale_ray import explain

    return sum(2 * group.shard_bytes for unit in explain(model).units for group in unit.groups)


def alternate(width: int, rounds: int, together: Callable[[], None]) -> dict[str, Any]:
    """Seconds of a step in rounds of BF16, FP8 and BF16 again, and the bytes that each sends."""
    models = {name: build(width, name == "fp8") for name in ("bf16", "fp8", "again")}
    steps = {name: stepper(model, width) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 2):
        for name, step in steps.items():
            together()
            began = time.perf_counter()
            step()
            together()
            if round_ >= 2:
                seconds[name].append(time.perf_counter() - began)
    return {"seconds": seconds, "sent": {name: sent_by(model) for name, model in models.items()}}


def on_rank(rank: int, world: int, store: str, width: int, rounds: int, out: Any) -> None:
    """One gloo rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    join(store, rank, world)
    out.put((rank, alternate(width, rounds, dist.barrier)))
    dist.destroy_process_group()


def on_emulated(_rank: int, _world: int, _store: str, width: int, rounds: int, ranks: int, out: Any) -> None:
    """One process that claims to be one of ``ranks``."""
    import torch

    from vescale_ray.emulation import emulated_world

    torch.set_num_threads(1)
    with emulated_world(ranks, scale=LINK_SCALE):
        out.put((0, alternate(width, rounds, lambda: None)))


def wire_share(name: str, ranks: int) -> float:
    """Bytes that gathers of the layers of a known model put on the wire of ``ranks`` emulated ranks in FP8, relative to BF16."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from vescale_ray import fully_shard
    from vescale_ray.emulation import emulated_world
    from vescale_ray.optim import fp8_policy
    from vescale_ray.planner.models.model_shapes import model_shapes

    precision, total = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), {True: 0, False: 0}
    for shapes in (unit for unit in model_shapes(name).units if unit.name.startswith("layer")):
        for quantized in total:
            layer = nn.Module()
            for p in shapes.params:
                shape = (min(p.shape[0], MOST_EXPERTS), *p.shape[1:]) if len(p.shape) == 3 else p.shape
                layer.register_parameter(p.name.replace(".", "_"), nn.Parameter(torch.empty(shape, device="meta")))
            with emulated_world(ranks, scale=0.0) as wire:
                unit: Any = fully_shard(layer, mp_policy=precision, quantize_policy=fp8_policy(layer) if quantized else None, to_empty=True)
                with torch.no_grad():
                    for parameter in unit.parameters():
                        parameter.to_local().fill_(1.0)
                wire.log.clear()
                unit.unshard()
                total[quantized] += shapes.count * sum(nbytes for _, nbytes, *_ in wire.log)
    return total[True] / total[False]


def on_wire(_rank: int, _world: int, _store: str, name: str, ranks: int, out: Any) -> None:
    """One process that claims to be one of ``ranks``, and gathers layers of a known model."""
    out.put((0, wire_share(name, ranks)))


def report(label: str, found: dict[str, Any], figures: dict[str, Any]) -> None:
    """Print one row and add its figures."""
    seconds, sent = found["seconds"], found["sent"]
    fp8 = [a / b for a, b in zip(seconds["fp8"], seconds["bf16"], strict=True)]
    again = [a / b for a, b in zip(seconds["again"], seconds["bf16"], strict=True)]
    middle, noise = figure(fp8, "x", peer="bf16"), figure(again, "x", peer="bf16")
    share = sent["fp8"] / sent["bf16"]
    figures[f"{label}/step"], figures[f"{label}/noise"] = middle, noise
    figures[f"{label}/bytes"] = figure([share], "x", goal="<= 0.51", peer="bf16")
    print(
        f"{label:<16}{1e3 * statistics.median(seconds['bf16']):>10.1f} ms {sent['bf16'] / 2**20:>9.2f} MiB"
        f"{share:>9.3f}{middle['value']:>10.2f} +- {middle['spread']:.2f}{noise['value']:>10.2f} +- {noise['spread']:.2f}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of gloo ranks")
    parser.add_argument("--emulated", default="64,256,1024", help="numbers of claimed ranks; empty: none")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=1024, help="rows and columns of each matrix; a multiple of 128")
    parser.add_argument("--emulated-width", type=int, default=4096, help="the same on claimed ranks, of which each needs a few rows")
    parser.add_argument("--models", default="llama-3-8b,gpt-oss-20b,deepseek-v3", help="known models to gather layers of; empty: none")
    parser.add_argument("--model-ranks", default="8,64,256", help="numbers of claimed ranks for them")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    print(f"{'ranks':<16}{'BF16 step':>13}{'BF16 sent':>14}{'bytes':>9}{'FP8 step':>18}{'BF16 again':>18}")
    for world in (int(n) for n in given.ranks.split(",") if n):
        found = run_ranks(on_rank, world, given.width, given.rounds)
        report(f"{world} gloo", found[0], figures)
    for ranks in (int(n) for n in given.emulated.split(",") if n):
        report(f"{ranks} emulated", run_ranks(on_emulated, 1, given.emulated_width, given.rounds, ranks)[0], figures)
    for name in (name for name in given.models.split(",") if name):
        for ranks in (int(n) for n in given.model_ranks.split(",") if n):
            share = run_ranks(on_wire, 1, name, ranks)[0]
            figures[f"{name} {ranks}/bytes"] = figure([share], "x", goal="<= 0.51", peer="bf16")
            print(f"{name + ', ' + str(ranks):<24}{share:>9.4f} of BF16's bytes", flush=True)
    write(given.json, figures, layers=LAYERS, width=given.width, emulated_width=given.emulated_width, tokens=TOKENS, link_scale=LINK_SCALE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
