"""The model of ``model.factory``: its shapes from a call on the meta device, its initial values from a call on the CPU.

The second call takes memory for the whole model. It is left out for a model that fills its own parameters and buffers, with
``init_parameter`` and ``init_buffer``.
"""

from __future__ import annotations

import copy
import importlib
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from vescale_ray.checkpoint.huggingface_layout import persistent_buffers
from vescale_ray.compat.core import GLOBAL_DEVICE_CONTEXT
from vescale_ray.errors import BadInput
from vescale_ray.models import hf
from vescale_ray.workers.building.host_memory import free_memory

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig


def model_on_meta(config: RunConfig) -> nn.Module:
    """Return the model of ``model.factory``, on the meta device. A factory that can't run there is called on the CPU.

    Raises:
        ValueError: the factory can't be imported, raises, or returns no module or the same one again, or the model has persistent buffers,
            lazy parameters, or tensors that are neither parameters nor buffers.
    """
    where = f"model.factory = {config.model.factory}"
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter in the checkpoint")  # the CPU call copies
            model = _call(config)
    except ValueError as error:
        if error.__cause__ is None or isinstance(error.__cause__, OSError | ImportError):
            raise  # the CPU would not help
        with torch.device("cpu"):
            model = _call(config)
    else:
        if not any(tensor.is_meta for tensor in model.parameters()) and _call(config) is model:
            raise ValueError(f"{where}: it returns the same module at each call; return copy.deepcopy(..) of it, or build a new one")
    if (lazy := next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)) is not None:
        raise ValueError(f"{where}: {lazy} has no shape yet; call the model once in the factory, or give the layer its input size")
    kept = [] if hf.is_hf(model) else list(persistent_buffers(model))
    if kept:
        raise ValueError(
            f"{where}: persistent buffers {kept[:3]} are no part of a run's state; register them with persistent=False if they are "
            "constant, or leave them out (BatchNorm: track_running_stats=False)"
        )
    moved: dict[Tensor, Any] = {}
    for path, module in model.named_modules():
        if (fault := _plain_tensor(module)) is not None:
            raise ValueError(f"{where}: {path}{'.' if path else ''}{fault}")
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not tensor.is_meta:
                    if tensor not in moved:
                        empty = tensor.detach().to("meta")
                        moved[tensor] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                    tensors[name] = moved[tensor]
    return model


def _plain_tensor(module: nn.Module) -> str | None:
    """Return what is wrong with a tensor of ``module`` that is neither a parameter nor a buffer; None if it has none on the meta device."""
    for name, value in vars(module).items():
        if value is module._parameters or value is module._buffers:
            continue
        several = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
        found = [value] if several is None else several
        if any(isinstance(one, Tensor) and not isinstance(one, nn.Parameter) and one.is_meta for one in found):
            if f"{name}_g" in module._parameters:
                return f"{name} is computed by torch.nn.utils.weight_norm; use torch.nn.utils.parametrizations.weight_norm"
            if several is not None:
                return f"{name} holds tensors that are neither parameters nor buffers; register each as a buffer, persistent=False"
            remedy = f"register it with register_buffer({name!r}, tensor, persistent=False)"
            return f"{name} is a tensor, but neither a parameter nor a buffer; {remedy}"
    return None


