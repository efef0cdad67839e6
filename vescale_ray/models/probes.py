"""Forwards on the meta device, before any process has values: they tell a model's masks, and sizes that do not fit each other."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

_NEVER_CAUSAL = frozenset({"cpmant", "xlnet"})
"""Types of models whose attention has no causal form."""
_MISFIT = re.compile(
    r"must match|same reduction dim|broadcast|cannot be multiplied|is invalid for input|[Ee]xpected .*(size|shape)|split_with_sizes|"
    r"k not in range"
)
"""Errors of torch about sizes."""
_OF_DEVICE_OR_DTYPE = re.compile(r"\bmeta\b|triton|cuda|device|dtype|float16|fp16|bf16|\bhalf\b", re.IGNORECASE)
"""Errors that a run may not have: its device is another one, and it may cast the parameters, for kernels that take no float32."""


@dataclass(frozen=True)
class Trial:
    """Findings of a forward on the meta device.

    Attributes:
        shape: shape of its tokens.
        output: its result; None if it fails.
        fault: why it fails; None if it does not, or if another device may let it succeed.
        masks: names of transformers' mask functions in the order of the calls, each with whether it got the positions.
        reads_ahead: whether torch's attention to all tokens got neither a mask nor ``is_causal``.
    """

    shape: tuple[int, int]
    output: Any
    fault: str | None
    masks: Sequence[tuple[str, bool]]
    reads_ahead: bool


def try_forward(model: nn.Module, shape: tuple[int, int] = (1, 8), *, positions: bool = False) -> Trial:
    """Run a forward of ``model``, on the meta device, with tokens of this shape.

    Many operations fail on the meta device only. So only errors about sizes or arguments, and assertions, count.

    Args:
        positions: whether the model also gets ``position_ids``.
    """
    given = torch.zeros(shape, dtype=torch.int64, device="meta")
    masks: list[tuple[str, bool]] = []

    def called(name: str) -> Callable[..., None]:
        return lambda *_, position_ids=None, **__: masks.append((name, position_ids is not None))

    output, fault, attention = None, None, _Attention(shape[1])
    try:
        with torch.no_grad(), without_masks(model, called), torch.device("meta"), attention:
            output = model(given, **({"position_ids": given} if positions else {}))
    except Exception as error:
        text = " ".join(str(error).split())
        of_sizes = isinstance(error, RuntimeError) and _MISFIT.search(text) is not None
        of_arguments = isinstance(error, TypeError) and "forward() " in text
        asserted = isinstance(error, AssertionError) and bool(text)
        counts = of_sizes or of_arguments or asserted or isinstance(error, ValueError | ZeroDivisionError)
        fault = f"{type(error).__name__}: {text[:300]}" if counts and not _OF_DEVICE_OR_DTYPE.search(text) else None
    return Trial(shape, output, fault, masks, attention.reads_ahead)


class _Attention(TorchFunctionMode):
    """Notes whether torch's attention to ``tokens`` tokens is open to all of them."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.reads_ahead = tokens, False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            places = {"query": 0, "key": 1, "attn_mask": 3, "is_causal": 5}
            given: dict[str, Any] = {name: args[at] if at < len(args) else kwargs.get(name) for name, at in places.items()}
            query, key, mask, causal = given.values()
            self.reads_ahead |= mask is None and not causal and query.shape[-2] == key.shape[-2] == self.tokens > 1
        elif func is F.multi_head_attention_forward:  # torch calls no observable attention function here; dimension 0 counts the tokens
            open_to_all = kwargs.get("attn_mask") is None and not kwargs.get("is_causal")
            self.reads_ahead |= open_to_all and args[0].shape[0] == args[1].shape[0] == self.tokens > 1
        return func(*args, **kwargs)


def masks_documents(model: nn.Module, trial: Trial) -> bool:
    """Return whether transformers' ``model`` keeps the documents of a sequence apart, given their positions. ``trial``: a forward with
    positions.

    Layers with a state, such as Mamba's, do not, nor architectures that do not pass the positions to transformers' mask functions.
    """
    return not _has_states(model) and bool(trial.masks) and trial.masks[0][1]


def causal_key(model: nn.Module, trial: Trial) -> str | None:
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
    if not trial.masks or not trial.masks[0][0].startswith("create_bidirectional"):
        return None
    return '"is_decoder": true' if hasattr(config, "is_decoder") else ""


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
        if name.startswith("create_") and "mask" in name and getattr(maker, "__module__", "").startswith("transformers.")
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


def _has_states(model: Any) -> bool:
    """Return whether layers carry a state along the sequence: state spaces, linear attention, convolutions."""
    decoder: nn.Module = model.get_decoder() or model
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return (
        bool(getattr(model, "_is_stateful", False))
        or any("linear" in kind for kind in kinds)
        or any(isinstance(module, nn.Conv1d) for module in decoder.modules())
    )
