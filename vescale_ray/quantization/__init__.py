"""Block-wise quantization. Pure functions of a tensor's own elements; no communication.

``fp8`` quantizes weights for the all-gather, ``products`` computes linear layers in FP8; ``block_scales`` serves ``fp8`` and 8-bit AdamW.
Imports torch and :mod:`vescale_ray.block_grid`.
"""

from vescale_ray.quantization.fp8 import Fp8Block
from vescale_ray.quantization.products import compute_in_fp8

__all__ = ["Fp8Block", "compute_in_fp8"]
