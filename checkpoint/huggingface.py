"""Import weights from Hugging Face's safetensors folders into shards or a new commit. Each rank reads its own flat ranges.

FP8 weights with one scale per block become FP32 values as they are read (:mod:`~vescale_ray.checkpoint.bridges.fp8_files`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .api import together
from .bridges.foreign import (
    OBJECT_BYTES,
    Files,
    Imported,
    Progress,
    into_commit,
    into_state,
    is_root,
    local_folder,
)
from .bridges.fp8_files import DequantizedSource, block_in
from .bridges.pieces import FileLayout, PiecedSource
from .bridges.safetensors_file import Located, read_header
from .commits import Commit
from .errors import ForeignFileError
from .format.digest import as_bytes, view_of
from .state.matching import StoredTensor
from .state.name_tables import Globs, NameTable, chosen, globs, table_of
from .stores.store import Root

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ALIASES = "vescale_ray.aliases"

LLAMA = {
    "embed.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.*_proj.weight": "model.layers.*.self_attn.*_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.ffn.*_proj.weight": "model.layers.*.mlp.*_proj.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
"""Names of ``vescale_ray.models.Llama`` and their names in transformers' ``LlamaForCausalLM``. Both rotate halves of a head, so rows stay
in place."""

TABLES = {"llama": LLAMA}


class HfSource:
    """The tensors of a safetensors file, of a folder of them, or of an index. Only headers are read until ranges are requested.

    Raises:
        ForeignFileError: a header or the index is malformed, or refers to files outside its folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        given = local_folder(path, "the folder to read")
        folder, names, index = _files_of(given)
        self.folder, self._path, self._files = folder, given, Files(folder)
        self._located: dict[str, Located] = {}
        self._aliases: dict[str, str] = {}
        for name in names:
            tensors, metadata = read_header(self._files, name)
            for key, located in tensors.items():
                if key in self._located:
                    raise ForeignFileError(f"{folder}: tensor {key!r} is both in {self._located[key].file} and in {name}")
                self._located[key] = located
            self._aliases |= _stored_aliases(folder / name, metadata)
        if index is not None:
            for key, name in index.items():
                if key not in self._located or self._located[key].file != name:
                    raise ForeignFileError(f"{folder}: the index has tensor {key!r} in {name}, which does not hold it")
            self._located = {key: located for key, located in self._located.items() if key in index}
        self._aliases = {a: n for a, n in self._aliases.items() if n in self._located and a not in self._located}
        self._tensors = {name: StoredTensor(t.shape, {"param": t.dtype}) for name, t in self._located.items()}

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    @property
    def meta(self) -> Mapping[str, Any]:
        return {"models": ["model"]}

    def describe(self) -> str:
        return str(self._path)

    def read_into(self, name: str, kind: str, start: int, out: torch.Tensor) -> None:
        located = self._located[name]
        self._files.read_into(located.file, located.offset + start * located.dtype.itemsize, out)


