"""Facts from operators' schemas, and the rule for plain tensors among distributed operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor

from vescale_ray.compat.core import (
    NO_CONTEXT,
    DispatchKey,
    ForceDispatchKeyGuard,
    current_autograd_node,
    dispatch_tls_local_exclude_set,
    dispatch_tls_local_include_set,
)
from vescale_ray.compat.tensor import allows_implicit_replication
from vescale_ray.dtensor.operations.argument_tensors import tensors_in
from vescale_ray.dtensor.spec import sharding_of

GATHERED_OF = "_vescale_gathered_of"
"""Attribute of gathered parameters of ``fully_shard``: a mark, whose first item refers to an object with the parameter's name, ``fqn``."""
SHARDED_OF = "_vescale_sharded_of"
"""Attribute of sharded parameters of ``fully_shard`` and of their ``.data``, with such a mark."""

# These write running statistics, which their schema does not declare.
HIDDEN_WRITES = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm", "_batch_norm_impl_index"})


@lru_cache(maxsize=4096)
def schema_facts(func: Any) -> tuple[tuple[str, ...], bool]:
    """Return the names of the arguments that ``func`` writes, and whether its result is a view of an argument.

    Raises:
        RuntimeError: ``func`` is a collective. It would move a gathered copy, and its result would be lost.
    """
    schema = func._schema
    if "c10d" in func.namespace:
        raise RuntimeError(
            f"{func} of a ragged tensor, or of what was computed from one: it already stands for the whole over all ranks. Leave "
            "out the collective, and wrappers that call it (DistributedDataParallel, ZeroRedundancyOptimizer), or call it on "
            "full_tensor() or on to_local(), this rank's part"
        )
    writes = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    if schema.name.removeprefix("aten::") in HIDDEN_WRITES:
        writes = (*writes, "running_mean", "running_var")
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return writes, is_view


def written(func: Any, writes: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the values of the arguments that ``func`` writes."""
    if not writes:
        return []
    values = [kwargs[name] for name in writes if name in kwargs]
    return values + [a for a, described in zip(args, func._schema.arguments, strict=False) if described.name in writes]


def meta_like(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without storage, from which torch can tell the shape of a result."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def in_torchs_backward() -> bool:
    """True if one of torch's derivative formulas is running. A plain tensor that it makes (ones to join with a gradient) is whole, and
    equal on every rank.

    This does not hold for a user's Function or for hooks. It excludes the formula of ``prod``: for tensor subclasses torch uses another
    one, which gives 0 where the one for plain tensors gives NaN."""
    node = current_autograd_node()
    if node is None or isinstance(node, BackwardCFunction):
        return False
    return not any(name in node.name() for name in ("AccumulateGrad", "ProdBackward"))


def plain_is_whole() -> bool:
    """True if a plain tensor among distributed operands is whole: in torch's derivative formulas and in ``implicit_replication()``."""
    return in_torchs_backward() or allows_implicit_replication()


def refuse_leaf(op: Any, value: Tensor, meets: str) -> None:
    """Raise if a plain tensor without dimensions would get a DTensor as its gradient, which no optimizer could use."""
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op}: a plain tensor without dimensions that requires grad meets {meets}, and its gradient would be a DTensor: "
            "call full_tensor() on the other operand, or make this one a DTensor (DTensor.from_local(value, mesh, [Replicate()]))"
        )


def plain_meets(op: Any, value: Tensor, what: str) -> PlainOperandError:
    """Return the error for a plain tensor among distributed operands: it may be a whole tensor or this rank's part."""
    mark = getattr(value, GATHERED_OF, None)
    parameter = mark[0]() if mark else None
    if parameter is not None:
        return PlainOperandError(
            f"{op}: the gathered parameter {parameter.fqn!r} meets {what}: compute with parameters before the forward or after the "
            "backward, when all are sharded, or with full_tensor() of the other operand"
        )
    return PlainOperandError(
        f"{op}: a plain tensor of shape {tuple(value.shape)} meets {what}: distribute it first (vescale_ray.distribute_tensor for a whole "
        "tensor, RaggedDTensor.from_local for this rank's part), or call full_tensor() on the other operand; parameters of a sharded "
        "module are whole in its forward, in methods given to register_fsdp_forward_method(), or after its unshard(); change a module "
        "(pruning, other embeddings) before fully_shard"
    )


