"""Values that a model's factory gives to parameters. It runs on the meta device, where they are lost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_WRITES = frozenset("normal_ uniform_ fill_ zero_ copy_ mul_ div_ add_ sub_ clamp_ exponential_ __setitem__".split())
"""Methods that write values to a tensor."""


class NoValues(TorchFunctionMode):
    """Skip the functions of :mod:`torch.nn.init` for tensors on the meta device. They do nothing there, in half of a model's construction
    time.

    Attributes:
        assigned: tensors that got values outside of ``reset_parameters``, each with the function. The values are lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.assigned: list[tuple[Tensor, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        tensor, caller = args[0] if args else kwargs.get("tensor"), sys._getframe(1)
        skipped = getattr(func, "__module__", None) == nn.init.__name__
        if not isinstance(tensor, Tensor):
            result = func(*args, **kwargs)
            if name in ("tensor", "as_tensor"):
                self.assigned.append((result, f"torch.{name}"))
            return result
        # Some functions of torch.nn.init only look at a tensor and return, if it is on the meta device.
        initializes = skipped or caller.f_globals.get("__name__") == nn.init.__name__
        if (initializes or name in _WRITES) and tensor.is_meta and not _within_reset():
            self.assigned.append((tensor, name if skipped or not initializes else caller.f_code.co_name.removeprefix("_no_grad_")))
        return tensor if skipped and tensor.is_meta else func(*args, **kwargs)


def _within_reset() -> bool:
    """Return whether a module fills itself, as it does again when it has memory."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name not in ("reset_parameters", "_reset_parameters"):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def drop_values(model: nn.Module) -> None:
    """Move parameters with values to the meta device, where the others are. ``init_parameter`` fills all of them."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                moved.setdefault(parameter, nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad))
                module._parameters[name] = moved[parameter]


def check_kept(model: nn.Module, where: str, assigned: Sequence[tuple[Tensor, str]]) -> None:
    """Refuse values that a factory gives to parameters of torch's own modules, as their ``reset_parameters`` fills these anew."""
    writers = {tensor.untyped_storage()._cdata: writer for tensor, writer in assigned}
    for above, module in model.named_modules():
        for name, parameter in module.named_parameters(above, recurse=False) if type(module).__module__.startswith("torch.") else ():
            if (writer := writers.get(parameter.untyped_storage()._cdata)) is not None:
                raise ValueError(
                    f"{where}: {name} gets values by {writer}, which are lost, since the factory runs on the meta device and "
                    f"reset_parameters() of {type(module).__name__} fills the parameter; fill all parameters in a method "
                    f"init_parameter(name, full, generator) of {type(model).__name__}"
                )
