"""Optimizer steps on sharded parameters against their peers, side by side: time, bytes of state, collectives.

    python benchmarks/optimizers.py [--quick] [--world 2] [--cases muon,adamw,..] [--json OUT]

Each line of CASES is one comparison: our optimizer on our `fully_shard`, and the peer on the peer's sharding (or on ours), with the same
initial values and gradients, on gloo ranks with one thread each. Both live in the same processes. A round runs each once, in rotated order,
and a ratio is formed inside a round; figures are medians, the spread is half the distance of the quartiles. The peer runs twice: the
deviation of `noise` from 1 is noise. The gate requires that after the same steps parameters are as close as the case says. Only steps are
timed, without forward and backward. Two more tables need no processes: how evenly Muon's plan spreads the work of published models, and the
gain of batched Newton-Schulz here. The exit code is 0 for any figures, 1 if a gate fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ranks import join, run_ranks
from benchmarks.reporting import figure, write

WIDTH, FFN, LAYERS = 256, 768, 4


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        ours, peer: make the optimizer from ``(model.named_parameters(), module)``; raise ImportError if it is not installed.
        peer_name: printed name of the peer.
        peer_shards: engine that shards the peer's model: ``fsdp2`` or ``ours``.
        policy: the ``block_policy`` of our sharding.
        gate: largest relative difference of the parameters from the peer's after two steps; None if they are meant to differ.
        goal: goal of the time ratio.
    """

    ours: Callable[[list[tuple[str, Any]]], Any]
    peer: Callable[[list[tuple[str, Any]]], Any]
    peer_name: str
    peer_shards: str = "fsdp2"
    policy: Callable[[], Callable[[str, Any], Any] | None] = lambda: None
    gate: float | None = 1e-5
    goal: str | None = "<= 1.0"


def _muon(named: list[tuple[str, Any]], **options: Any) -> Any:
    from vescale_ray.optim import Muon

    return Muon(named, lr=1e-3, **options)


def _always_batched(named: list[tuple[str, Any]]) -> Any:
    return _muon(named, batched=True)


def _never_batched(named: list[tuple[str, Any]]) -> Any:
    return _muon(named, batched=False)


def _torch(name: str) -> Callable[[list[tuple[str, Any]]], Any]:
    def made(named: list[tuple[str, Any]]) -> Any:
        import torch

        return getattr(torch.optim, name)([p for _, p in named], lr=1e-3, weight_decay=0.1)

    return made


def _ours(module: str, name: str, **options: Any) -> Callable[[list[tuple[str, Any]]], Any]:
    def made(named: list[tuple[str, Any]]) -> Any:
        import importlib

        return getattr(importlib.import_module(f"vescale_ray.optim.{module}"), name)(named, lr=1e-3, weight_decay=0.1, **options)

    return made


def _torchao(named: list[tuple[str, Any]]) -> Any:
    from torchao.optim import AdamW8bit

    return AdamW8bit([p for _, p in named], lr=1e-3, weight_decay=0.1)


def _whole() -> Any:
    from vescale_ray import Block

    return lambda name, p: Block.tensor()


def _policy_of(module: str, name: str) -> Callable[[], Any]:
    def policy() -> Any:
        import importlib

        return getattr(importlib.import_module(f"vescale_ray.optim.{module}"), name).block_policy()

    return policy


CASES: dict[str, Case] = {
    # torch's result on DTensors is not bitwise equal to its own on one process: BF16 sums have other parts (tall matrices).
    "muon": Case(_muon, _torch("Muon"), "torch.optim.Muon, FSDP2", gate=2e-2),
    "muon_whole": Case(_muon, _torch("Muon"), "torch.optim.Muon, FSDP2", policy=_whole, gate=2e-2),
    "muon_batched": Case(_always_batched, _never_batched, "our Muon, batched=False", peer_shards="ours", gate=2e-2, goal=None),
    "adamw": Case(_ours("adamw", "AdamW"), _torch("AdamW"), "torch.optim.AdamW, FSDP2"),
    "adamw8bit": Case(
        _ours("adamw8bit", "AdamW8bit"), _torch("AdamW"), "torch.optim.AdamW, FSDP2", policy=_policy_of("adamw8bit", "AdamW8bit"), gate=None
    ),
    "adamw8bit_torchao": Case(
        _ours("adamw8bit", "AdamW8bit"), _torchao, "torchao's AdamW8bit, FSDP2", policy=_policy_of("adamw8bit", "AdamW8bit"), gate=None
    ),
    "shampoo": Case(
        _ours("shampoo", "Shampoo"),
        _torch("AdamW"),
        "torch.optim.AdamW, FSDP2",
        policy=_policy_of("shampoo", "Shampoo"),
        gate=None,
        goal=None,
    ),
    "soap": Case(
        _ours("soap", "SOAP"), _torch("AdamW"), "torch.optim.AdamW, FSDP2", policy=_policy_of("soap", "SOAP"), gate=None, goal=None
    ),
}


