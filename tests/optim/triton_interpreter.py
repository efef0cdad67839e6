"""Compare the kernel with the torch path. test_adamw8bit_triton.py runs this in its own process with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from vescale_ray import Block
from vescale_ray.optim import AdamW8bit
from vescale_ray.optim.eight_bit import adamw8bit
from vescale_ray.optim.eight_bit.adamw8bit_triton import step_region_triton

BLOCKS: list[Any] = [256, 100, Block.tile(32, 32), Block.tile(7, 30), Block.rows(8)]


def noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def main() -> int:
    torch.set_num_threads(1)
    reference = adamw8bit.step_region_torch
    for block in BLOCKS:
        for shape in ((33, 65), (2, 17, 24)):
            params = [nn.Parameter(noise(shape, 0)) for _ in range(2)]
            optimizers = [AdamW8bit([p], block=block, min_8bit_numel=1, lr=0.01, weight_decay=0.1) for p in params]
            for step in range(3):
                grad = noise(shape, step + 1) * torch.exp(2 * noise((1, shape[-1]), 99))
                if step == 2:
                    grad.view(-1)[7] = float("nan")
                for param, optimizer, path in zip(params, optimizers, (reference, step_region_triton), strict=True):
                    adamw8bit.step_region_torch = path
                    param.grad = grad
                    optimizer.step()
            a, b = ({"param": p, **optimizer.state[p]} for p, optimizer in zip(params, optimizers, strict=True))
            for kind in a:
                assert a[kind].detach().numpy().tobytes() == b[kind].detach().numpy().tobytes() or torch.equal(
                    a[kind].nan_to_num(nan=-9e9), b[kind].nan_to_num(nan=-9e9)
                ), f"{kind} differs for {block} of {shape}"
    print("equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
