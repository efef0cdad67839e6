"""Our fully_shard against torch's, side by side on gloo: step time, CPU seconds, peak memory.

    python benchmarks/compare_fsdp.py [--quick] [--world 2] [--models dense256,comm,moe] [--mixed] [--json OUT]

Protocol (``docs/benchmarks.md``): first an equality gate checks that the losses of the first steps agree. All systems live in the same
processes, and each round runs every system once in rotated order. Ratios to FSDP2 are formed inside a round; figures are their medians.
FSDP2 runs twice (``fsdp2_again``): the deviation of that row from 1 is noise. CPU seconds are summed over the ranks and include gloo's
threads. ``fsdp2_a2a`` and ``fsdp1_a2a`` are FSDP2 and FSDP1 with an all-to-all reduce-scatter like ours, for a like-for-like comparison.
``ours_flat`` is ours with AdamW as a ``Flat`` optimizer. "Ideal" is compute and optimizer alone plus the fastest raw collectives on flat
buffers, without overlap.

``--mixed``: compute in BF16 and reduce in FP32. FSDP1 and the parts of an ideal step are left out then.

Memory: each system runs in its own set of processes. The figures are the peak resident size above the size before the model is built and,
for one more step, the peak of live tensor bytes. The latter is torch's own count of allocations, plus the resident part of the buffers that
ours maps itself. "Least possible" is a rank's part of parameters and states plus the compute alone. The exit code is 0 for any figures, 1
if the equality gate fails.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ranks import join, run_ranks
from benchmarks.reporting import figure, write

MODELS = {
    # name: (layers, width, ffn, vocabulary, experts, batch, sequence)
    "dense256": (8, 256, 684, 1000, 0, 1, 256),
    "comm": (2, 1024, 2736, 1000, 0, 1, 16),
    "moe": (3, 360, 331, 1999, 7, 1, 192),
}
TIME_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000"}  # keep freed memory, as a caching allocator
MEMORY_MALLOC = {"MALLOC_MMAP_MAX_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}  # return freed memory, so that RSS is meaningful
SYSTEMS = ("fsdp2", "fsdp2_again", "fsdp2_a2a", "fsdp1_a2a", "ours", "ours_flat")
REFERENCES = ("local", "raw_gloo", "raw_pairs", "copies")
"""The parts that a step cannot avoid: compute and a sharded optimizer step without communication; the collectives alone, on persistent flat
buffers, as gloo's own or as pairwise exchanges; and the copies that ours makes."""


def build(name: str) -> Any:
    """A small Llama, with fused soft-routed experts instead of its SwiGLU if the model has experts."""
    import torch
    from torch import nn

    from vescale_ray.models.llama import Llama, LlamaConfig

    layers, width, ffn, vocab, experts, _, sequence = MODELS[name]
    torch.manual_seed(0)
    heads = 8 if width % 16 == 0 else 6
    model = Llama(LlamaConfig(dim=width, layers=layers, heads=heads, kv_heads=2, ffn=ffn, vocab=vocab, max_seq=sequence))

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(width, experts)
            self.up = nn.Parameter(torch.randn(experts, width, 2 * ffn) * 0.02)
            self.down = nn.Parameter(torch.randn(experts, ffn, width) * 0.02)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.reshape(-1, width)
            choice = self.router(flat).argmax(-1)
            out = torch.zeros_like(flat)
            for e in range(experts):
                rows = (choice == e).nonzero().squeeze(-1)
                gate, up = (flat[rows] @ self.up[e]).chunk(2, -1)
                out = out.index_add(0, rows, (nn.functional.silu(gate) * up) @ self.down[e])
            return out.view_as(x) + 0.0 * self.router(x).sum()

    if experts:
        for layer in model.layers:
            children = dict(layer.named_children())
            wide = [name for name, child in children.items() if any(getattr(m, "out_features", None) == ffn for m in child.modules())]
            setattr(layer, wide[0], Experts())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.02 if p.dim() > 1 else torch.ones(p.shape))
    return model