def model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, FFN), (WIDTH, FFN), (FFN, WIDTH)]
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in shapes)) for _ in range(LAYERS)))


def sharded(who: str, policy: Any, world: int) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as fsdp2

    from vescale_ray import fully_shard

    made, mesh = model(), init_device_mesh("cpu", (world,))
    for layer in made:
        fully_shard(layer, mesh=mesh, block_policy=policy) if who == "ours" else fsdp2(layer, mesh=mesh)
    generator = torch.Generator().manual_seed(1)
    for p in made.parameters():
        full = torch.randn(p.shape, generator=generator)
        p.grad = torch.zeros_like(p)
        if who == "ours":
            p.grad.copy_(full)
        else:
            from torch.distributed.tensor import distribute_tensor

            p.grad = distribute_tensor(full, mesh, p.placements, src_data_rank=None)
    return made


def state_bytes(optimizer: Any) -> int:
    """Bytes of this rank's states."""
    from torch.distributed.tensor import DTensor

    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            local = value._local_tensor if isinstance(value, DTensor) else value
            if hasattr(local, "element_size"):
                inner = (
                    [getattr(local, name) for name in local.__tensor_flatten__()[0]] if hasattr(local, "__tensor_flatten__") else [local]
                )
                total += sum(part.numel() * part.element_size() for part in inner)
    return total


