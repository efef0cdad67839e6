"""The choice between Triton's kernels and torch's operations, which give the same bits."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

_FOUND = importlib.util.find_spec("triton") is not None
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_triton() -> bool:
    """Return True if kernels can be built here."""
    return _FOUND


def on_triton(values: Tensor) -> bool:
    """Return True if kernels quantize ``values`` or write them: on a CUDA device with Triton, in FP32, BF16 or FP16."""
    return values.device.type == "cuda" and has_triton() and values.dtype in _DTYPES and values.numel() > 0
