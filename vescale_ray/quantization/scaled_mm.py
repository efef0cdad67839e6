"""Products of FP8 codes with a scale for each block, by torch's ``scaled_mm``.

Compiled graphs hold them as a custom operation, because torch 2.13 can't compile its own. Its fake tensors refuse matrices whose last block
is smaller. Inductor replaces it by the older ``torch._scaled_mm``, which wants the second operand's scales transposed
(pytorch/pytorch#188996), and refuses MX operands (pytorch/pytorch#186384).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def scaled_product(a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, tiles: list[bool], mx: bool, dtype: torch.dtype) -> Tensor:
    """Return ``a @ b.T`` in ``dtype``, for e4m3 codes ``[m, k]`` and ``[n, k]`` in the layout that cuBLASLt wants.

    Args:
        tiles: whether ``a`` and ``b`` have a scale for 128 x 128 elements; else they have one for 128 elements of a row.
        mx: instead, both have a scale for 32 elements of a row, as MXFP8.
    """
    if torch.compiler.is_compiling():
        return torch.ops.vescale_ray.fp8_product(a, b, scales_a, scales_b, tiles, mx, dtype)  # type: ignore[no-any-return]
    return _product(a, b, scales_a, scales_b, tiles, mx, dtype)


def _product(a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, tiles: list[bool], mx: bool, dtype: torch.dtype) -> Tensor:
    kinds = [F.ScalingType.BlockWise128x128 if tile else F.ScalingType.BlockWise1x128 for tile in tiles]
    if not mx:
        return F.scaled_mm(a, b.t(), scales_a, kinds[0], scales_b, kinds[1], output_dtype=dtype)
    kind, order = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    return F.scaled_mm(a, b.t(), scales_a, kind, scales_b, kind, order, order, output_dtype=dtype)


def _empty(a: Tensor, b: Tensor, scales_a: Tensor, scales_b: Tensor, tiles: list[bool], mx: bool, dtype: torch.dtype) -> Tensor:
    """Return memory for the result of :func:`scaled_product`."""
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


torch.library.custom_op("vescale_ray::fp8_product", _product, mutates_args=()).register_fake(_empty)
OPERATIONS = [torch.ops.aten._scaled_mm_v2.default, torch.ops.vescale_ray.fp8_product.default]
"""Operations that compute products: torch's own, and that of compiled graphs."""