def shard(name: str, system: str, mixed: bool = False) -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as torch_fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from vescale_ray.fsdp import fully_shard

    class Exchange(ReduceScatter):
        """Our reduce-scatter on gloo, for FSDP2."""

        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
            received = torch.empty_like(input_tensor)
            dist.all_to_all_single(received, input_tensor, group=group)
            torch.sum(received.view(group.size(), -1), 0, out=output_tensor)
            if op == dist.ReduceOp.AVG:
                output_tensor.div_(group.size())

    def exchange(_state: None, full: torch.Tensor, shard: torch.Tensor) -> None:
        """The same for FSDP1, as its communication hook, which must also compute the mean."""
        received = torch.empty_like(full)
        dist.all_to_all_single(received, full)
        torch.sum(received.view(dist.get_world_size(), -1), 0, out=shard)
        shard.div_(dist.get_world_size())

    model = build(name)
    if system == "local":
        return model
    if system == "fsdp1_a2a":
        wrap = ModuleWrapPolicy({type(model.layers[0])})
        wrapped = FullyShardedDataParallel(model, auto_wrap_policy=wrap, use_orig_params=True, device_id=torch.device("cpu"))
        wrapped.register_comm_hook(None, exchange)
        return wrapped
    how = fully_shard if system.startswith("ours") else torch_fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else MixedPrecisionPolicy()
    for layer in model.layers:
        how(layer, mp_policy=policy)
    how(model, mp_policy=policy)
    if system == "fsdp2_a2a":
        for module in (*model.layers, model):
            module.set_custom_reduce_scatter(Exchange())
    return model


def stepper(name: str, model: Any, rank: int, *, flat: bool = False) -> Callable[[int], float]:
    import torch
    import torch.nn.functional as F

    from vescale_ray.optim import Flat

    _, _, _, vocab, _, batch, sequence = MODELS[name]
    optimizer = (Flat if flat else torch.optim.AdamW)(model.parameters(), lr=1e-3)

    def step(index: int) -> float:
        generator = torch.Generator().manual_seed(1000 * index + rank)
        tokens = torch.randint(vocab, (batch, sequence + 1), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def systems(mixed: bool) -> tuple[str, ...]:
    return tuple(system for system in SYSTEMS if not (mixed and system == "fsdp1_a2a"))


def most_deviation(mixed: bool) -> float:
    """The largest relative difference between losses of two systems: a BF16 rounding may fall on either side."""
    return 1e-3 if mixed else 1e-5


def references(name: str, rank: int, world: int) -> dict[str, Callable[[int], float]]:
    """Steps of :data:`REFERENCES`."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from vescale_ray.fsdp.buffers.memory import MAPPED_BYTES

    _, _, _, vocab, _, batch, sequence = MODELS[name]
    model = shard(name, "local")
    parameters = sum(p.numel() for p in model.parameters())
    flat = torch.nn.Parameter(torch.zeros(-(-parameters // world)))
    flat.grad = torch.ones_like(flat)
    optimizer = torch.optim.AdamW([flat], lr=1e-3)

    def local(index: int) -> float:
        generator = torch.Generator().manual_seed(1000 * index + rank)
        tokens = torch.randint(vocab, (batch, sequence + 1), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for p in model.parameters():
            p.grad = None
        optimizer.step()
        return loss.item()

    blocks = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    units = [(-(-numel // world), 2) for numel in blocks] + [(-(-(parameters - sum(blocks)) // world), 1)]
    # The matrix product writes gradients of large linear layers directly into their buffer; the others are copied there.
    copied = [sum(p.numel() for p in layer.parameters()) - _written_in_place(layer) for layer in model.layers]
    copied.append(parameters - sum(blocks) - _written_in_place(model) + sum(_written_in_place(layer) for layer in model.layers))
    most = max(size for size, _ in units)
    whole, received, part, out = torch.zeros(world * most), torch.zeros(world * most), torch.zeros(most), torch.zeros(most)

    def pairs(send: Callable[[int], torch.Tensor], receive: Callable[[int], torch.Tensor]) -> None:
        works = []
        for distance in range(1, world):
            works.append(dist.irecv(receive((rank - distance) % world), (rank - distance) % world))
            works.append(dist.isend(send((rank + distance) % world), (rank + distance) % world))
        for work in works:
            work.wait()

    def raw(by_pairs: bool) -> Callable[[int], float]:
        def step(_index: int) -> float:
            for size, gathers in units:
                full = whole[: world * size].view(world, size)
                parts = received[: world * size].view(world, size)
                for _ in range(gathers):
                    if by_pairs:
                        pairs(lambda _: part[:size], lambda r: full[r])  # noqa: B023 (called at once)
                        full[rank].copy_(part[:size])
                    else:
                        dist.all_gather_single(full.view(-1), part[:size])
                if by_pairs:
                    pairs(lambda r: full[r], lambda r: parts[r])  # noqa: B023
                    parts[rank] = full[rank]
                else:
                    dist.all_to_all_single(parts.view(-1), full.view(-1))
                torch.sum(parts, 0, out=out[:size])
            return 0.0

        return step

    def copies(_index: int) -> float:
        """Copy the gradients that need a copy into their buffer and, for each all-gather with a small buffer, this rank's own part."""
        for (size, gathers), numel in zip(units, copied, strict=True):
            whole[:numel].copy_(received[:numel])
            for _ in range(gathers * (4 * world * size < MAPPED_BYTES)):
                whole[:size].copy_(part[:size])
        return 0.0

    return {"local": local, "raw_gloo": raw(False), "raw_pairs": raw(True), "copies": copies}


def _written_in_place(module: Any) -> int:
    """Number of gradient elements that need no copy."""
    from torch import nn

    from vescale_ray.fsdp.groups.linear import LEAST_NUMEL

    weights = [m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear)]
    return sum(numel for numel in weights if numel >= LEAST_NUMEL)


