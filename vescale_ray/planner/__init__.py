"""Structure-aware planning: where every tensor of a group lies in the global buffer ([veScale-FSDP], section on planning).

The global buffer has ``num_shards`` equal parts of ``shard_numel`` elements. Tensors lie in it one after another, each
contiguous, padding only between them or at the end, and no shard boundary cuts a block:

    tensors  |--- q_proj ---|--- o_proj ---| |-------- up_proj --------|..|
    ranks    |      0      |      1      |      2      |      3      |       boundaries at multiples of shard_numel

A layout: ``layout`` says what it is, ``search`` finds the smallest one (``place``: a fixed order; ``orders``: all of them;
``bounds``: what none can beat), a pure function of its inputs: the same on every rank and in every process.

A model: ``shapes`` and ``architectures`` (what it is made of), ``units`` (a unit's buffers, and the levers against padding),
``advice`` (which lever), ``cost`` (memory and time), ``choose`` (which sharding), ``request`` and ``report`` (for people),
``baselines`` (other systems, to compare). Imports torch, ``errors`` and ``geometry`` only.
"""

from vescale_ray.planner.choose import Choice, Option, choose_sharding
from vescale_ray.planner.cost import HARDWARE, Hardware, Memory, Policy
from vescale_ray.planner.layout import START_BYTES, Layout, TensorSpec
from vescale_ray.planner.search import plan_layout
from vescale_ray.planner.shapes import ModelShapes, model_shapes
from vescale_ray.planner.units import Blocks, Bundle, Lever, UnitPlan, plan_buffers, plan_unit

__all__ = [
    "HARDWARE",
    "START_BYTES",
    "Blocks",
    "Bundle",
    "Choice",
    "Hardware",
    "Layout",
    "Lever",
    "Memory",
    "ModelShapes",
    "Option",
    "Policy",
    "TensorSpec",
    "UnitPlan",
    "choose_sharding",
    "model_shapes",
    "plan_layout",
    "plan_buffers",
    "plan_unit",
]
