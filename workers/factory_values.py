"""Values that a model's factory gives to parameters in place. It runs on the meta device, so they are given again when there is memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_FILLS = frozenset("normal_ uniform_ fill_ zero_ copy_ exponential_ random_ bernoulli_ __setitem__".split())
"""Methods that give a tensor new values."""
_CHANGES = frozenset(
    "mul_ div_ add_ sub_ clamp_ erfinv_ pow_ sqrt_ tril_ triu_ masked_fill_ index_fill_ fill_diagonal_ "
    "__imul__ __iadd__ __isub__ __itruediv__".split()
)
"""Methods that change values of a tensor."""
Writes = dict[int, list["Write"]]
"""Calls in order, by the storage of the tensor."""


@dataclass(frozen=True)
class Write:
    """A call that gives values to a tensor on the meta device, or makes it.

    Attributes:
        tensor: the tensor, a parameter or a part of one.
        function: the function; None if it can't be repeated.
        args, kwargs: its arguments, without the tensor.
        makes: True if the function returns the tensor.
    """

    tensor: Tensor
    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    makes: bool = False

    @property
    def is_repeatable(self) -> bool:
        """True if no argument is a tensor on the meta device, whose values are lost."""
        return self.function is not None and not any(t.is_meta for t in _tensors([self.args, list(self.kwargs.values())]))

    @property
    def fills(self) -> bool:
        """True if the values do not depend on earlier ones."""
        return self.makes or self.name in _FILLS or hasattr(nn.init, self.name)

    def repeat(self, parameter: Tensor) -> None:
        """Give the values to the same part of ``parameter``, which has memory."""
        part = parameter.as_strided(self.tensor.size(), self.tensor.stride(), self.tensor.storage_offset())
        if self.makes:
            part.copy_(self.function(*self.args, **self.kwargs))
        else:
            self.function(part, *self.args, **self.kwargs)


class FactoryWrites(TorchFunctionMode):
    """Record calls that give values to tensors on the meta device, and skip functions of :mod:`torch.nn.init` there. They do nothing on
    that device, in half of a model's construction time.

    Attributes:
        writes: the calls after the last ``reset_parameters`` that filled the tensor. Modules call that method again when they have memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: Writes = {}
        self._call: FrameType | None = None
        self._copies: list[Tensor] = []
        """Copies of tensors with values, kept so that no other tensor gets their storage's address."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        tensor = args[0] if args else kwargs.get("tensor")
        if not isinstance(tensor, Tensor):
            result = func(*args, **kwargs)
            if isinstance(kwargs.get("out"), Tensor):
                self._record(Write(kwargs["out"], name, None, args, kwargs))
            elif isinstance(result, Tensor) and result.is_meta and not name.startswith("empty"):
                here = {"device": "cpu"} if "device" in kwargs else {}
                self._record(Write(result, f"torch.{name}", func, args, kwargs | here, makes=True))
            return result
        if not tensor.is_meta:
            return func(*args, **kwargs)
        if getattr(func, "__module__", None) == nn.init.__name__:
            self._record(Write(tensor, name, func, args[1:], {key: value for key, value in kwargs.items() if key != "tensor"}))
            return tensor
        call = _init_call(sys._getframe(1))
        if call is None and name in _FILLS | _CHANGES:
            self._record(Write(tensor, name, func, args[1:], kwargs))
        elif call is not None and call is not self._call:  # its first look at the tensor: some of these functions then return
            self._call = call
            code = call.f_code
            given = {key: call.f_locals[key] for key in code.co_varnames[1 : code.co_argcount]}
            self._record(Write(call.f_locals["tensor"], code.co_name, getattr(nn.init, code.co_name), (), given))
        result = func(*args, **kwargs)
        if name == "clone" and (known := self.writes.get(tensor.untyped_storage()._cdata)):  # copy.deepcopy calls it, too
            self.writes[result.untyped_storage()._cdata] = list(known)
            self._copies.append(result)
        return result

    def _record(self, write: Write) -> None:
        storage = write.tensor.untyped_storage()._cdata
        if _within_reset():
            self.writes.pop(storage, None)
        else:
            self.writes.setdefault(storage, []).append(write)


def _init_call(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the function of :mod:`torch.nn.init` that was called from outside, if it fills a tensor."""
    outermost = None
    while frame is not None and frame.f_globals.get("__name__") == nn.init.__name__:
        outermost, frame = frame, frame.f_back
    public = outermost is not None and outermost.f_code.co_name.endswith("_") and hasattr(nn.init, outermost.f_code.co_name)
    return outermost if public and outermost is not None and "tensor" in outermost.f_locals else None


def _within_reset() -> bool:
    """Return whether a module fills itself, as it does again when it has memory."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_name not in ("reset_parameters", "_reset_parameters"):
        frame = frame.f_back
    return frame is not None


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def drop_values(model: nn.Module) -> None:
    """Move parameters with values to the meta device, where the others are. ``init_parameter`` fills all of them."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                moved.setdefault(parameter, nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad))
                module._parameters[name] = moved[parameter]


def is_filled(parameter: Tensor, writes: Writes) -> bool:
    """Return whether ``writes`` give all of ``parameter`` values, if repeated in order."""
    found = writes.get(parameter.untyped_storage()._cdata, [])
    return bool(found) and found[0].fills and found[0].tensor.numel() == parameter.numel()


def keep_writes(model: Any, writes: Writes, where: str) -> None:
    """Keep the writes to parameters of ``model`` for :func:`writes_of`.

    Raises:
        ValueError: one can't be repeated, so its values are lost.
    """
    kept = {name: writes.get(parameter.untyped_storage()._cdata, []) for name, parameter in model.named_parameters()}
    for name, lost in ((name, write) for name, found in kept.items() for write in found if not write.is_repeatable):
        raise ValueError(
            f"{where}: {name} gets values by {lost.name} from a tensor without values, since the factory runs on the meta device; fill all "
            f"parameters in a method init_parameter(name, full, generator) of {type(model).__name__}"
        )
    model._factory_writes = kept


def writes_of(model: nn.Module) -> dict[str, list[Write]]:
    """Return the writes of the factory that built ``model``, by the parameter's name."""
    found: Any = getattr(model, "_factory_writes", {})
    return dict(found)
