"""Saves to a fake S3."""

from __future__ import annotations

import torch

from tests.checkpoint.checkpoint_support import (
    adam_like,
    random_bits,
    random_layout,
    save_in_process,
)

BEFORE, AFTER = adam_like(seed=1), {**adam_like(seed=2), ("large", "param"): random_bits((2_800_000,), torch.float32, 3)}


TOP = "runs/one/"


def save_after(store, step=20):
    """Save one rank of 11 MiB: three parts, an aux object and a commit."""
    return save_in_process(store, AFTER, random_layout(AFTER, 1, seed=2), step=step, block_bytes=1 << 20, chunk_bytes=4 << 20)
