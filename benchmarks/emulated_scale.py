"""EMULATION of fully_shard against torch's at 8 to 1024 claimed ranks, in one process; also without the two ideas of the paper.

    python benchmarks/emulated_scale.py [--quick] [--ranks 64,256,1024] [--models llama,gpt-oss] [--device cpu|cuda] [--json OUT]

There is no cluster: collectives take the time of a model of the network and send nothing. ``vescale_ray/emulation.py`` lists the limits.
Kernels, allocator, streams and host are real. On a GPU the models are slices of Llama-3-70B and GPT-OSS-120B with their real widths. On a
CPU the widths are small and the network is slowed down in proportion (``--scale``), so the figures compare systems but give no absolute
speed. On the CPU, FSDP2's collectives block (as on gloo) and ours do not; on a GPU both run on streams.

There are two tables. In the first no tensor has a block requirement: ``fsdp2``, ``fsdp2_again`` (the deviation of its ratio from 1 is
noise), ``ours``, and ``ours, no DBuffer``. The last shards every parameter by itself, with copies before and after each collective (by
``shard_placement_fn``).

In the second table ours keep blocks of rows of every matrix of a layer whole (:data:`ROWS`; on a CPU a layer has as many blocks). The
vocabulary is cut to a few rows, so embeddings have no blocks. ``ours, blocks`` is the default. ``no planning`` keeps the model's tensor
order, with shards a multiple of all blocks. ``advised`` uses the planner's lever, or its smaller group (HSDP) if no lever is enough; the
row is missing if the default is what it advises. A row whose padding would more than double the parameters is not run; the table says so.

Rounds run every system once, in rotated order. Ratios are formed inside a round; the figure is their median, the spread half the distance
of their quartiles. Memory is that of one system alone: on a GPU the peak of reserved bytes, on a CPU the peak of live tensors in a step
that computes in BF16 and reduces in FP32. The latter includes parameters and AdamW's states.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

from benchmarks.live_memory import peak_of_live_tensors
from benchmarks.reporting import figure, write
from vescale_ray.emulation import emulated_world
from vescale_ray.fsdp import explain, fully_shard
from vescale_ray.geometry import Block
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.planner import Layout, Lever, TensorSpec, plan_buffers, unit_plan
from vescale_ray.planner.advice import advise
from vescale_ray.planner.models.model_shapes import from_module
from vescale_ray.planner.unit_plan import Blocks

ROWS = {"llama": {"cuda": 128, "cpu": 4}, "gpt-oss": {"cuda": 64, "cpu": 1}}
"""Rows of a block. 2,880 rows of an expert are 45 blocks of 64."""
MOST_PADDING = 1.0
"""Padding of a model, as a fraction of its parameters, above which a row is not run: it would need too much memory."""
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


@dataclass(frozen=True)
class Row:
    """A row of a table: how a model is sharded.

    Attributes:
        rows: rows of a block; None: no requirement.
        ranks: ranks that share the parameters; None: all.
    """

    label: str
    system: str
    rows: int | None = None
    lever: Lever = Lever()
    ranks: int | None = None


def sharded(name: str, row: Row, device: torch.device, *, mixed: bool = False) -> tuple[Any, torch.Tensor]:
    """The sharded model on the meta device, and its input. ``mixed``: compute in BF16 on a CPU, too."""
    model, data = build(name, device)
    large = device.type == "cuda"
    options: dict[str, Any] = {"mp_policy": BF16 if large or mixed else FP32}
    how: Callable[..., Any] = torch_fully_shard if row.system.startswith("fsdp2") else fully_shard
    if row.ranks is not None:
        shape = (torch.distributed.get_world_size() // row.ranks, row.ranks)
        options["mesh"] = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    blocks: dict[str, Any] = {}
    if row.system == "ours, no DBuffer":
        options["shard_placement_fn"] = lambda param: Shard(0)
    elif row.system.startswith("ours") and row.rows is not None:
        block = Block.rows(row.rows)
        blocks = {"block_policy": lambda name, param: block if param.dim() >= 2 else None, "allow_gaps": row.lever.strided}
    # On a CPU a layer is a thousandth, and so is the padding that is worth a second buffer.
    planned = without_planning if row.system == "ours, no planning" else partial(plan_buffers, padding_bytes=1 << (20 if large else 10))
    with mock.patch.object(unit_plan, "plan_buffers", planned):
        layers = list(model.layers)
        for start in range(0, len(layers), row.lever.layers):
            unit = layers[start : start + row.lever.layers]
            how(unit if len(unit) > 1 else unit[0], **options, **blocks)
        how(model, **options)
    return model, data


def shard(name: str, system: str, device: torch.device, rows: int | None) -> tuple[Any, torch.Tensor]:
    """The sharded model with storage, and its input. ``rows``: rows of ours' blocks; None: no requirement."""
    return with_storage(*sharded(name, Row(system, system, rows), device), device)


def with_storage(model: Any, data: torch.Tensor, device: torch.device) -> tuple[Any, torch.Tensor]:
    model.to_empty(device=device)
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().fill_(0.01)
    return model, data


def padding(model: Any, row: Row) -> float:
    """Padding of all buffers as a fraction of the parameters; 0 for systems without blocks, which are always run."""
    if row.rows is None:
        return 0.0
    told = explain(model)
    return sum(group.shard_numel * group.ranks for unit in told.units for group in unit.groups) / told.parameter_count - 1


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


