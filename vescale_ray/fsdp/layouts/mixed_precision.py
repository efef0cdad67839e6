"""The compute and reduce dtypes that a mixed precision policy gives to one parameter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_ray.compat import installed_release
from vescale_ray.errors import BadArgument, noted

REDUCES_IN_OWN_DTYPE = installed_release() >= (2, 15)
"""True if a policy without ``reduce_dtype`` reduces in the parameter's dtype, as torch does since 2.15. Older torch reduces in the compute
dtype."""


def dtypes(orig: torch.dtype, policy: MixedPrecisionPolicy) -> tuple[torch.dtype, torch.dtype]:
    """Return the compute dtype and the reduce dtype. The policy applies to floating-point parameters only."""
    if not orig.is_floating_point:
        return orig, orig
    compute = policy.param_dtype or orig
    return compute, policy.reduce_dtype or (orig if REDUCES_IN_OWN_DTYPE else compute)


def policy_of(fqn: str, param: nn.Parameter, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return the policy of one parameter. ``param_dtype_override_fn`` (torch 2.15) may exempt it from ``param_dtype``.

    Raises:
        BadArgument: that function returns a third dtype, or the parameter has a ``grad_dtype`` of its own.
    """
    if param.grad_dtype not in (param.dtype, None):
        raise BadArgument(
            f"{fqn!r} is {param.dtype} with grad_dtype {param.grad_dtype}: gradients of sharded parameters have the parameter's dtype; "
            f"leave grad_dtype alone, and say with MixedPrecisionPolicy(reduce_dtype=..) in which dtype they are summed"
        )
    override: Any = getattr(policy, "param_dtype_override_fn", None)
    if override is None:
        return policy
    with noted(f"param_dtype_override_fn raised this for parameter {fqn!r}; fully_shard changed nothing"):
        chosen = override(param)
    if chosen not in (None, policy.param_dtype, param.dtype):
        raise BadArgument(
            f"param_dtype_override_fn gave {chosen} for {fqn!r}: return None or {policy.param_dtype} (the policy's param_dtype), or "
            f"{param.dtype} to leave the parameter as it is"
        )
    return replace(policy, param_dtype=policy.param_dtype if chosen is None else chosen, param_dtype_override_fn=None)  # type: ignore[call-arg]
