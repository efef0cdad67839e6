"""Ragged tensors with a reduction pending on another mesh dimension, as ``[Partial(), RaggedShard(..)]``.

A gradient of which each replica has its own contribution is such a tensor. Linear operations keep the reduction pending, so accumulating
gradients over micro-batches needs no communication. Every other operation reduces first. A non-linear operation that would write such a
tensor raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_ray.dtensor.operations.argument_tensors import each, each_argument
from vescale_ray.dtensor.operations.schema import written
from vescale_ray.dtensor.redistribution import move
from vescale_ray.dtensor.spec import LocalSharding, ragged_mesh_dim, settled_placements, sharding_of, wrap

# Operations on one tensor that commute with every reduction.
_SAME = frozenset(
    "detach detach_ alias clone view _unsafe_view reshape squeeze unsqueeze view_as_real view_as_complex lift_fresh record_stream "
    "is_pinned _pin_memory".split()
)
# Operations that read only the layout: they run on the layout with nothing pending.
_FROM_LAYOUT = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full new_empty_strided "
    "is_same_size".split()
)
# Linear operations, which commute with pending sums and means.
_NEGATE = frozenset("neg neg_ zero_ _foreach_neg _foreach_neg_ _foreach_zero_".split())
_SCALE = frozenset("mul mul_ div div_ _foreach_mul _foreach_mul_ _foreach_div _foreach_div_".split())
_ADD = frozenset("add add_ sub sub_ _foreach_add _foreach_add_ _foreach_sub _foreach_sub_".split())


def any_pending(cls: type[DTensor], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an argument, or an item of a list, is a ragged tensor with a reduction pending.

    Raises:
        ValueError: one is torch's DTensor with a ragged placement, and does not hold this rank's part.
    """
    for value in (*args, *kwargs.values()) if kwargs else args:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, cls):
                if sharding_of(item._spec).pending:
                    return True
            elif type(item) is DTensor and ragged_mesh_dim(item.placements) is not None:
                held, part = tuple(item._local_tensor.shape), tuple(sharding_of(item._spec).local_shape)
                if held != part:
                    raise ValueError(
                        f"a DTensor of shape {tuple(item.shape)} with placements {list(item.placements)} holds {held} on this rank, whose "
                        f"part is {part}: torch.distributed.tensor.zeros and ones ignore a RaggedShard; use torch.zeros_like(parameter) or "
                        f"vescale_ray.distribute_tensor"
                    )
    return False


def on_pending(cls: type[DTensor], func: Any, writes: Sequence[str], handler: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func``, one of whose arguments is a pending ragged tensor."""
    name = func._schema.name.removeprefix("aten::")
    if name in _SAME:
        return handler(cls, func, args, kwargs)
    if name in _FROM_LAYOUT:
        return func(*each(lambda v: _relabelled(cls, v), args), **kwargs)
    if name == "copy_" and isinstance(args[0], cls):  # copy_ reduces itself
        return handler(cls, func, args, kwargs)
    shardings = _linear(cls, func, name, args, kwargs)
    if shardings is not None:
        local = func(*each(lambda v: v._local_tensor if isinstance(v, cls) else v, args), **kwargs)
        if writes:
            return args[0] if isinstance(args[0], Tensor) else None
        if isinstance(local, Tensor):
            return wrap(cls, local, shardings[0].spec(local.dtype))
        return [wrap(cls, x, s.spec(x.dtype)) for x, s in zip(local, shardings, strict=True)]
    for target in written(func, writes, args, kwargs):
        for item in target if isinstance(target, list | tuple) else (target,):
            if isinstance(item, cls) and sharding_of(item._spec).pending:
                raise RuntimeError(
                    f"{func} would write to {sharding_of(item._spec).describe()}, whose reduction is pending: "
                    f"redistribute it to {list(settled_placements(item.placements))} first"
                )
    args, kwargs = each_argument(lambda v: settled(cls, v), args, kwargs)
    return func(*args, **kwargs)


def settled(cls: type[DTensor], value: Any) -> Any:
    """Reduce a pending ragged tensor, by one all-reduce of the part per pending dimension. Other values are returned unchanged."""
    if not isinstance(value, cls) or not sharding_of(value._spec).pending:
        return value
    local, spec = move(value._local_tensor, value._spec, settled_placements(value.placements))
    return wrap(cls, local, spec)


def _relabelled(cls: type[DTensor], value: Any) -> Any:
    if not isinstance(value, cls):
        return value
    return wrap(cls, value._local_tensor, sharding_of(value._spec).settled().spec(value.dtype))


def _linear(cls: type[DTensor], func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[LocalSharding] | None:
    """Return the layouts of the results if ``func`` may run on the local contributions, else None."""
    first = list(args[0]) if isinstance(args[0], list | tuple) else [args[0]]
    if not first or not all(isinstance(v, cls) for v in first) or any(isinstance(v, Tensor) for v in kwargs.values()) or "out" in kwargs:
        return None
    shardings = [sharding_of(v._spec) for v in first]
    for sharding, value in zip(shardings, first, strict=True):
        sums = all(p.reduce_op in ("sum", "avg") for p in sharding.placements if p.is_partial())  # type: ignore[attr-defined]
        if not sharding.pending or not sums or not (value.dtype.is_floating_point or value.dtype.is_complex):
            return None
    if name in _NEGATE and len(args) == 1:
        return shardings
    if name in _SCALE and len(args) == 2 and not kwargs and _numbers(args[1]):
        return shardings
    if name in _ADD and len(args) >= 2 and (len(args) == 2 or _numbers(args[2])):
        second = list(args[1]) if isinstance(args[1], list | tuple) else [args[1]]
        if len(second) == len(first) and all(
            isinstance(v, cls) and sharding_of(v._spec).same_layout(s) and v.dtype == w.dtype
            for v, w, s in zip(second, first, shardings, strict=True)
        ):
            return shardings
    return None


def _numbers(value: Any) -> bool:
    """True if ``value`` is a factor without a sharding, equal on every rank: a number, a plain 0-dim tensor, or a list of numbers."""
    if isinstance(value, Tensor):
        return not isinstance(value, DTensor) and value.ndim == 0
    if isinstance(value, list | tuple):
        return all(isinstance(v, int | float | complex) for v in value)
    return isinstance(value, int | float | complex)
