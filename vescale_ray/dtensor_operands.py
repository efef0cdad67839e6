"""Operands of an operation on ragged tensors: how anything that meets a ragged tensor becomes a matching local tensor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_leaves, tree_map

from vescale_ray.dtensor_spec import Sharding, pending_spec, replicated, sharding_of
from vescale_ray.redistribute import move

T = TypeVar("T", bound=DTensor)


def wrap(cls: type[T], local: Tensor, spec: DTensorSpec, requires_grad: bool = False) -> T:
    """A ``cls`` over ``local`` with ``spec``'s layout and ``local``'s dtype. Skips DTensor's ``__init__``, which does nothing."""
    if local.dtype is not spec.tensor_meta.dtype:  # type: ignore[union-attr]
        spec = sharding_of(spec).spec(local.dtype)
    return cast(T, cls.__new__(cls, local, spec, requires_grad=requires_grad))


def operand(cls: type[DTensor], value: Any, sharding: Sharding, op: str) -> Any:
    """``value`` as it takes part in an element-wise operation on local tensors of ``sharding``; non-tensors as they are.

    Raises:
        ValueError: a plain tensor with dimensions (whole tensor or this rank's part? it must be said), or another mesh.
    """
    if not isinstance(value, Tensor):
        return value
    if not isinstance(value, DTensor):
        if value.ndim == 0:
            return value if sharding.shape else value.view(1)
        raise ValueError(
            f"{op}: a plain tensor of shape {tuple(value.shape)} meets {sharding.describe()}: "
            "distribute it first (vescale_ray.distribute_tensor for a whole tensor, RaggedDTensor.from_local for this rank's part)"
        )
    if isinstance(value, GatheredView):
        value.check(op)
    if value.device_mesh != sharding.mesh:
        raise ValueError(
            f"{op}: operands on different meshes, {value.device_mesh} and {sharding.mesh}: "
            "move one with full_tensor() and distribute_tensor()"
        )
    if isinstance(value, cls):
        mine = sharding_of(value._spec)
        if mine.same_layout(sharding):
            return value._local_tensor
    if value.shape == sharding.shape:
        local, _ = move(value._local_tensor, value._spec, sharding.placements)
        return local.contiguous()
    full, _ = move(value._local_tensor, value._spec, replicated(sharding.mesh))
    return spread(full, sharding)


def spread(full: Tensor, sharding: Sharding) -> Tensor:
    """A tensor that broadcasts to ``sharding.shape``, cut so that it broadcasts to the local shape."""
    if full.ndim == 0:
        return full if sharding.shape else full.view(1)
    merged = len(sharding.placement.dims)
    inner, section = len(sharding.shape) - merged, tuple(sharding.section)
    for dim in range(full.ndim):  # the part that meets this rank's section
        at = dim + len(section) - full.ndim
        if full.shape[dim] != 1 and section[at] != full.shape[dim]:
            full = full.narrow(dim, sharding.offsets[at], section[at])
    lead, trail = full.shape[: max(full.ndim - inner, 0)], full.shape[max(full.ndim - inner, 0) :]
    if all(n == 1 for n in lead):
        # Dimensions are kept where there are any: a tensor with dimensions takes part in type promotion, one without does not.
        return full.reshape(trail or (1,))
    rows = full.expand(*section[:merged], *trail).reshape(sharding.placement.units_of(section), *trail)
    return rows[sharding.first_unit : sharding.first_unit + sharding.local_shape[0]]


def gathered(cls: type[DTensor], value: Any) -> Any:
    """A ragged tensor as torch's DTensor with Replicate everywhere (one collective); anything else as it is."""
    if not isinstance(value, cls):
        return value
    full, spec = move(value._local_tensor, value._spec, replicated(value.device_mesh))
    return DTensor(full, spec, requires_grad=False)


