"""Checks that data and model use the same tokens, that documents have ends, and that rules on the held-out loss have held-out samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale_ray.controller.protocol import RunRefused
from vescale_ray.errors import one_line

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig
    from vescale_ray.data.dataset import Dataset
    from vescale_ray.models.hf import HfFolder


def open_data(config: RunConfig) -> tuple[Dataset, dict[str, Dataset]]:
    """Open the data set and the evaluation sets of a run, with all checks that need no model.

    Args:
        config: the configuration with the data of ``model.hf`` (:func:`vescale_ray.controller.driver.preflight.with_model_data`).

    Raises:
        BadInput: with one line, for the first thing that is wrong.
    """
    from vescale_ray.data.dataset_loading import load_dataset, load_eval_sets

    dataset = load_dataset(config.data, given=config.given.dataset)
    sets = load_eval_sets(config.data, dataset)
    check_some_tokens([dataset, *sets.values()])
    if config.model.hf is not None and dataset.unit == "bytes":
        refuse_bytes(config.model.hf)
    if config.data.document_mask:
        _check_ends(dataset, sets)
    if not dataset.heldout_samples:
        _refuse_heldout_loss(config, dataset.num_samples)
    return dataset, sets


def _refuse_heldout_loss(config: RunConfig, samples: int) -> None:
    """Refuse a rule that depends on the held-out loss if there is no held-out sample."""
    early, kept = config.train.early_stop, config.checkpoint
    rules = {"train.early_stop": early is not None and early.metric, "checkpoint.keep_best": kept.keep_best and kept.keep_metric}
    for rule, metric in rules.items():
        if metric == "heldout_loss":
            raise RunRefused(
                f"{rule} with data.heldout = {config.data.heldout:g}: the data has {samples} samples and none to hold out, so there is no "
                "heldout_loss to go by; raise data.heldout, lower data.seq_len, or give more data"
            )


def _check_ends(dataset: Dataset, sets: Mapping[str, Dataset]) -> None:
    """Refuse data whose documents can't be kept apart, because their end token is unknown or differs between sources."""
    end = dataset.end_token
    if end is None:
        raise RunRefused("data.document_mask = true: the end of a document is not known, or differs by source; set data.end_token")
    for name, one in sets.items():
        if one.end_token != end:
            told = "is not known" if one.end_token is None else f"is token {one.end_token}"
            raise RunRefused(
                f"data.document_mask = true: the end of a document {told} in data.eval.{name}, but token {end} in the training data; "
                f"set data.eval.{name}.end_token to {end}"
            )


def check_tokenizer(given: str, folder: HfFolder) -> None:
    """Refuse a tokenizer with tokens that the model lacks, or that mean other tokens to the model's weights."""
    from vescale_ray.data.text.encoders import id_count, load_tokenizer

    tokenizer, digest = load_tokenizer(given)
    if id_count(tokenizer) > folder.vocab:
        raise RunRefused(
            f"data.tokenizer = {given}: its ids need {id_count(tokenizer)} rows, the embeddings of model.hf = {folder.path} "
            f"{folder.vocab}; use the tokenizer that the model was made for"
        )
    if folder.tokenizer is not None and folder.tokenizer != Path(given):
        own, own_digest = load_tokenizer(str(folder.tokenizer))
        if digest != own_digest and tokenizer.get_vocab() != own.get_vocab():
            raise RunRefused(f"data.tokenizer = {given}: its tokens are not those of the model's {folder.tokenizer}; leave it out")


def check_some_tokens(datasets: Iterable[Any]) -> None:
    """Refuse files with token ids outside the vocabulary. The check reads a few blocks of each file."""
    from vescale_ray.data.block_dataset import BlockDataset

    for dataset in datasets:
        for source in getattr(dataset, "sources", (dataset,)):
            if isinstance(source, BlockDataset) and source.unit == "ids":
                try:
                    source.check_some()
                except OSError as error:
                    raise RunRefused(one_line(error)) from None


def refuse_bytes(hf: str) -> None:
    """Refuse text as bytes for a model with weights, because these were trained with other tokens."""
    from vescale_ray.models.hf import open_folder

    if open_folder(hf).has_weights:
        raise RunRefused(
            f"model.hf = {hf}: has no tokenizer.json, so text would be bytes, which are other tokens to its weights; set data.tokenizer, "
            "or save the tokenizer with AutoTokenizer"
        )
