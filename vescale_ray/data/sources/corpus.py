"""Text files as one array of bytes, cut into windows; hashes select the held-out files.

The default corpus is the library sources of the running Python: about 11 MB of real text on every machine, without a download. The
hash of a file's content decides whether it is held out, so adding files never moves another one. Files are sorted by relative path,
and one sha256 names the whole corpus. Two runs can thus tell whether they read the same text; losses on different texts are not
comparable.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from vescale_ray.data.order.stream import SampleStream
from vescale_ray.errors import BadInput

STDLIB_SKIPPED = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "site-packages", "dist-packages", "__pycache__"}
)
"""Folders that are not the standard library, or that some distributions strip. All are skipped, for the same text everywhere."""

VOCAB = 256
"""Number of tokens of text that is read as bytes."""

Bytes = npt.NDArray[np.uint8]


class CorpusError(BadInput):
    """The corpus does not exist, can't be read or holds too little text; the message is one line with its path and the remedy."""


@dataclass(frozen=True)
class Corpus:
    """The text of a run. Sample ``i`` is the bytes ``[i * seq_len, (i + 1) * seq_len + 1)``, so each byte is predicted once per epoch.

    Attributes:
        train, heldout: uint8; all files of that part one after another, each ended by a zero byte.
        name: the specification it was loaded from.
        files: number of files of both parts.
        bytes: number of bytes of both parts, end marks included.
        sha256: hash of every file's path and content, in order.
        heldout_files: number of held-out files.
    """

    train: Bytes
    heldout: Bytes
    seq_len: int
    name: str
    files: int
    bytes: int
    sha256: str
    heldout_files: int

    @property
    def vocab(self) -> int:
        """Number of token ids; tokens are bytes."""
        return VOCAB

    @property
    def unit(self) -> str:
        """Kind of the tokens."""
        return "bytes"

    @property
    def masked(self) -> bool:
        """True if targets may not count."""
        return False

    @property
    def end_token(self) -> int:
        """Token that ends each document."""
        return 0

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text of a token."""
        return 1.0

    @cached_property
    def num_samples(self) -> int:
        """Number of windows of the training part."""
        return _windows(self.train, self.seq_len)

    @cached_property
    def heldout_samples(self) -> int:
        """Number of windows of the held-out part; may be 0."""
        return _windows(self.heldout, self.seq_len)

    def batch(self, ids: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and their successors of the training samples ``ids``, int64 ``[n, seq_len]`` each.

        Raises:
            IndexError: an id is not in ``[0, num_samples)``.
        """
        return _gather(self.train, self.seq_len, self.num_samples, ids)

    def heldout_batch(self, ids: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and their successors of the held-out samples ``ids``, as :meth:`batch` does."""
        return _gather(self.heldout, self.seq_len, self.heldout_samples, ids)

    def order(self, seed: int) -> SampleStream:
        """Return the order of the training samples."""
        return SampleStream(self.num_samples, seed)

    def read_ahead(self, order: SampleStream, position: int) -> None:
        """Do nothing: the text is in memory."""

    def describe(self) -> dict[str, str | int | None]:
        """Return the JSON-compatible description of the text, which is one block in memory."""
        counts = {"files": self.files, "documents": self.files, "tokens": self.bytes, "blocks": 1, "samples": self.num_samples}
        return {"name": self.name, "type": "text", **counts, "heldout_samples": self.heldout_samples, "sha256": self.sha256}

    def identity(self) -> dict[str, str | int]:
        """Return what determines which sample an id stands for: values by configuration key."""
        return {"data.corpus": self.sha256}


def load_corpus(spec: str, seq_len: int, heldout_fraction: float) -> Corpus:
    """Read the corpus ``spec``: ``stdlib``, or the path of a file or of a folder (all its files except hidden ones).

    If the corpus is a single file, its last part is held out.

    Raises:
        CorpusError: the path does not exist, can't be read, or holds too little text for one training window.
        ValueError: ``seq_len`` or ``heldout_fraction`` is out of range.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len = {seq_len}: give at least 1")
    if not 0 <= heldout_fraction < 1:
        raise ValueError(f"heldout_fraction = {heldout_fraction}: give a fraction of at least 0 and below 1")
    digest = hashlib.sha256()
    parts: tuple[list[Bytes], list[Bytes]] = ([], [])
    files = 0
    for name, content in _contents(spec):
        files += 1
        file_hash = hashlib.sha256(content).digest()
        digest.update(name.encode() + b"\0" + file_hash)
        is_heldout = int.from_bytes(file_hash[:8], "big") < heldout_fraction * 2.0**64
        parts[is_heldout].append(np.frombuffer(content + b"\0", dtype=np.uint8))
    if files == 1:
        whole = (parts[0] + parts[1])[0]
        cut = len(whole) - int(len(whole) * heldout_fraction)
        parts = ([whole[:cut]], [whole[cut:]])
    train, heldout = (np.concatenate(part) if part else np.zeros(0, dtype=np.uint8) for part in parts)
    if _windows(train, seq_len) < 1:
        raise CorpusError(
            f"data.corpus = {spec}: {len(train)} bytes of training text in {files} file(s) are too few for one sample of "
            f"data.seq_len = {seq_len}; give more text or lower data.seq_len"
        )
    heldout_files = sum(1 for part in parts[1] if len(part))
    return Corpus(train, heldout, seq_len, spec, files, len(train) + len(heldout), digest.hexdigest(), heldout_files)


def _contents(spec: str) -> Iterator[tuple[str, bytes]]:
    """Yield the relative name and the content of each non-empty file, in sorted order."""
    try:
        root, paths = text_files(spec)
        empty = True
        for path in paths:
            content = path.read_bytes()
            if content:
                empty = False
                yield path.name if path == root else path.relative_to(root).as_posix(), content
    except OSError as error:
        raise CorpusError(f"data.corpus = {spec}: {error.filename or spec} can't be read: {error.strerror}") from None
    if empty:
        raise CorpusError(f"data.corpus = {spec}: is empty; give a file or folder that holds text")


def text_files(spec: str) -> tuple[Path, list[Path]]:
    """Return the root of a corpus and its files, in sorted order. The root of a single file is the file.

    Raises:
        CorpusError: the path does not exist, or a folder can't be read.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if spec == "stdlib" else Path(spec).expanduser()
    try:
        if root.is_file():
            return root, [root]
        if root.is_dir():
            return root, sorted(_walk(root, stdlib=spec == "stdlib"), key=lambda path: path.relative_to(root).parts)
    except OSError as error:
        raise CorpusError(f"data.corpus = {spec}: {error.filename or root} can't be read: {error.strerror}") from None
    if root.exists():
        raise CorpusError(f"data.corpus = {spec}: is neither a file nor a folder; give stdlib, or a file or folder that holds text")
    raise CorpusError(f"data.corpus = {spec}: no such file or folder; give stdlib or a path that every worker can read")


def leads_up(path: str | Path) -> bool:
    """Return whether ``path`` is a link to a folder above it. A walk would enter that folder again and again."""
    return os.path.islink(path) and any(os.path.samefile(above, path) for above in Path(path).parents)


def lost_link(spec: str, path: str | Path) -> CorpusError:
    """Return the error for a link that leads neither to a file nor to a folder that a walk can enter."""
    what = "a folder above it" if os.path.exists(path) else "nothing"
    return CorpusError(f"data.corpus = {spec}: {path} is a link to {what}; remove it, or give a glob that leaves it out")


def _walk(root: Path, *, stdlib: bool) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=fail, followlinks=not stdlib):
        folders[:] = [name for name in folders if not name.startswith(".") and not (stdlib and name in STDLIB_SKIPPED)]
        for name in folders if not stdlib else ():
            if leads_up(path := Path(folder, name)):
                raise lost_link(str(root), path)
        for name in names:
            path = Path(folder, name)
            if name.startswith(".") or (stdlib and not name.endswith(".py")):
                continue
            if path.is_file():
                yield path
            elif path.is_symlink():
                raise lost_link(str(root), path)


def _windows(text: Bytes, seq_len: int) -> int:
    return max(0, (len(text) - 1) // seq_len)


def _gather(text: Bytes, seq_len: int, samples: int, ids: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
    index = np.asarray(ids, dtype=np.int64).reshape(-1)
    if index.size and (index.min() < 0 or index.max() >= samples):
        raise IndexError(f"sample ids {index.min()}..{index.max()}: there are {samples} samples")
    windows = text[index[:, None] * seq_len + np.arange(seq_len + 1)].astype(np.int64)
    whole = torch.from_numpy(windows)
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
