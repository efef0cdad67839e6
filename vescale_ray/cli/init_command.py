"""``vescale-ray init``: write a job file from a few flags or questions, with the memory that its sharding takes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from vescale_ray.cli.common import OK, lasting_path
from vescale_ray.errors import BadInput

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig
    from vescale_ray.models.hf import HfFolder

_TEMPLATE = """\
# {title}
#   vescale-ray data inspect {file}      # documents, tokens, a decoded sample
#   vescale-ray train {file}             # starts, or resumes from the newest checkpoint
# Every key that is not here keeps its default; docs/reference/configuration.md lists them all.
run: {run}{on_cluster}
model: {model}
data: {data}
train:
  steps: 1000
  slots: {slots}            # the global batch is slots * slot_batch sequences, on any number of workers
  slot_batch: {slot_batch}
  lr: {lr}
  warmup_steps: 50
  eval_every: 100
{compute}{experts}
elastic: {{workers: {workers}, replace_lost: true}}
checkpoint: {{every: 100, keep_last: 2}}
ray: {ray}
"""


@click.command("init")
@click.argument("name")
@click.option("--hf", metavar="FOLDER", help="A model's folder, as model.hf. [default: a small Llama of bytes]")
@click.option("--lora", is_flag=True, help="Train adapters of the model's weights, which stay frozen.")
@click.option("--data", "corpora", multiple=True, metavar="PATH", help="Training data, as data.corpus; may be given several times.")
@click.option("--column", metavar="NAME", help="Column of Parquet, or field of JSON lines. [default: text]")
@click.option("--seq-len", type=click.IntRange(1), help="Tokens of a sample. [default: 2048 on GPUs, else 128]")
@click.option("--gpus", type=click.IntRange(0), help="GPUs, one for each worker. [default: 0]")
@click.option("--hardware", default="h100", show_default=True, help="The GPU: a100, h100, h800, h200 or b200.")
@click.option("--workers", type=click.IntRange(1), help="Workers without GPUs. [default: 2]")
@click.option(
    "--expert-parallel", type=click.IntRange(1), default=1, metavar="N", help="Workers that share the experts of each layer. [default: 1]"
)
@click.option("--out", metavar="FILE", callback=lasting_path, help="The file to write. [default: NAME.yaml]")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def init(
    name: str,
    hf: str | None,
    lora: bool,
    corpora: tuple[str, ...],
    column: str | None,
    seq_len: int | None,
    gpus: int | None,
    hardware: str,
    workers: int | None,
    expert_parallel: int,
    out: str | None,
    force: bool,
) -> int:
    """Write a job file for the run NAME. On a terminal, the command asks for what matters most and is not given.

    Example: vescale-ray init tuned --hf models/Qwen3-8B --data 'documents/*.jsonl' --gpus 8
    """
    from vescale_ray.config import read_config

    if sys.stdin.isatty() and hf is None and not corpora and gpus is None:
        hf = click.prompt("Folder of a Hugging Face model (empty: a small Llama)", default="", show_default=False) or None
        corpora = (click.prompt("Training data (path, glob or URL)", default="stdlib"),)
        gpus = click.prompt("GPUs (0: CPUs)", default=0, type=click.IntRange(0))
    read_config(yaml.safe_dump({"run": {"name": name}}), "NAME")
    path = Path(out or f"{name}.yaml")
    if path.exists() and not force:
        raise BadInput(f"{path}: exists already; give --force, or another --out")
    if lora and hf is None:
        raise BadInput("--lora: adapters need the weights of a model; give --hf")
    if gpus and workers not in (None, gpus):
        raise BadInput(f"--workers {workers} with --gpus {gpus}: each GPU has one worker; leave --workers out")
    if expert_parallel > 1:
        _check_experts(expert_parallel, hf, workers or gpus or 2)
    text = _job(path.name, name, hf, lora, corpora, column, seq_len, gpus or 0, hardware, workers or gpus or 2, expert_parallel)
    config = read_config(text, str(path))
    if gpus:
        text = _with_memory(text, config, hardware)
    _warn_of_data(corpora, hf)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path}: can't be written ({error.strerror})") from None
    click.echo(f"{path}: written; look at it, then `vescale-ray train {path}`")
    return OK


def _warn_of_data(corpora: tuple[str, ...], hf: str | None) -> None:
    """Warn of data that is hardly meant, or that this machine lacks. The workers may have it."""
    from vescale_ray.data.sources.files import find_files

    if hf is not None and not corpora:
        _warn("--data is not given, so the file trains on the source text of Python's standard library; set data.corpus in it")
    for corpus in corpora:
        if "://" in corpus:
            continue
        try:
            find_files(corpus)
        except BadInput as error:
            _warn(str(error))


def _warn(text: str) -> None:
    click.echo(f"vescale-ray: warning: {text}", err=True)


def _check_experts(count: int, hf: str | None, workers: int) -> None:
    """Raise BadInput if ``count`` of ``workers`` workers can't share the experts of the model in folder ``hf``."""
    from vescale_ray.models.hf import build, open_folder
    from vescale_ray.workers.building.model_building import check_shared_experts

    key = f"--expert-parallel {count}"
    if hf is None:
        raise BadInput(f"{key}: the small Llama has no experts; give --hf with a mixture of experts, or leave it out")
    if workers % count:
        whole = workers // count * count
        raise BadInput(
            f"{key}: {workers} workers are not a multiple of it; give {whole or count} or another multiple as --workers or --gpus"
        )
    model = build(open_folder(hf, "--hf"))
    try:
        check_shared_experts(model, count, key)
    except ValueError as error:
        raise BadInput(str(error)) from None


