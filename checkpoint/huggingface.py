"""Import weights from Hugging Face's safetensors folders into shards or a new commit, and export a commit to them.

Import reads flat ranges, each rank its own. Export streams verified blocks in bounded pieces, and reads back what it wrote.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from .api import from_first, ranks_of, together
from .arguments import nbytes
from .bridges.foreign import (
    OBJECT_BYTES,
    Files,
    Imported,
    Progress,
    TensorSource,
    into_commit,
    into_state,
    is_root,
    local_folder,
    new_folder,
    publish,
    take_back,
)
from .bridges.safetensors_file import SAFETENSORS_NAME, Located, header_of, read_header
from .commits import Commit
from .errors import CheckpointMismatch, ExportFailed, ForeignFileError
from .format.digest import as_bytes, view_of
from .format.object_layout import dtype_name
from .format.reader import Checkpoint, open_checkpoint
from .state.matching import StoredTensor, some
from .state.names import Globs, NameTable, chosen, globs, table_of
from .stores.posix import sync_folder
from .stores.store import Root

INDEX = "model.safetensors.index.json"
_ALIASES = "vescale_ray.aliases"
_PIECE_BYTES = 32 << 20

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
        self._path, self._files = given, Files(folder)
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


def import_hf(
    path: str | os.PathLike[str],
    target: Root | nn.Module | Mapping[str, torch.Tensor],
    *,
    rename: Mapping[str, str] | NameTable | None = None,
    include: Globs = "*",
    exclude: Globs = (),
    allow_missing: Globs = (),
    allow_unexpected: Globs = (),
    cast: bool = False,
    device: torch.device | str | None = None,
    step: int = 0,
    object_bytes: int = OBJECT_BYTES,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> Imported | Commit:
    """Import weights from safetensors into a model's shards, or into a checkpoint folder as its newest commit. Every rank calls it.

    Args:
        path: a folder (its ``model.safetensors.index.json``, or else all its ``*.safetensors``), an index, or one file.
        target: a model or dict of tensors, sharded or not, to fill; or a checkpoint root.
        rename: table from our names to the files' (:data:`LLAMA`). For a root its inverse is used, which regular expressions do not have:
            give the inverse of a ``NameTable`` of the other direction, or a table of globs.
        include, exclude: globs of our names.
        allow_missing, allow_unexpected, cast, device: for a model, as in :func:`~vescale_ray.checkpoint.load`.
        step, object_bytes: for a root, the commit's step and the size of its objects in bytes, which is also the memory used.

    Raises:
        ForeignFileError: a file is malformed. CheckpointMismatch: names, shapes or dtypes differ.
    """
    source = _from_all(path, group)
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


@dataclass(frozen=True)
class Exported:
    """Files written, in order; names written; bytes of the tensors."""

    files: tuple[str, ...]
    tensors: tuple[str, ...]
    bytes: int


def export_hf(
    root: Root,
    commit: str | Commit | None,
    folder: str | os.PathLike[str],
    *,
    rename: Mapping[str, str] | NameTable | None = None,
    include: Globs = "*",
    exclude: Globs = (),
    key: str = "model",
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Export the weights of a commit as safetensors files and, last, their index. Every rank calls it, and the ranks share the files.

    Each file is written under a temporary name, synced, read back and compared, and then renamed. Tied tensors are written once, under
    their first name. The header lists their other names, for :func:`import_hf`. Takes 64 MiB of memory.

    Args:
        commit: name of a commit; ``None`` means the newest.
        folder: folder to create; it must not hold safetensors files.
        rename: table from our names to the files' (:data:`LLAMA`).
        include, exclude: globs of our names.
        key: entry of the state (``"ema"``, ..).
        dtype: dtype to which floating-point tensors are cast.
        max_shard_bytes: most bytes of tensors in a file; a larger tensor gets its own file.

    Raises:
        ValueError: the folder holds model files, or is a URL. CheckpointMismatch: there is nothing to write, or safetensors lacks a dtype.
            CheckpointCorrupt: the checkpoint is damaged. ExportFailed: the data read back differs from the written data.
    """
    rank, world = ranks_of(group)
    nbytes("max_shard_bytes", max_shard_bytes)
    place = local_folder(folder, "the folder to write")

    made: list[Path] = []

    def begin() -> Commit:
        found = open_checkpoint(root, commit).commit
        made.extend(new_folder(folder))
        there = sorted(p.name for p in place.iterdir() if p.name.endswith((".safetensors", ".index.json")))
        if there:
            raise ValueError(f"{place} holds {some(there)}: give a folder without model files")
        return found

    chosen_commit = from_first(begin, group)

    def write() -> tuple[list[_File], dict[str, str]]:
        checkpoint = open_checkpoint(root, chosen_commit)
        files, aliases = _plan(checkpoint, table_of(rename), globs(include), globs(exclude), key, dtype, max_shard_bytes)
        metadata = {"format": "pt", **({_ALIASES: json.dumps(aliases)} if aliases else {})}
        for file in files[rank::world]:
            _write(checkpoint, place / file.name, file, metadata, progress)
            mine.append(place / file.name)
        return files, aliases

    def finish() -> None:
        weights = {entry.name: file.name for file in files for entry in file.entries}
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": weights}, indent=2, sort_keys=True) + "\n"
        publish(place / INDEX, text.encode())

    mine: list[Path] = []
    try:
        files, _ = together(write, group)
        size = sum(entry.bytes for file in files for entry in file.entries)
        from_first(finish, group)
    except BaseException:
        take_back(mine, made)
        raise
    return Exported(tuple(f.name for f in files), tuple(e.name for f in files for e in f.entries), size)