def rank_main(rank: int, world: int, store: str, name: str, rounds: int, out: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import CommDebugMode

    torch.set_num_threads(1)
    join(store, rank, world)
    case = CASES[name]
    systems = {"ours": (case.ours, "ours", case.policy()), "peer": (case.peer, case.peer_shards, None)}
    models = {key: sharded(who, policy, world) for key, (_, who, policy) in systems.items()}
    optimizers = {key: make(list(models[key].named_parameters())) for key, (make, _, _) in systems.items()}
    collectives = {}
    for key, optimizer in optimizers.items():
        optimizer.step()
        with CommDebugMode() as counted:
            optimizer.step()
        collectives[key] = counted.get_total_counts()
    worst = 0.0
    for a, b in zip(models["ours"].parameters(), models["peer"].parameters(), strict=True):
        a, b = a.detach().full_tensor(), b.detach().full_tensor()
        worst = max(worst, float((a - b).norm() / b.norm()))
    rows = []
    everything = ("ours", "peer", "peer_again")
    for index in range(rounds):
        row = {}
        for k in range(len(everything)):
            key = everything[(k + index) % len(everything)]
            dist.barrier()
            began = time.perf_counter()
            optimizers[key.removesuffix("_again")].step()
            dist.barrier()
            row[key] = time.perf_counter() - began
        rows.append(row)
    numel = sum(p.to_local().numel() for p in models["ours"].parameters())
    states = {key: state_bytes(optimizer) for key, optimizer in optimizers.items()}
    out.put((rank, {"gate": worst, "rows": rows, "states": states, "numel": numel, "collectives": collectives}))
    dist.barrier()
    dist.destroy_process_group()


def exact(value: float, unit: str, goal: str | None = None) -> dict[str, Any]:
    return {"value": value, "spread": 0.0, "unit": unit, "goal": goal, "peer": None}


def plans() -> dict[str, Any]:
    """Balance and traffic of Muon's plan for published models, laid out by our planner; nothing is run."""
    import torch

    from vescale_ray.optim.matrix.exchange import Job, plan
    from vescale_ray.optim.matrix.matrices import matrices
    from vescale_ray.optim.matrix.newton_schulz import coefficients
    from vescale_ray.planner import TensorSpec, plan_layout
    from vescale_ray.planner.models.model_shapes import model_shapes

    rounds, figures = coefficients("keller-jordan", 5), {}
    print(f"\n{'Muon plan':<16}{'ranks':>6}{'matrices':>10}{'max/mean':>10}{'bound':>8}{'bytes/ideal':>13}{'buckets':>9}")
    for name, worlds in (("llama-3-8b", (8, 64, 256)), ("llama-3-70b", (64, 256)), ("qwen3-30b-a3b", (64,))):
        for world in worlds:
            jobs: list[Job] = []
            for unit in model_shapes(name).units:
                layout = plan_layout([TensorSpec(p.name, p.shape, None, torch.float32) for p in unit.params], world)
                for _ in range(unit.count):
                    for p in (p for p in unit.params if p.kind in ("matrix", "expert") and len(p.shape) in (2, 3)):
                        held = layout.ranks_of(p.name)
                        ranges = {r: layout.local_range(p.name, r) for r in held}
                        start = 0
                        intervals = []
                        for r in range(world):
                            a, b = ranges.get(r, (start, start))
                            intervals.append((a, b))
                            start = b
                        jobs += [Job.of(len(jobs), span, intervals, rounds, 1e-7) for span in matrices(p.shape, None, p.name)]
            made = plan(jobs, world)
            numel = sum(job.span.numel for job in jobs)
            ideal = 4 * numel / world * (1 - 1 / world)
            sent = sum(made.sent_bytes()) / world / ideal
            goal = "<= 1.06" if (name, world) == ("llama-3-8b", 64) else None
            figures[f"plan.{name}.{world}.balance"] = exact(made.roots.balance, "max / mean", goal)
            figures[f"plan.{name}.{world}.bytes"] = exact(sent, "of 4 N / W (1 - 1 / W)")
            print(
                f"{name:<16}{world:>6}{len(jobs):>10}{made.roots.balance:>10.3f}{made.roots.lower_bound:>8.3f}{sent:>13.3f}"
                f"{len(made.buckets):>9}"
            )
    return figures


def batching(quick: bool) -> dict[str, Any]:
    """Newton-Schulz of many equal matrices on one thread: a loop against one batch, and whether the bits are the same."""
    import torch

    from vescale_ray.optim.matrix.newton_schulz import coefficients, orthogonalize, orthogonalize_batch

    torch.set_num_threads(1)
    rounds, figures = coefficients("keller-jordan", 5), {}
    print(f"\n{'Newton-Schulz':<20}{'loop ms':>9}{'batch ms':>10}{'ratio':>8}{'same bits':>11}")
    for count, rows, cols in ((64, 64, 64), (32, 128, 128), (16, 256, 256), (16, 64, 256), (4, 512, 512)):
        many = torch.randn(count, rows, cols).bfloat16()
        ratios, loops, batches = [], [], []
        for _ in range(3 if quick else 9):
            began = time.perf_counter()
            alone = [orthogonalize(m, rounds) for m in many]
            middle = time.perf_counter()
            together = orthogonalize_batch(many, rounds)
            end = time.perf_counter()
            ratios.append((end - middle) / (middle - began))
            loops.append(middle - began)
            batches.append(end - middle)
        same = all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
        key = f"{count}x{rows}x{cols}"
        figures[f"newton_schulz.{key}.batch_to_loop"] = figure(ratios, "ratio", None, "one by one")
        loop_ms, batch_ms = statistics.median(loops) * 1e3, statistics.median(batches) * 1e3
        print(f"{key:<20}{loop_ms:>9.1f}{batch_ms:>10.1f}{statistics.median(ratios):>8.2f}{same!s:>11}")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rounds = options.rounds or (5 if options.quick else 31)



    figures: dict[str, Any] = {}
    failed = False
    print(f"{'case':<20}{'ours ms':>9}{'peer ms':>9}{'ratio':>8}{'+-':>7}{'noise':>8}{'B/param':>9}{'peer':>7}{'collectives':>13}  peer")
    for name in options.cases.split(","):
        case = CASES[name]
        missing = next((module for module in _needs(name) if not _importable(module)), None)
        if missing is not None:
            print(f"{name:<20}left out: {missing} is not installed")
            continue
        ranks = run_ranks(rank_main, options.world, name, rounds)
        gate = max(rank["gate"] for rank in ranks)
        if case.gate is not None and gate > case.gate:
            failed = True
            print(f"{name:<20}gate: parameters differ by {gate:.1e} from the peer's, more than {case.gate:.1e}  FAILED")
            continue
        rows = [{key: max(rank["rows"][i][key] for rank in ranks) for key in ranks[0]["rows"][i]} for i in range(rounds)]
        ratio = figure([row["ours"] / row["peer"] for row in rows], "ratio", case.goal, case.peer_name)
        noise = figure([row["peer_again"] / row["peer"] for row in rows], "ratio", None, case.peer_name)
        numel = sum(rank["numel"] for rank in ranks)
        per = {key: sum(rank["states"][key] for rank in ranks) / numel for key in ("ours", "peer")}
        figures |= {f"{name}.time.ratio": ratio, f"{name}.time.noise": noise}
        figures |= {f"{name}.state.{key}": exact(value, "bytes per parameter") for key, value in per.items()}
        figures |= {f"{name}.collectives.{key}": exact(ranks[0]["collectives"][key], "a step and rank") for key in per}
        figures[f"{name}.gate"] = exact(gate, "relative difference after two steps")
        times = {key: statistics.median(row[key] for row in rows) * 1e3 for key in ("ours", "peer")}
        counts = f"{ranks[0]['collectives']['ours']} / {ranks[0]['collectives']['peer']}"
        print(
            f"{name:<20}{times['ours']:>9.2f}{times['peer']:>9.2f}{ratio['value']:>8.3f}{ratio['spread']:>7.3f}{noise['value']:>8.3f}"
            f"{per['ours']:>9.3f}{per['peer']:>7.3f}{counts:>13}  {case.peer_name}",
            flush=True,
        )
    figures |= plans()
    figures |= batching(options.quick)
    write(options.json, figures)
    return int(failed)


def _needs(name: str) -> list[str]:
    own = {"adamw8bit": "adamw8bit", "adamw8bit_torchao": "adamw8bit", "shampoo": "shampoo", "soap": "soap"}
    modules = [f"vescale_ray.optim.{own[name]}"] if name in own else []
    return [*modules, "torchao"] if name.endswith("torchao") else modules


def _importable(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


if __name__ == "__main__":
    sys.exit(main())
