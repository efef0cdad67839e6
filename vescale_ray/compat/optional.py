"""Private names that a torch release may lack; callers do without them. This file imports no torch, and only looks at loaded modules."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any

MESH_CACHES = (
    "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear",
    "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear",
    "torch.distributed.tensor._redistribute:_gen_transform_infos.cache_clear",
    "torch.distributed.tensor._redistribute:clear_redistribute_planner_cache",
    "torch.distributed.tensor._collective_utils:MeshTopoInfo.build_from_mesh.cache_clear",
    "torch._C:_clear_DTensor_sharding_propagator_cache",
)
"""Torch's caches of DTensor dispatch. Their keys hold device meshes, a mesh holds its group, and a live group keeps its sockets open. A
cache that a torch release lacks is skipped; the test of dissolved groups detects new ones."""


def clear_mesh_caches() -> None:
    """Empty the caches that hold device meshes."""
    for entry in MESH_CACHES:
        module, _, path = entry.partition(":")
        if module in sys.modules:
            try:
                attrgetter(path)(sys.modules[module])()
            except AttributeError:
                continue


def flight_record() -> Any:
    """Return the function that dumps torch's flight recorder as JSON; None if torch is not loaded or has none."""
    return getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
