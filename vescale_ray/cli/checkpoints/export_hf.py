"""``vescale-ray ckpt export-hf``: a checkpoint's weights as a folder of Hugging Face's, which from_pretrained loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vescale_ray.cli.checkpoints.checkpoint_commands import as_json_flag, excludes, includes
from vescale_ray.cli.checkpoints.checkpoint_conversions import DTYPES, bytes_of, names_option, table_at, told, weights
from vescale_ray.cli.checkpoints.checkpoint_output import bar
from vescale_ray.cli.checkpoints.checkpoint_paths import bad_values, open_at, run_folder_of, split, store_at
from vescale_ray.cli.checkpoints.export_adapters import check_base, merged_weights, write_adapter
from vescale_ray.cli.checkpoints.export_fp8 import Fp8Files, fp8_files
from vescale_ray.cli.common import lasting_path
from vescale_ray.errors import BadInput

if TYPE_CHECKING:
    import torch

    from vescale_ray.checkpoint import Checkpoint
    from vescale_ray.checkpoint.bridges.pieces import FileLayout
    from vescale_ray.checkpoint.huggingface_export import Computed
    from vescale_ray.config import RunConfig
    from vescale_ray.config.model_section import LoraSettings
    from vescale_ray.models.hf import HfFolder


@click.command("export-hf")
@click.argument("path")
@click.argument("folder", callback=lasting_path)
@names_option
@includes
@excludes
@click.option("--key", default="model", show_default=True, help="The entry of the state to write.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="Cast floating-point tensors to this dtype.")
@click.option("--max-shard", default="5GB", show_default=True, metavar="SIZE", help="Largest size of one file.")
@click.option("--model", metavar="FOLDER", help="The model's folder, as model.hf. [default: the one that the run at PATH trained]")
@click.option("--merge", is_flag=True, help="Add the adapters of model.lora to the weights, and write those. [default: the adapter alone]")
@click.option("--fp8", is_flag=True, help="Write matrices in FP8 with a scale per block, by train.quantize or its default.")
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
    merge: bool,
    fp8: bool,
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
    cast: torch.dtype | None = getattr(torch, DTYPES[dtype]) if dtype else None
    limit, table = bytes_of("--max-shard", max_shard), table_at(names)
    described = _described(path, model) if names is None else None
    config = _config(path, opened)
    adapters = config.model.lora if config is not None and names is None else None
    _check_options(path, described, adapters, merge, fp8, {"--include": include, "--exclude": exclude, "--key": key != "model"})
    if config is not None and adapters is not None and not merge:
        return told(folder, write_adapter(folder, opened, adapters, str(config.model.hf), cast), as_json)
    files: _ModelFiles | None = None
    if described is not None:
        _check_free(folder)
        files = _files_of(described, model, config, opened, cast or described.dtype, fp8)
        _check_model(opened, key, files, f"--model = {model}" if model is not None else str(described.path))
        cast, exclude = cast or described.dtype, (*exclude, *files.left_out)
    quantized = files.quantized if files is not None else None
    if quantized is not None and quantized.note:
        click.echo(quantized.note, err=True)
    with bad_values(), bar("writing", weights(opened, key), as_json) as advance:
        done = checkpoint.export_hf(
            store_at(split(path)[0]),
            opened.commit,
            folder,
            rename=table,
            layout=files.layout if files is not None else None,
            extra=files.extra if files is not None else None,
            quantize=dict.fromkeys(quantized.names, quantized.form).get if quantized is not None else None,
            include=include or "*",
            exclude=exclude,
            key=key,
            dtype=cast,
            max_shard_bytes=limit,
            progress=advance,
        )
    if described is not None:
        copy_description(described, Path(folder), cast, quantized.config if quantized is not None else None)
    return told(
        folder, {"commit": opened.commit.name, "files": list(done.files), "tensors": len(done.tensors), "bytes": done.bytes}, as_json
    )


def _described(path: str, model: str | None) -> HfFolder | None:
    """Return the folder that describes the model: ``model``, or the copy in the folder of the run at PATH. None if the run trained no model
    of ``model.hf``."""
    from vescale_ray.config import load_config
    from vescale_ray.models.hf import CONFIG, open_folder

    if model is not None:
        return open_folder(model, "--model")
    run = run_folder_of(_without_name(path))
    if run is None or not run.config_path.is_file() or load_config(run.config_path).model.hf is None:
        return None
    if not (run.model / CONFIG).is_file():
        raise BadInput(f"{run.model}: has no {CONFIG}, which the run had copied from model.hf; name the model's folder with --model")
    return open_folder(run.model)


def _check_options(
    path: str, described: HfFolder | None, adapters: LoraSettings | None, merge: bool, fp8: bool, parts: Mapping[str, object]
) -> None:
    """Refuse options that exclude each other. ``parts``: values of the options that choose a part of the checkpoint, by name."""
    if merge and adapters is None:
        raise BadInput(f"--merge: {path} is not a checkpoint of a run with model.lora, or --names is given; leave it out")
    if merge and described is None:
        raise BadInput(f"--merge: {path} is not its run's folder; name the folder of the base with --model")
    if fp8 and described is None:
        raise BadInput("--fp8: config.json must describe the scales; export a model of model.hf without --names, or give --model")
    if fp8 and adapters is not None and not merge:
        raise BadInput("--fp8: an adapter is not quantized; give --merge, too")
    chosen = next((name for name, value in parts.items() if value), None)
    if adapters is not None and chosen is not None:
        raise BadInput(f"{chosen}: an adapter, or the weights with it, is exported whole; leave it out")


def _check_free(folder: str) -> None:
    """Refuse an output folder that contains a model's description, because the export would replace it."""
    from vescale_ray.models.hf import SMALL_FILES

    there = [name for name in SMALL_FILES if (Path(folder) / name).exists()]
    if there:
        raise BadInput(f"{folder} holds {', '.join(there)}: give a folder without model files")


