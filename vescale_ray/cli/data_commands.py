"""``vescale-ray data``: what the data of a run is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from vescale_ray.cli.common import OK, CommandGroup

COLUMNS = ("files", "documents", "rows_without_answer", "tokens", "answer_tokens", "blocks", "samples", "heldout_samples")
SHOWN = 400
"""Characters of a decoded sample that are shown."""


@click.group(cls=CommandGroup)
def data() -> None:
    """Look into the data of a run."""


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
    from vescale_ray.controller.driver.preflight import absolute, with_model_data
    from vescale_ray.data.inspection import inspect as report_on

    is_run = Path(target).suffix in (".yaml", ".yml")
    if is_run:
        config = load_config(target, overrides)
    else:
        config = load_config(None, [f"data.corpus={target}", *overrides])
    config = with_model_data(absolute(config))
    found = report_on(config.data, config.run.seed, config.train.steps * config.global_batch)
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
