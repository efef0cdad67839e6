"""Check that the engine does on a GPU what it does on the CPU. One GPU, one NCCL rank, no Ray; a table in well under 8 minutes.

    python benchmarks/gpu_check.py [--only ROW] [--json OUT]     exit 0: all checks pass, or there is no GPU; 1: a check failed
    python benchmarks/gpu_check.py --device cpu     the same checks on gloo (the memory checks need a GPU)

With one rank the engine needs no collectives, since parameters are views of the shard. ``collectives`` rows switch that shortcut off, to
exercise the pool, the streams and NCCL itself. Rows with two ranks on the one GPU run over gloo, if torch allows it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks.gpu_experts import check_experts
from benchmarks.gpu_fp8 import check_fp8, check_fp8_kernels, check_products, kernel_seconds
from benchmarks.gpu_rescale import GLOO, Skip, check_abort, check_generations, check_moves, check_offload, check_refused
from benchmarks.ranks import join
from benchmarks.reporting import write
from vescale_ray import gloo

LAYERS, VOCAB, BATCH, SEQ = 6, 1000, 4, 128
WIDTH = {"cuda": 512, "cpu": 64}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build(device: torch.device, width: int | None = None, layers: int = LAYERS) -> nn.Module:
    from vescale_ray.models.llama import Llama, LlamaConfig

    width = width or WIDTH[device.type]
    model = Llama(LlamaConfig(dim=width, layers=layers, heads=8, kv_heads=4, ffn=width * 11 // 4, vocab=VOCAB, max_seq=SEQ))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.02 if p.dim() > 1 else torch.ones(p.shape))
    return model.to(device)


def shard(model: Any, how: Callable[..., Any], **options: Any) -> Any:
    for layer in model.layers:
        how(layer, **options)
    return how(model, **options)


def with_collectives(model: Any) -> Any:
    """Switch off the shortcut for one rank."""
    from vescale_ray.fsdp.units.schedule import unit_of

    for unit in {id(unit): unit for m in model.modules() if (unit := unit_of(m)) is not None}.values():
        for group in unit.groups:
            group.alone = False
            group.tell_gradients()
    return model


def train(model: Any, device: torch.device, steps: int = 10, clip: Callable[..., Any] | None = None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        tokens = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step % 2)).to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        if clip is not None:
            clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def check_parity(device: torch.device, collectives: bool, policy: MixedPrecisionPolicy | None, offload: bool = False) -> str:
    from vescale_ray.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
    from vescale_ray.optim import clip_grad_norm_

    options = {"mp_policy": policy} if policy else {}
    if offload and device.type == "cpu":
        raise Skip("host memory is the device here")
    ours = shard(build(device), fully_shard, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(), **options)
    if collectives:
        with_collectives(ours)
    got = train(ours, device, clip=None if offload else clip_grad_norm_)
    if policy is None:
        expected, bound, peer = train(build(device), device, clip=None if offload else nn.utils.clip_grad_norm_), 1e-5, "one process"
    else:
        theirs = shard(build(device), torch_fully_shard, **options)
        expected, bound, peer = train(theirs, device, clip=nn.utils.clip_grad_norm_), 2**-8, "torch fully_shard"
    difference = apart(got, expected)
    assert difference <= bound, f"losses differ from {peer} by {difference:.1e}, more than {bound:.0e}"
    assert got[-1] < got[0], f"the loss does not fall: {got}"
    return f"losses equal {peer} to {difference:.1e}"


def check_memory(device: torch.device) -> str:
    """Peak memory of a step, ours with collectives against torch's with the same policy."""
    from vescale_ray.fsdp import fully_shard

    if device.type == "cpu":
        raise Skip("needs a GPU")
    peaks = {}
    for name, how in (("torch", torch_fully_shard), ("ours", fully_shard)):
        gc.collect()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        model = shard(build(device, width=1024, layers=8), how, mp_policy=BF16)
        if name == "ours":
            with_collectives(model)
        train(model, device, steps=3)
        torch.cuda.reset_peak_memory_stats()
        train(model, device, steps=3)
        peaks[name] = torch.cuda.max_memory_allocated() - base, torch.cuda.max_memory_reserved()
        del model
    ratio = peaks["ours"][0] / peaks["torch"][0]
    shown = ", ".join(f"{name} {a / 2**20:.0f} MiB allocated, {r / 2**20:.0f} reserved" for name, (a, r) in peaks.items())
    assert ratio <= 1.0, f"our peak is {ratio:.2f} of torch's ({shown})"
    return f"ratio {ratio:.2f} ({shown})"


