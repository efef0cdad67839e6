"""Structure-aware planning: where every tensor of a group lies in the global buffer ([veScale-FSDP], section on planning).

The global buffer has ``num_shards`` equal parts of ``shard_numel`` elements. Tensors lie in it one after another, each
contiguous, padding only between them or at the end, and no shard boundary cuts a block:

    tensors  |--- q_proj ---|--- o_proj ---| |-------- up_proj --------|..|
    ranks    |      0      |      1      |      2      |      3      |       boundaries at multiples of shard_numel

``layout`` says what a layout is, ``search`` finds the smallest one (``place``, ``orders``), a pure function of its inputs: the
same on every rank and in every process. It imports torch and ``geometry`` only.
"""

from vescale_ray.planner.layout import START_BYTES, Layout, TensorSpec
from vescale_ray.planner.search import plan_layout

__all__ = ["START_BYTES", "Layout", "TensorSpec", "plan_layout"]
