"""The shapes of a model that is given by its name, its config or as a module."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vescale_ray.errors import BadInput
from vescale_ray.planner.models import architectures
from vescale_ray.planner.models.shapes import ModelShapes, from_module

if TYPE_CHECKING:
    from torch import nn


def model_shapes(model: str | Path | dict[str, Any] | nn.Module, *, experts: Literal["fused", "separate"] = "fused") -> ModelShapes:
    """Return the shapes of a model.

    Args:
        model: a known name (``llama-3-8b``, ..), the path of a ``config.json``, its contents, ``pkg.mod:factory`` (a callable that
            returns a module, or a module class; it is called on the meta device), or a module on any device.
        experts: storage of the experts of a named model or a config: ``"fused"`` stacks or ``"separate"`` matrices.

    Raises:
        BadInput: an unknown name (with the nearest known one), an unknown architecture, or a factory that fails; one line.
    """
    if isinstance(model, dict):
        return architectures.from_config(model, "config").with_experts(experts)
    if isinstance(model, Path) or (isinstance(model, str) and (model.endswith(".json") or "/" in model)):
        return architectures.from_config(_read(Path(model)), str(model)).with_experts(experts)
    if isinstance(model, str):
        if ":" in model:
            return from_module(_build(model), model)
        return architectures.published(model).with_experts(experts)
    return from_module(model, type(model).__name__)


def _read(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: can't be read ({error.strerror}): give a known model's name, a config.json or pkg.mod:factory") from None
    except ValueError as error:
        raise BadInput(f"{path}: not JSON ({error}): give the config.json of a model") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path}: not a JSON object: give the config.json of a model")
    return config


def _build(path: str) -> nn.Module:
    """Call ``pkg.mod:factory`` on the meta device."""
    import importlib
    import sys

    import torch
    from torch import nn

    where, _, attribute = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a console script does not look in the current folder
    try:
        factory: Callable[[], Any] = getattr(importlib.import_module(where), attribute)
        with torch.device("meta"):
            module = factory() if callable(factory) and not isinstance(factory, nn.Module) else factory
    except Exception as error:
        raise BadInput(f"{path}: the model can't be built on the meta device: {type(error).__name__}: {error}") from None
    if not isinstance(module, nn.Module):
        raise BadInput(f"{path}: returned a {type(module).__name__}, not an nn.Module")
    return module
