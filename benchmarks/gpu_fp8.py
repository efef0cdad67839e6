"""Check of gathers in FP8 on a device, a row of ``gpu_check.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