@dataclass(frozen=True)
class _Entry:
    name: str
    stored: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _File:
    name: str
    entries: tuple[_Entry, ...]


def _plan(
    checkpoint: Checkpoint,
    table: NameTable,
    include: Sequence[str],
    exclude: Sequence[str],
    key: str,
    dtype: torch.dtype | None,
    max_bytes: int,
) -> tuple[list[_File], dict[str, str]]:
    """Assign tensors to files, in the same way on every rank; also ``{alias: name}`` of tied tensors, by the files' names."""
    names = {name: stored for name, stored in checkpoint.names(key).items() if chosen(name, include, exclude)}
    if not names:
        raise CheckpointMismatch(f"checkpoint {checkpoint.commit.path} has no tensor of {key!r} that fits {', '.join(include)}")
    new = table.map(names)
    entries: list[_Entry] = []
    first: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for name, stored in names.items():
        if stored in first:
            aliases[new[name]] = first[stored]
            continue
        first[stored] = new[name]
        tensor = checkpoint.tensors[stored]
        kept = tensor.kinds["param"]
        to = dtype if dtype is not None and kept.is_floating_point else kept
        if to not in SAFETENSORS_NAME:
            raise CheckpointMismatch(f"{name!r} is {dtype_name(to)}, which safetensors has no name for: exclude it, or give a dtype")
        entries.append(_Entry(new[name], stored, tensor.shape, to))
    shards: list[list[_Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.bytes
    count = len(shards)
    files = []
    for index, held in enumerate(shards):
        called = "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
        # Wide elements first, so that every tensor begins at a multiple of its element size.
        files.append(_File(called, tuple(sorted(held, key=lambda e: -e.dtype.itemsize))))
    return files, aliases


def _write(checkpoint: Checkpoint, path: Path, file: _File, metadata: Mapping[str, str], progress: Progress | None) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        try:
            written = xxhash.xxh3_128()
            header = header_of([(e.name, e.shape, e.dtype) for e in file.entries], metadata)
            _append(fd, memoryview(header), written)
            for entry in file.entries:
                stored = checkpoint.tensors[entry.stored].kinds["param"]
                step = max(1, _PIECE_BYTES // max(stored.itemsize, entry.dtype.itemsize))
                numel = math.prod(entry.shape)
                for start in range(0, numel, step):
                    piece = checkpoint.read_range(entry.stored, start, min(numel, start + step)).to(entry.dtype)
                    _append(fd, view_of(as_bytes(piece)), written)
                    if progress is not None:
                        progress(piece.numel() * stored.itemsize)
            os.fsync(fd)
            with suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # so that the data is read back from the disk
            _compare(fd, path, written)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        take_back([temporary, path])
        raise


def _append(fd: int, data: memoryview, digest: Any) -> None:
    digest.update(data)
    while len(data):
        data = data[os.write(fd, data) :]


def _compare(fd: int, path: Path, written: Any) -> None:
    found, offset = xxhash.xxh3_128(), 0
    while data := os.pread(fd, 4 << 20, offset):
        found.update(data)
        offset += len(data)
    if found.digest() != written.digest():
        raise ExportFailed(f"{path}: the data read back differs from the data written: the disk or its connection is at fault")


def _from_all(path: str | os.PathLike[str], group: dist.ProcessGroup | None) -> TensorSource:
    return together(lambda: HfSource(path), group)


def _files_of(path: Path) -> tuple[Path, list[str], dict[str, str] | None]:
    """(folder, file names, the index's {tensor: file} if there is one)."""
    if path.is_dir():
        if (path / INDEX).is_file():
            return _indexed(path / INDEX)
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
        raise ForeignFileError(f"{path}: no index: no JSON: {error}") from None
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise ForeignFileError(f"{path}: no index: it has no weight_map")
    for key, name in weights.items():
        # Plain names only: a foreign index must not make us read other files of this machine.
        plain = isinstance(name, str) and name.endswith(".safetensors") and name == os.path.basename(name) and not set(name) & {"\\", "\0"}
        if not plain or name.startswith("."):
            raise ForeignFileError(f"{path}: the index puts tensor {key!r} in {name!r}, which is not a safetensors file in its folder")
    return path.parent, sorted(set(weights.values())), weights


def _stored_aliases(path: Path, metadata: Mapping[str, str]) -> dict[str, str]:
    if _ALIASES not in metadata:
        return {}
    try:
        aliases = json.loads(metadata[_ALIASES])
    except (ValueError, RecursionError):
        aliases = None
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        raise ForeignFileError(f"{path}: its {_ALIASES} is not a JSON object of names")
    return aliases
