"""Checks of a run's model and loss function before a worker starts, on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vescale_ray.config import VOCAB
from vescale_ray.controller.protocol import RunRefused

if TYPE_CHECKING:
    from torch import Tensor

    from vescale_ray.config import RunConfig


def check_causal(hf: str, model: Any) -> None:
    """Refuse a model that reads the tokens that it is to predict."""
    from vescale_ray.models.hf import sees_ahead

    if sees_ahead(model):
        key = '"is_decoder": true' if hasattr(model.config, "is_decoder") else '"use_bidirectional_attention": false'
        raise RunRefused(
            f"model.hf = {hf}: {type(model).__name__} is an encoder, whose attention reads the tokens that training predicts; give a "
            f"causal model, or set {key} in its config.json"
        )


def check_document_mask(model: Any) -> None:
    """Refuse ``data.document_mask`` for a model that takes no positions, or whose attention ignores them."""
    from vescale_ray.models.hf import is_hf, masks_documents

    kind = type(model).__name__
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise RunRefused(f"data.document_mask = true: {kind}.forward takes no position_ids; add them, or set it to false")
    if is_hf(model) and not masks_documents(model):
        raise RunRefused(f"data.document_mask = true: the layers of transformers' {kind} do not keep documents apart; set it to false")


def check_vocabulary(model: Any, config: RunConfig) -> None:
    """Refuse a model of the user's whose embeddings have no row for some tokens. It would fail in a step, on a GPU without a reason."""
    rows = [int(module.num_embeddings) for module in model.modules() if hasattr(module, "num_embeddings")]
    vocab = config.data.vocab or VOCAB
    if rows and max(rows) < vocab:
        raise RunRefused(
            f"data.vocab = {vocab}: the embedding of model.factory = {config.model.factory} has {max(rows)} rows; "
            "give the model a row for each token"
        )


def check_factory(model: Any, config: RunConfig) -> None:
    """Refuse a model of ``model.factory`` that trains nothing, or whose forward does not return logits of all tokens.

    The forward runs on the meta device. If it can't, as it reads values, nothing is known.
    """
    import torch

    where = f"model.factory = {config.model.factory}: "
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RunRefused(f"{where}no parameter has requires_grad, so there is nothing to train")
    if config.model.loss is not None:
        return
    tokens = torch.zeros(1, config.data.seq_len, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), torch.device("meta"):
            output = model(tokens)
    except Exception:
        return
    logits, vocab = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None), config.data.vocab or VOCAB
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        found = f"a {type(output).__name__}" if not isinstance(logits, torch.Tensor) else f"logits of {logits.dim()} dimensions"
        raise RunRefused(f"{where}its forward returns {found}; return logits (batch, seq_len, vocab), or set model.loss")
    if logits.shape[-1] < vocab:
        raise RunRefused(f"{where}its forward returns logits of {logits.shape[-1]} tokens, but data.vocab = {vocab}; give each token one")


def check_loss(path: str, function: Callable[[Any, Tensor], Any], vocab: int) -> None:
    """Refuse a loss function that does not return one sum over the targets, by a call with random logits.

    If the function takes another output than logits, nothing is known.
    """
    import torch

    logits = torch.randn(2, 4, vocab, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(8).view(2, 4) % vocab
    first, second = targets.index_fill(0, torch.tensor([1]), -100), targets.index_fill(0, torch.tensor([0]), -100)
    try:
        with torch.no_grad():
            results = [function(logits, one) for one in (targets, first, second)]
            results.append(function(logits.repeat(2, 1, 1), targets.repeat(2, 1)))  # a mean over all positions stays, a sum doubles
    except Exception:
        return
    if not all(isinstance(one, torch.Tensor) and one.numel() == 1 for one in results):
        what = next(one for one in results if not (isinstance(one, torch.Tensor) and one.numel() == 1))
        shape = f" of shape {list(what.shape)}" if isinstance(what, torch.Tensor) else ""
        raise RunRefused(f"model.loss = {path}: it returns a {type(what).__name__}{shape}; return the sum over the targets, one number")
    whole, *halves, twice = (float(one) for one in results)
    if abs(whole - sum(halves) / 2) < 1e-4 * abs(whole) or abs(whole - twice) < 1e-4 * abs(whole):
        raise RunRefused(f"model.loss = {path}: it returns the mean over the targets; return their sum (reduction='sum')")
