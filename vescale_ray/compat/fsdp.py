"""Private names of torch's ``fully_shard``: the types of its arguments, its hooks and its state, which vescale_ray's uses, too."""

from __future__ import annotations

from vescale_ray.compat import need, private_names

with private_names():
    # disable_dynamo imports torch._dynamo at the first hook. The import there would keep the first forward's frames alive.
    import torch._dynamo

    # The registry in which composable functions store a module's state and find that of others.
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

    # Types of fully_shard's arguments and of custom communications.
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, DataParallelMeshDims, ReduceScatter

    # Communications that torch offers to set_custom_all_gather and set_custom_reduce_scatter.
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        ProcessGroupAllocAllGather,
        ProcessGroupAllocReduceScatter,
        SymmMemAllGather,
        SymmMemReduceScatter,
    )

    # Results that shard_placement_fn may give, and the phases that tools ask a module's state for.
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult, TrainingState

    # The place of a parameter, in the state that tools read.
    from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo

    need("torch.autograd.graph.Node", "_register_hook_dict")  # a tensor hook without a handle to remove it, at a quarter of the time
