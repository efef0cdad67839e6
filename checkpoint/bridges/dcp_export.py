"""Export a commit as a stock PyTorch DCP checkpoint, streamed, and verified by reading it back.

DCP's own writer is not used: it holds every tensor of a file in memory until the file is done, and reports a failed thread as a success.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from vescale_ray.compat.checkpoint import StorageInfo, flatten_state_dict

from ..api import from_first, gathered, ranks_of, together
from ..commits import Commit
from ..errors import CheckpointMismatch, ExportFailed, first_few
from ..format.digest import as_bytes, view_of
from ..format.object_layout import dtype_name
from ..reading.reader import Checkpoint, open_checkpoint
from ..state.name_tables import Globs, chosen, globs
from ..stores.store import Root
from .dcp import Ref, declared, nested
from .dcp_files import Archives
from .foreign import Progress, local_folder, new_folder, publish, take_back

_DCP_VERSION = "1.0.0"
_CHUNK_BYTES = 64 << 20
_FILE_BYTES = 4 << 30


@dataclass(frozen=True)
class DcpExported:
    """Names of the files written, keys written, and bytes of the tensors."""

    files: tuple[str, ...]
    keys: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class _Item:
    """One archive to write: a plain value (``ref`` is None), or rows of a tensor."""

    key: str
    ref: Ref | None
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def export_dcp(
    root: Root,
    commit: str | Commit | None,
    folder: str | os.PathLike[str],
    *,
    include: Globs = "*",
    exclude: Globs = (),
    entries: Mapping[str, str] | None = None,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> DcpExported:
    """Write a commit as a DCP checkpoint that stock ``torch.distributed.checkpoint.load`` reads. Every rank calls it, and the ranks share
    the work.

    Every tensor is read back from the files and compared with verified data; ``.metadata`` is written last. The export takes about 128 MiB
    of memory; a row larger than 64 MiB is written whole.

    Args:
        commit: name of a commit; ``None`` means the newest.
        folder: folder to create; it must be empty.
        include, exclude: globs of DCP's keys (``model.*``).
        entries: ``{our entry: DCP's}`` for entries with other names than in :data:`ENTRIES`.

    Raises:
        ValueError: the folder is not empty, or is a URL. CheckpointCorrupt: the checkpoint is damaged. ExportFailed: the data read back
            differs. On any error, the written files are removed.
    """
    rank, world = ranks_of(group)
    place = local_folder(folder, "the folder to write")

    made: list[Path] = []

    def begin() -> Commit:
        found = open_checkpoint(root, commit).commit
        made.extend(new_folder(folder))
        there = sorted(p.name for p in place.iterdir())
        if there:
            raise ValueError(f"{place} holds {first_few(there)}: give an empty folder")
        return found

    chosen_commit = from_first(begin, group)
    leaves: dict[str, Any] = {}
    paths: dict[str, Any] = {}

    def write() -> dict[MetadataIndex, Any]:
        checkpoint = open_checkpoint(root, chosen_commit)
        flat, planned = flatten_state_dict(nested(checkpoint, entries))
        leaves.update({key: leaf for key, leaf in flat.items() if chosen(key, globs(include), globs(exclude))})
        paths.update({key: planned[key] for key in leaves})
        if not leaves:
            raise CheckpointMismatch(f"checkpoint {checkpoint.commit.path} has nothing that fits {', '.join(globs(include))}")
        _check_writable(leaves)
        items = list(_items(leaves))
        return _write_items(checkpoint, leaves, items[rank::world], place, rank, progress, files)

    def finish() -> None:
        described: dict[str, Any] = {key: declared(leaf) for key, leaf in leaves.items()}
        for key, entry in described.items():
            if isinstance(entry, TensorStorageMetadata):
                leaf = leaves[key]
                entry.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for _, o, s in _boxes(key, leaf)]
        whole = Metadata(described, paths, storage, StorageMeta(checkpoint_id=str(place)), _DCP_VERSION)
        publish(place / ".metadata", pickle.dumps(whole))

    files: list[Path] = []
    try:
        mine = together(write, group)
        storage = {index: info for one in gathered(mine, group) for index, info in one.items()}
        from_first(finish, group)
    except BaseException:
        take_back(files, made)
        raise
    names = sorted({info.relative_path for info in storage.values()})
    return DcpExported(tuple(names), tuple(leaves), sum(leaf.bytes for leaf in leaves.values() if isinstance(leaf, Ref)))


def _check_writable(leaves: Mapping[str, Any]) -> None:
    """Raises CheckpointMismatch for a tensor whose dtype torch.save() cannot write (such as int4)."""
    for dtype, key in {leaf.dtype: key for key, leaf in leaves.items() if isinstance(leaf, Ref)}.items():
        try:
            torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
        except Exception:
            raise CheckpointMismatch(f"{key!r} is {dtype_name(dtype)}, which torch.save() can't write: exclude it") from None


def _items(leaves: Mapping[str, Any]) -> Iterator[_Item]:
    for key, leaf in leaves.items():
        if isinstance(leaf, Ref):
            for _, offsets, sizes in _boxes(key, leaf):
                yield _Item(key, leaf, offsets, sizes)
        else:
            whole = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()
            yield _Item(key, None, (0,) * len(whole), whole)


def _boxes(key: str, leaf: Ref | torch.Tensor) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Cut a stored tensor into boxes of whole rows: as many as fit into 64 MiB, at least one. A box is a contiguous range of elements."""
    shape = tuple(leaf.shape)
    if not isinstance(leaf, Ref) or not shape or not math.prod(shape):
        yield key, (0,) * len(shape), shape
        return
    row = math.prod(shape[1:]) * leaf.dtype.itemsize
    step = max(1, _CHUNK_BYTES // row)
    for start in range(0, shape[0], step):
        yield key, (start, *(0 for _ in shape[1:])), (min(step, shape[0] - start), *shape[1:])


def _write_items(
    checkpoint: Checkpoint,
    leaves: Mapping[str, Any],
    items: list[_Item],
    place: Path,
    rank: int,
    progress: Progress | None,
    files: list[Path],
) -> dict[MetadataIndex, Any]:
    infos: dict[MetadataIndex, Any] = {}
    number = 0
    while items:
        name = f"__{rank}_{number}.distcp"
        written: list[tuple[_Item, Any, bytes]] = []
        with open(place / name, "xb") as file:
            files.append(place / name)
            while items and file.tell() < _FILE_BYTES:
                item = items.pop(0)
                offset, digest = file.tell(), b""
                value = leaves[item.key]
                if item.ref is not None:
                    value = _chunk(checkpoint, item)
                    digest = xxhash.xxh3_128_digest(view_of(as_bytes(value.view(-1))))
                torch.save(value, file)
                written.append((item, StorageInfo(name, offset, file.tell() - offset), digest))
                if progress is not None and item.ref is not None:
                    progress(value.numel() * item.ref.dtype.itemsize)
            file.flush()
            os.fsync(file.fileno())
            with suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the data is read back from the disk
        _read_back(place, written)
        for item, info, _ in written:
            value = leaves[item.key]
            is_tensor = item.ref is not None or isinstance(value, torch.Tensor)
            infos[MetadataIndex(item.key, torch.Size(item.offsets) if is_tensor else None)] = info
        number += 1
    return infos


def _chunk(checkpoint: Checkpoint, item: _Item) -> torch.Tensor:
    assert item.ref is not None
    row = math.prod(item.ref.shape[1:])
    start = item.offsets[0] * row if item.offsets else 0
    return checkpoint.read_range(item.ref.name, start, start + math.prod(item.sizes), item.ref.kind).view(item.sizes)


def _read_back(place: Path, written: list[tuple[_Item, Any, bytes]]) -> None:
    files = Archives(place)
    for item, info, digest in written:
        if item.ref is not None:
            found = xxhash.xxh3_128()
            files.digest(info, found.update)
            if found.digest() != digest:
                raise ExportFailed(f"{place / info.relative_path}: {item.key!r} was read back with other bytes than were written")