def check_muon(device: torch.device) -> str:
    """Newton-Schulz and steps against the CPU's. On a GPU also the speed of batched Newton-Schulz, as a share of a matrix product's."""
    from vescale_ray.optim import Muon
    from vescale_ray.optim.matrix.newton_schulz import coefficients, flops, orthogonalize, orthogonalize_batch

    rounds, furthest = coefficients("keller-jordan", 5), 0.0
    for shape in ((256, 512), (512, 128), (333, 257), (64, 64)):
        many = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0))
        expected = torch.stack([orthogonalize(m, rounds) for m in many]).float()
        for got in (orthogonalize_batch(many.to(device), rounds), torch.stack([orthogonalize(m, rounds) for m in many.to(device)])):
            furthest = max(furthest, float((got.float().cpu() - expected).norm() / expected.norm()))
    for shape in ((256, 512), (333, 257), (4, 96, 200)):
        pair = [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(d)) for d in ("cpu", device)]
        optimizers = [Muon([p], lr=0.02) for p in pair]
        for step in range(3):
            grad = torch.randn(shape, generator=torch.Generator().manual_seed(step + 2))
            for p, optimizer in zip(pair, optimizers, strict=True):
                p.grad = grad.to(p.device)
                optimizer.step()
        furthest = max(furthest, float((pair[0] - pair[1].cpu()).detach().norm() / pair[0].detach().norm()))
    assert furthest <= 2e-2, f"results differ from the CPU's by {furthest:.1e}"
    if device.type == "cpu":
        return f"differ from the CPU's by {furthest:.1e}; the rate needs a GPU"
    stack = torch.randn(4, 4096, 4096, device=device, dtype=torch.bfloat16)
    rates = {}
    for name, run, work in (
        ("product", lambda: stack @ stack, 4 * 2 * 4096**3),
        ("Newton-Schulz", lambda: orthogonalize_batch(stack, rounds), 4 * flops(4096, 4096, 5)),
    ):
        times = []
        for turn in range(13):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times += [begin.elapsed_time(end) / 1e3] if turn >= 3 else []
        rates[name] = work / sorted(times)[len(times) // 2] / 1e12
    part = rates["Newton-Schulz"] / rates["product"]
    shown = ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in rates.items())
    assert part > 0.5, f"batched Newton-Schulz of 4096 x 4096 runs at {part:.2f} of a BF16 product's rate ({shown}), not above 0.5"
    return f"differ from the CPU's by {furthest:.1e}; {part:.2f} of a product's rate ({shown})"


def check_release(device: torch.device) -> str:
    """Steps allocate no lasting memory, and deleting the model frees everything without the garbage collector."""
    from vescale_ray.fsdp import fully_shard

    if device.type == "cpu":
        raise Skip("needs a GPU")
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        model = with_collectives(shard(build(device), fully_shard, mp_policy=BF16))
        train(model, device, steps=3)
        held = torch.cuda.memory_allocated()
        train(model, device, steps=5)
        grown = torch.cuda.memory_allocated() - held
        del model
        left = torch.cuda.memory_allocated() - before
    finally:
        gc.enable()
    assert grown <= 0, f"5 more steps hold {grown} bytes more"
    assert left <= 1 << 20, f"{left} bytes are left after the model was deleted"
    return "no growth over steps; everything freed"


def _two_ranks(rank: int, store: str, results: Any) -> None:
    from vescale_ray.fsdp import fully_shard

    try:
        torch.cuda.set_device(0)
        join(store, rank, 2, GLOO)
        device = torch.device("cuda", 0)
        losses = train(shard(build(device), fully_shard), device, steps=6)
        results.put(("ok", rank, losses))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        results.put(("error", rank, f"{type(error).__name__}: {str(error).splitlines()[0]}"))


def check_two_ranks(device: torch.device) -> str:
    if device.type == "cpu":
        raise Skip("needs a GPU")
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_two_ranks, args=(r, f"{folder}/store", results), daemon=True) for r in range(2)]
        for process in ranks:
            process.start()
        try:
            got = [results.get(timeout=120) for _ in ranks]
        finally:
            for process in ranks:
                process.join(timeout=10)
                if process.is_alive():
                    process.kill()
    errors = [text for kind, _, text in got if kind == "error"]
    if errors:
        raise Skip(f"gloo on this GPU: {errors[0]}")
    expected = train(build(device), device, steps=6)
    difference = max(apart(losses, expected) for _, _, losses in got)
    assert difference <= 1e-5, f"losses of two ranks differ from one process by {difference:.1e}"
    return f"losses equal one process to {difference:.1e}"