class GatheredView(DTensor):
    """What a view operation (transpose, indexing, ..) gives that no local tensor can be a view for: a gathered copy, to read only.

    Writing to it would not reach the ragged tensor, so that raises; so does reading it after the ragged tensor was written, which a view
    would show. Every other operation is torch's own.
    """

    _sources: tuple[tuple[Tensor, int], ...] = ()
    """The ragged tensors that it was gathered from, and how often they had been written."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        writes, is_view = schema_facts(func)
        GatheredView.refuse_writes(func, written(func, writes, args, kwargs or {}))
        sources: tuple[tuple[Tensor, int], ...] = ()
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, GatheredView):
                value.check(func)
                sources += value._sources
        result = func(*map(_plain, args), **{k: _plain(v) for k, v in (kwargs or {}).items()})
        return read_only(result, sources) if is_view else result

    @staticmethod
    def refuse_writes(func: Any, targets: Any) -> None:
        """Raise if one of these, or of their items, is such a copy."""
        if any(isinstance(target, GatheredView) for target in tree_leaves(targets)):
            raise RuntimeError(
                f"{func}: this tensor is a gathered copy, not a view, of a RaggedDTensor: writing to it would not reach "
                "that tensor; write to its to_local(), or build the whole tensor and use copy_()"
            )

    def check(self, func: Any) -> None:
        """Raise if the ragged tensor was written since."""
        if any(writes_of(tensor) != count for tensor, count in self._sources):
            raise RuntimeError(
                f"{func}: this tensor is a gathered copy, not a view, of a RaggedDTensor that was written since: take the view again"
            )

    def to_local(self, **kwargs: Any) -> Tensor:  # type: ignore[override]
        self.check("to_local")
        return super().to_local(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:  # type: ignore[override]
        self.check("redistribute")
        return super().redistribute(*args, **kwargs)


def writes_of(tensor: Any) -> int:
    """How often a ragged tensor was written: in place, through a list, through its local tensor."""
    try:
        return int(tensor._version + tensor._local_tensor._version)
    except RuntimeError:  # tensors made in inference mode don't count
        return 0


class PendingDTensor(DTensor):
    """A reduction whose sum, maximum or norm over the ranks is still pending (Partial): torch's DTensor in everything but one.

    ``.item()``, ``float()`` and ``bool()`` give the whole answer; torch's own DTensor silently gives this rank's contribution.
    """

    def full_tensor(self, **kwargs: Any) -> Tensor:  # type: ignore[override]
        if self.requires_grad or kwargs:
            return super().full_tensor(**kwargs)
        return _settled(self)._local_tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = func._schema.name
        if func is torch.ops.aten._local_scalar_dense.default:
            return _settled(args[0])._local_tensor.item()
        if name in ("aten::detach", "aten::alias"):  # here, because torch's sharding cache would keep the mesh
            return pending(func(args[0]._local_tensor), args[0]._spec)
        if name == "aten::stack" and len(args) < 2 and not kwargs and set(map(type, args[0])) == {PendingDTensor}:
            spec = args[0][0]._spec  # hundreds of norms: one tensor, reduced once
            if all(t._spec is spec for t in args[0]):
                value = torch.stack([t._local_tensor for t in args[0]])
                return pending(value, pending_spec(spec.mesh, spec.placements, value.shape, value.dtype))
        if schema_facts(func)[0] or name.endswith("_like") or name.startswith("aten::new_"):
            # torch would keep the placement, so that filling it with 1 on each rank makes a "sum" of as many ones.
            return _write_pending(func, args, kwargs or {})
        operands = [v for v in tree_leaves((args, kwargs)) if isinstance(v, DTensor)]
        if name == "aten::_to_copy" or any(v._spec is not operands[0]._spec for v in operands[1:]):
            # A cast of every rank's contribution is not the cast of the whole; and torch joins operands of several kinds by making
            # one of them pending again, as a norm of norms, which has no sign.
            args, kwargs = tree_map(_settle, (args, kwargs or {}))
        result = func(*map(_plain, args), **{k: _plain(v) for k, v in (kwargs or {}).items()})
        return _still_pending(result) if isinstance(result, Tensor) else tree_map(_still_pending, result)


def pending(value: Tensor, spec: DTensorSpec) -> PendingDTensor:
    return cast(PendingDTensor, PendingDTensor.__new__(PendingDTensor, value, spec, requires_grad=False))


def _settled(value: DTensor) -> DTensor:
    """``value`` reduced: torch's DTensor with Replicate."""
    local, spec = move(value._local_tensor, value._spec, replicated(value.device_mesh))
    return DTensor(local, spec, requires_grad=False)


def _settle(value: Any) -> Any:
    return _settled(value) if isinstance(value, PendingDTensor) else value


def _write_pending(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """In place, ``out=`` and ``*_like``: reduce first, then write; the same objects come back."""
    stand_ins: list[tuple[PendingDTensor, DTensor]] = []

    def stand_in(value: Any) -> Any:
        if not isinstance(value, PendingDTensor):
            return _plain(value)
        for known, plain in stand_ins:
            if known is value:
                return plain
        stand_ins.append((value, _settled(value)))
        return stand_ins[-1][1]

    result = func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))
    for value, plain in stand_ins:
        value._local_tensor, value._spec = plain._local_tensor, plain._spec
    return tree_map(lambda r: next((value for value, plain in stand_ins if plain is r), r), result)


def _still_pending(value: Any) -> Any:
    if type(value) is DTensor and any(p.is_partial() for p in value.placements):
        return pending(value._local_tensor, value._spec)
    return value


def read_only(result: Any, sources: tuple[tuple[Tensor, int], ...] = ()) -> Any:
    """DTensors in ``result`` as :class:`GatheredView` of ``sources``."""

    def convert(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        view = GatheredView(value._local_tensor, value._spec, requires_grad=False)
        view._sources = sources
        return view

    return tree_map(convert, result)


def _plain(value: Any) -> Any:
    """An argument with our read-only and pending DTensors as torch's own; stacking hundreds of norms is the hot case."""
    if isinstance(value, GatheredView | PendingDTensor):
        return DTensor.__new__(DTensor, value._local_tensor, value._spec, requires_grad=False)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


@lru_cache(maxsize=4096)
def schema_facts(func: Any) -> tuple[tuple[str, ...], bool]:
    """Names of the arguments that ``func`` writes, and whether its result is a view of an argument."""
    schema = func._schema
    writes = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
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
