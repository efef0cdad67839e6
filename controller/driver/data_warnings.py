"""Warnings of data that a run can train on, but that is probably a mistake."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig

_SPLITS = {
    split: re.compile(rf"(^|[-._ /0-9])({words})([-._ /0-9]|$)", re.IGNORECASE)
    for split, words in (("train", "train|training"), ("validation", "validation|valid|val|dev"), ("test", "test|testing|eval|evaluation"))
}
"""Words in file names by which the package ``datasets`` recognizes splits."""
_UNUSED_SHARE = 0.1
"""Largest share of the tokens that may be in no sample without a warning."""
_MASKS = frozenset({"labels", "loss_mask", "completion_mask", "assistant_masks"})
"""Columns in which other programs mark the tokens to learn."""


def warnings_of(dataset: Any, sets: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Yield a warning for each fault of the data that does not prevent the run."""
    yield from damaged(dataset, config.data.damaged)
    yield from scarce(dataset, config)
    yield from left_out(dataset)
    yield from cut(dataset, config.data.seq_len)
    yield from twice(dataset)
    yield from endless(dataset)
    yield from foreign_tokens(dataset, config.data.tokenizer)
    yield from other_purposes(dataset, sets)
    yield from unread_keys(dataset, sets, config)


def damaged(dataset: Any, policy: str) -> Iterator[str]:
    """Warn of data that is left out because it is damaged, and of data for which ``data.damaged`` has no effect."""
    from vescale_ray.data.block_dataset import BlockDataset

    for name, source in _sources(dataset).items():
        if not isinstance(source, BlockDataset):
            if policy == "skip":
                yield f"data.damaged = skip has no effect on {name}: it is held in memory, and damaged files end the run"
            continue
        skipped = source.skipped
        if skipped is not None and (skipped.files or skipped.records):
            what = f"{skipped.files:,} missing or damaged files and {skipped.records:,} damaged records"
            yield f"{name}: {what} are left out (data.damaged = skip)"
            yield from (f"{name}: left out: {text}" for text in skipped.texts)


def scarce(dataset: Any, config: RunConfig) -> Iterator[str]:
    """Warn of data that is too little for one step, or for a held-out sample."""
    data, samples = config.data, dataset.num_samples
    if samples < config.global_batch:
        yield (
            f"the data has {samples} training samples of data.seq_len = {data.seq_len}, and a step takes {config.global_batch}, so it "
            "takes some of them several times; give more data, or lower data.seq_len or train.slots"
        )
    if not dataset.heldout_samples and data.heldout and data.eval_samples:
        yield (
            f"data.heldout = {data.heldout:g} of {samples} samples is none, so there is no held-out loss; raise it, lower data.seq_len, "
            "or set it to 0"
        )


def left_out(dataset: Any) -> Iterator[str]:
    """Warn of null texts, and of rows that are left out because they have no answer."""
    for name, source in _sources(dataset).items():
        told = source.describe()
        if nulls := told.get("documents_without_text"):
            yield f"{name}: {nulls:,} of {told['documents']:,} documents are null, and count as empty ones"
        if rows := told.get("rows_without_answer"):
            other = f" of the role assistant, but messages of {told['other_roles']}" if "other_roles" in told else ""
            yield f"{name}: {rows:,} of {told['documents']:,} rows are left out, since they have no answer{other}"


def cut(dataset: Any, seq_len: int) -> Iterator[str]:
    """Warn of files of tokens that are too short for samples, and of conversations that are longer than a sample."""
    for name, source in _sources(dataset).items():
        if not (files := _files(source)):
            continue
        told = source.describe()
        unused = told["tokens"] - (told["samples"] + told["heldout_samples"]) * seq_len
        if len(files) > 1 and not files[0].joins and unused > told["tokens"] * _UNUSED_SHARE:
            yield (
                f"{name}: {unused:,} of {told['tokens']:,} tokens are in no sample, since each file is cut into samples of data.seq_len = "
                f"{seq_len} by itself; lower data.seq_len, or join the files"
            )
        rows = told["documents"] - told["rows_without_answer"] if source.unit == "chat" else 0
        if rows and told["tokens"] > 2 * rows * seq_len:
            yield (
                f"{name}: a row has {told['tokens'] // rows:,} tokens on average, more than two samples of data.seq_len = {seq_len}, "
                "so many answers are learned without the beginning of their conversation; raise data.seq_len"
            )