def check_adamw8bit(device: torch.device) -> str:
    """The Triton kernel against the CPU reference, for block kinds and tails; and its time against the time to move its bytes.

    The time is the kernel's alone. Small tensors share a launch, so their host time is told, too."""
    from vescale_ray import Block
    from vescale_ray.optim import AdamW8bit
    from vescale_ray.optim.eight_bit.adamw8bit import has_triton

    if device.type == "cpu" or not has_triton():
        raise Skip("needs a GPU and Triton")
    codes = wrong = 0
    furthest = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        for block in (1024, 256, 1000, Block.tile(32, 32), Block.tile(7, 30), Block.rows(32), Block.rows(300)):
            for shape in ((512, 768), (333, 257), (3, 96, 200)):
                start = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
                pair = [nn.Parameter(start.clone()), nn.Parameter(start.to(device))]
                optimizers = [AdamW8bit([p], lr=0.01, weight_decay=0.1, block=block) for p in pair]
                for step in range(3):
                    grad = torch.randn(shape, generator=torch.Generator().manual_seed(step + 2)).to(dtype)
                    for p, optimizer in zip(pair, optimizers, strict=True):
                        p.grad = grad.to(p.device)
                        optimizer.step()
                here, there = (optimizer.state[p] for p, optimizer in zip(pair, optimizers, strict=True))
                for kind in ("exp_avg_code", "exp_avg_sq_code"):
                    codes += here[kind].numel()
                    wrong += int((here[kind] != there[kind].cpu()).sum())
                for kind in ("exp_avg_scale", "exp_avg_sq_scale"):
                    torch.testing.assert_close(here[kind], there[kind].cpu(), rtol=1e-6, atol=0)
                furthest = max(furthest, (pair[0].float() - pair[1].float().cpu()).abs().max().item())
    assert wrong <= codes * 1e-6, f"{wrong} of {codes} codes differ from the CPU's"
    assert furthest <= 2**-6, f"parameters differ from the CPU's by {furthest:.1e}"  # one unit of a BF16 number up to 4
    numel = 1 << 26
    param = nn.Parameter(torch.zeros(numel >> 12, 1 << 12, device=device))
    param.grad = torch.randn_like(param)
    shown = []
    for block in (1024, Block.tile(32, 32)):
        optimizer = AdamW8bit([param], block=block)
        # Parameter and codes are read and written, the gradient is read: 16 bytes each. A copy of half as many moves as much.
        source = torch.empty(numel * 16 // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        ours, floor = kernel_seconds(lambda optimizer=optimizer: optimizer.step()), kernel_seconds(lambda s=source, t=target: t.copy_(s))
        shown.append(f"{block}: {ours * 1e3:.2f} ms, {ours / floor:.2f} of the bandwidth floor")
        assert ours <= 1.3 * floor, f"a step over {numel} parameters takes {shown[-1]}, more than 1.3"
    params = [nn.Parameter(torch.zeros(64, 4096, device=device)) for _ in range(300)]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = AdamW8bit(params)
    optimizer.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    optimizer.step()
    shown.append(f"a step over 300 tensors takes {(time.perf_counter() - began) * 1e3:.1f} ms of the host")
    return f"{wrong} of {codes} codes differ from the CPU's; " + "; ".join(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", action="append", metavar="ROW", help="run only rows whose name contains this; may be given several times")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: skipped")
        return 0
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(max(1, min(4, os.cpu_count() or 1)))
    checks: dict[str, Callable[[], str | tuple[str, dict[str, Any]]]] = {
        "fp32, one rank": lambda: check_parity(device, False, None),
        "fp32, collectives": lambda: check_parity(device, True, None),
        "bf16 compute, fp32 reduce": lambda: check_parity(device, True, BF16),
        "cpu offload": lambda: check_parity(device, True, None, offload=True),
        "muon": lambda: check_muon(device),
        "peak memory": lambda: check_memory(device),
        "release": lambda: check_release(device),
        "two ranks, one GPU": lambda: check_two_ranks(device),
        "8-bit Adam kernel": lambda: check_adamw8bit(device),
        "gathers in FP8": lambda: check_fp8(device, shard, with_collectives, train, [build(device), build(device)]),
        "FP8 kernels": lambda: check_fp8_kernels(device),
        "FP8 products": lambda: check_products(device),
        "experts": lambda: check_experts(device),
        "rescale: new groups": lambda: check_generations(device),
        "rescale: abort": lambda: check_abort(device),
        "rescale: refused": lambda: check_refused(device),
        "rescale: moves": lambda: check_moves(device),
        "rescale: offload": lambda: check_offload(device),
    }
    chosen = {title: check for title, check in checks.items() if not options.only or any(part in title for part in options.only)}
    if not chosen:
        parser.error(f"--only {' '.join(options.only)} names no row: use a part of {', '.join(map(repr, checks))}")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}")
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        join(f"{folder}/store", 0, 1, "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        assert gloo.worker_threads(dist.distributed_c10d._get_default_group()) == 1
        for title, check in chosen.items():
            start, figures = time.perf_counter(), {}
            try:
                state, found = "ok", check()
                text, figures = found if isinstance(found, tuple) else (found, {})
            except Skip as reason:
                state, text = "skipped", str(reason)
            except Exception as error:
                state, text = "FAILED", f"{type(error).__name__}: {error}"
                if not isinstance(error, AssertionError):
                    traceback.print_exc()
            rows[title] = {"state": state, "seconds": time.perf_counter() - start, "text": text, **figures}
            print(f"{title:<28}{state:<9}{rows[title]['seconds']:>6.1f} s  {text}", flush=True)
            write(options.json, {}, rows=rows)  # after each row: a machine that is lent for minutes may go before the last one
        dist.destroy_process_group()
    return 1 if any(row["state"] == "FAILED" for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
