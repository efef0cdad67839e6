"""``vescale-ray data``: what the data of a run is, and its preparation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vescale_ray.cli.common import OK, CommandGroup
from vescale_ray.errors import BadInput

if TYPE_CHECKING:
    from vescale_ray.data.preparation import PreparedFile

COLUMNS = (
    *("files", "documents", "documents_without_text", "rows_without_answer", "tokens", "answer_tokens", "answers_with_end"),
    *("blocks", "samples", "heldout_samples", "skipped_files", "skipped_records"),
)
SHOWN = 400
"""Characters of a decoded sample that are shown."""


@click.group(cls=CommandGroup)
def data() -> None:
    """Look into the data of a run, and prepare it."""


@data.command()
@click.argument("target", metavar="RUN.yaml|PATH")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the whole decoded samples.")
def inspect(target: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Show files, documents, tokens, blocks, shares and a decoded sample of each source and evaluation set.

    PATH is a file, folder, glob or URL, as data.corpus. Data that `train` refuses is refused with the same line.

    Example: vescale-ray data inspect 'tokens/*.parquet' data.column=input_ids data.vocab=50257
    """
    from vescale_ray.config import load_config
    from vescale_ray.controller.driver.data_checks import open_data
    from vescale_ray.controller.driver.preflight import absolute, with_model_data
    from vescale_ray.data.inspection import inspect as report_on

    is_run = Path(target).suffix in (".yaml", ".yml")
    if is_run:
        config = load_config(target, overrides)
    else:
        config = load_config(None, [f"data.corpus={target}", *overrides])
    config = with_model_data(absolute(config))
    dataset, sets = open_data(config)
    found = report_on(config.data, dataset, sets, config.run.seed, config.train.steps * config.global_batch)
    if as_json:
        click.echo(json.dumps({"seq_len": config.data.seq_len, "sources": [asdict(one) for one in found]}))
        return OK
    for one in found:
        counts = {name: one.about[name] for name in COLUMNS if one.about.get(name) is not None}
        told = [f"{name.replace('heldout_', 'held-out ').replace('_', ' ')} {count:,}" for name, count in counts.items()]
        told += [f"bytes per token {one.bytes_per_token:.2f}"] if one.bytes_per_token is not None else []
        if is_run and one.share is not None:
            told += [f"share {one.share:.3%}", f"epochs in {config.train.steps:,} steps {one.epochs:.3g}"]
        click.echo(f"{one.key} = {one.about['name']} ({one.about['type']}): {', '.join(told)}")
        click.echo(f"  {one.sample[:SHOWN]!r}{'..' if len(one.sample) > SHOWN else ''}")
    return OK


OPTIONS = {"column": "--column", "tokenizer": "--tokenizer", "end_token": "--end-token", "format": "--format", "corpus": "SOURCE"}
"""Option of ``prepare`` for each key of the section ``data``."""


@data.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--tokenizer", required=True, metavar="FILE", help="The tokenizer.json that turns text into tokens.")
@click.option("--out", required=True, metavar="FOLDER", help="Folder or URL of the output, which all nodes share.")
@click.option("--column", default="text", show_default=True, help="Column of Parquet, or field of JSONL, with the text.")
@click.option("--end-token", help="Token that ends each document. Default: that of the files beside the tokenizer.")
@click.option("--format", "kind", type=click.Choice(["auto", "text", "jsonl", "parquet"]), default="auto", help="Default: by the suffix.")
@click.option("--shards", type=click.IntRange(1, 99_999), help="Number of output files. Default: one for 64 MiB of text.")
@click.option("--workers", type=click.IntRange(min=1), help="Files to make at a time. Default: the CPUs.")
def prepare(
    sources: tuple[str, ...],
    tokenizer: str,
    out: str,
    column: str,
    end_token: str | None,
    kind: str,
    shards: int | None,
    workers: int | None,
) -> int:
    """Turn text into Parquet files of token ids, in parallel. SOURCE is a file, folder, glob or URL of Parquet, JSONL or text.

    Uses the Ray of RAY_ADDRESS, or a local one. The same command again keeps what is finished, after it has read it back.

    Example: vescale-ray data prepare 'articles/*.jsonl' --tokenizer tokenizer.json --out tokens
    """
    from vescale_ray.config import parse_config
    from vescale_ray.controller.driver.preflight import absolute
    from vescale_ray.controller.driver.preparing import prepare as carry_out
    from vescale_ray.data import preparation
    from vescale_ray.lasting import check_lasting, whole

    check_lasting("--out", out)
    if not out.strip():
        raise BadInput(f"--out = {out!r}: give a folder or URL that every worker can write")
    try:
        keys = {"corpus": list(sources), "tokenizer": tokenizer, "column": column, "end_token": end_token, "format": kind}
        section = absolute(parse_config({"data": keys})).data
        made = preparation.plan(section, whole(out), shards)
        preparation.begin(made)
        done: list[PreparedFile] = []
        with _files_bar(len(made.pieces)) as advance:

            def tell(one: PreparedFile) -> None:
                done.append(one)
                advance()
                if one.damaged is not None:
                    click.echo(f"made anew: {one.damaged}", err=True)

            carry_out(made, workers, tell)
    except BadInput as error:
        text = str(error).replace("set data.format to chat for conversations", "conversations need no preparation")
        for key, option in OPTIONS.items():
            text = text.replace(f"data.{key}", option)
        raise BadInput(text) from None
    kept = sum(one.kept for one in done)
    documents, tokens = (sum(getattr(one, name) for one in done) for name in ("documents", "tokens"))
    click.echo(f"{made.out}: files {len(done):,} ({kept:,} kept), documents {documents:,}, tokens {tokens:,}")
    click.echo(f"train with data.corpus='{made.out}/*.parquet' data.column={preparation.COLUMN} data.tokenizer={section.tokenizer}")
    return OK


@contextmanager
def _files_bar(total: int) -> Iterator[Callable[[], None]]:
    """Draw a bar on stderr if that is a terminal; yields a function to call with each finished file."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("files"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("files", total=total)
        yield lambda: progress.advance(task)
