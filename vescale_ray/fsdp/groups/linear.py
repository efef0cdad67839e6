"""Weight gradients of linear layers, which the matrix product writes directly into the gradient buffer.

Autograd would compute such a gradient in separate memory and then copy it into the buffer. That is one more pass over every
parameter, and a temporary as large as the largest weight. Here the product's output *is* a piece of the buffer, and autograd gets an alias
of it as the gradient. ``AccumulateGrad`` takes the alias over as ``.grad`` without a copy. If the weight was used several times in the
backward, autograd adds the other gradients in new memory, which is copied as usual.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from vescale_ray.compat.core import disable_dynamo, has_function_mode, peek_interpreter_stack
from vescale_ray.fsdp.groups.running_backward import will_accumulate
from vescale_ray.fsdp.layouts.group_parameter import SINK, PrivateMark

_FORWARD, _LINEAR = nn.Linear.forward, F.linear
"""Torch's own, which programs replace (fake quantization, fused kernels)."""

LEAST_NUMEL = 1 << 16
"""Number of elements of a weight from which a saved pass is worth the time of a Python autograd function (about 20 us)."""


class GradientBuffer(Protocol):
    """The gradients of a group (:class:`vescale_ray.fsdp.groups.gradients.Gradients`), as a linear layer uses them."""

    @property
    def buffer_dtype(self) -> torch.dtype: ...

    def claim(self, index: int, like: torch.Tensor) -> torch.Tensor | None: ...


class RunningCall(Protocol):
    """A unit's running forward (:class:`vescale_ray.fsdp.units.marks.Call`), as a linear layer uses it."""

    reachable: bool

    def mark(self, tensors: Iterable[torch.Tensor]) -> None: ...

    def enter(self, grad: Any) -> None: ...


class Caller(Protocol):
    """The unit that manages the layer's parameters."""

    @property
    def call(self) -> RunningCall | None: ...


Sink = tuple[Callable[[], GradientBuffer | None], int]


def offer_sink(leaf: nn.Parameter, gradients: Callable[[], GradientBuffer | None], index: int) -> None:
    """Let linear layers write the gradient of the unsharded parameter ``leaf`` into the buffer of ``gradients``, a weak reference."""
    leaf.__dict__[SINK] = PrivateMark((gradients, index))


def adopt_linear(module: nn.Module, unit: Caller | None) -> bool:
    """Run ``module`` through :class:`_Linear` if that saves time, provided it is an ``nn.Linear`` with torch's forward.

    Args:
        unit: the unit that manages the module's parameters. A backward that reaches the module's output enters it.

    Returns:
        Whether the module is such an ``nn.Linear``.
    """
    if isinstance(module, nn.Linear) and type(module).forward is _FORWARD and "forward" not in module.__dict__:
        # A bound method: torch.compile compares only its function, so that similar layers share one compilation. It compares a callable
        # object by identity, and would compile every layer until it gives up.
        module.forward = MethodType(_forward, _Layer(module, unit))  # type: ignore[method-assign,assignment]
        return True
    return False


class _Layer:
    """A linear layer and its unit, held weakly."""

    __slots__ = ("module", "unit")

    def __init__(self, module: nn.Linear, unit: Caller | None) -> None:
        self.module, self.unit = weakref.ref(module), None if unit is None else weakref.ref(unit)

    def call(self) -> RunningCall | None:
        """Return the unit's running forward, if it makes a graph."""
        unit = None if self.unit is None else self.unit()
        return None if unit is None or not torch.is_grad_enabled() else unit.call

    def __reduce__(self) -> Any:
        raise TypeError("a sharded nn.Linear can't be pickled or copied: save its state_dict")


def _forward(layer: _Layer, input: torch.Tensor) -> torch.Tensor:
    """Return the forward of the module's class."""
    module = layer.module()
    assert module is not None
    if torch.compiler.is_compiling():
        return type(module).forward(module, input)
    call = layer.call()
    weight = module._parameters.get("weight")  # reading a parametrized weight would run its parametrization once more
    if type(module).forward is _FORWARD and F.linear is _LINEAR and weight is not None and _pays(input, weight):
        if call is not None:
            call.reachable = True
        written: torch.Tensor = _Linear.apply(input, weight, module.bias, weight.__dict__[SINK], call)
        return written
    out = type(module).forward(module, input)
    if call is not None and out.requires_grad:
        call.mark((out,))
    return out


def _pays(input: torch.Tensor, weight: torch.Tensor) -> bool:
    sink = weight.__dict__.get(SINK)
    if not sink or not weight.requires_grad or weight.numel() < LEAST_NUMEL or not torch.is_grad_enabled():
        return False
    owner = sink[0]()
    return (
        owner is not None
        and owner.buffer_dtype == weight.dtype == input.dtype
        and type(weight) is nn.Parameter
        and weight.dtype.is_floating_point  # the formulas are not those of complex numbers
        and input.layout is torch.strided
        and type(input) in (torch.Tensor, nn.Parameter)
        and not torch.is_autocast_enabled(input.device.type)
        and peek_interpreter_stack() is None
        and not has_function_mode()
    )


class _Linear(torch.autograd.Function):
    """``F.linear`` with torch's own backward formulas, and a given place for the weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: Sink, call: RunningCall | None
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.sink, ctx.call = sink, call
        out = F.linear(input, weight, bias)
        # As in torch, autograd does not treat the output as a view. Otherwise it could not be changed in place (an activation). Nothing
        # else holds the tensor that it views.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    @disable_dynamo
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        if ctx.call is not None:
            ctx.call.enter(grad)  # before the weight is read
        input, weight = ctx.saved_tensors
        wants_input, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        of_input = grad @ weight if wants_input else None
        rows = grad.reshape(-1, grad.shape[-1])
        of_bias = rows.sum(0) if wants_bias else None
        accumulates = wants_weight and will_accumulate(ctx.next_functions[1][0])
        if accumulates is False:
            return of_input, None, of_bias, None, None
        columns = input.reshape(-1, input.shape[-1])
        owner, index = ctx.sink[0](), ctx.sink[1]
        place = owner.claim(index, rows) if owner is not None and accumulates and not torch.is_grad_enabled() else None
        if place is None:
            return of_input, rows.t() @ columns, of_bias, None, None
        torch.mm(rows.t(), columns, out=place)
        # Autograd takes over a gradient that no one else holds: a new object on the same memory.
        return of_input, place.view_as(place), of_bias, None, None
