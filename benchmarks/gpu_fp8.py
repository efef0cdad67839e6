"""Checks of gathers and products in FP8 on a device, two rows of ``gpu_check.py``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_rescale import Skip

WIDTH, TOKENS, REPEATS = 8192, 8192, 20
"""Size of the linear layer that is timed."""


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


def check_products(device: torch.device) -> str:
    """FP8 products and their gradients equal the CPU's emulation; the time of a compiled linear layer, as a part of BF16's.

    Raises:
        AssertionError: a result differs.
        Skip: the device is no Hopper GPU.
    """
    from vescale_ray.quantization import Fp8Block, compute_in_fp8
    from vescale_ray.quantization.products import check_device

    if device.type == "cpu":
        raise Skip("needs a Hopper GPU")
    try:
        check_device(device)
    except ValueError as error:
        raise Skip(str(error)) from None
    worst = 0.0
    for tokens, inputs, outputs in ((256, 384, 512), (7, 208, 304), (130, 1040, 144)):
        here, x, dy = nn.Linear(inputs, outputs, bias=False), torch.randn(tokens, inputs), torch.randn(tokens, outputs)
        compute_in_fp8(here, lambda name, parameter: Fp8Block())
        there, results = nn.Linear(inputs, outputs, bias=False), []
        compute_in_fp8(there, lambda name, parameter: Fp8Block())
        there.load_state_dict(here.state_dict())
        for layer, where in ((here, torch.device("cpu")), (there.to(device), device)):
            given = x.to(where, torch.bfloat16).float().requires_grad_()
            out = layer(given)
            out.backward(dy.to(where))
            results.append([t.detach().cpu() for t in (out, given.grad, layer.weight.grad)])
        worst = max(worst, *(float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True)))
    assert worst <= 1e-3, f"products differ from the CPU's emulation by {worst:.1e}"  # tensor cores add up with fewer bits
    seconds = {}
    for name in ("bf16", "fp8"):
        layer = nn.Linear(WIDTH, WIDTH, bias=False, device=device, dtype=torch.bfloat16)
        if name == "fp8":
            compute_in_fp8(layer, lambda name, parameter: Fp8Block())
        compiled = torch.compile(layer)
        x = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
        seconds[name] = _seconds(lambda compiled=compiled, x=x, dy=dy: compiled(x).backward(dy))
    return f"equal the emulation to {worst:.1e}; a linear layer of {WIDTH} takes {seconds['fp8'] / seconds['bf16']:.2f} of BF16's time"


def _seconds(step: Callable[[], None]) -> float:
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
