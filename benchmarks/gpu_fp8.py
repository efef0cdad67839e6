"""Checks of gathers, kernels and products in FP8 on a device, three rows of ``gpu_check.py``."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_rescale import Skip

WIDTH, TOKENS, SIDE, REPEATS = 8192, 8192, 128, 20
"""Size of the linear layer that is timed, and of its tiles."""


def check_fp8(
    device: torch.device, shard: Callable[..., Any], with_collectives: Callable[..., Any], train: Callable[..., list[float]], models: Any
) -> str:
    """Codes have the CPU's bits, gathered weights are theirs, and a run with collectives has the losses of one without.

    Args:
        shard, with_collectives, train: the functions of ``gpu_check.py``.
        models: two equal models with ``layers``, which are sharded.

    Raises:
        AssertionError: a result differs, or NaN in a weight is not found.
    """
    from vescale_ray.fsdp import MixedPrecisionPolicy, fully_shard
    from vescale_ray.optim import fp8_policy
    from vescale_ray.quantization import Fp8Block
    from vescale_ray.quantization.fp8 import dequantize, quantize

    forms = (Fp8Block(), Fp8Block(1, 128), Fp8Block(32, 32, "power_of_two"))
    generator = torch.Generator().manual_seed(0)
    for shape in ((300, 520), (3, 200, 128)):
        weight = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(6).exp()
        for form in forms:
            here, there = quantize(weight, form), quantize(weight.to(device), form)
            assert torch.equal(here[0].view(torch.uint8), there[0].cpu().view(torch.uint8)), f"{form}: codes of {shape} differ"
            assert torch.equal(here[1], there[1].cpu()), f"{form}: scales of {shape} differ"
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(dequantize(*here, form, dtype=dtype), dequantize(*there, form, dtype=dtype).cpu()), f"{form}: values"

    losses = []
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for one, collective in zip(models, (True, False), strict=True):
        policy = fp8_policy(one, Fp8Block(64, 64))
        masters = {name: p.detach().cpu().clone() for name, p in one.layers[0].named_parameters() if policy(name, p) is not None}
        sharded = shard(one, fully_shard, mp_policy=precision, quantize_policy=policy)
        if collective:
            with_collectives(sharded)
        sharded.layers[0].unshard()
        for name, master in masters.items():
            expected = dequantize(*quantize(master, Fp8Block(64, 64)), Fp8Block(64, 64), dtype=torch.bfloat16)
            assert torch.equal(sharded.layers[0].get_parameter(name).detach().cpu(), expected), f"{name} was gathered with other values"
        sharded.layers[0].reshard()
        losses.append(train(sharded, device))
    assert losses[0][-1] < losses[0][0], f"the loss does not fall: {losses[0]}"
    difference = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    assert difference <= 2**-8, f"losses with and without collectives differ by {difference:.1e}"
    with torch.no_grad():
        next(p for p in models[0].layers[0].parameters() if p.dim() == 2).mul_(torch.nan)
    try:
        train(models[0], device, steps=2)
    except FloatingPointError:
        return f"codes and scales have the CPU's bits; losses with and without collectives are equal to {difference:.1e}"
    raise AssertionError("NaN in a weight was not found")


def check_fp8_kernels(device: torch.device) -> tuple[str, dict[str, Any]]:
    """Operands have the CPU's bits; each kernel's time, relative to the time in which the device copies as many bytes.

    Raises:
        AssertionError: a result differs, or quantizing or dequantizing weights takes more than 1.25 of the copy.
        Skip: the device has no kernels.
    """
    from vescale_ray.quantization import Fp8Block, operands
    from vescale_ray.quantization.kernels import has_triton

    if device.type == "cpu" or not has_triton():
        raise Skip("needs a GPU and Triton")
    power = Fp8Block(scales="power_of_two")
    for m, k in ((256, 384), (7, 200), (130, 1040)):
        x = torch.randn(m, k).mul(torch.randn(m, k).mul(3).exp()).bfloat16()
        for form in (Fp8Block(), power):
            for tiles in (True, False):
                here = map(operands.for_gpu, operands.operands(x, form, tiles=tiles, rows=True, columns=True))
                there = operands.operands(x.to(device), form, tiles=tiles, rows=True, columns=True)
                for one, other in zip(here, there, strict=True):
                    assert torch.equal(one.codes.view(torch.uint8), other.codes.cpu().view(torch.uint8)), f"{form}: codes of {m} x {k}"
                    assert torch.equal(one.scales, other.scales.cpu()), f"{form}: scales of {m} x {k}"
    figures = {}
    for name, moved, run in _kernels(device):
        source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        ours, floor = kernel_seconds(run), kernel_seconds(lambda s=source, t=target: t.copy_(s))
        figures[name] = {"seconds": ours, "floor_seconds": floor, "bytes": moved, "of_floor": ours / floor}
    shown = ", ".join(f"{name} {found['of_floor']:.2f}" for name, found in figures.items())
    text = f"operands have the CPU's bits; of the bandwidth floor: {shown}"
    slow = [name for name, found in figures.items() if "quantize" in name and found["of_floor"] > 1.25]
    assert not slow, f"{', '.join(slow)}: more than 1.25 of the bandwidth floor ({text})"
    return text, {"kernels": figures}


def _kernels(device: torch.device) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Yield the name, the bytes that it moves, and a call of each kernel. Weights and activations are of 8192 x 8192."""
    from vescale_ray.quantization import Fp8Block
    from vescale_ray.quantization.fp8_triton import whole_table
    from vescale_ray.quantization.operands import operands

    shape, numel = (TOKENS, WIDTH), TOKENS * WIDTH
    weight = torch.randn(shape, device=device)
    for form in (Fp8Block(), Fp8Block(scales="power_of_two"), Fp8Block(1, 128), Fp8Block(32, 32, "power_of_two")):
        table, scale_bytes = whole_table(shape, form.block, form.power), numel // (form.rows * form.columns) * form.scale_dtype.itemsize
        codes = torch.empty(numel, dtype=torch.uint8, device=device)
        scales = torch.empty(scale_bytes, dtype=torch.uint8, device=device)
        for dtype in (torch.float32, torch.bfloat16):
            flat, moved = weight.to(dtype).view(-1), numel * (dtype.itemsize + 1) + scale_bytes
            where = f"{form}, {str(dtype).removeprefix('torch.')}"
            yield f"quantize {where}", moved, lambda t=table, f=flat, c=codes, s=scales: t.quantize(f, c, s)
            yield f"dequantize {where}", moved, lambda t=table, f=flat, c=codes, s=scales: t.dequantize(c, s, f)
    x = weight.bfloat16()
    for form in (Fp8Block(), Fp8Block(scales="power_of_two")):
        kinds = {
            "inputs": {"rows": True}, "inputs, transposed": {"columns": True}, "output gradients": {"rows": True, "columns": True},
            "weight": {"tiles": True, "rows": True}, "weight, transposed": {"tiles": True, "columns": True},
        }  # fmt: skip
        for name, wanted in kinds.items():
            orders = len(wanted) - wanted.get("tiles", False)
            scale_bytes = 4 * (numel // SIDE // (SIDE if "tiles" in wanted else 1)) * orders
            run = lambda x=x, form=form, wanted=wanted: operands(x, form, **wanted)  # noqa: E731
            yield f"operands of {name}, {form}", numel * (2 + orders) + scale_bytes, run


def check_products(device: torch.device) -> tuple[str, dict[str, Any]]:
    """FP8 products and their gradients equal the CPU's emulation; the time of a linear layer, eager and compiled, with BF16's.

    Raises:
        AssertionError: a result differs.
        Skip: the device has no FP8 products.
    """
    if device.type == "cpu":
        raise Skip("needs a Hopper or Blackwell GPU")
    forms, worst, refused = _multiplied(device), 0.0, []
    figures, shown = {"the three products alone": _products_seconds(device, next(iter(forms.values())))}, []
    for how in ("eager", "compiled"):
        for name, form in {"bf16": None, **forms}.items():
            figures[f"{name}, {how}"] = _layer_seconds(device, form, how == "compiled")
            if form is not None:
                shown.append(f"{name}, {how} {figures[f'bf16, {how}'] / figures[f'{name}, {how}']:.2f}")
    speed = f"a linear layer of {WIDTH}, in times BF16's speed (goal 1.5): {'; '.join(shown)}"
    for form, (tokens, inputs, outputs) in itertools.product(forms.values(), ((256, 384, 512), (7, 208, 304), (130, 1040, 144))):
        try:
            worst = max(worst, _difference(device, form, tokens, inputs, outputs))
        except RuntimeError as error:
            refused.append(f"{form}, {tokens} x {inputs} x {outputs}: {str(error).splitlines()[0]}")
    assert not refused, f"{'; '.join(refused)} ({speed})"
    assert worst <= 1e-3, f"products differ from the CPU's emulation by {worst:.1e} ({speed})"  # tensor cores add up with fewer bits
    text = f"equal the emulation to {worst:.1e}; {speed}"
    return text, {"layer_seconds": figures}


def _difference(device: torch.device, form: Any, tokens: int, inputs: int, outputs: int) -> float:
    """Return how far a linear layer's output and gradients are from those of the CPU."""
    from vescale_ray.quantization import compute_in_fp8

    here, x, dy = nn.Linear(inputs, outputs, bias=False), torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    there, results = nn.Linear(inputs, outputs, bias=False), []
    there.load_state_dict(here.state_dict())
    for layer, where in ((here, torch.device("cpu")), (there.to(device), device)):
        compute_in_fp8(layer, lambda name, parameter: form)
        given = x.to(where, torch.bfloat16).float().requires_grad_()
        out = layer(given)
        out.backward(dy.to(where))
        results.append([t.detach().cpu() for t in (out, given.grad, layer.weight.grad)])
    return max(float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True))