class PlainOperandError(ValueError):
    """A plain tensor among distributed operands."""


class PlainTargetError(PlainOperandError):
    """A plain tensor to which an operation on ragged tensors would write."""


def parameter_name(value: Tensor) -> str | None:
    """Return the name of the sharded parameter of ``fully_shard`` that ``value`` is, or is a view of."""
    marks = (getattr(one, SHARDED_OF, None) for one in (value, value._base))
    return next((parameter.fqn for mark in marks if mark and (parameter := mark[0]()) is not None), None)


def called(value: DTensor) -> str:
    """Return the words for a ragged tensor in an error. A sharded parameter of ``fully_shard`` has its name there, too."""
    name, words = parameter_name(value), sharding_of(value._spec).describe()
    return words if name is None else f"parameter {name!r} ({words})"


def with_parameter(op: Any, args: Sequence[Any], error: PlainOperandError) -> ValueError:
    """Return ``error`` with the name of the sharded parameter of ``fully_shard`` that meets the plain tensor, if one does."""
    lists = [value for value in args if isinstance(value, list | tuple) and value]
    met = (one for one in zip(*lists, strict=False) if any(isinstance(v, Tensor) and not isinstance(v, DTensor) and v.ndim for v in one))
    tensors = tensors_in(next(met, args) if len(lists) > 1 else args)
    name = next(filter(None, map(parameter_name, tensors)), None)
    if name is None or any(getattr(tensor, GATHERED_OF, None) for tensor in tensors):
        return error
    if isinstance(error, PlainTargetError) or (op._schema.is_mutable and parameter_name(tensors[0]) is None):
        return ValueError(f"parameter {name!r}: {error}")
    if op._schema.is_mutable:
        return ValueError(
            f"parameter {name!r} is sharded, and {op} would write to it from a plain tensor: give that to vescale_ray.distribute_tensor(), "
            "or change the parameter's full_tensor() on all ranks alike and write it back with copy_() under torch.no_grad(). In a step of "
            "an optimizer it is a gradient or a state (set_optimizer_state_dict of vescale_ray.state_dict loads whole states)"
        )
    return ValueError(
        f"parameter {name!r} is sharded, since this is not the forward of its fully_shard unit, and {op} gets a plain tensor, too: call "
        "the module itself instead of its forward(), shard the module that uses the parameter as the unit that holds it, give a method "
        "that uses it to register_fsdp_forward_method(), or call unshard() before. To compute with the sharded parameter, use its "
        "full_tensor(), or give the other tensor, if all ranks have the same, to vescale_ray.distribute_tensor(). Change a module "
        "(pruning, parametrizations) before fully_shard"
    )


def different_meshes(op: Any, one: Any, other: Any) -> ValueError:
    """Return the error for operands on different meshes: a value that is equal on all ranks of one mesh may differ on those of another."""
    return ValueError(
        f"{op}: operands on different meshes, {one} and {other}: move one with full_tensor(); for gradients on several meshes use "
        f"vescale_ray.optim.clip_grad_norm_"
    )


def lazy_conjugation(tensors: Iterable[Tensor]) -> Any:
    """Return a context that enables lazy conjugation and negation for an operation on ``tensors``.

    Torch disables them under ``__torch_dispatch__``. An operation that makes such views itself (linalg.pinv) would ignore their meaning.
    """
    return _lazy_conjugation() if any(dtype.is_complex for dtype in {t.dtype for t in tensors}) else NO_CONTEXT


@contextmanager
def _lazy_conjugation() -> Iterator[None]:
    excluded = dispatch_tls_local_exclude_set()
    for key in (DispatchKey.Conjugate, DispatchKey.Negative):
        excluded = excluded.remove(key)
    with ForceDispatchKeyGuard(dispatch_tls_local_include_set(), excluded):
        yield
