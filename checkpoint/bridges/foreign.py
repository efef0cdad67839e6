"""Read tensors of other programs' files into a model's shards or a new commit. No process ever holds all of them.

A :class:`TensorSource` gives flat ranges of tensors. A rank reads only the intervals that it holds. For a new commit the tensors are laid
end to end and cut into objects of bounded size, which the ranks write in turn.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..api import from_first, gathered, next_epoch, ranks_of, together
from ..arguments import nbytes, order
from ..commits import Commit, commit, newest_order
from ..errors import CheckpointMismatch, CommitExists, CommitRefused, ForeignFileError
from ..format.digest import CHUNK_BYTES, as_bytes, view_of
from ..format.object_layout import ShardPiece
from ..format.shard import Vote, new_attempt, write_shard
from ..format.strict_json import check_meta
from ..reading.loading import PARTLY, prepared
from ..state.entries import restore_values
from ..state.flat_state import State, TensorChoice
from ..state.matching import StoredTensor
from ..state.name_tables import Globs, NameTable, globs, table_of
from ..state.tensors import local_part
from ..stores.opening import store_of
from ..stores.posix import sync_folder
from ..stores.store import ObjectStore, Root
from ..upkeep.collection import discard

OBJECT_BYTES = 256 << 20
"""Maximum number of bytes of one object of an imported commit, and about the memory to write it. Objects are larger if there would be more
than 1024."""

Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call."""


class TensorSource(Protocol):
    """Tensors (of kind ``param`` and others) that can be read by flat ranges."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    @property
    def aliases(self) -> Mapping[str, str]: ...

    @property
    def meta(self) -> Mapping[str, Any]:
        """Data besides tensors, in the form in which :func:`~vescale_ray.checkpoint.save` stores ``meta``."""
        ...

    def describe(self) -> str: ...

    def read_into(self, name: str, kind: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` (flat, on the CPU, of the stored dtype) with the elements from ``start`` on."""
        ...


@dataclass(frozen=True)
class Imported:
    """Names read, bytes read by this rank, and names of the model that the files lack (``allow_missing``)."""

    tensors: tuple[str, ...]
    bytes: int
    missing: tuple[str, ...]


def fill(source: TensorSource, name: str, kind: str, start: int, out: torch.Tensor) -> None:
    """Read elements from ``start`` on into ``out``, in chunks. ``out`` is flat, on any device, of any dtype that the stored one may be cast
    to."""
    stored = source.tensors[name].kinds[kind]
    if out.device.type == "cpu" and out.dtype == stored:
        source.read_into(name, kind, start, out)
        return
    chunk = CHUNK_BYTES // stored.itemsize
    whole = torch.empty(min(chunk, out.numel()), dtype=stored)
    for position in range(0, out.numel(), chunk):
        target = out[position : position + chunk]
        part = whole[: target.numel()]
        source.read_into(name, kind, start + position, part)
        target.copy_(part)


class _Whole:
    """A source of whole tensors, in the form from which a state is loaded."""

    def __init__(self, source: TensorSource) -> None:
        self._source, self.tensors, self.aliases, self.meta = source, source.tensors, source.aliases, source.meta

    def read(self, name: str, kind: str) -> torch.Tensor:
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=stored.kinds[kind])
        self._source.read_into(name, kind, 0, whole.view(-1))
        return whole


def local_folder(folder: str | os.PathLike[str], what: str) -> Path:
    """Return ``folder`` as a path of this machine.

    Raises:
        ValueError: it is empty or a URL. Other programs' files are read from and written to local folders only.
    """
    text = os.fspath(folder)
    if not text or "://" in text:
        raise ValueError(f"{what} {text!r} is {'a URL' if text else 'empty'}; give a folder of this machine")
    return Path(text).absolute()


def new_folder(folder: str | os.PathLike[str]) -> list[Path]:
    """Create an export folder if it does not exist. Returns the created folders, for :func:`take_back`. Raises ValueError if it cannot be
    created."""
    place = local_folder(folder, "the folder to write")
    made = [one for one in (place, *place.parents) if not one.exists()]
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{place} can't be created as a folder: {error.strerror}") from None
    return made


def take_back(files: Iterable[Path], folders: Iterable[Path] = ()) -> None:
    """Remove the files and empty folders (innermost first) of an unfinished export. Otherwise a reader might take it for complete, and a
    second try would find its place taken."""
    for path in files:
        with suppress(OSError):
            path.unlink()
    for path in folders:
        with suppress(OSError):
            path.rmdir()


