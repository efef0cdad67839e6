"""Forwards on the meta device, before any process has values: they tell a model's masks, and sizes that do not fit each other."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_NEVER_CAUSAL = frozenset({"cpmant", "xlnet"})
"""Types of models whose attention has no causal form."""
_MISFIT = re.compile(
    r"must match|same reduction dim|broadcast|cannot be multiplied|is invalid for input|[Ee]xpected .*(size|shape)|split_with_sizes"
)
"""Errors of torch about sizes."""
_OF_DEVICE_OR_DTYPE = re.compile(r"\bmeta\b|triton|cuda|device|dtype|float16|fp16|bf16|\bhalf\b", re.IGNORECASE)
"""Errors that a run may not have: its device is another one, and it may cast the parameters, for kernels that take no float32."""


def masks_documents(model: nn.Module) -> bool:
    """Return whether the layers of transformers' ``model``, on the meta device, keep documents apart if they get the positions.

    Layers with a state, such as Mamba's, do not. Not every architecture hands the positions to transformers' mask functions.
    """
    return not _has_states(model) and _first_mask(model)[1]


def causal_key(model: nn.Module) -> str | None:
    """Return the setting of config.json that would make ``model`` causal, for example ``"is_causal": true``.

    ``model`` is a transformers model on the meta device. None: it is causal already. Empty: no setting makes it causal. Encoders attend to
    later tokens, as BERT does without ``is_decoder``.
    """
    config: Any = model.config
    text = config.get_text_config()
    for key, causal in (("is_causal", True), ("causal", True), ("use_bidirectional_attention", False)):
        if getattr(text, key, causal) is (not causal):
            return f'"{key}": {str(causal).lower()}'
    if config.model_type in _NEVER_CAUSAL:
        return ""
    if not _first_mask(model)[0].startswith("create_bidirectional"):
        return None
    return '"is_decoder": true' if hasattr(config, "is_decoder") else ""


def forward_fault(model: nn.Module, shape: tuple[int, int], *, positions: bool = False) -> str | None:
    """Return why a forward of ``model``, on the meta device, fails with tokens of this shape; None if it does not, or can't be known.

    Many operations fail on the meta device only. So only errors about sizes or arguments count.

    Args:
        positions: whether the model also gets ``position_ids``.
    """
    given = torch.zeros(shape, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), without_masks(model), torch.device("meta"):
            model(given, **({"position_ids": given} if positions else {}))
    except Exception as error:
        text = " ".join(str(error).split())
        of_sizes = isinstance(error, RuntimeError) and _MISFIT.search(text) is not None
        of_arguments = isinstance(error, TypeError) and "forward() " in text
        if (of_sizes or of_arguments or isinstance(error, ValueError)) and not _OF_DEVICE_OR_DTYPE.search(text):
            return f"{type(error).__name__}: {text[:300]}"
    return None


@contextmanager
def without_masks(model: nn.Module, made: Callable[[str], Any] = lambda name: lambda *_, **__: None) -> Iterator[dict[str, Any]]:
    """Replace transformers' mask functions, which look at values, in the modules of ``model``; yields the functions by name.

    Args:
        made: returns the function that takes the place of the one of this name. By default it returns no mask.
    """
    files = {type(one).__module__: sys.modules[type(one).__module__] for one in model.modules()}
    makers = [
        (file, name, maker)
        for file in files.values()
        for name, maker in vars(file).items()
        if name.startswith("create_") and "mask" in name and callable(maker)
    ]
    warning = [one for one in model.modules() if hasattr(one, "warn_if_padding_and_no_attention_mask")]
    for one in warning:
        one.warn_if_padding_and_no_attention_mask = lambda *_: None  # type: ignore[assignment]  # it looks for padding in the tokens
    for file, name, _ in makers:
        setattr(file, name, made(name))
    try:
        yield {name: maker for _, name, maker in makers}
    finally:
        for one in warning:
            del one.warn_if_padding_and_no_attention_mask
        for file, name, maker in makers:
            setattr(file, name, maker)


def _first_mask(model: nn.Module) -> tuple[str, bool]:
    """Return the first of transformers' mask functions that a forward of ``model`` calls, and whether it gets the positions.

    The name is empty if there is none. The forward runs up to there.
    """

    class Reached(Exception):
        pass

    def reaching(name: str) -> Any:
        def reached(*_: Any, position_ids: Tensor | None = None, **__: Any) -> None:
            raise Reached(name, position_ids is not None)

        return reached

    tokens = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    positions = {"position_ids": tokens} if "position_ids" in inspect.signature(model.forward).parameters else {}
    try:
        with without_masks(model, reaching) as makers:
            if makers:
                model(tokens, **positions)
    except Reached as how:
        name, told = how.args
        return name, told
    except Exception:  # some look at values before they make a mask
        return "", False
    return "", False


def _has_states(model: Any) -> bool:
    """Return whether layers carry a state along the sequence: state spaces, linear attention, convolutions."""
    decoder: nn.Module = model.get_decoder() or model
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return (
        bool(getattr(model, "_is_stateful", False))
        or any("linear" in kind for kind in kinds)
        or any(isinstance(module, nn.Conv1d) for module in decoder.modules())
    )
