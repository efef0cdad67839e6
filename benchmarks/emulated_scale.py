"""EMULATION of fully_shard against torch's at 8 to 1024 claimed ranks, in one process; also without the two ideas of the paper.

    python benchmarks/emulated_scale.py [--quick] [--ranks 64,256,1024] [--models llama,gpt-oss] [--device cpu|cuda] [--json OUT]

There is no cluster: collectives take the time of a model of the network and send nothing. ``vescale_ray/emulation.py`` lists the limits.
Kernels, allocator, streams and host are real. On a GPU the models are slices of Llama-3-70B and GPT-OSS-120B with their real widths. On a
CPU the widths are small and the network is slowed down in proportion (``--scale``), so the figures compare systems but give no absolute
speed. On the CPU, FSDP2's collectives block (as on gloo) and ours do not; on a GPU both run on streams.

The systems are ``fsdp2``, ``fsdp2_again`` (the deviation of its ratio from 1 is noise) and ``ours``, plus two ablations.
``ours, no DBuffer`` shards every parameter by itself, with copies before and after each collective (by ``shard_placement_fn``).
``ours, no planning`` keeps the model's tensor order, with shards a multiple of all blocks. Ours keep blocks of 128 rows (CPU: 8) of every
matrix whole. Rounds run every system once, in rotated order. Ratios are formed inside a round; the figure is their median, the spread half
the distance of their quartiles. Memory on a GPU is the peak of reserved bytes of one system alone.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

from benchmarks.reporting import figure, write
from vescale_ray.emulation import emulated_world
from vescale_ray.fsdp import fully_shard
from vescale_ray.geometry import Block
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.planner import Layout, TensorSpec, units

SYSTEMS = ("fsdp2", "fsdp2_again", "ours", "ours, no DBuffer", "ours, no planning")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = MixedPrecisionPolicy()


class Experts(nn.Module):
    """Fused experts with equal token counts, as GPT-OSS stores them."""

    def __init__(self, count: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.gate_up = nn.Parameter(torch.empty(count, dim, 2 * hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, dim = self.gate_up.shape[0], x.shape[-1]
        tokens = self.norm(x).reshape(-1, dim)
        grouped = tokens[: tokens.shape[0] // count * count].view(count, -1, dim)
        gate, up = torch.bmm(grouped, self.gate_up).chunk(2, -1)
        out = torch.bmm(nn.functional.silu(gate) * up, self.down).view(-1, dim)
        return x + nn.functional.pad(out, (0, 0, 0, tokens.shape[0] - out.shape[0])).view_as(x)


class ExpertLayers(nn.Module):
    def __init__(self, layers: int, count: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(count, dim, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(name: str, device: torch.device) -> tuple[Any, torch.Tensor]:
    """The model on the meta device, and its input."""
    large = device.type == "cuda"
    with torch.device("meta"):
        if name == "llama":
            dim, ffn, heads, kv_heads, tokens = (8192, 28672, 64, 8, 4096) if large else (256, 896, 8, 1, 128)
            config = LlamaConfig(dim=dim, layers=4, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=1024, max_seq=tokens)
            model: nn.Module = Llama(config)
            return model, torch.randint(1024, (1, tokens), device=device)
        count, dim, hidden = (128, 2880, 2880) if large else (128, 48, 48)
        model = ExpertLayers(3, count, dim, hidden)
    return model, torch.randn(1, 8192 if large else 512, dim, device=device)


def without_planning(specs: Sequence[TensorSpec], num_shards: int, **_: Any) -> tuple[Layout, ...]:
    """Tensors in the given order, each at a multiple of its block, with shards a multiple of every block (and of 128 bytes)."""
    quantum = 128 // min(s.dtype.itemsize for s in specs)
    step = quantum
    for spec in specs:
        step = math.lcm(step, spec.granularity)
    offsets, end = {}, 0
    for spec in specs:
        start = -(-end // math.lcm(spec.granularity, quantum)) * math.lcm(spec.granularity, quantum)
        offsets[spec.name], end = start, start + spec.numel
    shard = -(-end // (num_shards * step)) * step
    granularity = {s.name: s.granularity for s in specs}
    return (Layout(tuple(specs), num_shards, shard, offsets, granularity, lower_bound=1),)


def shard(name: str, system: str, device: torch.device, rows: int) -> tuple[Any, torch.Tensor]:
    model, data = build(name, device)
    options: dict[str, Any] = {"mp_policy": BF16 if device.type == "cuda" else FP32}
    how: Callable[..., Any] = torch_fully_shard if system.startswith("fsdp2") else fully_shard
    if system == "ours, no DBuffer":
        options["shard_placement_fn"] = lambda param: Shard(0)
    elif system.startswith("ours"):
        options["block_policy"] = lambda name, param: Block.rows(rows) if param.dim() >= 2 else None
    patch = mock.patch.object(units, "plan_buffers", without_planning if system == "ours, no planning" else units.plan_buffers)
    with patch:
        for layer in model.layers:
            how(layer, **options)
        how(model, **options)
    model.to_empty(device=device)
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().fill_(0.01)
    return model, data


def stepper(model: Any, data: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(data).float().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(name: str, ranks: int, device: torch.device, rounds: int, scale: float, rows: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    peaks: dict[str, float] = {}
    with emulated_world(ranks, scale=scale) as wire:
        if device.type == "cuda":  # alone, so that the peak is its own
            for system in SYSTEMS:
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                run = stepper(*shard(name, system, device, rows))
                for _ in range(3):
                    run()
                peaks[system] = torch.cuda.max_memory_reserved() / 2**20
                del run
        runs = {system: stepper(*shard(name, system, device, rows)) for system in SYSTEMS}
        wires = {}
        for system, run in runs.items():
            run()
            wire.log.clear()
            run()
            wires[system] = sum(seconds for *_, seconds in wire.log), sum(nbytes for _, nbytes, *_ in wire.log)
        times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        for index in range(rounds):
            for k in range(len(SYSTEMS)):
                system = SYSTEMS[(k + index) % len(SYSTEMS)]
                synchronize(device)
                began = time.perf_counter()
                runs[system]()
                synchronize(device)
                times[system].append(time.perf_counter() - began)
        wire.log.clear()
    print(f"\nEMULATED {name}, {ranks} claimed ranks, {device.type}")
    print(f"{'system':<20}{'step ms':>9}{'ratio':>8}{'+-':>7}{'wire ms':>9}{'bytes':>8}" + (f"{'reserved':>10}" if peaks else ""))
    for system in SYSTEMS:
        ratio = figure([a / b for a, b in zip(times[system], times["fsdp2"], strict=True)], "ratio")
        sent = wires[system][1] / wires["fsdp2"][1]
        figures[f"{name}.{ranks}.{system}.step_ratio"] = ratio
        figures[f"{name}.{ranks}.{system}.bytes_ratio"] = {"value": sent, "spread": 0.0, "unit": "ratio", "goal": None, "peer": "fsdp2"}
        if peaks:
            peak = peaks[system] / peaks["fsdp2"]
            figures[f"{name}.{ranks}.{system}.peak_ratio"] = {"value": peak, "spread": 0.0, "unit": "ratio", "goal": None, "peer": "fsdp2"}
        print(
            f"{system:<20}{statistics.median(times[system]) * 1e3:>9.1f}{ratio['value']:>8.3f}{ratio['spread']:>7.3f}"
            f"{wires[system][0] * 1e3:>9.1f}{sent:>8.3f}" + (f"{peaks[system]:>8.0f}Mi" if peaks else "")
        )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 rounds, 64 ranks")
    parser.add_argument("--ranks", default=None)
    parser.add_argument("--models", default="llama,gpt-oss")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=float, default=None, help="multiplies the time of every collective; default 1, on a CPU 100")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    rounds = options.rounds or (5 if options.quick else 15)
    ranks = [int(r) for r in (options.ranks or ("64" if options.quick else "64,256,1024")).split(",")]
    scale = options.scale if options.scale is not None else (1.0 if device.type == "cuda" else 100.0)
    rows = 128 if device.type == "cuda" else 8
    figures: dict[str, Any] = {}
    for name in options.models.split(","):
        for count in ranks:
            figures |= measure(name, count, device, rounds, scale, rows)
            gc.collect()
    write(options.json, figures, emulated=True, scale=scale)
    return 0


if __name__ == "__main__":
    sys.exit(main())