def _job(
    file: str,
    name: str,
    hf: str | None,
    lora: bool,
    corpora: tuple[str, ...],
    column: str | None,
    seq_len: int | None,
    gpus: int,
    hardware: str,
    workers: int,
    expert_parallel: int,
) -> str:
    from vescale_ray.models.hf import open_folder
    from vescale_ray.planner.hardware import HARDWARE

    folder = open_folder(hf, "--hf") if hf is not None else None
    if lora and folder is not None and not folder.has_weights:
        raise BadInput(f"--lora: {folder.path} holds no safetensors weights, and adapters train on a frozen base; leave it out")
    if gpus and hardware not in HARDWARE:
        raise BadInput(f"--hardware {hardware}: give one of {', '.join(HARDWARE)}")
    most = folder.positions if folder is not None else None
    length = seq_len or min(2048 if gpus else 128, most or 2048)
    if folder is not None and folder.positions is not None and length > folder.positions:
        raise BadInput(f"--seq-len {length}: the model takes {folder.positions} tokens at most (max_position_embeddings)")
    model: dict[str, Any] = {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384}
    if hf is not None:
        model = {"hf": hf, **({"lora": {"rank": 16, "alpha": 32}} if lora else {})}
    paths = list(corpora) or ["stdlib"]
    data = {"corpus": paths[0] if len(paths) == 1 else paths, **({"column": column} if column else {}), "seq_len": length}
    compute = "  param_dtype: bfloat16\n  activation_checkpointing: full\n  device: cuda" if gpus else "  device: cpu"
    return _TEMPLATE.format(
        title=_title(folder, lora, gpus),
        file=file,
        run=_flow({"name": name, "dir": "runs", "seed": 0}),
        on_cluster="   # on a cluster: a dir that all nodes share" if gpus else "",
        model=_flow(model),
        data=_flow({**data, "heldout": 0.01, "eval_samples": 64}),
        slots=2 * workers,
        slot_batch=1 if gpus else 4,
        lr="2.0e-4" if lora else "3.0e-3" if folder is None else "1.0e-5" if folder.has_weights else "3.0e-4",
        compute=compute,
        experts=f"\n  expert_parallel: {expert_parallel}" if expert_parallel > 1 else "",
        workers=workers,
        ray="{cpus_per_worker: 8, gpus_per_worker: 1}" if gpus else "{cpus_per_worker: 0.5}",
    )


def _flow(value: dict[str, Any]) -> str:
    """Return the mapping as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()


def _title(folder: HfFolder | None, lora: bool, gpus: int) -> str:
    what = "Train a small Llama on bytes" if folder is None else f"Train {'adapters of ' if lora else ''}{folder.path.name}"
    return f"{what}, on {gpus} GPUs." if gpus else f"{what}, on CPUs."


def _with_memory(text: str, config: RunConfig, hardware: str) -> str:
    """Return the job file with the memory of a step at the end of its first line, and with the shard group that the plan chooses.

    Raises:
        BadInput: the step does not fit the GPUs.
    """
    from vescale_ray.planner.hardware import HARDWARE
    from vescale_ray.workers.building.job_plan import choose_for_job

    gpus = config.elastic.workers
    choice = choose_for_job(config, gpus, HARDWARE[hardware], any_group=True)
    taken, there = choice.options[0].memory.total / 2**30, choice.hardware.memory / 2**30
    if choice.best is None:
        less = "" if config.model.lora is not None else ", or train adapters with --lora"
        raise BadInput(f"--gpus {gpus}: a step takes {taken:.0f} GiB on each, of {there:.0f} GiB of a {hardware}; give more GPUs{less}")
    title, _, rest = text.partition("\n")
    if (group := choice.best.group) < gpus:
        why = f"{gpus // group} replicas of {group} GPUs, which the plan expects to be the fastest"
        rest = rest.replace("\nelastic: ", f"\n  sharding: {{shard_group: {group}}}    # {why}\nelastic: ", 1)
    return f"{title} A step takes about {taken:.1f} of {there:.0f} GiB of each {hardware}, by `vescale-ray plan`.\n{rest}"
