"""Export the weights of a commit as Hugging Face's safetensors files: stream verified blocks in bounded pieces, and read back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from vescale_ray.block_grid import Grid
from vescale_ray.quantization import Fp8Block, fp8

from .api import from_first, ranks_of, together
from .arguments import nbytes
from .bridges.foreign import Progress, local_folder, new_folder, publish, take_back
from .bridges.fp8_files import CODES, SCALES
from .bridges.pieces import FileLayout, FilePiece
from .bridges.safetensors_file import SAFETENSORS_NAME, header_of
from .commits import Commit
from .errors import CheckpointMismatch, ExportFailed, first_few
from .format.digest import as_bytes, view_of
from .format.object_layout import dtype_name
from .huggingface import ALIASES, INDEX
from .reading.reader import Checkpoint, open_checkpoint
from .state.name_tables import Globs, NameTable, chosen, globs, table_of
from .stores.posix import sync_folder
from .stores.store import Root

_PIECE_BYTES = 32 << 20


@dataclass(frozen=True)
class Exported:
    """Files and tensors of an export: paths of the files, in order, names of the tensors, and the tensors' bytes."""

    files: tuple[str, ...]
    tensors: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Computed:
    """A tensor of an export that ``make`` computes from the checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[Checkpoint], torch.Tensor]


def export_hf(
    root: Root,
    commit: str | Commit | None,
    folder: str | os.PathLike[str],
    *,
    rename: Mapping[str, str] | NameTable | None = None,
    layout: FileLayout | None = None,
    extra: Mapping[str, Computed] | None = None,
    quantize: Callable[[str], Fp8Block | None] | None = None,
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
        rename: table from our names to the files' (:data:`~vescale_ray.checkpoint.huggingface.LLAMA`).
        layout: the model's tensors as the files store them; names that it lacks keep their names.
        extra: tensors that the commit lacks, by their names in the files; each is computed when it is written.
        quantize: returns the FP8 format of a matrix, by its name in the files, or None. The files then hold its codes and FP32 scales
            (:mod:`~vescale_ray.checkpoint.bridges.fp8_files`). The matrix is read twice, once for the scales.
        include, exclude: globs of our names.
        key: entry of the state (``"ema"``, ..).
        dtype: dtype to which floating-point tensors are cast.
        max_shard_bytes: maximum number of bytes of tensors in a file; a larger tensor gets its own file.

    Raises:
        ValueError: the folder holds model files, or is a URL. CheckpointMismatch: there is nothing to write, safetensors lacks a dtype, or
            a tensor to quantize is no matrix, or holds Inf or NaN.
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
            raise ValueError(f"{place} holds {first_few(there)}: give a folder without model files")
        return found

    chosen_commit = from_first(begin, group)

    def write() -> tuple[list[_File], dict[str, str]]:
        checkpoint = open_checkpoint(root, chosen_commit)
        entries, aliases = _entries(checkpoint, table_of(rename), layout, globs(include), globs(exclude), key, dtype, extra or {})
        files = _cut(_quantized(entries, quantize or (lambda name: None)), max_shard_bytes)
        metadata = {"format": "pt", **({ALIASES: json.dumps(aliases)} if aliases else {})}
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
    """A tensor of the files: elements of the stored tensor ``stored`` from ``start`` on, or ``computed``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: str = ""
    start: int = 0
    computed: Computed | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def pieces(self, checkpoint: Checkpoint) -> Iterator[torch.Tensor]:
        """Yield the elements in order, in bounded pieces, in the dtype of the file."""
        wider = max(4 if self.computed is not None else checkpoint.tensors[self.stored].kinds["param"].itemsize, self.dtype.itemsize)
        for piece in self.values(checkpoint, max(1, _PIECE_BYTES // wider)):
            yield piece.to(self.dtype)

    def values(self, checkpoint: Checkpoint, step: int) -> Iterator[torch.Tensor]:
        """Yield the elements in order, in pieces of ``step`` elements, as the checkpoint has them."""
        if self.computed is not None:
            yield from self.computed.make(checkpoint).flatten().split(step)
            return
        for start in range(self.start, self.start + self.numel, step):
            yield checkpoint.read_range(self.stored, start, min(self.start + self.numel, start + step))

    def read_bytes(self, checkpoint: Checkpoint, piece: torch.Tensor) -> int:
        """Return the number of stored bytes that ``piece`` was made from, to show progress."""
        return 0 if self.computed is not None else piece.numel() * checkpoint.tensors[self.stored].kinds["param"].itemsize


@dataclass(frozen=True)
class _QuantizedEntry(_Entry):
    """The FP8 codes, or the scales, of the matrix ``source``."""

    source: _Entry = field(kw_only=True)
    form: Fp8Block = field(kw_only=True)

    @classmethod
    def both(cls, source: _Entry, form: Fp8Block) -> list[_Entry]:
        if len(source.shape) != 2 or 0 in source.shape or not source.dtype.is_floating_point:
            what = f"{source.name!r} of shape {list(source.shape)} and dtype {dtype_name(source.dtype)}"
            raise CheckpointMismatch(f"{what} has no FP8 layout in files: only matrices of floating-point numbers have one")
        grid = Grid.of(source.shape, form.block)
        return [
            cls(source.name, source.shape, CODES, source=source, form=form),
            cls(source.name + SCALES, grid.state_shape, torch.float32, source=source, form=form),
        ]

    def pieces(self, checkpoint: Checkpoint) -> Iterator[torch.Tensor]:
        cols = self.source.shape[1]
        band = min(self.form.rows, self.source.shape[0]) * cols
        for values in self.source.values(checkpoint, max(1, _PIECE_BYTES // (4 * band)) * band):
            try:
                codes, scales = fp8.quantize(values.view(-1, cols), self.form, name=self.source.name)
            except FloatingPointError:
                raise CheckpointMismatch(
                    f"{self.source.name!r} holds Inf or NaN, for which FP8 has no code: export an older checkpoint"
                ) from None
            yield (codes if self.dtype == CODES else fp8.scale_values(scales)).flatten()

    def read_bytes(self, checkpoint: Checkpoint, piece: torch.Tensor) -> int:
        return self.source.read_bytes(checkpoint, piece) if self.dtype == CODES else 0


def _quantized(entries: Sequence[_Entry], policy: Callable[[str], Fp8Block | None]) -> list[_Entry]:
    forms = [policy(entry.name) for entry in entries]
    both = (_QuantizedEntry.both(entry, form) if form is not None else [entry] for entry, form in zip(entries, forms, strict=True))
    return [part for parts in both for part in parts]


@dataclass(frozen=True)
class _File:
    name: str
    entries: tuple[_Entry, ...]


def _entries(
    checkpoint: Checkpoint,
    table: NameTable,
    layout: FileLayout | None,
    include: Sequence[str],
    exclude: Sequence[str],
    key: str,
    dtype: torch.dtype | None,
    extra: Mapping[str, Computed],
) -> tuple[list[_Entry], dict[str, str]]:
    """Return the tensors of the files; also ``{alias: name}`` of tied tensors, by the files' names."""
    names = {name: stored for name, stored in checkpoint.names(key).items() if chosen(name, include, exclude)}
    if not names and not extra:
        raise CheckpointMismatch(f"checkpoint {checkpoint.commit.path} has no tensor of {key!r} that fits {', '.join(include)}")
    parts: dict[str, list[tuple[str, FilePiece]]] = {}
    for file_name, piece in (layout.pieces if layout is not None else {}).items():
        parts.setdefault(piece.name, []).append((file_name, piece))
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
        for file_name, piece in parts.get(name) or [(new[name], FilePiece(name, 0, tensor.shape))]:
            entries.append(_Entry(file_name, piece.shape, to, stored, piece.start))
    entries += [_Entry(name, given.shape, given.dtype, computed=given) for name, given in extra.items()]
    return entries, aliases


def _cut(entries: Sequence[_Entry], max_bytes: int) -> list[_File]:
    """Assign tensors to files, in the same way on every rank."""
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
    return files


def _write(checkpoint: Checkpoint, path: Path, file: _File, metadata: Mapping[str, str], progress: Progress | None) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        try:
            written = xxhash.xxh3_128()
            header = header_of([(e.name, e.shape, e.dtype) for e in file.entries], metadata)
            _append(fd, memoryview(header), written)
            for entry in file.entries:
                for piece in entry.pieces(checkpoint):
                    _append(fd, view_of(as_bytes(piece)), written)
                    if progress is not None:
                        progress(entry.read_bytes(checkpoint, piece))
            os.fsync(fd)
            with suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # so that the data is read back from the disk
            _compare(fd, path, written)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        take_back([temporary, path])
        if isinstance(error, OSError):  # an operation on a descriptor names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
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
