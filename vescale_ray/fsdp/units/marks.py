"""Marks in the autograd graph: they tell a unit when backward reaches its part of the graph, and when it leaves it.

An entry mark is a tensor hook. The unit's outputs have one, and so have the outputs of each module inside that has parameters, and tensors
that its modules keep as attributes. So a loss on an intermediate tensor gathers the unit before its parameters are read. The exit mark is
an identity node on the unit's inputs. Its backward runs when backward has left the unit's part of the graph, even if the input has other
uses.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from vescale_ray.compat.core import CreationMeta, are_functorch_transforms_active, disable_dynamo, run_as_is, set_creation_meta
from vescale_ray.fsdp.groups.linear import adopt_linear
from vescale_ray.fsdp.groups.running_backward import will_accumulate
from vescale_ray.fsdp.units.tree import Copies, grad_tensors, graph_tensors, map_arguments

_MARK = -1
"""Key of an entry mark in a tensor's hooks. Torch's own keys count from 0."""


class MarkedUnit(Protocol):
    """A unit (:class:`vescale_ray.fsdp.units.unit.Unit`), as the marks use it."""

    loads: int
    modules: tuple[weakref.ref[nn.Module], ...]
    stashing: tuple[weakref.ref[nn.Module], ...]

    @property
    def call(self) -> Call[Any] | None: ...

    @property
    def open_call(self) -> Call[Any] | None: ...

    @property
    def gathered(self) -> bool: ...

    def pre_backward(self, call: Any) -> None: ...

    def backward_inside(self) -> None: ...

    def close(self) -> None: ...


U = TypeVar("U", bound=MarkedUnit)


class Call(Generic[U]):
    """One forward of a unit that has a graph, linked to the call before it.

    Prefetching follows the order of calls, and never asks which graphs are still alive. One rank may keep a graph alive by chance, and that
    must not change the order of its collectives.
    """

    __slots__ = ("__weakref__", "consumed", "earlier", "exit", "forward", "loads", "previous", "reachable", "unit")

    def __init__(self, unit: U) -> None:
        self.unit: weakref.ref[U] = weakref.ref(unit)
        self.exit: weakref.ref[Any] | None = None
        """The exit mark on the inputs, if a tensor among them takes one."""
        self.previous: Call[U] | None = None
        self.earlier: Call[U] | None = None
        """The call of the same unit before this one, in the same outermost forward."""
        self.forward: object = None
        """An object that all calls of one outermost forward share."""
        self.reachable = False
        """True if a tensor carries an entry mark of this call."""
        self.consumed = False
        self.loads = unit.loads

    def follow(self, previous: Call[U] | None, same_unit: Call[U] | None) -> None:
        """Set the calls before this one: ``previous``, the last call of any unit, and ``same_unit``, the last call of this unit."""
        self.previous, self.forward = previous, object() if previous is None else previous.forward
        self.earlier = same_unit if same_unit is not None and same_unit.forward is self.forward else None

    @property
    def is_first(self) -> bool:
        """True if backward has reached all earlier calls of this unit. Until then more gradients may arrive, on some ranks at least."""
        earlier = self.earlier
        while earlier is not None and earlier.consumed:
            earlier = earlier.earlier
        return earlier is None

    @property
    def is_nearly_first(self) -> bool:
        """True if backward needs no further all-gather: this is the first call, or the second and the first one's unit is gathered."""
        earlier = self.previous
        if earlier is None:
            return True
        unit = earlier.unit()
        return earlier.previous is None and unit is not None and unit.gathered

    def is_to_come(self) -> bool:
        """True if the running backward will pass through this call and its exit mark, but has not reached it yet."""
        node = None if self.consumed or self.exit is None else self.exit()
        return node is not None and bool(will_accumulate(node))

    def mark(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark ``tensors``: a backward that reaches one of them enters the unit."""
        for tensor in tensors:
            self.reachable = True
            hooks = tensor._backward_hooks
            if hooks is None and tensor.grad_fn is not None:
                # This does register_hook's work without a handle: 1 us instead of 4, on every output of every module.
                tensor._backward_hooks = OrderedDict(((_MARK, self.enter),))
                tensor.grad_fn._register_hook_dict(tensor)
            elif hooks is None or hooks.get(_MARK) != self.enter:
                tensor.register_hook(self.enter)
            if tensor._is_view():
                # If a view is changed in place, it gets a new history without the hook; the history of its base continues from here.
                base = tensor._base
                if base is not None and base.grad_fn is not None:
                    base.grad_fn.register_prehook(self.before_base)

    @run_as_is
    @unserializable_hook
    def enter(self, _grad: Any) -> None:
        """Enter the unit: the gradient of a marked tensor has arrived."""
        unit = self.unit()
        if unit is None or unit.open_call is self:
            return
        if unit.call is self:  # the unit is still in its forward, so its parameters are gathered
            unit.backward_inside()
        else:
            unit.pre_backward(self)

    def before_base(self, grads: Any) -> None:
        """Enter the unit: a gradient has arrived for the base of an output that is a view."""
        if not self.consumed:
            self.enter(grads)


def mark_inputs(
    unit: MarkedUnit, args: tuple[Any, ...], kwargs: dict[str, Any], copies: Copies
) -> tuple[tuple[Any, ...], dict[str, Any], weakref.ref[Any] | None]:
    """Return the inputs with an exit mark, and the mark's node; no node if no tensor requires a gradient."""
    tensors = grad_tensors((args, kwargs)) if kwargs else grad_tensors(args)
    if not tensors:
        return args, kwargs, None
    outputs = _InputMark.apply(weakref.ref(unit), *tensors)
    if not are_functorch_transforms_active():
        for output in outputs:
            # A view that is changed in place gets a history without the mark, which is an identity. The unit then ends with the backward.
            set_creation_meta(output, CreationMeta.DEFAULT)
    marked = {id(tensor): output for tensor, output in zip(tensors, outputs, strict=True)}
    return *map_arguments(lambda tensor: marked.get(id(tensor), tensor), args, kwargs, copies), weakref.ref(outputs[0].grad_fn)


def watch_modules(unit: MarkedUnit, managed: Iterable[nn.Module]) -> None:
    """Mark tensors that leave the modules of a unit other than as the unit's output.

    Args:
        managed: the modules whose parameters the unit manages. Linear layers mark their outputs themselves, at less cost.
    """
    unit_ref = weakref.ref(unit)

    def mark_output(_module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        unit = unit_ref()
        if unit is not None and unit.call is not None:
            unit.call.mark(graph_tensors(output))

    roots = {id(module) for ref in unit.modules if (module := ref()) is not None}
    for module in managed:
        if not adopt_linear(module, unit) and id(module) not in roots and module._parameters:
            module.register_forward_hook(mark_output)
    unit.stashing = tuple(weakref.ref(module) for module in managed if not type(module).__module__.startswith("torch.nn.modules."))


def kept_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return new tensors with a graph that ``module`` holds as attributes, directly or in lists, tuples and dicts.

    Of a large container only the last entries are searched, since new ones are appended."""
    found: list[torch.Tensor] = []
    for name, value in module.__dict__.items():
        if name not in _INTERNAL and (isinstance(value, torch.Tensor) or type(value) in _CONTAINERS):
            _collect(value, found, 3)
    return found


def _collect(value: Any, found: list[torch.Tensor], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None and not value.__dict__.get(_SEEN):
            value.__dict__[_SEEN] = True
            found.append(value)
    elif depth and type(value) in _CONTAINERS:
        for item in islice(reversed(value.values() if isinstance(value, dict) else value), _MOST):
            _collect(item, found, depth - 1)


_CONTAINERS = (list, tuple, dict)
_MOST = 64
"""Maximum number of entries of a container that are searched."""
_INTERNAL = frozenset(nn.Module().__dict__)
_SEEN = "_vescale_seen"


class _InputMark(torch.autograd.Function):
    """Identity on a unit's inputs. Its backward runs when backward has left the unit's part of the graph."""

    generate_vmap_rule = True

    @staticmethod
    def forward(unit: weakref.ref[MarkedUnit], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.unit = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    @disable_dynamo
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        unit = ctx.unit()
        if unit is not None:
            call = unit.open_call
            unit.close()
            if call is not None and torch.is_grad_enabled():  # create_graph: the graph of these gradients reads the parameters, too
                call.mark(grad_tensors(grads))
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _unit: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tangents
