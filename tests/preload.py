"""What ranks need, imported once by the fork server that they come from: each would spend one to two seconds on it. Whoever starts the
server first says what it imports, so that this is one list for all tests.

Nothing here starts a thread: a process that is forked has none of them.
"""

from __future__ import annotations

import gc
import importlib

MODULES = (
    "hypothesis",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.nn.functional",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
    "vescale_ray.checkpoint",
    "vescale_ray.fsdp",
    "vescale_ray.models.llama",
    "vescale_ray.optim",
    "vescale_ray.planner",
    "vescale_ray.state_dict",
    "vescale_ray.workers.rehearsal",
    "tests.checkpoint.checkpoint_support",
    "tests.dtensor.layouts",
    "tests.ranks",
    "tests.workers.tiny",
)

for module in MODULES:
    importlib.import_module(module)
# What is here stays: a collection in a rank would touch, and so copy, the pages of every object.
gc.collect()
gc.freeze()