def publish(path: Path, data: bytes) -> None:
    """Write the file that completes an export, durably and atomically. If that fails, remove it: no name may refer to removed files, and
    nothing may block a second try."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        take_back([temporary, path])
        raise


def into_state(
    source: TensorSource,
    state: State,
    *,
    include: Globs = "*",
    exclude: Globs = (),
    allow_missing: Globs = (),
    allow_unexpected: Globs = (),
    rename: Mapping[str, str] | NameTable | None = None,
    cast: bool = False,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Read into the modules, tensors, optimizers and values of ``state``, sharded or not, on the meta device or not. Every rank calls it.

    Arguments and errors are those of :func:`~vescale_ray.checkpoint.load`; also raises ForeignFileError. With ``alone``, a rank does not
    wait for the others and raises only its own errors.
    """
    rank, world = ranks_of(group)
    choice = TensorChoice(globs(include), globs(exclude), globs(allow_missing), globs(allow_unexpected), table_of(rename))

    def work() -> Imported:
        whole_source = _Whole(source)
        place = None if device is None else torch.device(device)
        flat, there, values = prepared(state, whole_source, source.describe(), choice, cast, place)
        done = 0
        with torch.no_grad():
            for pair, (name, kind) in there.items():
                part = local_part(pair[0], flat.tensors[pair], world, rank)
                whole = part.flat()
                for start, _, piece in part.rows(whole):
                    try:
                        fill(source, name, kind, start, piece)
                    except ForeignFileError as error:
                        raise ForeignFileError(f"{error}; {PARTLY}") from error
                    size = piece.numel() * source.tensors[name].kinds[kind].itemsize
                    done += size
                    if progress is not None:
                        progress(size)
                if not part.shared:
                    part.local.copy_(whole.view(part.local.shape))
        restore_values(state, values, whole_source, flat, choice)
        missing = tuple(dict.fromkeys(pair[0] for pair in flat.tensors if pair not in there and choice.takes_pair(pair, flat)))
        return Imported(tuple(dict.fromkeys(pair[0] for pair in there)), done, missing)

    return work() if alone else together(work, group)


def state_of(target: nn.Module | Mapping[str, Any]) -> State:
    """Return an import's target as a state. A module or a dict of tensors becomes the entry ``"model"``."""
    if isinstance(target, nn.Module) or all(isinstance(value, torch.Tensor) for value in target.values()):
        return {"model": target}
    if not isinstance(target, MutableMapping):
        raise ValueError(f"the state to fill is a {type(target).__name__}: give a dict, so that plain values can be set")
    return target


