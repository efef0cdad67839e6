"""A data set of token files, read in blocks: the samples are windows of a block's tokens.

A block is a run of consecutive parts (row groups, record batches, ranges of a file) with about :data:`BLOCK_TOKENS` tokens. The tokens of
its documents follow each other, and sample ``i`` of a block is its tokens ``[i * seq_len, (i + 1) * seq_len + 1)``. The rest of a block
that is shorter than a sample is not used. Flat files lose nothing at a block's end, since their blocks overlap by one token.

Samples are numbered in file order. The last ``heldout`` of them are held out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from vescale_ray.data.order.block_order import BlockOrder
from vescale_ray.data.sources.files import DamagedData, FileGone, Skipped
from vescale_ray.data.sources.read_ahead import ReadAhead
from vescale_ray.data.sources.token_files import TokenFile
from vescale_ray.data.text.chat import IGNORED
from vescale_ray.data.text.encoders import Tokens
from vescale_ray.errors import BadInput

BLOCK_TOKENS = 1 << 20
"""Minimum number of tokens of a block, unless its file ends. A window of blocks must be larger than the batch, and fit into memory."""
BLOCK_SAMPLES = 64
"""Minimum number of samples of a block, so that the unused rest is below 1 %."""

_CHECKED = 4
"""Blocks that are read before a run."""


def block_tokens(seq_len: int) -> int:
    """Return the least number of tokens of a block for samples of ``seq_len`` tokens, a multiple of ``seq_len``."""
    return seq_len * max(BLOCK_SAMPLES, -(-BLOCK_TOKENS // seq_len))


class BlockDataset:
    """A :class:`vescale_ray.data.dataset.Dataset` of token files.

    Args:
        files: at least one.
        name: the path, glob or URL by which the files were found, for messages.
        least: minimum number of tokens of a block, as :func:`block_tokens`.
        window: blocks whose samples are shuffled together.
        keys: other values that identify the tokens, by configuration key.
        end_token: token that ends each document, if it is known.
        skipped: counts data that is left out because it is damaged. Tokens of a part that can't be read are no targets. None: damage is
            an error.

    Attributes:
        files: the files, in order.
        needed: bytes of two windows of blocks, the least to reserve for training.
        reader: reads the blocks. Until :meth:`reserve` is called, it keeps only the last block.

    Raises:
        BadInput: there is no training sample, or the files have different types.
    """

    def __init__(
        self,
        files: Sequence[TokenFile],
        name: str,
        seq_len: int,
        heldout: float,
        vocab: int,
        window: int,
        least: int,
        keys: Mapping[str, str | int],
        end_token: int | None = None,
        skipped: Skipped | None = None,
    ) -> None:
        self.end_token, self.skipped = end_token, skipped
        self.files, self._name, self.seq_len, self._vocab, self._window, self._keys = files, name, seq_len, vocab, window, keys
        other = next((file for file in files if file.unit != files[0].unit), None)
        if other is not None:
            raise BadInput(
                f"data.corpus = {name}: {files[0].file.url} holds {files[0].kind}, but {other.file.url} holds {other.kind}; "
                "give files of text, or files of token ids"
            )
        if self.unit == "chat" and not (told := self._answers())["answer_tokens"]:
            roles = f", but messages of {told['other_roles']}" if "other_roles" in told else ""
            raise BadInput(
                f"data.corpus = {name}: no row has an answer to learn{roles}; give rows with a completion, or a message of the role "
                "assistant"
            )
        self._blocks = [block for block in _blocks(files, least) if (_tokens(files, block) - 1) // seq_len >= 1]
        samples = np.array([(_tokens(files, block) - 1) // seq_len for block in self._blocks], dtype=np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(samples)])
        self._heldout = int(int(self._starts[-1]) * heldout)
        if self.num_samples < 1:
            remedy = skipped.texts[0] if skipped is not None and skipped.texts else "give more data or lower data.seq_len"
            raise BadInput(
                f"data.corpus = {name}: {self.tokens} tokens in {len(files)} file(s) give no training sample of data.seq_len = {seq_len}; "
                f"{remedy}"
            )
        documents = sum(file.count or 0 for file in files)
        if end_token is not None and documents == self.tokens:
            raise BadInput(f"data.corpus = {name}: all {documents} documents are empty; give data with text in it")
        self._training = np.diff(np.minimum(self._starts, self.num_samples))
        self._training = self._training[self._training > 0]
        self._sizes = [_tokens(files, block) * max(files[file].itemsize for file, _ in block) for block in self._blocks]
        self.needed = sum(sorted(self._sizes, reverse=True)[: 2 * window])
        self.reserve(0)
        self._ahead_of: BlockOrder | None = None
        self._stays = (0, 0)
        """Order and range of positions for which the reader was last told what to expect."""

    def reserve(self, memory: int) -> None:
        """Keep at most ``memory`` bytes of blocks in memory, those that are read ahead included."""
        self.reader = ReadAhead(self._read, self._sizes, memory)

    def check_some(self) -> None:
        """Read a few blocks, evenly spaced.

        Raises:
            BadInput: a block is damaged, or has a token that is not in the vocabulary. A file of another tokenizer has many such tokens.
            OSError: the storage does not answer.
        """
        for block in np.unique(np.linspace(0, len(self._blocks) - 1, _CHECKED).astype(int)).tolist():
            self._read(block)

    @property
    def num_samples(self) -> int:
        """Number of training samples."""
        return int(self._starts[-1]) - self._heldout

    @property
    def heldout_samples(self) -> int:
        """Number of held-out samples; may be 0."""
        return self._heldout

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return self._vocab

    @property
    def unit(self) -> str:
        """Kind of the tokens (:class:`vescale_ray.data.dataset.Dataset`)."""
        return self.files[0].unit

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of text of a token, end tokens included; None if the text is not known."""
        return {"bytes": 1.0, "tokenizer": sum(file.text_bytes for file in self.files) / self.tokens}.get(self.unit)

    @property
    def masked(self) -> bool:
        """True if targets may not count (:class:`vescale_ray.data.dataset.Dataset`)."""
        return self.unit == "chat" or self.skipped is not None

    @property
    def tokens(self) -> int:
        """Number of tokens of all files, end tokens included."""
        return sum(int(file.counts.sum()) for file in self.files)

    def batch(self, ids: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets of training samples (:meth:`vescale_ray.data.dataset.Dataset.batch`)."""
        return self._gather(ids, 0, self.num_samples)

    def heldout_batch(self, ids: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets of held-out samples, as :meth:`batch` does."""
        return self._gather(ids, self.num_samples, self._heldout)

    def order(self, seed: int) -> BlockOrder:
        """Return the order of the training samples."""
        return BlockOrder(self._training, seed, self._window)

    def read_ahead(self, order: BlockOrder, position: int) -> None:
        """Begin to read the blocks of the samples from ``position`` on."""
        if order is not self._ahead_of or not self._stays[0] <= position < self._stays[1]:
            self._ahead_of, self._stays = order, (position, order.stays_until(position))
            self.reader.expect(order.blocks(position))

    def describe(self) -> dict[str, str | int | None]:
        """Return a JSON-compatible description of the data."""
        counts = [file.count for file in self.files]
        return {
            "name": self._name,
            "type": self.files[0].kind,
            "files": len(self.files),
            "documents": None if None in counts else sum(count or 0 for count in counts),
            "tokens": self.tokens,
            "blocks": len(self._blocks),
            "samples": self.num_samples,
            "heldout_samples": self._heldout,
            "sha256": self._digest(),
            **({"documents_without_text": nulls} if (nulls := sum(file.nulls for file in self.files)) else {}),
            **self._answers(),
            **({"skipped_files": self.skipped.files, "skipped_records": self.skipped.records} if self.skipped is not None else {}),
        }

    def identity(self) -> Mapping[str, str | int]:
        """Return what determines which sample an id stands for: values by configuration key."""
        return {**self._keys, "data.corpus": self._digest(), "data.shuffle_blocks": self._window}

    def _answers(self) -> dict[str, str | int | None]:
        """Return the counts of answers in fine-tuning data, and the roles that OpenAI's format lacks; empty for other data."""
        known = [file.answers for file in self.files if file.answers is not None]
        names = ("answer_tokens", "rows_without_answer", "answers_with_end")
        told: dict[str, str | int | None] = {name: sum(counts[place] for counts in known) for place, name in enumerate(names) if known}
        roles = sorted(set().union(*(file.foreign_roles for file in self.files)))
        return {**told, "other_roles": ", ".join(roles[:8])} if roles else told

    def _digest(self) -> str:
        """Return a hash of every file's name, content and parts."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(file.file.name.encode() + b"\0" + file.fingerprint + file.counts.tobytes())
        return digest.hexdigest()

    def _gather(self, ids: npt.ArrayLike, first: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = np.asarray(ids, dtype=np.int64).reshape(-1)
        if index.size and (index.min() < 0 or index.max() >= samples):
            raise IndexError(f"sample ids {index.min()}..{index.max()}: there are {samples} samples")
        index = index + first
        blocks = np.searchsorted(self._starts, index, side="right") - 1
        begins = (index - self._starts[blocks]) * self.seq_len
        windows = np.empty((len(index), self.seq_len + 1), dtype=np.int64)
        for block in np.unique(blocks).tolist():  # a block that is not kept is read once
            content = self.reader.get(block)
            for row in np.flatnonzero(blocks == block).tolist():
                windows[row] = content[begins[row] : begins[row] + self.seq_len + 1]
        whole = torch.from_numpy(windows)
        tokens, targets = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
        if self.masked:
            tokens, targets = torch.where(tokens < 0, ~tokens, tokens), targets.masked_fill(targets < 0, IGNORED)
        return tokens, targets

    def _read(self, block: int) -> Tokens:
        # A copy, since parts of Arrow streams may be views of a mapped file, which may become shorter.
        return np.concatenate([self._part(file, part) for file, part in self._blocks[block]])

    def _part(self, number: int, part: int) -> Tokens:
        file = self.files[number]
        try:
            tokens = file.read(part)
            if len(tokens) != (told := int(file.counts[part])):
                raise DamagedData(f"{file.file.url}: {len(tokens)} tokens stand where {told} were counted; put the file back as it was")
            return tokens
        except FileGone as error:  # perhaps on this machine only
            raise OSError(str(error)) from None
        except DamagedData as error:
            if self.skipped is None:
                raise
            self.skipped.part(file.file.url, part, file.rows(part), error)
            return np.full(int(file.counts[part]), ~0, dtype=np.int32)  # token 0, and no target


Block = list[tuple[int, int]]
"""The parts of a block, each as the number of its file and its number in the file."""


def _blocks(files: Sequence[TokenFile], least: int) -> list[Block]:
    """Cut the parts of all files, in order, into blocks of at least ``least`` tokens. A block ends with its file if the file does not allow
    joining."""
    blocks: list[Block] = []
    current: Block = []
    total = 0
    for number, file in enumerate(files):
        if current and not file.joins:
            blocks.append(current)
            current, total = [], 0
        for part, count in enumerate(file.counts.tolist()):
            current.append((number, part))
            total += count
            if total >= least:
                blocks.append(current)
                current, total = [], 0
    return [*blocks, current] if current else blocks


def _tokens(files: Sequence[TokenFile], block: Block) -> int:
    return sum(int(files[file].counts[part]) for file, part in block)
