"""Private names of DTensor. Importing them imports ``torch.distributed.tensor``."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from vescale_ray.compat import need, private_names

with private_names():
    # Cuts full tensors for set_model_state_dict and set_optimizer_state_dict.
    from torch.distributed._state_dict_utils import _distribute_tensors as distribute_tensors

    # Makes the results of torch.distributed.tensor.zeros, ones, ..; the stand-in replaces it.
    from torch.distributed.tensor._api import _dtensor_init_helper as init_tensor

    # A DTensor's mesh, placements and shape: made once and shared by all operations on equal tensors.
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # The pending norm that torch's clip_grad_norm_ and vescale_ray's exchange.
    from torch.distributed.tensor._ops._math_ops import _NormPartial as NormPartial

    # Redistribution of the dimensions that are not ragged.
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    # The box of a plain sharded tensor on a rank; the public function handles strided shards no better.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    # FSDP2's placement of tensor-parallel parameters, which checkpoints must read and write.
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

    need("torch.distributed.tensor.DTensor", "_local_tensor", "_spec")  # access without an autograd node
    need("torch.distributed.tensor.DTensor", "_op_dispatcher")  # knows whether plain tensors count as replicated
    need("torch.distributed.tensor.DTensor", "_stable_hash_for_caching")  # keeps ranks' compiled code apart
    need("torch.distributed.tensor.Partial", "_reduce_value")  # reduces pending reductions of a kind that only torch knows


def allows_implicit_replication() -> bool:
    """Return whether torch's ``implicit_replication()`` is on: a plain tensor among distributed ones is then the same on every rank."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)
