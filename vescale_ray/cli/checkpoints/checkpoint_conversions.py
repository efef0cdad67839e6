"""``vescale-ray ckpt export-hf, import-hf, export-dcp, import-dcp``: checkpoints to and from other programs' formats."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vescale_ray.cli.checkpoints.checkpoint_commands import as_json_flag, excludes, includes
from vescale_ray.cli.checkpoints.checkpoint_output import bar, size_text
from vescale_ray.cli.checkpoints.checkpoint_paths import Target, bad_values, open_at, root_of, run_folder_of, split, store_at
from vescale_ray.cli.common import OK, lasting_path
from vescale_ray.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from vescale_ray.checkpoint import Checkpoint
    from vescale_ray.checkpoint.bridges.pieces import FileLayout
    from vescale_ray.models.hf import HfFolder

_UNITS = {"": 1, "B": 1, **{f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)}, **{f"{u}iB": 1024**i for i, u in enumerate("KMGT", 1)}}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
_names = click.option("--names", metavar="TABLE", help="Translation of names: llama, or a JSON file {our name: theirs} of globs.")


@click.command("export-hf")
@click.argument("path")
@click.argument("folder", callback=lasting_path)
@_names
@includes
@excludes
@click.option("--key", default="model", show_default=True, help="The entry of the state to write.")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), help="Cast floating-point tensors to this dtype.")
@click.option("--max-shard", default="5GB", show_default=True, metavar="SIZE", help="Largest size of one file.")
@click.option("--model", metavar="FOLDER", help="The model's folder, as model.hf. [default: the one that the run at PATH trained]")
@as_json_flag
def export_hf(
    path: str,
    folder: str,
    names: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    key: str,
    dtype: str | None,
    max_shard: str,
    model: str | None,
    as_json: bool,
) -> int:
    """Write a checkpoint's weights to FOLDER as Hugging Face safetensors with their index, then read them back and compare.

    A model of model.hf gets its configuration and tokenizer, too, so that from_pretrained loads FOLDER.

    Example: vescale-ray ckpt export-hf runs/demo out --names llama --dtype bf16
    """
    import torch

    from vescale_ray import checkpoint
    from vescale_ray.models.hf import copy_description

    opened = open_at(path, None)
    cast: torch.dtype | None = getattr(torch, _DTYPES[dtype]) if dtype else None
    limit, table = _bytes("--max-shard", max_shard), _table(names)
    described = _described(path, model) if names is None else None
    layout, extra = (None, None) if described is None else _files_of(described)
    if described is not None and cast is None:
        cast = described.dtype
    with bad_values(), bar("writing", _weights(opened, key), as_json) as advance:
        done = checkpoint.export_hf(
            store_at(split(path)[0]),
            opened.commit,
            folder,
            rename=table,
            layout=layout,
            extra=extra,
            include=include or "*",
            exclude=exclude,
            key=key,
            dtype=cast,
            max_shard_bytes=limit,
            progress=advance,
        )
    if described is not None:
        copy_description(described, Path(folder), cast)
    return _told(
        folder, {"commit": opened.commit.name, "files": list(done.files), "tensors": len(done.tensors), "bytes": done.bytes}, as_json
    )


@click.command("import-hf")
@click.argument("source")
@click.argument("path")
@_names
@includes
@excludes
@click.option("--step", type=click.IntRange(min=0), default=0, show_default=True, help="The checkpoint's step.")
@as_json_flag
def import_hf(
    source: str, path: str, names: str | None, include: tuple[str, ...], exclude: tuple[str, ...], step: int, as_json: bool
) -> int:
    """Make SOURCE the newest checkpoint of PATH, which is created if missing.

    SOURCE is a folder of safetensors, their index or one file.

    Example: vescale-ray ckpt import-hf Llama-3.2-1B runs/tuned/checkpoints --names llama
    """
    from vescale_ray import checkpoint
    from vescale_ray.checkpoint.bridges.foreign import local_folder
    from vescale_ray.checkpoint.huggingface import HfSource

    root, table = root_of(path, must_exist=False), _table(names)
    with bad_values():
        found = local_folder(source, "SOURCE")
    if not found.exists():
        raise BadInput(f"{source}: no such file or folder")
    total = sum(math.prod(t.shape) * t.kinds["param"].itemsize for t in HfSource(source).tensors.values())
    with bad_values(), bar("importing", total, as_json) as advance:
        commit = checkpoint.import_hf(
            source, store_at(root), rename=table, include=include or "*", exclude=exclude, step=step, progress=advance
        )
    assert isinstance(commit, checkpoint.Commit)
    return _told(root, {"commit": commit.name, "bytes": commit.bytes}, as_json)


@click.command("export-dcp")
@click.argument("path")
@click.argument("folder", callback=lasting_path)
@includes
@excludes
@as_json_flag
def export_dcp(path: str, folder: str, include: tuple[str, ...], exclude: tuple[str, ...], as_json: bool) -> int:
    """Write a checkpoint to FOLDER for torch.distributed.checkpoint.load, then read it back and compare. Globs match DCP's keys
    (model.*)."""
    from vescale_ray import checkpoint

    opened = open_at(path, None)
    total = sum(math.prod(t.shape) * d.itemsize for t in opened.tensors.values() for d in t.kinds.values())
    with bad_values(), bar("writing", total, as_json) as advance:
        done = checkpoint.export_dcp(
            store_at(split(path)[0]), opened.commit, folder, include=include or "*", exclude=exclude, progress=advance
        )
    return _told(folder, {"commit": opened.commit.name, "files": list(done.files), "keys": len(done.keys), "bytes": done.bytes}, as_json)


@click.command("import-dcp")
@click.argument("source")
@click.argument("path")
@_names
@includes
@excludes
@click.option("--tied", multiple=True, metavar="OTHER=NAME", help="Two names of one tensor, which DCP stores twice.")
@click.option("--step", type=click.IntRange(min=0), default=0, show_default=True, help="The checkpoint's step.")
@as_json_flag
def import_dcp(
    source: str,
    path: str,
    names: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    tied: tuple[str, ...],
    step: int,
    as_json: bool,
) -> int:
    """Make SOURCE, written by torch.distributed.checkpoint.save, the newest checkpoint of PATH, optimizer states included.

    Nothing is unpickled, not even DCP's own index.
    """
    from vescale_ray import checkpoint
    from vescale_ray.checkpoint.bridges.foreign import local_folder

    root, table = root_of(path, must_exist=False), _table(names)
    with bad_values():
        found = local_folder(source, "SOURCE")
    if not found.is_dir():
        raise BadInput(f"{source}: no such folder")
    pairs = dict(_pair(text) for text in tied)
    with bad_values(), bar("importing", None, as_json) as advance:
        commit = checkpoint.import_dcp(
            source, store_at(root), rename=table, include=include or "*", exclude=exclude, tied=pairs, step=step, progress=advance
        )
    assert isinstance(commit, checkpoint.Commit)
    return _told(root, {"commit": commit.name, "bytes": commit.bytes}, as_json)


def _described(path: str, model: str | None) -> HfFolder | None:
    """The model's folder: ``model``, or the copy in the folder of the run at PATH; None if the run trained another kind of model."""
    from vescale_ray.models.hf import CONFIG, open_folder

    if model is not None:
        return open_folder(model, "--model")
    run = run_folder_of(path.rpartition("@")[0] or path)
    return open_folder(run.model) if run is not None and (run.model / CONFIG).is_file() else None


