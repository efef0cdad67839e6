"""The operations on ragged tensors: the table behind ``RaggedDTensor.__torch_dispatch__``.

| operation                                                    | on ragged tensors                                                     |
|--------------------------------------------------------------|-----------------------------------------------------------------------|
| element-wise (``torch.Tag.pointwise``), fill, masked_fill     | on the local tensors; operands of another layout are redistributed     |
| ``_foreach_*``, ``_fused_adam(w)/sgd/adagrad``, GradScaler    | the same, for lists                                                   |
| clone, detach, alias, ``to(..)``, ``*_like``                  | local, same layout                                                    |
| ``new_*``                                                    | of the same shape: same layout; else torch's DTensor, Replicate        |
| copy_                                                        | ragged: local or redistributed; a whole plain tensor: its part         |
| random, in place or ``*_like``                               | each rank draws all and keeps its part: the values of one device       |
| view, reshape, flatten, squeeze, unsqueeze                   | a true view: the same elements in another shape                        |
| norms and reductions (``reduce.py``)                 | local, then pending (Partial)                                          |
| any other that only reads                                    | gathered, one warning names it; ``VE_RAGGED_STRICT=1``: raises         |
| any other that writes to a ragged tensor                     | raises, naming it and what to do                                       |
| with a sum pending on another mesh dimension                  | linear ones on the local tensors, else reduced first                   |

An operation gives the right result or raises. Views that can't be local (transpose, indexing) are gathered, and writes are written back.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale_ray.dtensor.operations.argument_tensors import each
from vescale_ray.dtensor.operations.fallback import Cls, Handler, RaggedFallbackWarning, Rule, fallback, plain_target
from vescale_ray.dtensor.operations.operands import broadcasts, gathered, operand, spread
from vescale_ray.dtensor.operations.pending import any_pending, on_pending
from vescale_ray.dtensor.operations.reduce import REDUCTIONS, allclose, amp_unscale, equal, foreach_max, foreach_norm, reduce_op, scalar
from vescale_ray.dtensor.operations.schema import SHARDED_OF, called, schema_facts, written
from vescale_ray.dtensor.operations.views import random_in_place, random_like, reinterpret, reshape
from vescale_ray.dtensor.redistribution import move, plain_spec
from vescale_ray.dtensor.spec import LocalSharding, contiguous_stride, replicated, sharding_of, wrap
from vescale_ray.dtensor.transfer import view_of

__all__ = ["RaggedFallbackWarning", "dispatch", "wrap"]


def dispatch(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func``, at least one of whose arguments is a ``cls``."""
    found = _RULES.get(id(func))  # hashing an operator runs Python code
    rule = found[1] if found is not None else _rule(func)
    handler = rule.handler
    if handler is _pointwise or handler is _foreach:  # hot path: try the common case first, in which nothing is pending
        result = (_pointwise_alike if handler is _pointwise else _foreach_alike)(cls, func, rule, args, kwargs)
        if result is not NotImplemented:
            return result
    if any_pending(cls, args, kwargs):
        return on_pending(cls, func, rule.writes, handler, args, kwargs)
    if handler is not None:
        result = handler(cls, func, args, kwargs)
        if result is not NotImplemented:
            if rule.writes and handler is _foreach:
                lists = (value for value in written(func, rule.writes, args, kwargs) if isinstance(value, list | tuple))
                ours = [t for value in lists for t in value if isinstance(t, cls)]
                _count_writes(ours, [t._local_tensor for t in ours])
            return result
    return fallback(cls, func, rule, args, kwargs)


def _count_writes(tensors: Sequence[Tensor], local: Sequence[Tensor]) -> None:
    """Count a write to ``tensors`` and to their ``local`` tensors, which nothing else counts for lists of tensor subclasses.

    The version counters tell caches that a tensor changed: a low-precision copy reads the local one, autograd the ragged one.
    """
    torch.autograd.graph.increment_version(tensors)  # type: ignore[arg-type]  # skips tensors of inference mode
    torch.autograd.graph.increment_version(local)  # type: ignore[arg-type]


_RULES: dict[int, tuple[Any, Rule]] = {}
"""Rules by the operator's identity. Each entry keeps its operator alive, so that no other one gets the same identity."""


def _rule(func: Any) -> Rule:
    found = _RULES.get(id(func))
    if found is None:
        found = _RULES[id(func)] = (func, _make_rule(func))
    return found[1]


