"""Model FLOPs utilisation: the operations that a model needs for a token, and the peak rate of a device.

The count follows PaLM (arXiv 2204.02311, appendix B). It includes the multiplications and additions of the matrix products, once for
forward and twice for backward. Attention counts over the full square. Recomputed operations count for nothing, so a run with recomputation
has a lower utilisation.
"""

from __future__ import annotations

import torch
from torch import nn

FORWARD_AND_BACKWARD = 3
"""Operations of forward and backward, relative to forward: for each product of forward, backward has two."""

_T = 1e12
# Dense peak rates of one device, without sparsity: BF16 and TF32 on the tensor cores, FP32 outside them.
PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("H100 PCIe", {"bfloat16": 756 * _T, "tf32": 378 * _T, "float32": 51 * _T}),  # NVIDIA H100 data sheet
    ("H100 NVL", {"bfloat16": 835 * _T, "tf32": 417 * _T, "float32": 60 * _T}),  # NVIDIA H100 NVL data sheet
    ("H100", {"bfloat16": 989 * _T, "tf32": 494 * _T, "float32": 67 * _T}),  # NVIDIA H100 data sheet, SXM
    ("H200", {"bfloat16": 989 * _T, "tf32": 494 * _T, "float32": 67 * _T}),  # NVIDIA H200 data sheet, SXM
    ("A100", {"bfloat16": 312 * _T, "tf32": 156 * _T, "float32": 19.5 * _T}),  # NVIDIA A100 data sheet
    ("B200", {"bfloat16": 2250 * _T, "tf32": 1100 * _T, "float32": 75 * _T}),  # NVIDIA Blackwell data sheet, HGX B200
)
"""Peak operations per second by dtype. Keys are parts of the device name, and more specific names come first."""


def token_flops(model: nn.Module, seq_len: int) -> int:
    """Return the operations for one token of a sequence of ``seq_len`` tokens, forward and backward.

    If the model has a method ``flops_per_token(seq_len)``, its answer is used. A mixture-of-experts model needs one, since a token uses
    only some weights. Otherwise the estimate is 6 operations per element of each weight matrix. Embeddings and attention count for nothing.
    """
    told = getattr(model, "flops_per_token", None)
    if callable(told):
        return int(told(seq_len))
    matrices = (
        parameter.numel()  # a sharded parameter reports its global size
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim >= 2
    )
    return 2 * FORWARD_AND_BACKWARD * sum(matrices)


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Peak operations per second of ``device`` with operands of ``dtype``; None if it is unknown, as for every CPU."""
    return known_peak(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def known_peak(name: str, dtype: str) -> float | None:
    """Peak operations per second of the device named ``name``, from its maker's data sheet; None if the name is unknown."""
    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
        dtype = "tf32"
    return next((peaks.get(dtype) for part, peaks in PEAKS if part.lower() in name.lower()), None)
