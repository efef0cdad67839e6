"""Model FLOPs utilisation: the operations that a model needs for a token, and those that a device could do in a second at most.

Counted as everywhere (PaLM, arXiv 2204.02311, appendix B): multiplications and additions of the matrix products, forward once and backward
twice, attention over the whole square, nothing for what is recomputed. So a run with recomputation has a lower figure, not a higher one.
"""

from __future__ import annotations

import torch
from torch import nn

FORWARD_AND_BACKWARD = 3
"""Times the forward: backward has two products for each of its."""

_T = 1e12
# Of one device, dense, without sparsity: BF16 and TF32 in the tensor cores, FP32 outside of them.
PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("H100 PCIe", {"bfloat16": 756 * _T, "tf32": 378 * _T, "float32": 51 * _T}),  # NVIDIA H100 data sheet
    ("H100 NVL", {"bfloat16": 835 * _T, "tf32": 417 * _T, "float32": 60 * _T}),  # NVIDIA H100 NVL data sheet
    ("H100", {"bfloat16": 989 * _T, "tf32": 494 * _T, "float32": 67 * _T}),  # NVIDIA H100 data sheet, SXM
    ("H200", {"bfloat16": 989 * _T, "tf32": 494 * _T, "float32": 67 * _T}),  # NVIDIA H200 data sheet, SXM
    ("A100", {"bfloat16": 312 * _T, "tf32": 156 * _T, "float32": 19.5 * _T}),  # NVIDIA A100 data sheet
    ("B200", {"bfloat16": 2250 * _T, "tf32": 1100 * _T, "float32": 75 * _T}),  # NVIDIA Blackwell data sheet, HGX B200
)
"""By a part of the device's name, the more special ones first."""


def token_flops(model: nn.Module, seq_len: int) -> int:
    """Operations for one token of a sequence of ``seq_len``, forward and backward.

    A model that knows better has a method ``flops_per_token(seq_len)``: one in which not every weight is used for every token (experts)
    should. Else it is 6 for each element of a weight matrix that is no embedding, and nothing for attention.
    """
    told = getattr(model, "flops_per_token", None)
    if callable(told):
        return int(told(seq_len))
    matrices = (
        parameter.numel()  # of a sharded parameter: of the whole one
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim >= 2
    )
    return 2 * FORWARD_AND_BACKWARD * sum(matrices)


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Most operations that ``device`` does in a second with operands of ``dtype``; None: it isn't known, as for every CPU."""
    return known_peak(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def known_peak(name: str, dtype: str) -> float | None:
    """Of a device of this name, from its maker's data sheet."""
    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
        dtype = "tf32"
    return next((peaks.get(dtype) for part, peaks in PEAKS if part.lower() in name.lower()), None)
