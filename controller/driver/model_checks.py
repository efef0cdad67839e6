"""Checks of a run's model and loss function before a worker starts, on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale_ray.config import VOCAB
from vescale_ray.controller.protocol import RunRefused
from vescale_ray.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from vescale_ray.config import RunConfig
    from vescale_ray.models.probes import Trial

_TOKENS = 8
"""Tokens of a forward on the meta device. State space models loop over them."""


def _named(config: RunConfig) -> str:
    return f"model.hf = {config.model.hf}" if config.model.hf is not None else f"model.factory = {config.model.factory}"


def check_model(model: Any, config: RunConfig) -> list[str]:
    """Check a model without changing it, with one forward on the meta device. Return warnings."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RunRefused(f"{_named(config)}: no parameter has requires_grad, so there is nothing to train")
    check_vocabulary(model, config)
    if config.data.document_mask and "position_ids" not in inspect.signature(model.forward).parameters:
        kind = type(model).__name__
        raise RunRefused(f"data.document_mask = true: {kind}.forward takes no position_ids; add them, or set it to false")
    trial = _tried(model, config)
    open_to_all = config.given.dataset is None and check_causal(model, config, trial)
    if config.data.document_mask:
        check_document_mask(model, trial)
    check_forward(model, config, trial)
    return [open_to_all] if open_to_all else []


def _tried(model: Any, config: RunConfig) -> Trial:
    from vescale_ray.models.hf import is_hf
    from vescale_ray.models.probes import try_forward

    whole, positions = (config.train.slot_batch, config.data.seq_len), config.data.document_mask
    if is_hf(model):
        trial = try_forward(model, (1, min(_TOKENS, config.data.seq_len)), positions=positions)
        if trial.fault is None:  # some layers, as Reformer's, take whole chunks of tokens only
            return trial
    return try_forward(model, whole, positions=positions)


def check_causal(model: Any, config: RunConfig, trial: Trial) -> str | None:
    """Refuse a transformers model whose attention sees the tokens that it has to predict. Return a warning for another such model."""
    from vescale_ray.models.hf import is_hf
    from vescale_ray.models.probes import causal_key

    if not is_hf(model):
        if not trial.reads_ahead:
            return None
        return (
            f"{_named(config)}: its attention reads the tokens that training predicts (it has neither a mask nor is_causal); "
            "if that is not meant, make it causal"
        )
    if (key := causal_key(model, trial)) is None:
        return None
    remedy = f", or set {key} in its {'config.json' if config.model.hf else 'configuration'}" if key else ""
    raise RunRefused(
        f"{_named(config)}: {type(model).__name__} is an encoder, whose attention reads the tokens that training predicts; give a causal "
        f"model{remedy}"
    )


def check_forward(model: Any, config: RunConfig, trial: Trial) -> None:
    """Refuse a model whose forward fails because its sizes do not fit each other, or that returns no logits of all tokens."""
    import torch

    from vescale_ray.models.config_faults import misfit
    from vescale_ray.models.hf import CONFIG

    fault, output = trial.fault, trial.output
    if fault is not None and config.model.hf is not None:
        fault = misfit(Path(config.model.hf) / CONFIG) or fault
        raise RunRefused(f"{_named(config)}: a forward of {type(model).__name__} fails ({fault}); correct its config.json")
    if fault is not None:
        raise RunRefused(f"{_named(config)}: its forward fails with tokens {trial.shape}: {fault}; correct it")
    if output is None or config.model.loss is not None:
        return
    logits, vocab = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None), config.data.vocab or VOCAB
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        found = f"a {type(output).__name__}" if not isinstance(logits, torch.Tensor) else f"logits of {logits.dim()} dimensions"
        remedy = "return logits (batch, seq_len, vocab), or set model.loss"
    elif logits.shape[:2] != trial.shape:
        found, remedy = f"logits {tuple(logits.shape)} for tokens {trial.shape}", "return those of each token, (batch, seq_len, vocab)"
    elif logits.shape[-1] < vocab:
        found, remedy = f"logits of {logits.shape[-1]} tokens, but data.vocab = {vocab}", "give each token one"
    else:
        return
    raise RunRefused(f"{_named(config)}: its forward returns {found}; {remedy}")