def _make_rule(func: Any) -> Rule:
    name = func._schema.name.removeprefix("aten::")
    writes, is_view = schema_facts(func)
    pointwise = (torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags) or name in _ELEMENTWISE
    handler: Handler | None = _HANDLERS.get(name) if func.namespace == "aten" else None
    if pointwise and (name in ("max", "min") or func.namespace == "prims"):
        handler = _pointwise  # max(self, other) has the name of a reduction; torch.compile decomposes into prims
    elif handler is None and func.namespace == "aten" and not is_view:
        if name.startswith("_foreach_") and name not in _NOT_ELEMENTWISE_FOREACH:
            handler = _foreach
        elif name.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad")):
            handler = _foreach
        elif pointwise:
            handler = _pointwise
    # The schema of _unsafe_view declares no view, but torch writes through it (out= of kron).
    return Rule(handler, writes, is_view or name == "_unsafe_view")


# -- element-wise ---------------------------------------------------------------------------------------------------------


def _pointwise_alike(cls: Cls, func: Any, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Fast path without any search: every tensor is ragged with the same Sharding object, or plain without dimensions."""
    sharding: LocalSharding | None = None
    local: list[Any] = []
    for value in args:
        if type(value) is cls:
            try:
                mine = value._spec._ragged  # type: ignore[attr-defined]
            except AttributeError:  # torch made this spec
                mine = sharding_of(value._spec)
            if sharding is None:
                sharding = mine
            elif mine is not sharding:
                return NotImplemented
            value = value._local_tensor
        elif isinstance(value, Tensor) and (isinstance(value, DTensor) or value.ndim or value.requires_grad):
            return NotImplemented
        local.append(value)
    if sharding is None or not sharding.simple:
        return NotImplemented
    for value in kwargs.values():
        if isinstance(value, Tensor):
            return NotImplemented
    if rule.writes:
        if not isinstance(args[0], cls):
            raise plain_target(func, args[0])
        func(*local, **kwargs)
        return args[0]
    return _wrapped(cls, func(*local, **kwargs), sharding)


def _pointwise(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    targets = written(func, _rule(func).writes, args, kwargs)
    name = str(func)
    outs = [kwargs[k] for k in kwargs if k in _rule(func).writes]
    operands = [v for v in (*args, *(v for k, v in kwargs.items() if k not in _rule(func).writes)) if isinstance(v, Tensor)]
    shape = torch.broadcast_shapes(*(v.shape for v in operands))
    if targets:
        if not all(isinstance(t, cls) for t in targets):
            if any(isinstance(t, DTensor) and not isinstance(t, cls) for t in targets):
                return NotImplemented  # it writes to torch's DTensor: gather the ragged operands
            raise plain_target(func, next(t for t in targets if not isinstance(t, cls)))
        sharding = sharding_of(targets[0]._spec)
        if shape != sharding.shape:
            raise ValueError(f"{name}: operands broadcast to {tuple(shape)}, which can't be written into {called(targets[0])}")
        if not all(sharding_of(t._spec).same_layout(sharding) for t in targets):
            raise ValueError(f"{name}: the tensors to write have different layouts: redistribute them first")
    else:
        found = next((v for v in operands if isinstance(v, cls) and v.shape == shape), None)
        if found is None:
            return NotImplemented  # the result is larger than any ragged operand
        sharding = sharding_of(found._spec)
    local = [operand(cls, v, sharding, name) for v in args]
    if func._schema.name in _SCALAR_VALUE and isinstance(args[-1], Tensor):
        local[-1] = _whole(cls, args[-1])
    result = func(*local, **{k: operand(cls, v, sharding, name) for k, v in kwargs.items()})
    if targets:
        return args[0] if not outs else outs[0] if len(outs) == 1 else tuple(outs)
    return _wrapped(cls, result, sharding)


def _wrapped(cls: Cls, result: Any, sharding: LocalSharding) -> Any:
    """Return local results as ragged tensors of ``sharding``."""
    if isinstance(result, Tensor):
        return cls.__new__(cls, result.contiguous(), sharding.spec(result.dtype), requires_grad=False)
    if isinstance(result, list | tuple):
        return type(result)(_wrapped(cls, r, sharding) for r in result)
    return result


def _mask_put(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x[mask] = number`` with a mask of x's shape, which is element-wise. Any other index_put_ or index_fill_ is declined. If x has no
    dimensions, torch turns the mask into the index [0] or [] of a one-element view of x. Since torch 2.15 it does so for index_fill_, too.
    """
    fills = func._schema.name == "aten::index_fill_"
    x, indices, value, accumulate = (args[0], [args[2]], args[3], False) if fills else (*args[:3], len(args) > 3 and args[3])
    if not isinstance(x, cls) or len(indices) != 1 or accumulate or (isinstance(value, Tensor) and value.numel() != 1):
        return NotImplemented
    index = indices[0]
    number = _whole(cls, value).reshape(()).to(x._local_tensor.dtype) if isinstance(value, Tensor) else value
    if x.shape == (1,) and type(index) is Tensor and index.dtype is torch.int64 and index.tolist() in ([], [0]):
        if index.numel():
            x._local_tensor.fill_(number)
        return x
    if not isinstance(index, DTensor) or index.dtype is not torch.bool or index.shape != x.shape:
        return NotImplemented
    x._local_tensor.masked_fill_(operand(cls, index, sharding_of(x._spec), str(func)), number)
    return x


# -- lists: foreach, fused optimizers -------------------------------------------------------------------------------------


def _foreach_alike(cls: Cls, func: Any, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Fast path: every list is all ragged, with the same layouts index by index, or all plain 0-dim tensors (steps).

    A map or a comprehension per list keeps a step over hundreds of parameters as cheap as with FSDP2's DTensors.
    """
    shardings: list[LocalSharding] | None = None
    local: list[Any] = []
    for value in args:
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            kinds = set(map(type, value))
            if kinds == {cls}:
                try:
                    these = [t._spec._ragged for t in value]
                except AttributeError:  # torch made this spec
                    these = [sharding_of(t._spec) for t in value]
                if shardings is None:
                    shardings = these
                elif these != shardings:  # lists compare by identity first
                    return NotImplemented
                value = [t._local_tensor for t in value]
            elif kinds != {Tensor} or any(map(_NDIM, value)):
                return NotImplemented
        elif isinstance(value, DTensor):
            value = _whole(cls, value)
        local.append(value)
    if shardings is None or not all(map(_SIMPLE, shardings)):
        return NotImplemented
    result = func(*local, **{k: _foreach_keyword(cls, v) for k, v in kwargs.items()})
    for described, value, part in zip(func._schema.arguments, args, local, strict=False) if rule.writes else ():
        if described.name in rule.writes and isinstance(value, list | tuple) and value and type(value[0]) is cls:
            _count_writes(value, part)
    return None if result is None else _wrap_results(cls, result, args, shardings)


_NDIM, _SIMPLE = attrgetter("ndim"), attrgetter("simple")


def _foreach_keyword(cls: Cls, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_whole(cls, v) for v in value]
    return _whole(cls, value)


def _foreach(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run lists of several layouts, or of ragged, plain and torch's distributed tensors, with one call for each kind."""
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    count = len(lists[0])
    if any(len(x) != count for x in lists):
        raise ValueError(f"{func}: lists of different lengths {[len(x) for x in lists]}")
    # The written list decides the kind of an index. If torch's DTensors are written, their ragged operands are gathered.
    deciding = lists[:1] if _rule(func).writes else lists
    ragged = [i for i in range(count) if any(isinstance(x[i], cls) for x in deciding)]
    rest = sorted(set(range(count)) - set(ragged))
    for i in rest:
        if not isinstance(lists[0][i], DTensor) and any(isinstance(x[i], cls) for x in lists):
            raise plain_target(func, lists[0][i])

    def only(value: Any, indices: list[int]) -> Any:
        return [value[i] for i in indices] if isinstance(value, list | tuple) and len(value) == count else value

    merged: Any = None
    plain = [i for i in rest if not any(isinstance(x[i], DTensor) for x in lists)]
    torchs = sorted(set(rest) - set(plain))
    for indices, run in ((ragged, _foreach_ragged), (plain, None), (torchs, None)):
        if indices:
            some, keywords = [only(a, indices) for a in args], {k: only(v, indices) for k, v in kwargs.items()}
            if indices is plain:
                some = [a if isinstance(a, list | tuple) else _whole(cls, a) for a in some]  # a factor, as in clip_grad_norm_
            done = run(cls, func, some, keywords) if run else func(*each(lambda v: gathered(cls, v), some), **keywords)
            if done is not None:
                lists_done = done if isinstance(done, tuple) else (done,)
                merged = merged or tuple([None] * count for _ in lists_done)
                for target, part in zip(merged, lists_done, strict=True):
                    for i, value in zip(indices, part, strict=False):
                        target[i] = value
    return merged if merged is None or len(merged) > 1 else merged[0]


def _foreach_ragged(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a ``_foreach`` operation on lists with at least one ragged tensor per index. The first ragged tensor at an index gives the layout
    of all at this index. In every schema the list that is written comes first, so its layout decides."""
    name, described, writes = str(func), func._schema.arguments, _rule(func).writes
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    shardings = [sharding_of(next(x[i]._spec for x in lists if isinstance(x[i], cls))) for i in range(len(lists[0]))]
    local: list[Any] = []
    for argument, value in zip(described, args, strict=False):
        if not (isinstance(value, list | tuple) and value and isinstance(value[0], Tensor)):
            local.append(_whole(cls, value))
            continue
        items = []
        # A fused optimizer writes gradients only if it unscales them.
        written_to = argument.name in writes and not (argument.name == "grads" and kwargs.get("grad_scale") is None)
        for item, sharding in zip(value, shardings, strict=True):
            if written_to and not (isinstance(item, cls) and sharding_of(item._spec).same_layout(sharding)):
                if isinstance(item, DTensor) or item.ndim:
                    raise ValueError(
                        f"{name} would write {argument.name} of shape {tuple(item.shape)} along with {sharding.describe()}: "
                        "redistribute it to the same placements first"
                    )
            items.append(operand(cls, item, sharding, name))
        local.append(items)
    result = func(*local, **{k: _foreach_keyword(cls, v) for k, v in kwargs.items()})
    return None if result is None else _wrap_results(cls, result, args, shardings)


def _wrap_results(cls: Cls, result: Any, args: Sequence[Any], shardings: Sequence[LocalSharding]) -> Any:
    if isinstance(result, tuple):  # a functional fused optimizer returns one list per list argument
        lists = zip(result, args, strict=False)
        return tuple(_wrap_list(cls, part, shardings) if a and isinstance(a[0], cls) else part for part, a in lists)
    return _wrap_list(cls, result, shardings)


def _wrap_list(cls: Cls, local: Sequence[Tensor], shardings: Sequence[LocalSharding]) -> list[Any]:
    new = cls.__new__
    return [new(cls, t, s.spec(t.dtype), requires_grad=False) for t, s in zip(local, shardings, strict=True)]


def _whole(cls: Cls, value: Any) -> Any:
    """Return a tensor outside a list (a scalar, found_inf, lr) as a plain whole tensor."""
    if isinstance(value, cls):
        return gathered(cls, value)._local_tensor
    if isinstance(value, DTensor):
        return move(value._local_tensor, value._spec, replicated(value.device_mesh))[0]
    return value


def _foreach_copy(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    targets, sources = args[0], args[1]
    pairs = list(zip(targets, sources, strict=True))
    if all(type(t) is cls and type(s) is cls and sharding_of(t._spec) is sharding_of(s._spec) for t, s in pairs):
        func([t._local_tensor for t in targets], [s._local_tensor for s in sources], *args[2:], **kwargs)
        _count_writes(targets, [t._local_tensor for t in targets])
        return
    for target, source in pairs:
        target.copy_(source, *args[2:], **kwargs)


_SAME_TENSOR = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


# -- same layout, local ----------------------------------------------------------------------------------------------------


def _local_unary(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run clone, detach, _to_copy, zeros_like, .. on the local tensor. It is row-major, so memory formats have no effect."""
    x = args[0]
    if not isinstance(x, cls) or "out" in kwargs:
        return NotImplemented
    if kwargs:
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    if func in _SAME_TENSOR:
        same = wrap(cls, x._local_tensor, x._spec)  # an alias made below the dispatcher would count its writes separately
        if SHARDED_OF in x.__dict__:
            same.__dict__[SHARDED_OF] = x.__dict__[SHARDED_OF]  # errors of parameter.data name the parameter
        return same
    return wrap(cls, func(x._local_tensor, *args[1:], **kwargs), x._spec)


def _in_place_local(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run zero_, detach_, record_stream, .. on the local tensor, without other tensor operands."""
    func(args[0]._local_tensor, *args[1:], **kwargs)
    return args[0]


def _new(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    x, size = args[0], tuple(args[1])
    if "out" in kwargs:
        return NotImplemented
    sharding, rest = sharding_of(x._spec), args[2:]
    strided = func._schema.name == "aten::new_empty_strided"
    if size == tuple(sharding.shape) and (not strided or tuple(rest[0]) == sharding.stride or sharding.numel < 2):
        if strided:
            rest = (contiguous_stride(sharding.local_shape), *rest[1:])
        return wrap(cls, func(x._local_tensor, sharding.local_shape, *rest, **kwargs), x._spec)
    local = func(x._local_tensor, size, *rest, **kwargs)
    if not local.is_contiguous():
        return NotImplemented
    return DTensor(local, plain_spec(sharding.mesh, replicated(sharding.mesh), size, local.dtype), requires_grad=False)


def _copy(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, cls):
        if not isinstance(target, DTensor):
            raise plain_target(func, target)
        local, spec = move(source._local_tensor, source._spec, target.placements)
        return target.copy_(DTensor(local, spec, requires_grad=False), *args[2:], **kwargs)
    sharding = sharding_of(target._spec)
    if isinstance(source, DTensor):
        local = operand(cls, source, sharding, "copy_")
    elif source.shape == sharding.shape:
        local = view_of(source, sharding)
    elif broadcasts(source.shape, sharding.shape):
        local = spread(source, sharding)
    else:
        raise ValueError(
            f"copy_: a plain tensor of shape {tuple(source.shape)} into {called(target)}: give the whole tensor; "
            f"for this rank's part {sharding.local_shape} use to_local().copy_() under torch.no_grad()"
        )
    func(target._local_tensor, local, *args[2:], **kwargs)
    return target


# -- the rest -------------------------------------------------------------------------------------------------------------


def _is_same_size(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return bool(args[0].shape == args[1].shape)


def _ask_local(cls: Cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(args[0]._local_tensor, *args[1:], **kwargs)


# The last argument of these must be a tensor without dimensions, or a number.
_SCALAR_VALUE = frozenset({"aten::fill_", "aten::fill", "aten::masked_fill", "aten::masked_fill_"})
# Element-wise operations that torch does not tag as such (mostly in-place, out= and backward forms).
_ELEMENTWISE = frozenset(
    "abs_ copysign_ eq_ ne_ gt_ ge_ lt_ le_ gcd_ lcm_ heaviside_ gelu_ mish_ threshold_ xlogy_ fill fill_ masked_fill masked_fill_ "
    "floor_divide floor_divide_ hardswish hardswish_ rsub where isclose complex polar add sub mul div relu celu elu gelu mish softplus "
    "hardshrink hardsigmoid hardtanh leaky_relu softshrink threshold isinf isnan elu_backward hardshrink_backward hardsigmoid_backward "
    "hardswish_backward hardtanh_backward leaky_relu_backward mish_backward softplus_backward softshrink_backward gelu_backward "
    "threshold_backward".split()
)
_NOT_ELEMENTWISE_FOREACH = frozenset({"_foreach_mm", "_foreach_powsum"})

_HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("clone", "detach", "alias", "_to_copy", "lift_fresh", "_pin_memory"), _local_unary),
    **dict.fromkeys(("zeros_like", "ones_like", "empty_like", "full_like"), _local_unary),
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"), _new),
    **dict.fromkeys(("zero_", "record_stream", "detach_"), _in_place_local),
    **dict.fromkeys(("uniform_", "normal_", "bernoulli_", "exponential_", "random_", "cauchy_"), random_in_place),
    **dict.fromkeys(("log_normal_", "geometric_"), random_in_place),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), random_like),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"), reshape),
    **dict.fromkeys(("view_as_real", "view_as_complex"), reinterpret),
    **dict.fromkeys(REDUCTIONS, reduce_op),
    "max": reduce_op,
    "copy_": _copy,
    **dict.fromkeys(("index_put_", "index_fill_"), _mask_put),
    "equal": equal,
    "allclose": allclose,
    "_local_scalar_dense": scalar,
    "is_same_size": _is_same_size,
    "is_pinned": _ask_local,
    "_foreach_norm": foreach_norm,
    "_foreach_max": foreach_max,
    "_foreach_copy_": _foreach_copy,
    "_amp_foreach_non_finite_check_and_unscale_": amp_unscale,
}
