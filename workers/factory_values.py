"""Values that a model's factory gives to parameters in place. It runs on the meta device, so they are given again when there is memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from types import EllipsisType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_FILLS = frozenset(
    "normal_ uniform_ fill_ zero_ copy_ exponential_ random_ bernoulli_ log_normal_ cauchy_ geometric_".split()
)
"""Methods that give a tensor new values."""
_IN_PLACE = re.compile(r"[a-z]\w*_|__setitem__|__i(?!nt__|nit__|ndex__|nvert__|ter__)\w+__")
"""Methods that change a tensor in place. Most change its values."""
_KEEPING = frozenset("requires_grad_ detach_ share_memory_ rename_".split())
"""Methods in place that keep the values."""
_CONVERSIONS = frozenset("clone to float half bfloat16 double type".split())
"""Methods that return a tensor with the values of another one."""
MOST_CALLS = 1000
"""Calls that may give the values of an argument. Those of an iteration that uses its result several times double each time."""
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
        """True if no argument is a tensor on the meta device whose values are lost."""
        given = list(_flat([self.args, list(self.kwargs.values())]))
        lost = any(value.is_meta if isinstance(value, Tensor) else isinstance(value, Values) and not value.are_known for value in given)
        return self.function is not None and not lost

    @property
    def fills(self) -> bool:
        """True if the values do not depend on earlier ones."""
        if self.name == "__setitem__":
            return self.args[0] in (Ellipsis, slice(None)) if isinstance(self.args[0], EllipsisType | slice) else False
        return self.makes or self.name in _FILLS or hasattr(nn.init, self.name)

    def repeat(self, parameter: Tensor) -> None:
        """Give the values to the same part of ``parameter``, which has memory."""
        part = parameter.as_strided(self.tensor.size(), self.tensor.stride(), self.tensor.storage_offset())
        args, kwargs = _given(self.args), {key: _given(value) for key, value in self.kwargs.items()}
        if self.makes:
            part.copy_(self.function(*args, **kwargs))
        else:
            self.function(part, *args, **kwargs)


@dataclass(frozen=True)
class Values:
    """A tensor on the meta device, as an argument, with the calls that have given it values."""

    tensor: Tensor
    writes: tuple[Write, ...]

    @property
    def are_known(self) -> bool:
        """True if the calls give all of its values, and can be repeated."""
        whole = bool(self.writes) and self.writes[0].fills and self.writes[0].tensor.numel() * self.tensor.itemsize == self._bytes
        return whole and all(write.is_repeatable for write in self.writes)

    @cached_property
    def calls(self) -> int:
        """Number of calls that give the values, with those of their arguments."""
        given = (value for write in self.writes for value in _flat([write.args, list(write.kwargs.values())]))
        return len(self.writes) + sum(value.calls for value in given if isinstance(value, Values))

    @property
    def _bytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()

    def again(self) -> Tensor:
        """Return a tensor with memory and these values."""
        whole = torch.empty(self._bytes // self.tensor.itemsize, dtype=self.tensor.dtype)
        for write in self.writes:
            write.repeat(whole)
        return whole.as_strided(self.tensor.size(), self.tensor.stride(), self.tensor.storage_offset())


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

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        tensor = args[0] if args else kwargs.get("tensor")
        call = _init_call(sys._getframe(1))
        if getattr(func, "__module__", None) == nn.init.__name__ and isinstance(tensor, Tensor) and tensor.is_meta:
            self._record(Write(tensor, name, func, args[1:], {key: value for key, value in kwargs.items() if key != "tensor"}))
            return tensor
        if call is not None:
            if isinstance(tensor, Tensor) and tensor.is_meta and call is not self._call:  # its first look: some then return
                self._call = call
                code = call.f_code
                given = {key: call.f_locals[key] for key in code.co_varnames[1 : code.co_argcount]}
                self._record(Write(call.f_locals["tensor"], code.co_name, getattr(nn.init, code.co_name), (), given))
            return func(*args, **kwargs)
        if isinstance(tensor, Tensor) and tensor.is_meta and name not in _KEEPING and _IN_PLACE.fullmatch(name):
            if not (name == "__setitem__" and _is_itself(*args)):
                given = {key: self._values(value) for key, value in kwargs.items()}
                self._record(Write(tensor, name, func, self._values(args[1:]), given))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(kwargs.get("out"), Tensor):
            self._record(Write(kwargs["out"], name, None, args, kwargs))
        elif isinstance(result, Tensor) and result.is_meta and not name.startswith(("empty", "new_empty")):
            self._made(result, name, func, args, kwargs)
        return result

    def _made(self, result: Tensor, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call that has returned ``result``, unless it is a view or an argument."""
        storage = _storage(result)
        if not storage:
            return
        sources = [value for value in _flat([args, list(kwargs.values())]) if isinstance(value, Tensor)]
        if any(_storage(source) == storage for source in sources):
            return
        if name in _CONVERSIONS and not sources[0].is_meta:
            self._record(Write(result, name, Tensor.clone, (sources[0].detach(),), {}, makes=True))
            return
        if name in _CONVERSIONS:  # copy.deepcopy calls clone
            if known := self.writes.get(_storage(sources[0])):
                kept = result.detach()
                self.writes[storage] = [replace(write, tensor=_part(kept, write.tensor)) for write in known]
            return
        if name.endswith("_like") or name.startswith("new_"):  # only the size and the data type of the source matter
            args = (Values(sources[0].detach(), (Write(sources[0].detach(), "zero_", Tensor.zero_, (), {}),)), *args[1:])
        here = {"device": "cpu"} if "device" in kwargs else {}
        given = {key: self._values(value) for key, value in kwargs.items()} | here
        self._record(Write(result, f"torch.{name}", func, self._values(args), given, makes=True))

    def _values(self, given: Any) -> Any:
        """Replace tensors on the meta device in arguments by :class:`Values`."""
        if isinstance(given, Tensor) and given.is_meta:
            found = Values(given.detach(), tuple(self.writes.get(_storage(given), ())))
            return found if found.calls <= MOST_CALLS else Values(given.detach(), ())
        return type(given)(map(self._values, given)) if type(given) in (list, tuple) else given

    def _record(self, write: Write) -> None:
        # A parameter's data may get another storage later; the alias keeps this one, so that no other tensor gets its address.
        write, storage = replace(write, tensor=write.tensor.detach()), _storage(write.tensor)
        if _within_reset(storage):
            self.writes.pop(storage, None)
        elif write.fills and write.tensor.numel() * write.tensor.itemsize == write.tensor.untyped_storage().nbytes():
            self.writes[storage] = [write]
        else:
            self.writes.setdefault(storage, []).append(write)