def _check_model(opened: Checkpoint, key: str, files: _ModelFiles, model: str) -> None:
    """Refuse a checkpoint of a model other than the one whose configuration the export gets."""
    from vescale_ray.checkpoint.state.name_tables import matches
    from vescale_ray.models import lora

    layout, stored = files.layout, {name: at for name, at in opened.names(key).items() if "/" not in name}
    shapes = {name: tuple(opened.tensors[at].shape) for name, at in stored.items()}
    computed = {layout.pieces[name].name for name in files.extra if name in layout.pieces}
    known = {*layout.shapes, *layout.tied}
    wrong = [
        *(f"has no {name}" for name in layout.shapes if name not in shapes and name not in computed),
        *(f"has {name}, the model has not" for name in shapes if name not in known and not matches(name, lora.PARAMETERS)),
        *(f"has {n} of shape {shapes[n]}, the model of {s}" for n, s in layout.shapes.items() if n in shapes and shapes[n] != tuple(s)),
    ]
    if wrong and shapes:
        raise BadInput(f"{model}: {opened.commit.path} is of another model: it {wrong[0]}; name the folder of its model with --model")


def _without_name(path: str) -> str:
    return path.rpartition("@")[0] or path


def _config(path: str, opened: Checkpoint) -> RunConfig | None:
    """Return the configuration of the run at PATH, or the one that the checkpoint was saved with, or None."""
    from vescale_ray.config import RunConfig, load_config

    run = run_folder_of(_without_name(path))
    if run is not None and run.config_path.is_file():
        return load_config(run.config_path)
    try:
        return RunConfig.model_validate(opened.meta["config"])
    except (KeyError, ValueError):  # none, or that of another version
        return None


@dataclass(frozen=True)
class _ModelFiles:
    """A description of a model's tensors in files.

    Attributes:
        layout: layout of the parameters.
        extra: buffers and merged weights, by their names in the files.
        left_out: globs of names in the commit that the files leave out.
        quantized: the tensors in FP8; None: no tensor is in FP8.
    """

    layout: FileLayout
    extra: dict[str, Computed]
    left_out: tuple[str, ...]
    quantized: Fp8Files | None


def _files_of(
    folder: HfFolder, model: str | None, config: RunConfig | None, opened: Checkpoint, dtype: torch.dtype | None, fp8: bool
) -> _ModelFiles:
    """Describe the files of the model in ``folder``. ``config``: configuration of the run that trained it; ``model``: the option
    ``--model``."""
    from vescale_ray.checkpoint.huggingface_export import Computed
    from vescale_ray.checkpoint.huggingface_layout import file_layout, persistent_buffers, read_buffers
    from vescale_ray.models import lora
    from vescale_ray.models.hf import build

    built = build(folder)
    layout = file_layout(built)
    values = read_buffers(folder.path, layout, persistent_buffers(built))
    extra = {
        name: Computed(piece.shape, value.dtype, lambda _, value=value: value)  # type: ignore[misc]
        for name, piece in layout.pieces.items()
        if (value := values.get(piece.name)) is not None
    }
    left_out: tuple[str, ...] = ()
    if config is not None and config.model.lora is not None:
        base = check_base(opened, config.model.hf, model)
        lora.add_adapters(built, config.model.lora)
        layout, left_out = layout.renamed(lora.base_names(built)), lora.PARAMETERS
        extra = merged_weights(config.model.lora, base, built, layout, opened, dtype) | extra
    quantized = fp8_files(built, layout, config.train if config is not None else None) if fp8 else None
    return _ModelFiles(layout, extra, left_out, quantized)
