"""Operations without a ragged form: they run on the whole plain tensors with one warning, or raise; writes to ragged tensors raise."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_ray.communication.collectives import broadcast
from vescale_ray.compat.tensor import DTensorSpec, TensorMeta
from vescale_ray.dtensor.derived import GatheredView, derived, read_only
from vescale_ray.dtensor.operations.argument_tensors import each, each_argument, tensor_arguments, tensors_in
from vescale_ray.dtensor.operations.operands import gathered
from vescale_ray.dtensor.operations.schema import (
    HIDDEN_WRITES,
    PlainTargetError,
    called,
    different_meshes,
    lazy_conjugation,
    plain_is_whole,
    plain_meets,
    refuse_leaf,
    written,
)
from vescale_ray.dtensor.redistribution import move
from vescale_ray.dtensor.spec import replicated, sharding_of
from vescale_ray.dtensor.transfer import arrived
from vescale_ray.dtensor.write_back import Source

Cls = type[DTensor]
Handler = Callable[[Cls, Any, Sequence[Any], dict[str, Any]], Any]


class RaggedFallbackWarning(UserWarning):
    """An operation has no ragged form, so it has gathered the whole tensor on every rank."""


@dataclass(frozen=True)
class Rule:
    """The execution of one operator. If ``handler`` returns NotImplemented, the fallback takes over."""

    handler: Handler | None
    writes: tuple[str, ...]
    is_view: bool


def fallback(cls: Cls, func: Any, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix("aten::")
    targets = written(func, rule.writes, args, kwargs)
    GatheredView.refuse_writes(func, targets)
    if name in _BATCH_NORM:
        given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        statistics = written(func, ("running_mean", "running_var"), args, kwargs)
        if not given.get("training", True):
            targets = [t for t in targets if not any(t is s for s in statistics)]  # the rest is out=
        elif any(isinstance(t, Tensor) for t in targets):
            raise RuntimeError(
                f"{func} of {sharding_of(_first_ragged(cls, args, kwargs)._spec).describe()} would write running statistics, which is lost "
                "on DTensors: call it on full_tensor() and plain statistics"
            )
    for target in targets:
        for item in target if isinstance(target, list | tuple) else (target,):
            if isinstance(item, cls):
                raise RuntimeError(
                    f"{called(item)} can't be written part by part, as {func} would do: change its full_tensor() on all ranks alike "
                    "and write that back with copy_() under torch.no_grad(), or work on to_local()"
                )
            if isinstance(item, Tensor) and not isinstance(item, DTensor):
                raise plain_target(func, item)
    if os.environ.get("VE_RAGGED_STRICT", "0") not in ("", "0"):
        raise RuntimeError(
            f"{func} has no ragged form and VE_RAGGED_STRICT is set: gathering {called(_first_ragged(cls, args, kwargs))} is refused; "
            "call full_tensor() where that is meant, or work on to_local()"
        )
    # The text names only the operation, so that Python's filter shows it once.
    warnings.warn(f"{func} has no ragged form: each call gathers the whole tensor on every rank", RaggedFallbackWarning, stacklevel=4)
    if any(isinstance(t, DTensor) and not all(p.is_replicate() for p in t.placements) for t in tensors_in(targets)):
        # Torch runs writes to its own sharded DTensors.
        args, kwargs = each_argument(lambda v: gathered(cls, v), args, kwargs)
        result = func(*args, **kwargs)
    else:
        result = _on_whole(cls, func, args, kwargs, targets)
    if torch.Tag.nondeterministic_seeded in func.tags:
        _agree(result)
    if not rule.is_view:
        return result
    return read_only(result, tuple(Source(v) for v in tensor_arguments(args, kwargs) if isinstance(v, cls)))


def _on_whole(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any], targets: list[Any]) -> Any:
    """Run ``func`` on the whole plain tensors on every rank. Its results are DTensors with Replicate.

    It does not use torch's rules for Replicate: many operations have none, and some are wrong (complex linalg.pinv in torch 2.13).
    """
    mesh = _first_ragged(cls, args, kwargs).device_mesh
    written_to = [t for t in tensors_in(targets) if isinstance(t, DTensor)]

    def plain(value: Any) -> Any:
        if isinstance(value, DTensor):
            if value.device_mesh != mesh:
                raise different_meshes(func, value.device_mesh, mesh)
            if isinstance(value, GatheredView):
                value.check(func)
            return arrived(move(value._local_tensor, value._spec, replicated(mesh))[0]).resolve_conj().resolve_neg()
        if isinstance(value, Tensor) and value.ndim == 0:
            refuse_leaf(func, value, sharding_of(_first_ragged(cls, args, kwargs)._spec).describe())
        if isinstance(value, Tensor) and value.ndim and value.numel() != 1 and not plain_is_whole():
            raise plain_meets(func, value, sharding_of(_first_ragged(cls, args, kwargs)._spec).describe())
        return value

    def distributed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for target in written_to:
            if value is target._local_tensor:
                return target
        if value.layout is not torch.strided:
            raise RuntimeError(f"{func} gives a tensor of layout {value.layout}, which no DTensor can hold: call it on full_tensor()")
        value = value.resolve_conj().resolve_neg()
        meta = TensorMeta(value.shape, value.stride(), value.dtype)
        return derived(value, DTensorSpec(mesh, replicated(mesh), tensor_meta=meta))

    args, kwargs = each_argument(plain, args, kwargs)
    with lazy_conjugation(tensor_arguments(args, kwargs)):
        result = func(*args, **kwargs)
    return each(distributed, result)


def _first_ragged(cls: Cls, args: Sequence[Any], kwargs: dict[str, Any]) -> DTensor:
    return next(v for v in tensor_arguments(args, kwargs) if isinstance(v, cls))


def _agree(result: Any) -> None:
    """Give every rank the first rank's random numbers. Each rank drew its own, and a Replicate tensor must not differ by rank."""
    for tensor in tensors_in([result]):
        if isinstance(tensor, DTensor) and not tensor.is_meta and all(p.is_replicate() for p in tensor.placements):
            take_first_ranks(tensor._local_tensor, tensor.device_mesh, range(tensor.device_mesh.ndim))


def take_first_ranks(local: Tensor, mesh: DeviceMesh, dims: Iterable[int]) -> None:
    for dim in dims:
        if mesh.size(dim) > 1:
            work = broadcast(local, 0, mesh.get_group(dim))
            if work is not None:
                work.wait()


def plain_target(func: Any, target: Any) -> PlainTargetError:
    return PlainTargetError(
        f"{func} would write a ragged tensor into a plain tensor of shape {tuple(target.shape)}: "
        "use full_tensor() for the whole or to_local() for this rank's part, or, if a module is to be changed (other embeddings), do that "
        "before fully_shard; if it is an optimizer's state, load it with vescale_ray.state_dict.set_optimizer_state_dict and "
        "full_state_dict=True, or, if the optimizer has made it, use one of torch.optim or vescale_ray.optim"
    )


_BATCH_NORM = HIDDEN_WRITES | {"_native_batch_norm_legit", "_batch_norm_with_update"}