def _init_call(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the function of :mod:`torch.nn.init` that was called from outside, if it fills a tensor."""
    outermost = None
    while frame is not None and frame.f_globals.get("__name__") == nn.init.__name__:
        outermost, frame = frame, frame.f_back
    public = outermost is not None and outermost.f_code.co_name.endswith("_") and hasattr(nn.init, outermost.f_code.co_name)
    return outermost if public and outermost is not None and "tensor" in outermost.f_locals else None


def _within_reset(storage: int) -> bool:
    """Return whether a module fills its own parameter of this storage in ``reset_parameters``, as it does again when it has memory."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "reset_parameters" and isinstance(owner := frame.f_locals.get("self"), nn.Module):
            if any(parameter is not None and _storage(parameter) == storage for parameter in owner._parameters.values()):
                return True
        frame = frame.f_back
    return False


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _is_itself(tensor: Tensor, index: Any, value: Any) -> bool:
    """Return whether ``value`` is the part of ``tensor`` that it is assigned to, as in ``tensor[index] *= 2`` after the product."""
    if not isinstance(value, Tensor) or not value.is_meta or _storage(value) != _storage(tensor):
        return False
    part = tensor[index]
    return (part.storage_offset(), part.size(), part.stride()) == (value.storage_offset(), value.size(), value.stride())


def _part(whole: Tensor, like: Tensor) -> Tensor:
    return whole.as_strided(like.size(), like.stride(), like.storage_offset())


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, list | tuple):
        for value in values:
            yield from _flat(value)
    else:
        yield values


def _given(given: Any) -> Any:
    """Return arguments with :class:`Values` as tensors."""
    if isinstance(given, Values):
        return given.again()
    return type(given)(map(_given, given)) if type(given) in (list, tuple) else given


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
    # Values from another parameter are random once more if they are repeated.
    storages = {_storage(parameter) for parameter in model.parameters()}
    for name, lost in ((name, write) for name, found in kept.items() for write in found if not _can_repeat(write, storages)):
        raise ValueError(
            f"{where}: {name} gets values by {lost.name} from a tensor without values, since the factory runs on the meta device; fill all "
            f"parameters in a method init_parameter(name, full, generator) of {type(model).__name__}"
        )
    model._factory_writes = kept


def _can_repeat(write: Write, parameters: set[int]) -> bool:
    sources = [value for value in _flat([write.args, list(write.kwargs.values())]) if isinstance(value, Values)]
    like = write.name.removeprefix("torch.")
    shared = not (like.endswith("_like") or like.startswith("new_")) and any(_storage(source.tensor) in parameters for source in sources)
    return write.is_repeatable and not shared


def writes_of(model: nn.Module) -> dict[str, list[Write]]:
    """Return the writes of the factory that built ``model``, by the parameter's name."""
    found: Any = getattr(model, "_factory_writes", {})
    return dict(found)
