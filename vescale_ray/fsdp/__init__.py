"""Fully sharded data parallelism without copies, behind torch's ``fully_shard`` API ([veScale-FSDP], DBuffer and system parts).

The package imports torch, :mod:`vescale_ray.planner`, ``dbuffer`` and ``dtensor``, and never Ray. Its folders:

| folder | what it holds |
|---|---|
| ``construction`` | stages of ``fully_shard``: ``arguments`` checks, ``collect`` collects, ``grouping`` plans, ``fully_shard`` builds |
| ``surface`` | what users call on a module: ``module``, state dicts, torch's state of a module, ``overview`` (``explain``), ``finalize`` |
| ``units`` | the hooks of one call in forward and backward, the schedule of a root, how backward tells a unit where it is, checks |
| ``groups`` | one buffer in a step: its master shard, its gathered parameters, its gradients and their reduction |
| ``layouts`` | one parameter, the ranks' parts of a buffer, what they send, mesh dimensions (ZeRO, HSDP), dtypes, allowed phases |
| ``buffers`` | ``memory``: the buffer pool; ``lanes``: the side streams and the pool of a root; storages that torch refuses to read |
| ``communication`` | the all-gather, the check of the order of collectives, labels for profiles |

[Note: the tensors of a group]
P: elements of the group's parameters. W: ranks. S: elements of a rank's shard; W * S >= P, the difference is padding.
"orig" is the parameters' own dtype (FP32 master weights), "compute" is ``mp_policy.param_dtype``, "reduce" ``reduce_dtype``.

| tensor | elements, dtype | lifetime | made by |
|---|---|---|---|
| master shard (flat); sharded ``nn.Parameter``s are views | S, orig | the model's; on gloo in the buffer (below) | ``fully_shard`` |
| FP8 codes and scales (``quantize_policy``) | S and 4 per tile, bytes | the model's; renewed after each optimizer step | quantization |
| kept cast of the master shard (``keep_cast``) | S, compute | the model's; renewed after each optimizer step | cast |
| byte buffer of FP8 codes and scales | W*S and scales, bytes | all-gather to dequantization | all-gather |
| gathered buffer; unsharded parameters are views | W*S, compute | addresses: the model's; memory: unshard to reshard | all-gather |
| kept part, if `reshard_after_forward` is an int m | W*S/m, compute | from the end of forward to backward's all-gather | one copy |
| autograd's gradient, except weights of large ``nn.Linear``s | its own, compute | until its hook has run | autograd |
| gradient buffer (scratch) | W*S, arrival (below) | first gradient to the end of the reduce-scatter | hooks |
| exchange buffer (scratch), gloo with W > 2 | W*S, arrival | during the reduce-scatter | memory just released, if sizes match |
| two staging buffers, not gloo, if arrival is not reduce | W*S/6 or as set, reduce | during the reduce-scatter | casts, chunk by chunk |
| gradient shard (flat); ``param.grad`` are views | S, orig | until ``zero_grad`` | reduce-scatter, directly if reduce is orig |
| partial gradient shard, HSDP without all-reduce | S, orig | until the next backward with it | reduce-scatter |
| optimizer states | the shards' | the optimizer's | the optimizer, on sharded parameters |

Gradients arrive in the compute dtype if each of its values is one of the reduce dtype (BF16 and FP32), else in the reduce dtype. The
reduction casts them, so its result has the bits of gradients cast before. Without gradient sync they arrive in the reduce dtype, in which
they are summed. If a parameter gets a second gradient before a reduction nevertheless, the group's gradients move to such a buffer.

Number of buffers, for units of one size: the gathered buffers are prefetch depth + 1 = 2, and there is 1 gradient buffer. An accelerator
fills a second one while it reduces the first; the next unit is gathered into the memory of the first. So there are 3 buffers in all, in a
rotation that does not wait: collectives of one process group run one after the other anyway. On the CPU the pool frees all of them once a
pass needs no further unit. The first unit of a backward prefetches late, since all activations of the step are still alive. New host memory
of a gradient buffer is allocated page by page as gradients are written.

FP8: parameters that ``quantize_policy`` names form groups of their own. Each rank sends codes of its shard, which are dequantized into the
gathered buffer. Ranks that share tiles renew their codes in each all-gather, once they have exchanged these tiles' largest magnitudes.
Everything else is as for other groups. ``layouts/wire`` defines what a group sends.

Gaps: with ``allow_gaps`` a stack of matrices may be gathered with a gap behind each matrix. The shard is stored without the gaps if a rank
has elements of several matrices. Then the master shard, gradient shard and states are smaller than S, and the shard is copied tensor by
tensor into this rank's part of the gathered buffer, as with a cast.

One rank: nothing is gathered or scattered. Unsharded parameters are views of the master shard, or of its cast in the gathered buffer, and
gradients are written into the gradient shard directly. Padding of gradients is zeroed when a buffer is laid out and never written again.

Copies per step: for each all-gather the cast (S) into this rank's part of the gathered buffer (with ``keep_cast`` one cast per optimizer
step, which the all-gathers send), and each gradient once, from autograd's result into the buffer. Weights of large ``nn.Linear``s need no
copy if they arrive in the compute dtype: their matrix product writes into the buffer (``linear``). Without a cast, this rank's part (S) is
copied on gloo, unless the master shard lives there.

The master shard lives in the gathered buffer on gloo if it is not cast, has no gaps, and ``ParameterGroup._can_live_in_buffer`` finds no
other obstacle. This needs buffers of at least 256 KiB. The memory of this rank's part then stays, and only that of the others is freed.
Gathered parameters then take (W - 1) / W of the table's bytes, and so does an exchange.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle

from vescale_ray.fsdp.communication.debug import OrderError, set_debug
from vescale_ray.fsdp.communication.low_precision import LowPrecisionReduceScatter
from vescale_ray.fsdp.construction.fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx
from vescale_ray.fsdp.construction.stand_in import stand_in_for_torch
from vescale_ray.fsdp.layouts.phases import PhaseError
from vescale_ray.fsdp.layouts.sharding import Sharding
from vescale_ray.fsdp.surface.module import FSDPModule
from vescale_ray.fsdp.surface.overview import explain, held_bytes

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "LowPrecisionReduceScatter",
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
