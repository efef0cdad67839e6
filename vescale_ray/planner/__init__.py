"""Structure-aware planning: the position of every tensor of a group in the global buffer ([veScale-FSDP], section on planning).

The global buffer has ``num_shards`` equal parts of ``shard_numel`` elements. Each tensor is contiguous. Padding lies only between
tensors or at the end, and no shard boundary cuts a block:

    tensors  |--- q_proj ---|--- o_proj ---| |-------- up_proj --------|..|
    ranks    |      0      |      1      |      2      |      3      |       boundaries at multiples of shard_numel

``placement/``: ``layout`` defines the result and ``search`` finds the smallest one. ``place`` handles one fixed order, ``orders`` handles
all orders, and ``bounds`` proves lower bounds; ``buffers`` divides tensors among several buffers. The search is a pure function: every rank
and process gets the same layout.

``models/``: ``shapes`` and ``architectures`` describe a model's tensors. ``unit_plan`` plans a unit's buffers, with levers against padding;
``advice`` picks the lever. ``cost`` predicts memory, ``step_time`` time on the ``hardware``, and ``choose`` picks the sharding. ``request``
and ``choice_report`` serve the command line. Imports torch, ``errors`` and ``geometry`` only.
"""

from vescale_ray.planner.choose import Choice, Option, choose_sharding
from vescale_ray.planner.cost import Memory, Policy
from vescale_ray.planner.hardware import HARDWARE, Hardware
from vescale_ray.planner.models.model_shapes import model_shapes
from vescale_ray.planner.models.shapes import ModelShapes
from vescale_ray.planner.placement.layout import START_BYTES, Layout, TensorSpec
from vescale_ray.planner.placement.search import plan_layout
from vescale_ray.planner.unit_plan import Blocks, Bundle, Lever, UnitPlan, plan_buffers, plan_unit

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
