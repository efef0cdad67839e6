"""Imports that ranks need, made once by their fork server. Each rank would spend one to two seconds on them.

The first user of the server decides its imports, so this is one list for all tests. Nothing here starts a thread, because a forked process
has no threads of its parent.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os

MODULES = (
    "hypothesis",
    "numpy.ma",
    "pytest",
    "torch._dynamo",
    "torch._dynamo.repro.after_aot",  # and half a second of what the first compilation imports
    "torch._inductor.select_algorithm",
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
    "vescale_ray.workers.building.rehearsal",
    "tests.checkpoint.checkpoint_support",
    "tests.dtensor.layouts",
    "tests.ranks",
    "tests.workers.tiny",
)

OPTIONAL = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "peft")
"""Imports of the ranks that train models of transformers."""

os.environ.setdefault("HF_HUB_OFFLINE", "1")
for module in (*MODULES, *(name for name in OPTIONAL if importlib.util.find_spec(name.partition(".")[0]))):
    importlib.import_module(module)
# A collection in a rank would touch, and so copy, the pages of every object.
gc.collect()
gc.freeze()