def weights_source(path: str | os.PathLike[str]) -> HfSource | DequantizedSource:
    """Open safetensors. If the ``config.json`` beside them describes FP8 weights with one scale per block, these are FP32 values.

    Raises:
        ForeignFileError: a header, the index or ``config.json`` is malformed, or the weights are quantized in another way.
        CheckpointMismatch: scales are missing, or have another shape or sort of dtype.
    """
    source = HfSource(path)
    form = block_in(source.folder)
    return source if form is None else DequantizedSource(source, form)


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Return a hash of the tensors in safetensors files, however they are divided in files: their names, shapes, dtypes and samples.

    The samples are 512 elements in the middle of up to 1024 tensors, so that large weights take milliseconds.

    Raises:
        ForeignFileError: a header or the index is malformed.
    """
    source, digest = HfSource(path), hashlib.sha256()
    names = sorted(source.tensors)
    for name in names:
        digest.update(f"{name} {source.tensors[name].shape} {source.tensors[name].kinds['param']}\n".encode())
    for name in names[:: -(-len(names) // 1024) or 1]:
        numel = math.prod(source.tensors[name].shape)
        sample = torch.empty(min(512, numel), dtype=source.tensors[name].kinds["param"])
        source.read_into(name, "param", (numel - sample.numel()) // 2, sample)
        digest.update(view_of(as_bytes(sample)))
    return digest.hexdigest()


def import_hf(
    path: str | os.PathLike[str],
    target: Root | nn.Module | Mapping[str, torch.Tensor],
    *,
    rename: Mapping[str, str] | NameTable | None = None,
    layout: FileLayout | None = None,
    include: Globs = "*",
    exclude: Globs = (),
    allow_missing: Globs = (),
    allow_unexpected: Globs = (),
    cast: bool = False,
    device: torch.device | str | None = None,
    step: int = 0,
    object_bytes: int = OBJECT_BYTES,
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
    progress: Progress | None = None,
) -> Imported | Commit:
    """Import weights from safetensors into a model's shards, or into a checkpoint folder as its newest commit. Every rank calls it.

    Args:
        path: a folder (its ``model.safetensors.index.json``, or else all its ``*.safetensors``), an index, or one file.
        target: a model or dict of tensors, sharded or not, to fill; or a checkpoint root.
        rename: table from our names to the files' (:data:`LLAMA`). For a root its inverse is used, which regular expressions do not have:
            give the inverse of a ``NameTable`` of the other direction, or a table of globs.
        layout: for a model, its tensors as the files store them
            (:func:`~vescale_ray.checkpoint.huggingface_layout.file_layout`); ``rename`` then has the model's names.
        include, exclude: globs of our names.
        allow_missing, allow_unexpected, cast, device: for a model, as in :func:`~vescale_ray.checkpoint.load`.
        step, object_bytes: for a root, the commit's step and the size of its objects in bytes, which is also the memory used.
        alone: for a model: do not wait for the other ranks, which may take minutes longer, and raise only this rank's errors.

    Raises:
        ForeignFileError: a file is malformed, or the weights are quantized otherwise than in FP8 with one scale per block.
        CheckpointMismatch: names, shapes or dtypes differ, or scales are missing.
    """

    def opened() -> HfSource | DequantizedSource | PiecedSource:
        source = weights_source(path)
        return source if layout is None else PiecedSource(source, layout)

    if is_root(target) and (layout is not None or alone):
        given = "layout" if layout is not None else "alone"
        raise ValueError(f"{given} is for a model; a checkpoint folder takes the files' tensors as they are, with rename")
    source = opened() if alone else together(opened, group)
    if not is_root(target):
        if not isinstance(target, (nn.Module, Mapping)):
            raise ValueError(f"the target is a {type(target).__name__}; give a module, a dict of tensors, a checkpoint folder or a store")
        return into_state(
            source,
            {"model": target},
            include=include,
            exclude=exclude,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            rename=rename,
            cast=cast,
            device=device,
            group=group,
            alone=alone,
            progress=progress,
        )
    back = table_of(rename).inverse()
    ours = back.map([*source.tensors, *source.aliases])
    taken = {name: ours[name] for name in source.tensors if chosen(ours[name], globs(include), globs(exclude))}
    aliases = {ours[alias]: ours[name] for alias, name in source.aliases.items() if name in taken}
    meta = {"models": ["model"], "state": {}, "optimizers": {}, "meta": {"imported": {"from": str(path), "format": "safetensors"}}}
    return into_commit(
        source,
        target,  # type: ignore[arg-type]
        taken,
        step=step,
        meta=meta,
        aliases=aliases,
        object_bytes=object_bytes,
        group=group,
        progress=progress,
    )


def _files_of(path: Path) -> tuple[Path, list[str], dict[str, str] | None]:
    """(folder, file names, the index's {tensor: file} if there is one)."""
    if path.is_dir():
        if (path / INDEX).is_file():
            found = _indexed(path / INDEX)
            if (path / SINGLE).is_file() and SINGLE not in found[1]:
                raise ForeignFileError(f"{path}: {INDEX} does not name {SINGLE}, which lies beside it; remove the one that is old")
            return found
        if (path / SINGLE).is_file():
            return path, [SINGLE], None  # others beside it are adapters, or the same weights for another program
        # Skip names that begin with a dot: pieces of an aborted download or export, or macOS metadata files.
        names = sorted(p.name for p in path.glob("*.safetensors") if not p.name.startswith("."))
        if not names:
            raise ForeignFileError(f"{path}: holds no {INDEX} and no *.safetensors")
        return path, names, None
    if path.name.endswith(".json"):
        return _indexed(path)
    return path.parent, [path.name], None


def _indexed(path: Path) -> tuple[Path, list[str], dict[str, str]]:
    files = Files(path.parent)
    try:
        index = json.loads(files.read(path.name, 0, files.size(path.name)))
    except (ValueError, RecursionError) as error:
        raise ForeignFileError(f"{path}: not an index: not JSON: {error}") from None
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise ForeignFileError(f"{path}: not an index: it has no weight_map")
    for key, name in weights.items():
        # Plain names only: a foreign index must not make us read other files of this machine.
        plain = isinstance(name, str) and name.endswith(".safetensors") and name == os.path.basename(name) and not set(name) & {"\\", "\0"}
        if not plain or name.startswith("."):
            raise ForeignFileError(f"{path}: the index puts tensor {key!r} in {name!r}, which is not a safetensors file in its folder")
    return path.parent, sorted(set(weights.values())), weights


def _stored_aliases(path: Path, metadata: Mapping[str, str]) -> dict[str, str]:
    if ALIASES not in metadata:
        return {}
    try:
        aliases = json.loads(metadata[ALIASES])
    except (ValueError, RecursionError):
        aliases = None
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        raise ForeignFileError(f"{path}: its {ALIASES} is not a JSON object of names")
    return aliases
