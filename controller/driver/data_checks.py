"""Checks that data and model fit: the tokens mean the same, the model predicts them, and answers of chats have ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale_ray.controller.protocol import RunRefused

if TYPE_CHECKING:
    from vescale_ray.models.hf import HfFolder


def check_tokenizer(given: str, folder: HfFolder) -> None:
    """Refuse a tokenizer whose tokens the model lacks, or mean something else to its weights."""
    from vescale_ray.data.encoders import id_count, load_tokenizer

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


def check_causal(hf: str, model: Any) -> None:
    """Refuse a model that reads the tokens that it is to predict."""
    from vescale_ray.models.hf import sees_ahead

    if sees_ahead(model):
        key = '"is_decoder": true' if hasattr(model.config, "is_decoder") else '"use_bidirectional_attention": false'
        raise RunRefused(
            f"model.hf = {hf}: {type(model).__name__} is an encoder, whose attention reads the tokens that training predicts; give a "
            f"causal model, or set {key} in its config.json"
        )


def check_some_tokens(datasets: Iterable[Any]) -> None:
    """Refuse files of token ids that do not fit the vocabulary, by a few of their blocks. Text has been read already."""
    from vescale_ray.data.block_dataset import BlockDataset

    for dataset in datasets:
        for source in getattr(dataset, "sources", (dataset,)):
            if isinstance(source, BlockDataset) and source.unit == "ids":
                try:
                    source.check_some()
                except OSError as error:
                    raise RunRefused(" ".join(str(error).split())) from None


def endless(dataset: Any) -> Iterator[str]:
    """Warn of answers without an end, from which a model learns to go on for ever."""
    names = dict(zip(getattr(dataset, "names", ()), getattr(dataset, "sources", ()), strict=True)) or {"data.corpus": dataset}
    for name, source in names.items():
        if source.describe().get("answers_with_end") == 0:
            yield (
                f"{name}: no answer ends with a special token, so the model does not learn to end a turn; let the chat template put the "
                "end of a turn before {% endgeneration %}"
            )


def refuse_bytes(hf: str) -> None:
    """Refuse text as bytes if the model has weights, which were trained with other tokens."""
    from vescale_ray.models.hf import open_folder

    if open_folder(hf).has_weights:
        raise RunRefused(
            f"model.hf = {hf}: has no tokenizer.json, so text would be bytes, which are other tokens to its weights; set data.tokenizer, "
            "or save the tokenizer with AutoTokenizer"
        )
