"""DTensors derived from ragged tensors that are not ragged: gathered views, and results of operations and redistributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from vescale_ray.compat.core import TensorBase, run_as_is
from vescale_ray.compat.tensor import DTensorSpec, TensorMeta
from vescale_ray.dtensor.arguments import check_saved_part
from vescale_ray.dtensor.autograd import Classes, RaggedAwareDTensor, whole_of
from vescale_ray.dtensor.operations.argument_tensors import each, each_argument, tensor_arguments, tensors_in
from vescale_ray.dtensor.operations.schema import (
    different_meshes,
    plain_is_whole,
    plain_meets,
    refuse_leaf,
    schema_facts,
    with_parameter,
    written,
)
from vescale_ray.dtensor.operations.whole import held_whole, is_dtensor, on_local, refuse_new_shape, reshape_in_place, write_local
from vescale_ray.dtensor.redistribution import contribution, move
from vescale_ray.dtensor.spec import ShapedSpec, pending_spec, replicated, settled_placements, wrap
from vescale_ray.dtensor.transfer import arrived
from vescale_ray.dtensor.write_back import Source


class GatheredView(RaggedAwareDTensor):
    """A gathered copy, the result of a view operation (transpose, indexing, ..) that has no local view.

    An operation in place is written back (:mod:`vescale_ray.dtensor.write_back`), or raises if it can't be. After another write to the
    ragged tensor the copy raises on reads, since a true view would show that write. Torch runs every other operation.
    """

    _sources: tuple[Source, ...] = ()
    """The ragged tensors that it was gathered from."""

    @classmethod
    @run_as_is
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        writes, is_view = schema_facts(func)
        targets = written(func, writes, args, kwargs or {})
        if len(targets) == 1 and targets[0] is args[0] and isinstance(args[0], GatheredView) and len(args[0]._sources) == 1:
            if args[0]._sources[0].accepts(func, args[0]._local_tensor):
                return args[0].write(func, args, kwargs or {})
        GatheredView.refuse_writes(func, targets)
        sources: tuple[Source, ...] = ()
        for value in tensor_arguments(args, kwargs or {}):
            if isinstance(value, GatheredView):
                value.check(func)
                sources += value._sources
                mesh = value.device_mesh
        args, kwargs = _beside(func, "a gathered copy of a ragged tensor", mesh, args, kwargs or {}, () if targets else sources)
        result = func(*args, **kwargs)
        return read_only(result, sources) if is_view else each(_derived, result)

    @staticmethod
    def refuse_writes(func: Any, targets: Any) -> None:
        """Raise if a gathered copy is among ``targets`` or their items."""
        view = next((target for target in tensors_in(targets) if isinstance(target, GatheredView)), None)
        if view is None:
            return
        refuse_new_shape(func, "a gathered copy of a RaggedDTensor")
        what = f"{func}: this tensor is a gathered copy, not a view, of a RaggedDTensor"
        if torch.is_grad_enabled() and any(source.tensor.requires_grad for source in view._sources):
            raise RuntimeError(
                f"{what} that requires grad, and the gradient of a write would be lost: write to its full_tensor() and compute with "
                "that, or write under torch.no_grad()"
            )
        raise RuntimeError(
            f"{what}: writing to it would not reach that tensor; write to its to_local(), or build the whole tensor and use copy_()"
        )

    def check(self, func: Any) -> None:
        """Raise if a source was written since the copy was gathered."""
        if any(source.is_stale for source in self._sources):
            raise RuntimeError(
                f"{func}: this tensor is a gathered copy, not a view, of a RaggedDTensor that was written since: take the view again"
            )

    def write(self, func: Any, args: Any, kwargs: dict[str, Any]) -> GatheredView:
        """Run ``func`` in place, and write it back. Only ``copy_`` takes a plain tensor with dimensions, which is whole."""
        self.check(func)
        local = self._local_tensor
        if func is not torch.ops.aten.copy_.default:
            args = [self, *_beside(func, "a gathered copy of a ragged tensor", self.device_mesh, args[1:], {}, self._sources)[0]]
        args, kwargs = each_argument(lambda v: local if v is self else _whole(v) if isinstance(v, DTensor) else v, args, kwargs)
        func(*args, **kwargs)
        self._sources[0].take_back(self, local)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """Return torch's DTensor: a deep copy is not a view."""
        self.check("deepcopy")
        return _copied(self, memo, lambda local, spec: DTensor(local, spec, requires_grad=False))

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.check("pickle")
        return DTensor(self._local_tensor.detach(), self._spec, requires_grad=self.requires_grad).__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return formatted(self, spec)

    def to_local(self, **kwargs: Any) -> Tensor:
        self.check("to_local")
        return super().to_local(**kwargs)

    def full_tensor(self, **kwargs: Any) -> Tensor:
        self.check("full_tensor")
        return super().full_tensor(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        self.check("redistribute")
        return super().redistribute(*args, **kwargs)


TENSOR_DATA = cast(Any, torch.Tensor.__dict__.get("data") or TensorBase.__dict__["data"])


class DerivedDTensor(RaggedAwareDTensor):
    """The result of an operation on ragged tensors that is not ragged itself, and of operations on such results.

    It may be a reduction that is still pending over the ranks (Partial), or a gathered result (Replicate). It differs from torch's DTensor:

    - ``.item()``, ``float()`` and ``bool()`` give the whole answer; torch's silently give this rank's contribution.
    - A tensor without dimensions may be written into plain tensors, as ``clip_grad_norm_`` over ragged and plain parameters does.
    - Gradients come back in this class, and torch's derivative formulas may join them with plain tensors that they make.
    """

    _of_norm = False
    """True if this tensor is a view of a pending norm. A write to the view would not reach the norm."""

    @property
    def data(self) -> Tensor:
        """The tensor without autograd history, sharing memory. Torch's getter returns its DTensor, whose item() is this rank's part."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, DTensor) or value.shape != self.shape or value.device_mesh != self.device_mesh:
            raise ValueError(f"can't set .data of {self!r} to a {type(value).__name__} of shape {tuple(value.shape)}")
        TENSOR_DATA.__set__(self, value)
        self._local_tensor, self._spec = value._local_tensor, value._spec

    def __repr__(self) -> str:  # type: ignore[override]
        shown = f"this rank's contribution={self._local_tensor}" if _is_pending(self) else f"local_tensor={self._local_tensor}"
        return f"DerivedDTensor({shown}, device_mesh={self.device_mesh}, placements={self.placements})"

    def __format__(self, spec: str) -> str:
        return formatted(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        return _copied(self, memo, derived)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unpickled_derived, (self._local_tensor.detach(), self.device_mesh, self.placements, tuple(self.shape), self.requires_grad)

    def __coerce_tangent_metadata__(self) -> DTensor:
        """Return the gradient that a compiled function expects for this result: reduced, in the form that :func:`whole_of` returns."""
        return _derived(_settle(self)) if _is_pending(self) else self

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> DerivedDTensor:
        placements, meta, order, requires_grad = flatten_spec
        meta = TensorMeta(outer_size, outer_stride, meta.dtype)
        spec = ShapedSpec(inner_tensors["device_mesh"], placements, tensor_meta=meta, shard_order=order)
        return wrap(DerivedDTensor, inner_tensors["_local_tensor"], spec, requires_grad)

    @classmethod
    @run_as_is
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        if name == "_local_scalar_dense":
            return _whole(args[0]).item()
        if name in ("detach", "alias"):  # handled here, because torch's sharding cache would keep the mesh alive
            same = derived(func(args[0]._local_tensor), args[0]._spec)
            return _mark_view(same) if args[0]._of_norm or (name == "alias" and _is_norm(same)) else same
        if name == "allclose":  # torch has no rule for it
            left, right = (whole_of(v) if isinstance(v, DTensor) else v for v in args[:2])
            return bool(torch.allclose(left, right, *args[2:], **kwargs))
        writes, is_view = schema_facts(func)
        targets = tensors_in(written(func, writes, args, kwargs))
        if targets:
            if not any(isinstance(t, DTensor) for t in targets):
                return _write_plain(func, args, kwargs)
            if torch.Tag.inplace_view in func.tags:
                return reshape_in_place(func, args, kwargs)
            return _write(func, targets, args, kwargs)
        tensors = tensor_arguments(args, kwargs)
        moved = name in _SAME_ELEMENTS or (is_view and not {name, f"{name}.{func._schema.overload_name}"} & _OTHER_NUMBERS)
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        if _alike(tensors) and held_whole(tensors[:1]) and (moved or not _is_pending(tensors[0])) and not drawn:
            result = on_local(func, tensors[0], args, kwargs)
        else:
            operands = list(filter(is_dtensor, tensors))
            mesh = operands[0].device_mesh
            if other := next((v.device_mesh for v in operands if v.device_mesh != mesh), None):
                raise different_meshes(func, other, mesh)
            args, kwargs = _beside(func, "what was computed from a ragged tensor", mesh, args, kwargs)
            left = list(filter(is_dtensor, tensor_arguments(args, kwargs)))
            if held_whole(left) and not drawn:
                result = on_local(func, left[0], args, kwargs)
            else:
                result = each(_derived, func(*args, **kwargs))
        if (is_view or name == "_unsafe_view") and any(map(_is_norm, filter(is_dtensor, tensors))):
            for view in tensors_in([result]):
                if isinstance(view, DerivedDTensor):
                    view._of_norm = True
        return result


# Every pending reduction commutes with these, applied to each rank's contribution, and with views: they only move elements. Views
# that change the numbers are the exceptions.
_SAME_ELEMENTS = frozenset({"clone", "_unsafe_view", "stack", "cat"})
_OTHER_NUMBERS = frozenset({"view.dtype", "view_as_real", "view_as_complex", "real", "imag", "_conj", "_neg_view"})


Classes.other = DerivedDTensor


def derived(value: Tensor, spec: DTensorSpec) -> DerivedDTensor:
    """Return ``value`` as a DerivedDTensor. ``spec`` must have its dtype."""
    return wrap(DerivedDTensor, value, spec)


def unpickled_derived(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...], shape: tuple[int, ...], requires_grad: bool
) -> DerivedDTensor:
    check_saved_part(mesh, placements, shape)
    return wrap(DerivedDTensor, local, pending_spec(mesh, placements, shape, local.dtype), requires_grad)


def _is_pending(value: DTensor) -> bool:
    return any(p.is_partial() for p in value.placements)


def _is_norm(value: DTensor) -> bool:
    return any(p.is_partial() and type(p) is not Partial for p in value.placements)


def _settle(value: Any) -> Any:
    """Return a derived or plain DTensor as torch's DTensor with nothing pending. It shares memory if nothing was pending."""
    if (type(value) is DTensor or isinstance(value, _DERIVED)) and _is_pending(value):
        local, spec = move(value._local_tensor, value._spec, settled_placements(value.placements))
        return DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return a derived DTensor as torch's own DTensor, and any other value unchanged."""
    return DTensor.__new__(DTensor, value._local_tensor, value._spec, requires_grad=False) if isinstance(value, _DERIVED) else value


_DERIVED = (GatheredView, DerivedDTensor)


def _whole(value: DTensor) -> Tensor:
    return arrived(move(value._local_tensor, value._spec, replicated(value.device_mesh))[0])


def _alike(tensors: Sequence[Tensor]) -> TypeGuard[Sequence[DerivedDTensor]]:
    """Return whether all ``tensors`` are of this class, with equal meshes, placements and dtypes. During compilation each argument has a
    mesh object of its own, equal to the others'."""
    one = tensors[0]
    return isinstance(one, DerivedDTensor) and all(
        isinstance(v, DerivedDTensor)
        and (v._spec is one._spec or (v.placements == one.placements and v.device_mesh == one.device_mesh and v.dtype is one.dtype))
        for v in tensors
    )


def _mark_view(view: DerivedDTensor) -> DerivedDTensor:
    view._of_norm = True
    return view


def _write_plain(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation that writes plain tensors. A factor without dimensions becomes a number, which is the same on every rank."""

    def number(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        if value.ndim:
            raise ValueError(
                f"{func} would write a {type(value).__name__} of shape {tuple(value.shape)} into a plain tensor: use its full_tensor()"
            )
        return _whole(value)

    args, kwargs = each_argument(number, args, kwargs)
    return func(*args, **kwargs)


def _write(func: Any, targets: list[Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation in place or with ``out=``: reduce the operands, write, and return the same objects.

    Operands that are only read stay pending. A written tensor stays pending, too: the first rank contributes the new value, and the others
    contribute the neutral element. So its views, and callers of a compiled function that hold it, see the write. A norm has no sign, so
    its value replaces it instead.
    """
    stand_ins: list[tuple[DerivedDTensor, DTensor]] = []
    if func is torch.ops.aten.copy_.default and _alike(args[:2]) and _is_pending(args[0]):
        args[0]._local_tensor.copy_(args[1]._local_tensor)
        return args[0]
    for target in targets:
        if isinstance(target, DerivedDTensor) and target._of_norm:
            raise RuntimeError(
                f"{func} would write to a view of a norm whose reduction is pending, which it would not reach: "
                "write to that norm, or to its full_tensor()"
            )

    def stand_in(value: Any) -> Any:
        if not isinstance(value, DerivedDTensor):
            return _plain(value) if any(value is t for t in targets) else _settle(value)
        for known, plain in stand_ins:
            if known is value:
                return plain
        stand_ins.append((value, _settle(value)))
        return stand_ins[-1][1]

    args, kwargs = each_argument(stand_in, args, kwargs)
    whole = all(isinstance(t, DerivedDTensor) for t in targets) and held_whole(list(filter(is_dtensor, tensor_arguments(args, kwargs))))
    if whole and torch.Tag.nondeterministic_seeded not in func.tags:
        result = write_local(func, args, kwargs)
    else:
        result = func(*args, **kwargs)
    for value, plain in stand_ins:
        if not any(value is t for t in targets):
            continue
        if _is_norm(value) or not _is_pending(value):
            value._local_tensor, value._spec = plain._local_tensor, plain._spec
        else:
            pending = [dim for dim, p in enumerate(value.placements) if p.is_partial()]
            value._local_tensor.copy_(contribution(plain._local_tensor, value.device_mesh, value.placements, pending))
    return each(lambda r: next((value for value, plain in stand_ins if plain is r), r), result)


def _derived(value: Any) -> Any:
    return derived(value._local_tensor, value._spec) if type(value) is DTensor else value


def formatted(value: DTensor, spec: str) -> str:
    """Return ``format(value, spec)`` of a number that this rank has. Often only one rank prints, so this must not wait for the others."""
    if not spec:
        return str(value)
    if value.ndim == 0 and all(p.is_replicate() for p in value.placements):
        return value._local_tensor.item().__format__(spec)
    raise TypeError(
        f"format {spec!r} of a {type(value).__name__} of shape {tuple(value.shape)} with placements {value.placements}: "
        "format its item(), or full_tensor(), taken on every rank"
    )


def _copied(value: DTensor, memo: dict[int, Any], make: Callable[[Tensor, DTensorSpec], DTensor]) -> DTensor:
    """Return a deep copy that shares the mesh and the spec."""
    if id(value) in memo:
        return cast(DTensor, memo[id(value)])
    if not value.is_leaf:
        raise RuntimeError("only graph leaves can be deep-copied: call .detach() first")
    result = memo[id(value)] = make(value._local_tensor.detach().clone(), value._spec)
    result.requires_grad_(value.requires_grad)
    return result


def _beside(func: Any, what: str, mesh: DeviceMesh, args: Any, kwargs: Any, sources: Sequence[Source] = ()) -> tuple[list[Any], Any]:
    """Return the arguments with torch's DTensors, with nothing pending, in place of derived ones.

    Plain tensors with dimensions raise, except in torch's backward formulas.
    """

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return _settle(value)
        if value.ndim == 0:
            refuse_leaf(func, value, what)
            return value
        if value.numel() == 1 or plain_is_whole():
            return DTensor.from_local(value, mesh, replicated(mesh), run_check=False)
        raise with_parameter(func, [source.tensor for source in sources], plain_meets(func, value, what))

    return each_argument(convert, args, kwargs)


def read_only(result: Any, sources: tuple[Source, ...] = ()) -> Any:
    """Return ``result`` with its DTensors replaced by :class:`GatheredView` of ``sources``."""

    def convert(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        view = GatheredView(value._local_tensor, value._spec, requires_grad=False)
        view._sources = sources
        return view

    return each(convert, result)
