"""Block-wise quantization. Pure functions of a tensor's own elements; no communication.

``fp8`` quantizes weights for the all-gather; ``block_scales`` serves it and 8-bit AdamW. Imports torch and
:mod:`vescale_ray.block_grid`.
"""

from vescale_ray.quantization.fp8 import Fp8Block

__all__ = ["Fp8Block"]