def twice(dataset: Any) -> Iterator[str]:
    """Warn of a file that several paths of a corpus name."""
    for name, source in _sources(dataset).items():
        again = next((url for url, times in Counter(file.file.url for file in _files(source)).items() if times > 1), None)
        if again is not None:
            yield f"{name}: {again} is read several times, since several of its paths name it; give each file once"


def endless(dataset: Any) -> Iterator[str]:
    """Warn of answers without an end token. A model learns from them to go on for ever."""
    for name, source in _sources(dataset).items():
        if source.describe().get("answers_with_end") == 0:
            yield (
                f"{name}: no answer ends with a special token, so the model does not learn to end a turn; let the chat template put the "
                "end of a turn before {% endgeneration %}"
            )


def foreign_tokens(dataset: Any, tokenizer: str | None) -> Iterator[str]:
    """Warn of files that ``data prepare`` has made with a tokenizer other than the run's."""
    from vescale_ray.data.preparation import tokenizer_of
    from vescale_ray.data.text.encoders import load_tokenizer

    for name, source in _sources(dataset).items():
        made = tokenizer_of(files[0].file) if (files := _files(source)) and source.unit == "ids" else None
        if made is not None and tokenizer is not None and made != f"tokenizer {load_tokenizer(tokenizer)[1]}":
            yield (
                f"{name}: was prepared with another tokenizer.json than {tokenizer}; if their vocabularies differ, its tokens mean "
                "something else to the model"
            )


def other_purposes(dataset: Any, sets: Mapping[str, Any]) -> Iterator[str]:
    """Warn of training data that has another purpose: files of other splits, evaluation sets, and tokens that do not count."""
    from vescale_ray.data.sources.document_files import TextFile

    trained = _sources(dataset)
    for name, source in trained.items():
        files = _files(source)
        splits = {_split_of(file.file.name): file.file.url for file in reversed(files)}
        other = next((split for split in splits if split not in ("train", None)), None)
        source_code = None in splits and any(isinstance(file, TextFile) for file in files)  # in source code, "test" in a name is no split
        if other is not None and "train" in splits and not source_code:
            example = splits[other]
            yield f"{name}: trains on files of other splits, too, such as {example}; if that is not meant, give a glob for those of train"
        masks = _MASKS & set(getattr(files[0], "columns", ())) if files and source.unit == "ids" else ()
        if masks:
            yield f"{name}: the column {min(masks)} is not read, so all tokens are learned; rows with data.format = chat learn answers only"
    for name, one in sets.items():
        for key, source in trained.items():
            shared = {file.file.url for file in _files(source)} & {file.file.url for file in _files(one)}
            if shared or source.describe().get("sha256") == one.describe().get("sha256"):
                told = min(shared, default="its text")
                yield f"data.eval.{name}: {told} is training data of {key}, too; give data that is not trained on"


def _split_of(name: str) -> str | None:
    """Return the split that a file's name states. A name with ``train`` in it, such as train-test-split.jsonl, states train."""
    return next((split for split, pattern in _SPLITS.items() if pattern.search(name)), None)


def unread_keys(dataset: Any, sets: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Warn of keys of ``data`` that have no effect on any of the files."""
    from vescale_ray.data.sources.document_files import ArrowFile, JsonLinesFile, ParquetFile
    from vescale_ray.data.sources.token_files import FlatFile

    data, files = config.data, [file for source in (*_sources(dataset).values(), *sets.values()) for file in _files(source)]
    if data.column != "text" and not any(isinstance(file, ArrowFile | JsonLinesFile | ParquetFile) for file in files):
        yield f"data.column = {data.column} has no effect: no file of the data has columns"
    if data.dtype != "uint16" and not any(isinstance(file, FlatFile) for file in files):
        yield f"data.dtype = {data.dtype} has no effect: it is the type of tokens in .bin files, of which the data has none"


def _files(source: Any) -> Sequence[Any]:
    """Return the files of a source that is read in blocks. Text in memory has none."""
    from vescale_ray.data.block_dataset import BlockDataset

    return source.files if isinstance(source, BlockDataset) else ()


def _sources(dataset: Any) -> dict[str, Any]:
    return dict(zip(getattr(dataset, "names", ()), getattr(dataset, "sources", ()), strict=True)) or {"data.corpus": dataset}
