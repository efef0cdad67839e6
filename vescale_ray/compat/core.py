"""Private names of torch itself: autograd, dispatch, modules, optimizers. Importing them imports torch and no more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, cast

from vescale_ray.compat import need, private_names

with private_names():
    # Keeps torch.compile out of hooks, as torch's own fully_shard does.
    from torch import _disable_dynamo  # type: ignore[attr-defined]

    # Does the same without a wrapper around each call, for a function and all that it calls.
    from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
    from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
    from torch._C._dynamo.eval_frame import set_code_exec_strategy

    # One kernel for a list of tensors of several dtypes; the norms of torch.nn.utils take one dtype.
    from torch import _foreach_copy_ as foreach_copy_
    from torch import _foreach_mul_ as foreach_mul_
    from torch import _foreach_norm as foreach_norm

    # functorch transforms wrap tensors that are made inside them; gathered parameters must be plain tensors.
    from torch._C import _are_functorch_transforms_active as are_functorch_transforms_active
    from torch._C import _DisableFuncTorch as DisableFuncTorch

    # The number of active TorchFunctionModes, which may replace what a linear layer computes.
    # torch.set_default_device puts one there that concerns factories only.
    from torch import _GLOBAL_DEVICE_CONTEXT as GLOBAL_DEVICE_CONTEXT
    from torch._C import _len_torch_function_stack as len_torch_function_stack

    # Batched tensors of vmap have no graph of their own: that of the tensor inside needs the marks.
    from torch._C._functorch import get_unwrapped, is_batchedtensor

    # Returns None outside functorch transforms, where linear layers may write gradients in place.
    from torch._C._functorch import peek_interpreter_stack

    # A storage without memory, which replaces one that must not be read, and two flags that locate the flag for that.
    from torch._C import _construct_storage_from_data_pointer as construct_storage_from_data_pointer  # type: ignore[attr-defined]
    from torch._C import _set_throw_on_mutable_data_ptr as set_throw_on_mutable_data_ptr
    from torch._C import _set_warn_deprecated_on_mutable_data_ptr as set_warn_deprecated_on_mutable_data_ptr  # type: ignore[attr-defined]

    # Lets a module write in place to an input that has passed through an identity of ours.
    from torch._C._autograd import CreationMeta
    from torch._C._autograd import _set_creation_meta as set_creation_meta

    # The node whose backward runs: gradients of a custom function have the type of its inputs.
    from torch._C import _current_autograd_node as current_autograd_node

    # The number of the backward that this thread runs, or -1: it tells the gradients of two backwards apart.
    from torch._C import _current_graph_task_id as current_graph_task_id

    # Whether this backward adds to a leaf's gradient, or returns it to the caller of torch.autograd.grad.
    from torch._C import _will_engine_execute_node as will_engine_execute_node  # type: ignore[attr-defined]

    # Gives the outer tensor of a DTensor another shape, without dispatching to the DTensor.
    from torch._C import _DisableTorchDispatch as DisableTorchDispatch

    # Sees each operation with the tensors that it writes to, also behind .data.
    from torch.utils._python_dispatch import TorchDispatchMode

    # Dispatch keys of this thread: a gathered operation must conjugate lazily, as outside __torch_dispatch__.
    from torch._C import DispatchKey
    from torch._C import _dispatch_tls_local_exclude_set as dispatch_tls_local_exclude_set
    from torch._C import _dispatch_tls_local_include_set as dispatch_tls_local_include_set
    from torch._C import _ForceDispatchKeyGuard as ForceDispatchKeyGuard

    # Defines Tensor.data in some releases; a subclass that overrides the property calls the original setter.
    from torch._C import TensorBase

    # Stand-ins for tensors while torch.compile traces: the ragged tensor around them must be traceable, too.
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    # Tells that no profiler runs, so that labels cost nothing then.
    from torch.autograd import _profiler_enabled as profiler_enabled

    # Keeps operations out of a profile that may end after it.
    from torch.autograd import _enable_record_function as enable_record_function  # type: ignore[attr-defined]

    # Record the allocations of device memory, for a profile of the job.
    from torch.cuda.memory import _record_memory_history as record_memory_history
    from torch.cuda.memory import _snapshot as memory_snapshot

    # The common base of convolutions: build_optimizer routes their weights as matrices.
    from torch.nn.modules.conv import _ConvNd as ConvNd

    # Optimizers take their fast path for the tensor types in these lists; RaggedDTensor joins both.
    from torch.optim.optimizer import _foreach_supported_types as optim_foreach_types
    from torch.utils._foreach_utils import _foreach_supported_types as util_foreach_types

    # Hooks after and before every optimizer's step; torch's public functions to add one change a counter on a class of torch.
    from torch.optim.optimizer import _global_optimizer_post_hooks as global_optimizer_post_hooks
    from torch.optim.optimizer import _global_optimizer_pre_hooks as global_optimizer_pre_hooks

    # Hides the first forward's exchange from modes that count or record the user's operations.
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

    # Nested values: a model's inputs.
    from torch.utils._pytree import tree_leaves, tree_map_only

    need("torch.autograd.Variable", "_execution_engine")  # queue_callback calls a function at the end of a backward
    need("torch.Tensor", "_version", "_base", "_is_view")  # count writes, and follow views to their base
    need("torch.Tensor", "_backward_hooks", "_post_accumulate_grad_hooks")  # a user's hook must see the gradient that torch would give it
    need("torch.UntypedStorage", "_cdata")  # the identity of a storage, even without memory
    need("torch.UntypedStorage", "_swap_data_ptr_")  # makes a storage invalid and valid again
    need("torch.nn.Module", "_parameters", "_buffers", "_apply")  # parameters are exchanged in every forward, without __setattr__
    need("torch.optim.AdamW", "_init_group")  # makes an optimizer's states before its first step
    need("torch.optim.Optimizer", "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")  # called in a load
    need("torch.optim.Optimizer", "_optimizer_step_pre_hooks")  # may change gradients before a step
    need("torch.optim.Optimizer", "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")  # a checkpoint warns of them
    need("torch.ops.aten.add.Tensor", "_schema")  # an operation's name, its arguments and which of them it writes
    need("torch.cuda", "_sleep")  # a kernel of known length, for the emulated wire

NO_CONTEXT: Any = nullcontext()
F = TypeVar("F", bound=Callable[..., Any])


def has_function_mode() -> bool:
    """Return whether a TorchFunctionMode is active, other than that of ``torch.set_default_device``."""
    depth = len_torch_function_stack()
    return depth > 0 and depth > (getattr(GLOBAL_DEVICE_CONTEXT, "device_context", None) is not None)


def outside_transforms() -> Any:
    """Return a context that suspends ``torch.func`` transforms, which would wrap the gathered parameters."""
    return DisableFuncTorch() if are_functorch_transforms_active() else NO_CONTEXT


def disable_dynamo(function: F) -> F:
    """Keep ``torch.compile`` out of ``function``. Torch's error for ``fullgraph=True`` contains the reason."""
    wrapper: Any = _disable_dynamo(function)
    wrapper._torchdynamo_disable = True
    wrapper._torchdynamo_disable_msg = (
        "vescale_ray runs this outside of compiled code: leave out fullgraph=True; a unit of fully_shard without units inside can be "
        "compiled by itself, layer.compile(fullgraph=True)"
    )
    return cast(F, wrapper)


def run_as_is(function: F) -> F:
    """Let ``torch.compile`` run ``function``, and all that it calls, as they are.

    After a graph break torch compiles every Python frame separately. This includes frames that its dispatcher and autograd call, such as
    the code of an operation on a ragged tensor. Torch skips its own files. This function skips single functions, at no cost when they run.
    """
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    return function
