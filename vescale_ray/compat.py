"""The few torch names that changed between the releases we support (2.11 to 2.13), under their newest spelling.

The functions are looked up in ``torch.distributed`` at call time, so that a test can patch them there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

F = TypeVar("F", bound=Callable[..., Any])


def run_as_is(function: F) -> F:
    """Let ``torch.compile`` run ``function``, and all that it calls, as they are.

    After a graph break it compiles each Python frame for itself, also those that torch's dispatcher and autograd call: the code behind an
    operation on a ragged tensor, of which it makes something else. It leaves torch's own files out; this is the same for single functions,
    and costs nothing when they are called.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def all_gather_single(output: torch.Tensor, input: torch.Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """Gather equal ``input`` of every rank into ``output``. Named ``all_gather_into_tensor`` before torch 2.13."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(output, input, group=group, async_op=async_op)


def reduce_scatter_single(
    output: torch.Tensor, input: torch.Tensor, *, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None, async_op: bool = False
) -> Any:
    """Reduce ``input`` over ranks, keep this rank's part in ``output``. Named ``reduce_scatter_tensor`` before torch 2.13."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return function(output, input, op=op, group=group, async_op=async_op)


def all_gather_many(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, group: dist.ProcessGroup) -> None:
    """Several :func:`all_gather_single` of ``(output, input)`` as one call of the back end (NCCL: one launch)."""
    # torch's public names for it take lists of parts, which NCCL would have to copy out of a flat temporary.
    with dist._coalescing_manager(group=group):  # type: ignore[attr-defined]
        for output, input in pairs:
            all_gather_single(output, input, group=group)