def check_selective(model: Any, config: RunConfig) -> None:
    """Refuse ``train.activation_checkpointing: selective`` for a model that changes kept results in place. The model is not used further.

    If forward and backward can't run on the meta device, the check proves nothing, and a fault shows in the first step.
    """
    import torch

    from vescale_ray.models.probes import without_masks
    from vescale_ray.models.unit_selection import select_units
    from vescale_ray.workers.building.unit_forward import kept_results, recompute_selectively

    model.to(torch.bfloat16)  # grouped matrix products take no other dtype on the meta device
    recompute_selectively(select_units(model, config.model.units))
    tokens = torch.zeros(1, min(_TOKENS, config.data.seq_len), dtype=torch.int64, device="meta")
    try:
        with without_masks(model), torch.device("meta"), kept_results():
            output = model(tokens)
            (output if isinstance(output, torch.Tensor) else output.logits).float().sum().backward()
    except BadInput:
        raise
    except Exception:
        return


def check_document_mask(model: Any, trial: Trial) -> None:
    """Refuse ``data.document_mask`` for a model of transformers whose attention ignores positions."""
    from vescale_ray.models.hf import is_hf
    from vescale_ray.models.probes import masks_documents

    if is_hf(model) and not masks_documents(model, trial):
        kind = type(model).__name__
        raise RunRefused(f"data.document_mask = true: the layers of transformers' {kind} do not keep documents apart; set it to false")


def without_products(model: Any, policy: Any) -> list[str]:
    """Return a warning if the policy gives an FP8 format to weights that no layer with FP8 products holds, as fused experts."""
    from vescale_ray.quantization.products import Fp8Linear

    held = {id(module.weight) for module in model.modules() if isinstance(module, Fp8Linear)}
    names = [name for name, p in model.named_parameters() if id(p) not in held and policy(name, p) is not None]
    if not names:
        return []
    more = f" and {len(names) - 1} more weights" if len(names) > 1 else ""
    return [f"train.quantize_products = true: {names[0]}{more} multiply in train.param_dtype, since only linear layers have FP8 products"]


def check_vocabulary(model: Any, config: RunConfig) -> None:
    """Refuse a model whose embeddings have fewer rows than the data has token ids. It would fail in a step, on a GPU without a clear
    error."""
    rows = [int(module.num_embeddings) for module in model.modules() if hasattr(module, "num_embeddings")]
    vocab = config.data.vocab or VOCAB
    if rows and max(rows) < vocab:
        raise RunRefused(
            f"data.vocab = {vocab}: the embedding of model.factory = {config.model.factory} has {max(rows)} rows; "
            "give the model a row for each token"
        )


def check_loss(path: str, function: Callable[[Any, Tensor], Any], vocab: int) -> None:
    """Refuse a loss function that does not return one sum over the targets, by a call with random logits.

    If the function takes an output other than logits, the check proves nothing.
    """
    import torch

    logits = torch.randn(2, 4, vocab, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(8).view(2, 4) % vocab
    first, second = targets.index_fill(0, torch.tensor([1]), -100), targets.index_fill(0, torch.tensor([0]), -100)
    try:
        with torch.no_grad():
            results = [function(logits, one) for one in (targets, first, second)]
            results.append(function(logits.repeat(2, 1, 1), targets.repeat(2, 1)))  # a mean over all positions stays, a sum doubles
    except Exception as error:
        if isinstance(error, TypeError) and f"{getattr(function, '__name__', '')}() " in str(error):
            raise RunRefused(f"model.loss = {path}: {error}; it is called with the model's output and the targets") from None
        return
    if not all(isinstance(one, torch.Tensor) and one.numel() == 1 for one in results):
        what = next(one for one in results if not (isinstance(one, torch.Tensor) and one.numel() == 1))
        shape = f" of shape {list(what.shape)}" if isinstance(what, torch.Tensor) else ""
        raise RunRefused(f"model.loss = {path}: it returns a {type(what).__name__}{shape}; return the sum over the targets, one number")
    whole, *halves, twice = (float(one) for one in results)
    if abs(whole - sum(halves) / 2) < 1e-4 * abs(whole) or abs(whole - twice) < 1e-4 * abs(whole):
        raise RunRefused(f"model.loss = {path}: it returns the mean over the targets; return their sum (reduction='sum')")