def advised(name: str, ranks: int, device: torch.device) -> tuple[Row, str]:
    """The row that the planner advises for blocks, and a line about it.

    A unit has at most half of the slice's layers: the other half must be there to compute meanwhile.
    """
    rows = ROWS[name][device.type]
    model, _ = build(name, device)
    (layer,) = [unit for unit in from_module(model, name).units if unit.count > 1]
    group, blocks = ranks, Blocks(rows)
    while True:
        found = advise(layer, group, blocks, dtype=BF16.param_dtype, most_layers=layer.count // 2)
        if found.reached or group == 1:
            break
        group //= 2
    lever = found.best.lever
    count = sum(-(-math.prod(p.shape[:-1]) // rows) for p in layer.params if blocks.applies(p))
    how = f"{lever}: {found.best.padding_ratio:.1%} padding"
    if group < ranks:
        how = f"HSDP over {group} ranks, {ranks // group} replicas, {how}"
    line = f"a layer has {count} blocks of {rows} rows; the planner advises {how}"
    return Row("ours, blocks, advised", "ours", rows, lever, group if group < ranks else None), line


def measure(name: str, ranks: int, device: torch.device, rounds: int, scale: float) -> dict[str, Any]:
    """Both tables of one model and number of ranks."""
    rows = ROWS[name][device.type]
    free = [Row(system, system) for system in ("fsdp2", "fsdp2_again", "ours", "ours, no DBuffer")]
    lever, line = advised(name, ranks, device)
    default = Row("ours, blocks", "ours", rows)
    blocks = [Row("fsdp2", "fsdp2"), default, Row("ours, blocks, no planning", "ours, no planning", rows)]
    if lever.ranks is not None or lever.lever.layers > 1 or lever.lever.strided:
        blocks.append(lever)
    print(f"\nEMULATED {name}, {ranks} claimed ranks, {device.type}: no block requirement")
    figures = compare(name, ranks, device, rounds, scale, free)
    print(f"\nEMULATED {name}, {ranks} claimed ranks, {device.type}: {line}")
    return figures | compare(name, ranks, device, rounds, scale, blocks)


def compare(name: str, ranks: int, device: torch.device, rounds: int, scale: float, table: Sequence[Row]) -> dict[str, Any]:
    """Measure the rows of one table together, and print it. The first row is the peer of all."""
    figures: dict[str, Any] = {}
    with emulated_world(ranks, scale=scale) as wire:
        run_rows, refused = [], []
        for row in table:
            extra = padding(sharded(name, row, device)[0], row)
            (run_rows if extra <= MOST_PADDING else refused).append((row, extra))
        labels = [row.label for row, _ in run_rows]
        peaks = {row.label: peak(name, row, device) / 2**20 for row, _ in run_rows}
        runs = {row.label: stepper(*with_storage(*sharded(name, row, device), device)) for row, _ in run_rows}
        wires: dict[str, tuple[float, int, int]] = {}
        for label, run in runs.items():
            run()
            wire.log.clear()
            run()
            wires[label] = sum(seconds for *_, seconds in wire.log), sum(nbytes for _, nbytes, *_ in wire.log), len(wire.log)
        times = rounds_of(runs, rounds, device)
        wire.log.clear()
    header = f"{'system':<28}{'step ms':>9}{'ratio':>8}{'+-':>7}{'wire ms':>9}{'bytes':>8}{'calls':>7}"
    print(header + f"{'memory':>10}{'ratio':>8}")
    for label in labels:
        ratio = figure([a / b for a, b in zip(times[label], times[labels[0]], strict=True)], "ratio")
        sent = wires[label][1] / wires[labels[0]][1]
        key, plain = f"{name}.{ranks}.{label}", {"spread": 0.0, "goal": None, "peer": "fsdp2"}
        figures[f"{key}.step_ratio"] = ratio
        figures[f"{key}.bytes_ratio"] = {"value": sent, "unit": "ratio", **plain}
        figures[f"{key}.calls"] = {"value": wires[label][2], "unit": "calls", **plain}
        memory = peaks[label] / peaks[labels[0]]
        figures[f"{key}.peak_ratio"] = {"value": memory, "unit": "ratio", **plain}
        print(
            f"{label:<28}{statistics.median(times[label]) * 1e3:>9.1f}{ratio['value']:>8.3f}{ratio['spread']:>7.3f}"
            f"{wires[label][0] * 1e3:>9.1f}{sent:>8.3f}{wires[label][2]:>7}{peaks[label]:>8.1f}Mi{memory:>8.3f}"
        )
    for row, extra in refused:
        print(f"{row.label:<28}not run: {extra:.0%} of padding, {1 + extra:.1f} times the memory and the bytes")
        figures[f"{name}.{ranks}.{row.label}.padding"] = {"value": extra, "spread": 0.0, "unit": "ratio", "goal": None, "peer": None}
    return figures


def peak(name: str, row: Row, device: torch.device) -> int:
    """Return the peak bytes of a system alone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model, data = with_storage(*sharded(name, row, device, mixed=True), device)
    run = stepper(model, data)
    for _ in range(3):
        run()
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved()
    return 3 * sum(p.to_local().nbytes for p in model.parameters()) + peak_of_live_tensors(run)


def rounds_of(runs: dict[str, Callable[[], None]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each system in each round; the order rotates."""
    labels = list(runs)
    times: dict[str, list[float]] = {label: [] for label in labels}
    for index in range(rounds):
        for k in range(len(labels)):
            label = labels[(k + index) % len(labels)]
            synchronize(device)
            began = time.perf_counter()
            runs[label]()
            synchronize(device)
            times[label].append(time.perf_counter() - began)
    return times


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
    figures: dict[str, Any] = {}
    for name in options.models.split(","):
        for count in ranks:
            figures |= measure(name, count, device, rounds, scale)
            gc.collect()
    write(options.json, figures, emulated=True, scale=scale)
    return 0


if __name__ == "__main__":
    sys.exit(main())
