"""Facts from operators' schemas, and the rule for plain tensors among distributed ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from vescale_ray.compat.core import (
    DispatchKey,
    ForceDispatchKeyGuard,
    current_autograd_node,
    dispatch_tls_local_exclude_set,
    dispatch_tls_local_include_set,
    tree_leaves,
)
from vescale_ray.compat.tensor import allows_implicit_replication

# These write running statistics without saying so in their schema.
HIDDEN_WRITES = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm", "_batch_norm_impl_index"})


@lru_cache(maxsize=4096)
def schema_facts(func: Any) -> tuple[tuple[str, ...], bool]:
    """Names of the arguments that ``func`` writes, and whether its result is a view of an argument."""
    schema = func._schema
    writes = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    if schema.name.removeprefix("aten::") in HIDDEN_WRITES:
        writes = (*writes, "running_mean", "running_var")
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return writes, is_view


def written(func: Any, writes: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The values of the arguments that ``func`` writes."""
    if not writes:
        return []
    values = [kwargs[name] for name in writes if name in kwargs]
    return values + [a for a, described in zip(args, func._schema.arguments, strict=False) if described.name in writes]


def meta_like(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor without storage, to ask torch for the shape of a result."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def in_torchs_backward() -> bool:
    """Whether a derivative formula of torch's own is running: a plain tensor that it made (ones to join with a gradient) is whole, and the
    same on every rank. Not so for a Function of the user's, nor for what hooks do; and the formula for a product over a dimension is
    another one for tensor subclasses, which gives 0 where that for plain tensors gives NaN."""
    node = current_autograd_node()
    if node is None or isinstance(node, BackwardCFunction):
        return False
    return not any(name in node.name() for name in ("AccumulateGrad", "ProdBackward"))


def plain_is_whole() -> bool:
    """Whether a plain tensor beside distributed ones is whole: in torch's derivative formulas, and in its ``implicit_replication()``."""
    return in_torchs_backward() or allows_implicit_replication()


def refuse_leaf(op: Any, value: Tensor, meets: str) -> None:
    """Raise if a plain tensor without dimensions would get a gradient that is a DTensor: no optimizer could use it."""
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op}: a plain tensor without dimensions that requires grad meets {meets}, and its gradient would be a DTensor: "
            "make it one (vescale_ray.distribute_tensor(value, mesh, [Replicate()])), or work on full_tensor()"
        )


@contextmanager
def lazy_conjugation(*values: Any) -> Iterator[None]:
    """Under ``__torch_dispatch__`` torch leaves out the keys that conjugate and negate lazily: an operation that makes such views of
    its own (linalg.pinv) would then ignore what they mean."""
    if not any(isinstance(v, Tensor) and v.is_complex() for v in tree_leaves(values)):
        yield
        return
    excluded = dispatch_tls_local_exclude_set()
    for key in (DispatchKey.Conjugate, DispatchKey.Negative):
        excluded = excluded.remove(key)
    with ForceDispatchKeyGuard(dispatch_tls_local_include_set(), excluded):
        yield