def _files_of(folder: HfFolder) -> tuple[FileLayout, dict[str, Tensor]]:
    """The layout of the model's parameters in files, and its buffers by their names there."""
    from vescale_ray.checkpoint.huggingface_layout import file_layout, read_buffers
    from vescale_ray.models.hf import build

    built = build(folder)
    layout, values = file_layout(built), read_buffers(folder.path, built)
    return layout, {name: values[piece.name] for name, piece in layout.pieces.items() if piece.name in values}


def _told(where: Target, about: Mapping[str, Any], as_json: bool) -> int:
    place = where if "://" in str(where) else os.path.abspath(where)
    files = f", {size_text(about['bytes'])}, {len(about['files'])} files, read back and compared" if "files" in about else ""
    click.echo(json.dumps({"path": str(place), **about}) if as_json else f"{place}: {about['commit']}{files}")
    return OK


def _table(names: str | None) -> Mapping[str, str] | None:
    from vescale_ray.checkpoint.huggingface import TABLES

    if names is None:
        return None
    if names in TABLES:
        return TABLES[names]
    try:
        table = json.loads(Path(names).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"--names {names}: it is not one of {', '.join(TABLES)}, and no readable file ({error.strerror})") from None
    except ValueError as error:
        raise BadInput(f"--names {names}: not JSON: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(to, str) for to in table.values()):
        raise BadInput(f"--names {names}: give one JSON object of names: {{our name: theirs}}")
    return table


def _pair(text: str) -> tuple[str, str]:
    other, found, name = text.partition("=")
    if not (other and found and name):
        raise BadInput(f"--tied {text}: give OTHER=NAME, as head.weight=embed.weight")
    return other, name


def _bytes(option: str, text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS or float(match[1]) * _UNITS[match[2]] < 1:
        raise BadInput(f"{option} {text}: give a size such as 5GB, 512MiB or 1000000")
    return int(float(match[1]) * _UNITS[match[2]])


def _weights(opened: Checkpoint, key: str) -> int:
    stored = set(opened.names(key).values())
    return sum(math.prod(opened.tensors[n].shape) * opened.tensors[n].kinds["param"].itemsize for n in stored)
