"""The section ``data``: the training data, as one corpus or a mixture of several, and evaluation sets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from vescale_ray.config.sections import ConfigError, Count, CountOrZero, PositiveOrZero, Section


def _one_or_more(value: Any) -> Any:
    # One check for both types, so that a mistake gives one line and not one for each type.
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(isinstance(one, (str, int, float)) and not isinstance(one, bool) and one != "" for one in listed):
        raise ValueError("give a path, or a list of paths in brackets")
    if any(isinstance(one, str) and not one.isascii() and one.encode(errors="replace").decode() != one for one in listed):
        raise ValueError("give a text")
    return value


def _one_or_more_or_null(value: Any) -> Any:
    return value if value is None else _one_or_more(value)


Format = Literal["auto", "text", "jsonl", "chat", "parquet", "arrow", "bin", "npy"]
TokenType = Literal["uint16", "uint32"]


class SourceSection(Section):
    """One corpus of several. A key that is null has the value of the section ``data``."""

    corpus: Annotated[str | list[str], BeforeValidator(_one_or_more)]
    format: Format | None = None
    column: str | None = Field(default=None, min_length=1)
    dtype: TokenType | None = None
    end_token: str | None = Field(default=None, min_length=1)


class MixtureSource(SourceSection):
    """A source of ``data.mixture``."""

    weight: PositiveOrZero = 1.0


def _checked(where: str, value: Any, model: type[SourceSection]) -> Any:
    # Errors of pydantic would show the whole source, and with it a path.
    if not isinstance(value, (dict, model)):
        raise ConfigError(f"{where}: give keys and values in braces, for example {{corpus: /mnt/shared/a.parquet}}")
    given = value if isinstance(value, dict) else {"corpus": value.corpus}
    for key in given:
        if key not in model.model_fields:
            if key in DataSection.model_fields:
                raise ConfigError(f"{where}.{key}: all data of a run share this key; set data.{key}")
            near = difflib.get_close_matches(str(key), model.model_fields, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"give {', '.join(model.model_fields)}"
            raise ConfigError(f"unknown key {where}.{key}: {remedy}")
    if given.get("corpus") is None:
        raise ConfigError(f"{where}.corpus: is missing; give a path, or a list of paths in brackets")
    return value


def _mixture(value: Any) -> Any:
    if value is None:
        return value
    if not isinstance(value, list) or not value:
        example = "[{corpus: a.parquet, weight: 0.7}, {corpus: b.parquet, weight: 0.3}]"
        raise ConfigError(f"data.mixture: give a list of sources, for example {example}")
    return [_checked(f"data.mixture.{number}", one, MixtureSource) for number, one in enumerate(value)]


def _eval_sets(value: Any) -> Any:
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise ConfigError("data.eval: give sets by name, for example {wiki: {corpus: wiki.parquet}}")
    for name in value:
        if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,39}", name)) or name == "heldout":
            raise ConfigError(f"data.eval: {name!r} can't name a set; give a letter, then letters, digits, '_' and '-', and not heldout")
    return {name: _checked(f"data.eval.{name}", one, SourceSection) for name, one in value.items()}


class DataSection(Section):
    """The training data, and evaluation sets."""

    corpus: Annotated[str | list[str] | None, BeforeValidator(_one_or_more_or_null)] = Field(
        default="stdlib",
        description="`stdlib` (this Python's library sources), or a path, folder, glob or URL (`s3://bucket/tokens/*.parquet`), "
        "or a list of them; null with `mixture`",
    )
    mixture: Annotated[list[MixtureSource] | None, BeforeValidator(_mixture)] = Field(
        default=None,
        description="sources in place of `corpus`: `[{corpus: a.parquet, weight: 0.7}, {corpus: b.parquet, weight: 0.3}]`. Weights need "
        "not sum to 1. A source may have its own `format`, `column`, `dtype` and `end_token`",
    )
    eval: Annotated[dict[str, SourceSection], BeforeValidator(_eval_sets)] = Field(
        default={},
        description="evaluation sets by name, beside the held-out part: `{wiki: {corpus: wiki.parquet}}`, with the keys of a source",
    )
    format: Format = Field(
        default="auto",
        description="format of the files; auto: by their suffix, and text for unknown ones; chat: fine-tuning rows with `messages`, or "
        "with `prompt` and `completion`, in JSONL or Parquet, of which only the answers are learned",
    )
    column: str = Field(
        default="text", min_length=1, description="column of Parquet and Arrow (text, or lists of token ids), or field of JSONL (text)"
    )
    dtype: TokenType = Field(default="uint16", description="type of the tokens in `.bin` files")
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="a `tokenizer.json` that turns text into tokens (needs the extra `hf`); null: that of `model.hf`; else bytes",
    )
    end_token: str | None = Field(
        default=None,
        min_length=1,
        description="token that ends each document: its name in `tokenizer`, or its number; null: the end token "
        "named in the files beside `tokenizer`, none after lists of token ids, zero after bytes",
    )
    document_mask: bool = Field(
        default=False,
        description="attention stays within a document, and positions restart behind each `end_token`; the model's forward must take "
        "`position_ids`",
    )
    vocab: int | None = Field(
        default=None,
        ge=1,
        description="number of token ids, and of the model's embeddings; null: that of `model.hf` or the tokenizer, or 256 for bytes",
    )
    seq_len: Count = Field(default=128, description="tokens that one sample predicts")
    heldout: float = Field(
        default=0.05,
        ge=0,
        le=0.9,
        description="fraction that is kept for evaluation. Local text read as bytes: files chosen by hash; other data: the last samples",
    )
    eval_samples: CountOrZero = Field(
        default=64, description="samples per evaluation of the held-out part, and of each set of `eval`; 0 turns evaluation off"
    )
    damaged: Literal["stop", "skip"] = Field(
        default="stop",
        description="what happens with damaged training data. stop: the run ends, and names the file. skip: missing and damaged files, "
        "damaged lines of JSONL and damaged row groups are left out, named in a warning and counted",
    )
    shuffle_blocks: Count = Field(
        default=16,
        description="number of blocks (row groups, or about a million tokens) whose samples are shuffled together; the "
        "order of blocks is shuffled, too",
    )
    readahead_mb: Count = Field(
        default=512,
        description="MB of memory for blocks that each worker holds and reads ahead; at least twice the size of `shuffle_blocks` blocks",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_default_beside_a_mixture(cls, value: Any) -> Any:
        return {"corpus": None, **value} if isinstance(value, dict) and value.get("mixture") is not None else value

    @model_validator(mode="after")
    def _one_kind_of_training_data(self) -> DataSection:
        if self.mixture is None and self.corpus is None:
            raise ConfigError("data.corpus = null: give a path, or a list of paths in brackets")
        if self.mixture is not None and self.corpus is not None:
            raise ConfigError("data.corpus and data.mixture are both given: leave one out, or set it to null")
        others = (*(self.mixture or ()), *self.eval.values())
        if self.document_mask and "chat" in (self.format, *(source.format for source in others)):
            raise ConfigError("data.document_mask = true with data.format = chat: turns end as documents do; leave one of the two out")
        if self.mixture is not None and not sum(source.weight for source in self.mixture) > 0:
            raise ConfigError("data.mixture: all weights are 0; give at least one source a weight above 0")
        return self

    @property
    def corpora(self) -> list[tuple[str, str]]:
        """The paths of all data, evaluation sets included, each with its key."""
        sources: dict[str, SourceSection] = {f"mixture.{number}": source for number, source in enumerate(self.mixture or ())}
        sources |= {f"eval.{name}": source for name, source in self.eval.items()}
        given = {"data.corpus": self.corpus, **{f"data.{key}.corpus": source.corpus for key, source in sources.items()}}
        return [(key, path) for key, one in given.items() for path in ([one] if isinstance(one, str) else one or [])]

    def of(self, source: SourceSection) -> DataSection:
        """Return this section with the keys of a source in place of its own."""
        keys = {key: getattr(source, key) for key in SourceSection.model_fields}
        return self.model_copy(update={"mixture": None, "eval": {}, **{key: value for key, value in keys.items() if value is not None}})

    def with_paths(self, change: Callable[[str], str]) -> DataSection:
        """Return a copy with each path of data changed."""

        def changed(given: str | list[str] | None) -> str | list[str] | None:
            return change(given) if isinstance(given, str) else given and [change(one) for one in given]

        def copied(source: Any) -> Any:
            return source.model_copy(update={"corpus": changed(source.corpus)})

        mixture, sets = self.mixture and [copied(one) for one in self.mixture], {name: copied(one) for name, one in self.eval.items()}
        return self.model_copy(update={"corpus": changed(self.corpus), "mixture": mixture, "eval": sets})
