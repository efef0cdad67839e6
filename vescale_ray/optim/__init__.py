"""Optimizers and gradient clipping for sharded parameters.

Element-wise ``torch.optim`` optimizers work on sharded parameters unchanged. This package holds those that depend on shards and
blocks. Imports torch, :mod:`vescale_ray.dtensor` and geometry; never Ray.
"""

from vescale_ray.optim.adamw import AdamW
from vescale_ray.optim.build import CombinedOptimizer, OptimizerConfig, build_optimizer, route_parameters
from vescale_ray.optim.clip import clip_grad_norm_, total_norm
from vescale_ray.optim.eight_bit.adamw8bit import AdamW8bit
from vescale_ray.optim.flat import Flat
from vescale_ray.optim.fp8_policy import fp8_policy
from vescale_ray.optim.matrix.muon import Muon
from vescale_ray.optim.matrix.qk_clip import qk_clip_
from vescale_ray.optim.matrix.shampoo import Shampoo
from vescale_ray.optim.matrix.soap import SOAP

__all__ = [
    "SOAP",
    "AdamW",
    "AdamW8bit",
    "CombinedOptimizer",
    "Flat",
    "Muon",
    "OptimizerConfig",
    "Shampoo",
    "build_optimizer",
    "clip_grad_norm_",
    "fp8_policy",
    "qk_clip_",
    "route_parameters",
    "total_norm",
]