def into_commit(
    source: TensorSource,
    root: Root,
    names: Mapping[str, str],
    *,
    step: int = 0,
    meta: Mapping[str, Any],
    aliases: Mapping[str, str],
    object_bytes: int = OBJECT_BYTES,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> Commit:
    """Write the tensors of ``source`` as a new, newest commit. Every rank calls it and writes its share of the objects.

    Takes about ``object_bytes`` of memory. A failed or interrupted import removes what it wrote.

    Args:
        names: ``{source's name: name in the commit}`` of the tensors to import, with all their kinds.
        meta, aliases: as for :func:`~vescale_ray.checkpoint.commit`, by names in the commit.
    """
    rank, world = ranks_of(group)
    step, _ = order(step, None)
    nbytes("object_bytes", object_bytes)
    store = store_of(root)
    kinds = list(dict.fromkeys(kind for name in names for kind in source.tensors[name].kinds))
    # Kind by kind, so that an object's tensors of one kind are adjacent, as in a shard.
    items = [(name, kind) for kind in kinds for name in names if kind in source.tensors[name].kinds]
    total = sum(_bytes(source, name, kind) for name, kind in items)
    objects = list(_cut(source, items, max(object_bytes, -(-total // 1024))))

    def begin() -> tuple[str, int]:
        if not names:
            raise CheckpointMismatch(f"{source.describe()} has nothing to import")
        check_meta(meta)
        return new_attempt(), next_epoch(newest_order(store), None, step)

    attempt, epoch = from_first(begin, group)

    # One buffer for all objects in turn; buffers per object would stay in the allocator's heaps.
    mine_of = range(rank, len(objects), world)
    buffer = torch.empty(max((sum(_room(source, *cut) for cut in objects[index]) for index in mine_of), default=0), dtype=torch.uint8)

    def write_one(index: int) -> str:
        pieces, position = [], 0
        for cut in objects[index]:
            pieces.append(_piece(source, names[cut[0]], *cut, buffer[position:]))
            position += _room(source, *cut)
        vote = write_shard(store, attempt, index, pieces, step=step, epoch=epoch, world=len(objects))
        if progress is not None:
            progress(sum(p.data.numel() * p.dtype.itemsize for p in pieces))
        return vote.to_json()

    committing = False
    try:
        mine = together(lambda: [write_one(index) for index in mine_of], group)
        votes = [Vote.from_json(text) for texts in gathered(mine, group) for text in texts]
        committing = True
        return from_first(
            lambda: commit(store, votes, step=step, epoch=epoch, attempt=attempt, world=len(objects), meta=meta, aliases=aliases), group
        )
    except BaseException as error:
        # If a commit was attempted, it may exist despite the error, unless it was refused before anything was written.
        if not committing or (isinstance(error, CommitRefused) and not isinstance(error, CommitExists)):
            discard(store, attempt, "import", [f"data/{attempt}/r{index:05d}.safetensors" for index in mine_of])
        raise


def is_root(target: Any) -> bool:
    return isinstance(target, (str, os.PathLike)) or isinstance(target, ObjectStore)


def _bytes(source: TensorSource, name: str, kind: str) -> int:
    tensor = source.tensors[name]
    return math.prod(tensor.shape) * tensor.kinds[kind].itemsize


def _cut(source: TensorSource, items: Sequence[tuple[str, str]], limit: int) -> Iterator[list[tuple[str, str, int, int]]]:
    """Yield the items' elements in order, in lists of at most ``limit`` bytes but at least one element. Tensors are cut if necessary."""
    held: list[tuple[str, str, int, int]] = []
    room = limit
    for name, kind in items:
        width, numel = source.tensors[name].kinds[kind].itemsize, math.prod(source.tensors[name].shape)
        start = 0
        while True:
            if room < width and held and numel:
                yield held
                held, room = [], limit
            end = min(numel, start + max(1, room // width))
            held.append((name, kind, start, end))
            room -= (end - start) * width
            start = end
            if start >= numel:
                break
    yield held


def _room(source: TensorSource, name: str, kind: str, start: int, end: int) -> int:
    """Return the bytes that the elements ``[start, end)`` of a tensor take in the buffer: a multiple of 16, so that the next tensor's are
    aligned for any dtype."""
    return -(-(end - start) * source.tensors[name].kinds[kind].itemsize // 16) * 16


def _piece(source: TensorSource, new: str, name: str, kind: str, start: int, end: int, room: torch.Tensor) -> ShardPiece:
    tensor = source.tensors[name]
    dtype = tensor.kinds[kind]
    data = room[: (end - start) * dtype.itemsize].view(dtype)
    source.read_into(name, kind, start, data)
    return ShardPiece(new, kind, start, end, tensor.shape, dtype, data)


class Files:
    """Regular files of one folder, read at any offset; a few stay open.

    Raises:
        ForeignFileError: by every method: the file is not a regular file, cannot be read, or is too short. The message names it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}

    def size(self, name: str) -> int:
        return os.fstat(self._fd(name)).st_size

    def read(self, name: str, offset: int, size: int) -> bytes:
        left = self.size(name) - offset
        if size > left:  # checked before the bytes are allocated
            raise ForeignFileError(f"{self.folder / name}: ends at byte {offset + left}, {offset + size} are needed: truncated")
        try:
            data = os.pread(self._fd(name), size, offset)
        except OSError as error:
            raise ForeignFileError(f"{self.folder / name}: can't be read: {error.strerror}") from error
        if len(data) < size:
            raise ForeignFileError(f"{self.folder / name}: ends at byte {offset + len(data)}, {offset + size} are needed: truncated")
        return data

    def read_into(self, name: str, offset: int, out: torch.Tensor) -> None:
        """Fill ``out`` (flat, contiguous, on the CPU) with the bytes from ``offset`` on."""
        view, done = view_of(as_bytes(out)), 0
        while done < len(view):
            try:
                count = os.preadv(self._fd(name), [view[done : done + (64 << 20)]], offset + done)
            except OSError as error:
                raise ForeignFileError(f"{self.folder / name}: can't be read: {error.strerror}") from error
            if not count:
                raise ForeignFileError(f"{self.folder / name}: ends at byte {offset + done}, {offset + len(view)} are needed: truncated")
            done += count

    def close(self) -> None:
        while self._open:
            with suppress(OSError):
                os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _fd(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= 16:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                # Do not wait at a FIFO for a writer that never comes.
                fd = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                raise ForeignFileError(f"{self.folder / name}: can't be opened: {error.strerror}") from error
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise ForeignFileError(f"{self.folder / name}: is not a regular file, but a folder, device or pipe")
            self._open[name] = fd
        return self._open[name]