def initial_tensors(
    config: RunConfig,
    model: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    remedy: str,
    beat: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """Return initial values of parameters or buffers, from a call of ``model.factory`` on the CPU. Memory that nothing fills is NaN.

    Random values depend on ``run.seed`` alone, if they are torch's, Python's, or of NumPy's global generator.

    Args:
        model: an earlier result of :func:`model_on_meta`, perhaps sharded since.
        tensors: names and global shapes of the parameters or buffers of ``model`` that are needed.
        remedy: what the user does if there is too little memory.
        beat: called at each torch function that the factory calls. What it raises ends the factory, and is raised here.

    Raises:
        BadInput: there is too little memory, the factory raises or returns another model, or a tensor holds NaN.
    """
    where, needed = f"model.factory = {config.model.factory}", dict(tensors)
    size = sum(tensor.numel() * tensor.itemsize for tensor in [*model.parameters(), *model.buffers()])
    free = free_memory()
    if size > free:
        raise BadInput(
            f"{where}: its values take {size / 2**30:.1f} GiB of memory in each worker, and {free / 2**30:.1f} GiB are free; {remedy}"
        )
    try:
        with torch.device("cpu"), _nan_in_new_memory(), Beating(beat):
            built = _call(config)
    except ValueError as error:
        beat()  # raises its own error if that is what ended the factory
        raise BadInput(str(error)) from error
    found, known = dict([*built.named_parameters(), *built.named_buffers(remove_duplicate=False)]), dict(model.named_parameters())
    if (more := next((name for name, _ in built.named_parameters() if name not in known), None)) is not None:
        raise BadInput(f"{where}: {more} is a parameter on the CPU, but not on the meta device; build the same model")
    memory: dict[int, str] = {}
    for name, like in needed.items():
        value = found.get(name)
        if value is None or value.shape != like.shape:
            has = "no such tensor" if value is None else f"shape {tuple(value.shape)}"
            raise BadInput(f"{where}: {name} has shape {tuple(like.shape)} on the meta device, but on the CPU {has}; build the same model")
        if built is model or value.is_meta:
            raise BadInput(f"{where}: {name} is on the meta device at each call; build a new module in each, on the current device")
        other = memory.setdefault(value.data_ptr(), name) if isinstance(value, nn.Parameter) and value.numel() else name
        if other != name:
            raise BadInput(f"{where}: {other} and {name} are two parameters in the same memory; give both modules the same parameter")
        if value.is_floating_point() and value.itemsize > 1 and value.isnan().any():
            raise BadInput(f"{where}: {name} gets no values, or NaN; fill it in the constructor of its module")
    return {name: found[name].detach() for name in needed}


def _call(config: RunConfig) -> nn.Module:
    """Call ``model.factory`` on the current device, with the seed of the run. Raises ValueError if that gives no module."""
    path, arguments = config.model.factory, config.model.args
    assert path is not None
    try:
        factory = config.given.model or function_of(path)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model.factory = {path}: {error}; {_importable(path)}") from None
    except Exception as error:
        raise ValueError(f"model.factory = {path}: its import raises {type(error).__name__}: {error}") from error
    try:
        with _seeded(config.run.seed), _same_defaults():
            built: Any = factory(**copy.deepcopy(arguments))  # a factory may pop keys
    except Exception as error:
        called = f"model.args = {arguments}" if arguments else "no arguments"
        raise ValueError(f"model.factory = {path} with {called} raises {type(error).__name__}: {error}") from error
    if not isinstance(built, nn.Module):
        what = f"the class {built.__name__}" if isinstance(built, type) else f"a {type(built).__name__}"
        raise ValueError(f"model.factory = {path}: it returns {what}; give a function that returns a torch.nn.Module")
    return built


class Beating(TorchFunctionMode):
    """Calls ``beat`` at each torch function: values of a large model take minutes, longer than a worker may stand still."""

    def __init__(self, beat: Callable[[], None]) -> None:
        super().__init__()
        self._beat = beat

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self._beat()
        return func(*args, **(kwargs or {}))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the random generators of torch, NumPy and Python within the block."""
    arrays, numbers = np.random.get_state(), random.getstate()
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(arrays)
            random.setstate(numbers)


@contextmanager
def _same_defaults() -> Iterator[None]:
    """Undo a change of torch's default dtype or device within the block. A new default device would keep the current one in effect."""
    dtype, device = torch.get_default_dtype(), getattr(GLOBAL_DEVICE_CONTEXT, "device_context", None)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if getattr(GLOBAL_DEVICE_CONTEXT, "device_context", None) is not device:
            torch.set_default_device(None if device is None else device.device)


@contextmanager
def _nan_in_new_memory() -> Iterator[None]:
    """Let ``torch.empty`` return NaN within the block."""
    settings: Any = torch.utils.deterministic  # type: ignore[attr-defined]
    strict, quiet, fills = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(strict, warn_only=quiet)


def loss_function(path: str) -> Any:
    """Return the function of ``model.loss``.

    Raises:
        ValueError: it can't be imported.
    """
    try:
        return function_of(path)
    except Exception as error:
        raise ValueError(f"model.loss = {path}: {type(error).__name__}: {error}; {_importable(path)}") from None


def function_of(path: str) -> Any:
    """Return the function ``pkg.mod:name``. Raises ImportError or AttributeError if there is none."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _importable(path: str | None) -> str:
    """Return the remedy for a function that can't be imported. A console script does not look for modules in the current folder."""
    module, _, name = (path or "").partition(":")
    file = Path(*module.removesuffix(".py").split(".")).with_suffix(".py")
    if str(Path.cwd()) in sys.path or "" in sys.path or not file.is_file():
        return "give an importable pkg.mod:function"
    return f"write {'.'.join(file.with_suffix('').parts)}:{name}, and set the variable PYTHONPATH=. for {file} in this folder"
