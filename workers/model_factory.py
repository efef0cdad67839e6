"""The model of ``model.factory``: its shapes from a call on the meta device, its initial values from a call on the CPU.

The second call takes memory for the whole model. It is left out for a model that fills its own parameters and buffers, with
``init_parameter`` and ``init_buffer``.
"""

from __future__ import annotations

import importlib
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vescale_ray.checkpoint.huggingface_layout import persistent_buffers
from vescale_ray.errors import BadInput
from vescale_ray.models import hf

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig


def model_on_meta(config: RunConfig) -> nn.Module:
    """Return the model of ``model.factory``, on the meta device. A factory that can't run there is called on the CPU.

    Raises:
        ValueError: the factory can't be imported, raises, or returns no module, or the model has persistent buffers, or tensors that are
            neither parameters nor buffers.
    """
    where = f"model.factory = {config.model.factory}"
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter in the checkpoint")  # the other call copies
            model = _call(config)
    except ValueError:
        with torch.device("cpu"):
            model = _call(config)
    kept = [] if hf.is_hf(model) else list(persistent_buffers(model))
    if kept:
        raise ValueError(
            f"{where}: persistent buffers {kept[:3]} are no part of a run's state; register them with persistent=False if they are constant"
        )
    moved: dict[Tensor, Any] = {}
    for path, module in model.named_modules():
        for name, tensor in vars(module).items():
            if isinstance(tensor, Tensor) and tensor.is_meta:
                raise ValueError(
                    f"{where}: {path}{'.' if path else ''}{name} is a tensor, but neither a parameter nor a buffer; register it with "
                    f"register_buffer({name!r}, tensor, persistent=False)"
                )
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not tensor.is_meta:
                    if tensor not in moved:
                        empty = tensor.detach().to("meta")
                        moved[tensor] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                    tensors[name] = moved[tensor]
    return model


def model_with_values(
    config: RunConfig, tensors: Iterable[tuple[str, Tensor]], remedy: str, beat: Callable[[], None] = lambda: None
) -> nn.Module:
    """Return the model of ``model.factory`` with its values, on the CPU. Memory that nothing fills is NaN.

    Random values depend on ``run.seed`` alone, if they are torch's, NumPy's or Python's.

    Args:
        tensors: names and global shapes of the parameters or buffers that are needed.
        remedy: what the user does if there is too little memory.
        beat: called at each torch function that the factory calls.

    Raises:
        BadInput: there is too little memory, the factory raises, or one of the tensors is missing, has another shape, or holds NaN.
    """
    where, needed = f"model.factory = {config.model.factory}", dict(tensors)
    size, free = sum(tensor.numel() * tensor.itemsize for tensor in needed.values()), psutil.virtual_memory().available
    if size > free:
        raise BadInput(
            f"{where}: its values take {size / 2**30:.1f} GiB of memory in each worker, and {free / 2**30:.1f} GiB are free; {remedy}"
        )
    try:
        with torch.device("cpu"), _nan_in_new_memory(), _Beating(beat):
            model = _call(config)
    except ValueError as error:
        raise BadInput(str(error)) from error
    found = dict([*model.named_parameters(), *model.named_buffers()])
    for name, like in needed.items():
        value = found.get(name)
        if value is None or value.shape != like.shape:
            has = "no such tensor" if value is None else f"shape {tuple(value.shape)}"
            raise BadInput(f"{where}: {name} has shape {tuple(like.shape)} on the meta device, but on the CPU {has}; build the same model")
        if value.is_floating_point() and value.itemsize > 1 and value.isnan().any():
            raise BadInput(f"{where}: {name} gets no values, or NaN; fill it in the constructor of its module")
    return model


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
        with _seeded(config.run.seed):
            built: Any = factory(**arguments)
    except Exception as error:
        called = f"model.args = {arguments}" if arguments else "no arguments"
        raise ValueError(f"model.factory = {path} with {called} raises {type(error).__name__}: {error}") from error
    if not isinstance(built, nn.Module):
        what = f"the class {built.__name__}" if isinstance(built, type) else f"a {type(built).__name__}"
        raise ValueError(f"model.factory = {path}: it returns {what}; give a function that returns a torch.nn.Module")
    return built


class _Beating(TorchFunctionMode):
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