def _multiplied(device: torch.device) -> dict[str, Any]:
    """Return formats that the device multiplies, by name. Raises Skip if there are none."""
    from vescale_ray.quantization import Fp8Block
    from vescale_ray.quantization.products import check_device

    power, mx = Fp8Block(scales="power_of_two"), Fp8Block(32, 32, "power_of_two")
    found, error = {}, None
    for name, form in {"fp8": Fp8Block(), "fp8 power of two": power, "fp8 32x32 power of two": mx}.items():
        try:
            check_device(device, form)
            found[name] = form
        except ValueError as refused:
            error = refused
    if not found:
        raise Skip(str(error))
    return found


def _layer_seconds(device: torch.device, form: Any, compiled: bool) -> float:
    """Seconds of forward and backward of a linear layer of BF16."""
    from vescale_ray.quantization import compute_in_fp8

    layer: Any = nn.Linear(WIDTH, WIDTH, bias=False, device=device, dtype=torch.bfloat16)
    if form is not None:
        compute_in_fp8(layer, lambda name, parameter: form)
    if compiled:
        layer = torch.compile(layer)
    x = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
    return _seconds(lambda: layer(x).backward(dy))


def _products_seconds(device: torch.device, form: Any) -> float:
    """Seconds of the FP8 products of a layer's step without quantization."""
    from vescale_ray.quantization.operands import operands
    from vescale_ray.quantization.products import multiply

    x = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
    rows, columns = operands(x, form, rows=True, columns=True)
    weight, transposed = operands(x, form, tiles=True, rows=True, columns=True)
    pairs = ((rows, weight), (rows, transposed), (columns, columns))
    return _seconds(lambda: [multiply(a, b, torch.bfloat16) for a, b in pairs])


def _seconds(step: Callable[[], Any]) -> float:
    """Seconds of one step on the device, the median of several."""
    times = []
    for _ in range(REPEATS + 3):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        step()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(times[3:])


def kernel_seconds(run: Callable[[], object], rounds: int = 5, calls: int = 8) -> float:
    """Median seconds of the kernels of one call. A sleeping kernel holds the device until the host has queued all calls of a round."""
    run()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    return sorted(times)[len(times) // 2]
