"""Compare the kernel with the torch path. test_adamw8bit_triton.py runs this in its own process with TRITON_INTERPRET=1."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vescale_ray import Block
from vescale_ray.block_grid import Region
from vescale_ray.optim import AdamW8bit
from vescale_ray.optim.eight_bit import adamw8bit, adamw8bit_triton
from vescale_ray.optim.eight_bit.adamw8bit_values import Held, Hyper

BLOCKS: list[Any] = [256, 100, Block.tile(32, 32), Block.tile(7, 30), Block.rows(8), 5000, Block.rows(90)]
"""The last two do not fit into one pass."""
SHAPES = ((33, 65), (2, 17, 24), (96, 64))
"""The last has no tails, so the kernel loads several elements at a time."""


def noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kernel(work: Sequence[tuple[Held, Sequence[Region], Hyper]]) -> None:
    parts = []
    for held, regions, hyper in work:
        for r in regions:
            parts.append((held.part(r.element, r.bands * r.band_numel, r.block, r.bands * r.columns), r, hyper))
    adamw8bit_triton.step_triton(parts)


def main() -> int:
    torch.set_num_threads(1)
    adamw8bit_triton.LARGE = 4000  # of whole blocks, one tensor has a launch of its own
    reference = adamw8bit.step_blocks
    for block in BLOCKS:
        copies = [[nn.Parameter(noise(shape, 0)) for shape in SHAPES] for _ in range(2)]
        optimizers = [AdamW8bit(params, block=block, min_8bit_numel=1, lr=0.01, weight_decay=0.1) for params in copies]
        for step in range(3):
            for params, optimizer, path in zip(copies, optimizers, (reference, kernel), strict=True):
                adamw8bit.step_blocks = path  # type: ignore[assignment]
                for param in params:
                    # Gradients of widely different sizes reach all decades of the maps. Zeros are a block of their own in some cases.
                    param.grad = noise(param.shape, step + 1) * torch.exp(4 * noise((1, param.shape[-1]), 99))
                    param.grad[..., :8, :] = 0
                    if step == 2:
                        param.grad.view(-1)[-7] = float("nan")
                optimizer.step()
        for shape, *pair in zip(SHAPES, *copies, strict=True):
            a, b = ({"param": p, **optimizer.state[p]} for p, optimizer in zip(pair, optimizers, strict=True))
            for kind in a:
                assert a[kind].detach().numpy().tobytes() == b[kind].detach().numpy().tobytes() or torch.equal(
                    a[kind].nan_to_num(nan=-9e9), b[kind].nan_to_num(nan=-9e9)
                ), f"{kind} differs for {block} of {shape}"
    print("equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
