"""Time and memory of a training step on one GPU: FSDP2, ours, ours with collectives, and no FSDP. Llama of 1.14 B parameters, BF16.

    python benchmarks/gpu_step.py [--systems fsdp2,ours,..] [--compile no,yes] [--profile] [--device cuda|cpu] [--json OUT]

One NCCL rank; FP32 parameters, BF16 compute, fused AdamW, 4 sequences of 2,048 tokens; with ``--compile yes`` each block is compiled. With
one rank ours gathers nothing; ``ours_collectives`` makes it gather and reduce. ``ours_fp8`` has FP8 weights and products, which need a
Hopper or Blackwell GPU: ``--systems ours,ours_fp8`` compares it with BF16. Rounds run every system once in rotated order, except that peaks
are those of each system alone. ``host`` is the time until the step has been queued. ``--profile`` shows for one step of each system how
long each stream computes, the largest gaps of the computing stream, and the longest kernels. On a CPU the model is tiny.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks.gpu_check import with_collectives
from benchmarks.ranks import join
from benchmarks.reporting import figure, write
from vescale_ray.fsdp import fully_shard
from vescale_ray.models.llama import Llama, LlamaConfig
from vescale_ray.optim import fp8_policy
from vescale_ray.quantization import Fp8Block, compute_in_fp8

SYSTEMS = ("fsdp2", "fsdp2_again", "ours", "ours_collectives", "none")
OTHERS = ("ours_fp8",)
"""Systems that only ``--systems`` names."""
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
GAP_MS = 0.1


def build(system: str, device: torch.device, compiled: bool) -> tuple[Any, LlamaConfig, int]:
    """Return the sharded model, its configuration, and the number of sequences in a step."""
    large = device.type == "cuda"
    if large:
        config, batch = LlamaConfig(dim=2048, layers=16, heads=16, kv_heads=8, ffn=8192, vocab=32000, max_seq=2048), 4
    else:
        config, batch = LlamaConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=320, max_seq=32), 2
    with torch.device("meta"):
        model: Any = Llama(config)
    formats: dict[str, Any] = {}
    if system == "ours_fp8":
        formats["quantize_policy"] = fp8_policy(model, Fp8Block(scales="power_of_two"))
        compute_in_fp8(model, formats["quantize_policy"])
    if compiled:
        for layer in model.layers:
            layer.compile()
    if system != "none":
        how: Callable[..., Any] = torch_fully_shard if system.startswith("fsdp2") else fully_shard
        for layer in model.layers:
            how(layer, mp_policy=BF16, **formats)
        how(model, mp_policy=BF16, **formats)
    model.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            local = param.to_local() if hasattr(param, "to_local") else param
            local.copy_(torch.randn(local.shape, generator=generator, device=device) * 0.02) if param.dim() > 1 else local.fill_(1.0)
    if system == "ours_collectives":
        with_collectives(model)
    return model, config, batch


def stepper(system: str, device: torch.device, compiled: bool) -> Callable[[], torch.Tensor]:
    model, config, batch = build(system, device, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator(device=device).manual_seed(1)
    tokens = torch.randint(config.vocab, (batch, config.max_seq + 1), device=device, generator=generator)

    def step() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=system == "none"):
            out = model(tokens[:, :-1])
        loss = F.cross_entropy(out.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def timed(step: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Return the seconds of a step, and those until it has been queued."""
    began = time.perf_counter()
    step()
    queued = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, queued


def peaks(system: str, device: torch.device, compiled: bool) -> tuple[float, float]:
    """Return the peaks of allocated and of reserved GiB of a system alone, over three steps."""
    if device.type != "cuda":
        return 0.0, 0.0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    step = stepper(system, device, compiled)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - base[0]) / 2**30, (torch.cuda.max_memory_reserved() - base[1]) / 2**30


def profile(step: Callable[[], Any], title: str) -> None:
    """Print each stream's busy time, the gaps of the stream with the matrix products, and the longest kernels of one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    streams: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if str(event.device_type()).endswith("CUDA") and event.duration_ns():
            streams[event.device_resource_id()].append((event.start_ns() / 1e6, event.duration_ns() / 1e6, event.name()))
    print(f"--- {title}")
    totals: dict[str, list[float]] = defaultdict(list)
    for stream, kernels in sorted(streams.items()):
        kernels.sort()
        first, last = kernels[0][0], max(start + length for start, length, _ in kernels)
        busy = sum(length for _, length, _ in kernels)
        gaps, end, before = [], first, ""
        for start, length, name in kernels:
            totals[name].append(length)
            gaps += [(start - end, f"before {name[:60]} after {before[:60]}")] if start - end > GAP_MS else []
            end, before = max(end, start + length), name
        print(f"stream {stream}: {len(kernels)} kernels, {busy:.1f} of {last - first:.1f} ms; gaps {sum(g for g, _ in gaps):.1f} ms")
        for length, where in sorted(gaps, reverse=True)[:5]:
            print(f"    {length:8.2f} ms {where}")
    for name, lengths in sorted(totals.items(), key=lambda item: -sum(item[1]))[:25]:
        print(f"  {sum(lengths):9.2f} ms x{len(lengths):<5d}{name[:100]}")


def measure(systems: list[str], device: torch.device, compiled: bool, rounds: int, profiles: bool) -> dict[str, Any]:
    kind = "compiled" if compiled else "eager"
    memory = {system: peaks(system, device, compiled) for system in systems}
    steps = {system: stepper(system, device, compiled) for system in systems}
    for step in steps.values():
        for _ in range(3):
            timed(step, device)
    times: dict[str, list[tuple[float, float]]] = {system: [] for system in systems}
    for turn in range(rounds):
        for k in range(len(systems)):
            system = systems[(k + turn) % len(systems)]
            times[system].append(timed(steps[system], device))
    figures: dict[str, Any] = {}
    base = systems[0]
    for system in systems:
        ratio = figure([a / b for (a, _), (b, _) in zip(times[system], times[base], strict=True)], "ratio", "<= 0.92", base)
        wall, host = (statistics.median(column) * 1e3 for column in zip(*times[system], strict=True))
        figures[f"{kind}.{system}.step_ratio"] = ratio
        figures[f"{kind}.{system}.step_ms"] = figure([a * 1e3 for a, _ in times[system]], "ms", None, None)
        for name, goal, index in (("allocated", "<= 0.95", 0), ("reserved", "<= 0.90", 1)):
            value = memory[system][index]
            figures[f"{kind}.{system}.{name}_gib"] = {"value": value, "spread": 0.0, "unit": "GiB", "goal": goal, "peer": base}
        print(
            f"{kind:<9}{system:<17}{wall:8.1f} ms {ratio['value']:6.3f} +- {ratio['spread']:.3f}  host {host:6.1f} ms  "
            f"allocated {memory[system][0]:6.2f} GiB  reserved {memory[system][1]:6.2f} GiB",
            flush=True,
        )
    if profiles and device.type == "cuda":
        for system, step in steps.items():
            profile(step, f"{kind} {system}")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="the first one is the peer")
    parser.add_argument("--compile", default="no,yes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    systems = options.systems.split(",")
    if unknown := set(systems) - {*SYSTEMS, *OTHERS}:
        parser.error(f"--systems {','.join(sorted(unknown))}: use some of {','.join((*SYSTEMS, *OTHERS))}")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        join(f"{folder}/store", 0, 1, "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        for compiled in options.compile.split(","):
            figures |= measure(systems, device, compiled == "yes", options.rounds, options.profile)
            gc.collect()
            write(options.json, figures)
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