def time_rank(rank: int, world: int, store: str, name: str, mixed: bool, rounds: int, steps: int, out: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    join(store, rank, world)
    run = {system: stepper(name, shard(name, system, mixed), rank, flat=system == "ours_flat") for system in systems(mixed)}
    gate = {system: [run[system](i) for i in range(4)] for system in run}
    if not mixed:
        run.update(references(name, rank, world))
        for system in REFERENCES:
            run[system](0)
    everything = tuple(run)
    worst = max(abs(a - b) / abs(b) for losses in gate.values() for a, b in zip(losses, gate["fsdp2"], strict=True))
    rows: list[dict[str, tuple[float, float]]] = []
    if worst <= most_deviation(mixed):
        for index in range(rounds):
            row = {}
            for k in range(len(everything)):
                system = everything[(k + index) % len(everything)]
                dist.barrier()
                wall, cpu = time.perf_counter(), _cpu_seconds()
                for s in range(steps):
                    run[system](10 + index * steps + s)
                dist.barrier()
                row[system] = (time.perf_counter() - wall) / steps, (_cpu_seconds() - cpu) / steps
            rows.append(row)
    out.put((rank, {"gate": worst, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def memory_rank(rank: int, world: int, store: str, name: str, system: str, mixed: bool, out: Any) -> None:
    import gc

    import torch
    import torch.distributed as dist

    from benchmarks.live_memory import peak_of_live_tensors

    torch.set_num_threads(1)
    join(store, rank, world)
    warm = torch.nn.Linear(8, 8)  # exclude what a first backward and optimizer step load
    warm(torch.zeros(1, 8)).sum().backward()
    torch.optim.AdamW(warm.parameters()).step()
    model = shard(name, system, mixed)
    del warm
    gc.collect()
    base = _status("VmRSS") - sum(p.to_local().numel() * 4 for p in model.parameters()) // 1024
    step = stepper(name, model, rank)
    for i in range(2):
        step(i)
    Path("/proc/self/clear_refs").write_text("5")
    for i in range(3):
        step(2 + i)
    peak = _status("VmHWM") - base
    kept = 3 * sum(p.to_local().nbytes for p in model.parameters())
    out.put((rank, {"peak_kib": peak, "live_bytes": kept + peak_of_live_tensors(lambda: step(5))}))
    dist.barrier()
    dist.destroy_process_group()


def least_rank(rank: int, _world: int, _store: str, name: str, ranks: int, mixed: bool, out: Any) -> None:
    """The memory that every engine needs: one of ``ranks`` equal parts of float32 parameters and states, plus the compute alone on an
    unsharded model that drops each gradient at once."""
    import torch

    from benchmarks.live_memory import peak_of_live_tensors

    torch.set_num_threads(1)
    model = build(name)
    kept = 3 * sum(p.nbytes for p in model.parameters()) // ranks
    if mixed:
        model.bfloat16()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    step = stepper(name, model, rank)
    step(0)
    out.put((rank, {"live_bytes": kept + peak_of_live_tensors(lambda: step(1))}))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1])


def parts(name: str, rows: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """Print and return the figures of an ideal step and of like-for-like peers."""
    figures: dict[str, Any] = {}
    wall = {key: [row[key][0] for row in rows] for key in (*SYSTEMS, *REFERENCES)}
    raw = min(("raw_gloo", "raw_pairs"), key=lambda key: statistics.median(wall[key]))
    ideal = [a + b for a, b in zip(wall["local"], wall[raw], strict=True)]
    print(f"ideal: local {statistics.median(wall['local']) * 1e3:.1f} ms + {raw} {statistics.median(wall[raw]) * 1e3:.1f} ms")
    for system in SYSTEMS:
        bound = ">= 0.90" if system.startswith("ours") else None
        efficiency = figure([a / b for a, b in zip(ideal, wall[system], strict=True)], "ratio", bound)
        figures[f"{name}.{system}.efficiency"] = efficiency
        print(f"{system:<14}{efficiency['value']:>8.3f}{efficiency['spread']:>7.3f} of the ideal")
    for peer, goal in (("fsdp2_a2a", "<= 0.90"), ("fsdp1_a2a", "<= 1.00")):
        ratio = figure([a / b for a, b in zip(wall["ours"], wall[peer], strict=True)], "ratio", goal, peer)
        figures[f"{name}.ours.to_{peer}"] = ratio
        print(f"ours to {peer}: {ratio['value']:.3f} +- {ratio['spread']:.3f} (goal {goal})")
    share = figure([a / b for a, b in zip(wall["copies"], wall["ours"], strict=True)], "ratio", "< 0.03")
    figures[f"{name}.ours.copy_share"] = share
    print(f"ours copies: {share['value']:.3f} +- {share['spread']:.3f} of the step (goal < 0.03)")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 rounds, no memory runs")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--mixed", action="store_true", help="compute in BF16 and reduce in FP32")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rounds = options.rounds or (6 if options.quick else 30)
    figures: dict[str, Any] = {}
    for name in options.models.split(","):
        results = run_ranks(time_rank, options.world, name, options.mixed, rounds, 2, environment=TIME_MALLOC)
        gate = max(r["gate"] for r in results)
        passed = gate <= most_deviation(options.mixed)
        print(f"\n{name}, {options.world} ranks: losses of all systems agree to {gate:.1e}" + ("" if passed else "  FAILED"))
        if not passed:
            return 1
        print(f"{'system':<14}{'wall ms':>9}{'ratio':>8}{'+-':>7}{'CPU ms':>9}{'ratio':>8}{'+-':>7}")
        rows = results[0]["rows"]
        for system in systems(options.mixed):
            wall = [row[system][0] for row in rows]
            cpu = [sum(r["rows"][i][system][1] for r in results) for i in range(len(rows))]
            base = [sum(r["rows"][i]["fsdp2"][1] for r in results) for i in range(len(rows))]
            ratio = figure([row[system][0] / row["fsdp2"][0] for row in rows], "ratio", "<= 0.83" if system.startswith("ours") else None)
            cpu_ratio = figure([a / b for a, b in zip(cpu, base, strict=True)], "ratio", "<= 0.83" if system.startswith("ours") else None)
            figures[f"{name}.{system}.wall_ratio"], figures[f"{name}.{system}.cpu_ratio"] = ratio, cpu_ratio
            figures[f"{name}.{system}.wall_ms"] = figure([w * 1e3 for w in wall], "ms")
            print(
                f"{system:<14}{statistics.median(wall) * 1e3:>9.1f}{ratio['value']:>8.3f}{ratio['spread']:>7.3f}"
                f"{statistics.median(cpu) * 1e3:>9.1f}{cpu_ratio['value']:>8.3f}{cpu_ratio['spread']:>7.3f}"
            )
        if not options.mixed:
            figures.update(parts(name, rows))
        if options.quick:
            continue
        memory = {
            system: run_ranks(memory_rank, options.world, name, system, options.mixed, environment=MEMORY_MALLOC)
            for system in ("fsdp2", "ours")
        }
        for key, what, scale in (("peak", "peak_kib", 1 / 1024), ("live", "live_bytes", 1 / 2**20)):
            peaks = {}
            for system in memory:
                peaks[system] = max(r[what] for r in memory[system]) * scale
                figures[f"{name}.{system}.{key}_mib"] = figure([peaks[system]], "MiB")
                print(f"{system:<14}{key} {peaks[system]:.1f} MiB")
            figures[f"{name}.ours.{key}_ratio"] = figure(
                [peaks["ours"] / peaks["fsdp2"]], "ratio", "<= 0.85" if options.mixed else "<= 0.90"
            )
            print(f"{'':<14}ratio {peaks['ours'] / peaks['fsdp2']:.3f}")
        least = run_ranks(least_rank, 1, name, options.world, options.mixed, environment=MEMORY_MALLOC)[0]["live_bytes"] / 2**20
        figures[f"{name}.least.live_mib"] = figure([least], "MiB")
        print(f"{'least possible':<14} live {least:.1f} MiB, {least / figures[f'{name}.fsdp2.live_mib']['value']:.3f} of fsdp2's")
    write(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
