"""Fully sharded data parallelism without copies, behind torch's ``fully_shard`` API ([veScale-FSDP], DBuffer and system parts).

Imports torch, :mod:`vescale_ray.planner`, ``dbuffer`` and ``dtensor``; never Ray. One file, one idea: ``api`` (fully_shard), ``module``
(the methods it adds), ``unit`` (hooks: when), ``group`` (buffers: what), ``division`` (into the ranks' parts), ``sharding`` (over which
mesh dimensions), ``schedule`` (order and streams), ``memory`` (the pool), ``comm`` (the two collectives), ``linear`` (gradients without a
copy), ``delivery`` (reduced gradients to ``.grad``), ``uses`` (of which parameters, on all ranks alike), ``arrivals`` (what else a
gradient sets off), ``hooked`` (tensor classes with all-gather hooks), ``same_plan`` (do all ranks have it?), ``torch_state`` (a unit as
torch's state of one), ``labels`` (what logs and profilers show), ``stand_in`` (in the place of torch's), ``debug``, ``phases`` (what is
allowed when), ``overview`` (what came of it).

[Note: the tensors of a group]
P: elements of the group's parameters. W: ranks. S: elements of a rank's shard; W * S >= P, the difference is padding.
"orig" is the parameters' own dtype (FP32 master weights), "compute" is ``mp_policy.param_dtype``, "reduce" ``reduce_dtype``.

| tensor | elements, dtype | lives | made by |
|---|---|---|---|
| master shard (flat); sharded ``nn.Parameter``s are views | S, orig | as the model; on gloo inside that buffer (below) | ``fully_shard`` |
| cast shard, if compute is not orig (or gaps, below) | S, compute | as long as the model | one kernel per optimizer step |
| gathered buffer; unsharded parameters are views | W*S, compute | addresses: as the model; memory: unshard to reshard | all-gather |
| kept part, if `reshard_after_forward` is an int m | W*S/m, compute | from the end of forward to backward's all-gather | one copy |
| a parameter's gradient from autograd, but for weights of large ``nn.Linear``s | its own, compute | until its hook has run | autograd |
| gradient buffer (scratch), of new host memory as it is written | W*S, reduce | first gradient to the end of the reduce-scatter | hooks |
| exchange buffer (scratch), gloo with W > 2 or a cast | W*S, reduce | during the reduce-scatter | memory just released, if sizes match |
| gradient shard (flat); ``param.grad`` are views | S, orig | until ``zero_grad`` | reduce-scatter, straight into it if reduce is orig |
| partial gradient shard, HSDP without all-reduce | S, orig | until the next backward with it | reduce-scatter |
| optimizer states | the shards' | as long as the optimizer | the optimizer, on sharded parameters |

Buffers at a time, units of one size: gathered, prefetch depth + 1 = 2; gradients, 1 on the CPU, 2 on an accelerator (one filled
while the other is reduced). On the CPU all of it is freed as soon as a pass needs no further unit, and the first unit of a backward, whose
step's activations are all alive, prefetches late; on an accelerator torch's allocator keeps it.
Gaps: stacks of matrices that may be gathered with a gap behind each (``allow_gaps``) are kept without the gaps where a rank has
elements of several matrices. The master shard, gradient shard and states are smaller than S then, and the cast shard, also if it is
no cast, has the gaps; it is written tensor by tensor, once per optimizer step.
With one rank there is nothing to gather or scatter: unsharded parameters are views of the master (or cast) shard, and
gradients are written into the gradient shard at once. Padding is zeroed when a buffer is laid out and never written again.

What is copied per step: the cast (S); each gradient once (autograd's result into the buffer), but for weights of large ``nn.Linear``s,
whose product writes there itself if compute is reduce (``linear``); on gloo, where the all-gather is an exchange between ranks,
this rank's own part (S) into the gathered buffer where the master shard does not live there. Nothing else around the all-gather.

The master shard lives in the gathered buffer on gloo if it is not cast, has no gaps and nothing else speaks against it
(``Group._can_live_in_buffer``), from 256 KiB per buffer on: the memory of that part stays, that of the others' parts comes and goes.
Gathered parameters then take (W - 1) / W of the table's bytes, as an exchange does.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle

from vescale_ray.fsdp.api import fully_shard, register_fsdp_forward_method, share_comm_ctx
from vescale_ray.fsdp.debug import OrderError, set_debug
from vescale_ray.fsdp.module import FSDPModule
from vescale_ray.fsdp.overview import explain, held_bytes
from vescale_ray.fsdp.phases import PhaseError
from vescale_ray.fsdp.sharding import Sharding
from vescale_ray.fsdp.stand_in import stand_in_for_torch

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OrderError",
    "PhaseError",
    "Sharding",
    "UnshardHandle",
    "explain",
    "fully_shard",
    "held_bytes",
    "register_fsdp_forward_method",
    "set_debug",
    "share_comm_ctx",
    "stand_in_for_torch",
]
