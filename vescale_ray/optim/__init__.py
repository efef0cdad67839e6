"""Optimizers and gradient clipping for sharded parameters. Any element-wise ``torch.optim`` optimizer works on them as it is;
here is what needs to know about shards. Imports torch and :mod:`vescale_ray.dtensor`; never Ray."""

from vescale_ray.optim.adamw import AdamW
from vescale_ray.optim.build import CombinedOptimizer, OptimizerConfig, build_optimizer, route_parameters
from vescale_ray.optim.clip import clip_grad_norm_, total_norm
from vescale_ray.optim.flat import Flat
from vescale_ray.optim.muon import Muon
from vescale_ray.optim.qk_clip import qk_clip_

__all__ = [
    "AdamW",
    "CombinedOptimizer",
    "Flat",
    "Muon",
    "OptimizerConfig",
    "build_optimizer",
    "clip_grad_norm_",
    "qk_clip_",
    "route_parameters",
    "total_norm",
]
