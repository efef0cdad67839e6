"""``vescale-ray ckpt import-hf, export-dcp, import-dcp``: checkpoints to and from other programs' formats."""

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
from vescale_ray.cli.checkpoints.checkpoint_paths import Target, bad_values, open_at, root_of, split, store_at
from vescale_ray.cli.common import OK, lasting_path
from vescale_ray.errors import BadInput

if TYPE_CHECKING:
    from vescale_ray.checkpoint import Checkpoint

_UNITS = {"": 1, "B": 1, **{f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)}, **{f"{u}iB": 1024**i for i, u in enumerate("KMGT", 1)}}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
names_option = click.option("--names", metavar="TABLE", help="Translation of names: llama, or a JSON file {our name: theirs} of globs.")


@click.command("import-hf")
@click.argument("source")
@click.argument("path")
@names_option
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
    from vescale_ray.checkpoint.huggingface import weights_source

    root, table = root_of(path, must_exist=False), table_at(names)
    with bad_values():
        found = local_folder(source, "SOURCE")
    if not found.exists():
        raise BadInput(f"{source}: no such file or folder")
    total = sum(math.prod(t.shape) * t.kinds["param"].itemsize for t in weights_source(source).tensors.values())
    with bad_values(), bar("importing", total, as_json) as advance:
        commit = checkpoint.import_hf(
            source, store_at(root), rename=table, include=include or "*", exclude=exclude, step=step, progress=advance
        )
    assert isinstance(commit, checkpoint.Commit)
    return told(root, {"commit": commit.name, "bytes": commit.bytes}, as_json)


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
    return told(folder, {"commit": opened.commit.name, "files": list(done.files), "keys": len(done.keys), "bytes": done.bytes}, as_json)


@click.command("import-dcp")
@click.argument("source")
@click.argument("path")
@names_option
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

    root, table = root_of(path, must_exist=False), table_at(names)
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
    return told(root, {"commit": commit.name, "bytes": commit.bytes}, as_json)


def told(where: Target, about: Mapping[str, Any], as_json: bool) -> int:
    place = where if "://" in str(where) else os.path.abspath(where)
    files = f", {size_text(about['bytes'])}, {len(about['files'])} files, read back and compared" if "files" in about else ""
    click.echo(json.dumps({"path": str(place), **about}) if as_json else f"{place}: {about['commit']}{files}")
    return OK


def table_at(names: str | None) -> Mapping[str, str] | None:
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
        raise BadInput(f"--tied {text}: give OTHER=NAME, such as head.weight=embed.weight")
    return other, name


def bytes_of(option: str, text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS or float(match[1]) * _UNITS[match[2]] < 1:
        raise BadInput(f"{option} {text}: give a size such as 5GB, 512MiB or 1000000")
    return int(float(match[1]) * _UNITS[match[2]])


def weights(opened: Checkpoint, key: str) -> int:
    stored = set(opened.names(key).values())
    return sum(math.prod(opened.tensors[n].shape) * opened.tensors[n].kinds["param"].itemsize for n in stored)
