"""The interface of a file of tokens, and files that are one flat array: ``.bin`` and ``.npy``."""

from __future__ import annotations

import io
import math
from collections.abc import Set
from typing import Any, Protocol

import numpy as np

from vescale_ray.data.order.stream import Ids
from vescale_ray.data.sources.files import AGAIN, DamagedData, DataFile, reason_of
from vescale_ray.data.text.encoders import BadDocument, Tokens, check_ids
from vescale_ray.errors import BadInput

_HEADER = 1 << 16
"""Maximum number of bytes of the header of a file of numpy."""
_LLM_C = {20240520: "uint16", 20240801: "uint32"}
"""Type of the tokens in a file of llm.c, by the first of the 256 int32 words of its header. The third word is the number of tokens."""
_HALVES = 4
"""Upper halves of ids in uint32 are below this, if the vocabulary has less than 262,144 tokens."""


class TokenFile(Protocol):
    """A file in parts, the smallest pieces that are read at once.

    Attributes:
        counts: number of tokens of each part.
        itemsize: bytes of a token in memory.
        joins: whether a block may hold parts of several files.
        fingerprint: identifies the content, together with ``counts``.
        kind: type of the content, for messages.
        unit: what tokens are (:class:`vescale_ray.data.dataset.Dataset`); all files of a data set have the same.
        text_bytes: bytes of the text that a tokenizer has turned into the tokens; else 0.
        count: number of documents; None if the file does not tell.
        nulls: texts that are null, which count as empty documents.
        answers: tokens that are targets, rows without any, and answers with an end; None if all tokens are targets.
        foreign_roles: roles in rows without an answer that are none of OpenAI's.
    """

    file: DataFile
    counts: Ids
    itemsize: int
    joins: bool
    fingerprint: bytes
    kind: str
    unit: str

    @property
    def text_bytes(self) -> int: ...

    @property
    def count(self) -> int | None: ...

    @property
    def nulls(self) -> int: ...

    @property
    def answers(self) -> tuple[int, int, int] | None: ...

    @property
    def foreign_roles(self) -> Set[str]: ...

    def read(self, part: int) -> Tokens:
        """Return the tokens of a part. Safe in threads.

        Raises:
            DamagedData: the data is damaged, or the file is gone; the message names the file and the place.
            BadInput: a token is not in the vocabulary; the same.
            OSError: the storage does not answer.
        """
        ...

    def rows(self, part: int) -> int:
        """Return the number of documents of a part; 1 if the file does not tell."""
        ...


class FlatFile:
    """A file with one array of integers. Each part also holds the first token of the next part, so samples continue across parts.

    Args:
        start: byte at which the array begins.
        length: number of tokens.
        step: number of tokens of a part, without the one of the next part; a multiple of the sample's length.
        width: tokens of a row, for messages.
    """

    joins = False
    unit = "ids"
    text_bytes = nulls = 0
    count = None
    answers = None
    foreign_roles = frozenset[str]()

    def __init__(self, file: DataFile, dtype: Any, start: int, length: int, step: int, vocab: int, width: int = 1) -> None:
        self.file, self._dtype, self._start, self._step, self._vocab = file, np.dtype(dtype), start, step, vocab
        self._width = width
        self.itemsize = self._dtype.itemsize
        self.kind = str(self._dtype)
        begins = np.arange(0, max(1, length - 1), step, dtype=np.int64)
        self.counts: Ids = np.minimum(begins + step + 1, length) - begins
        self.fingerprint = file.edges()

    def read(self, part: int) -> Tokens:
        begin, count = part * self._step, int(self.counts[part])
        start = self._start + begin * self.itemsize
        # Not mapped into memory: a file that is written anew meanwhile would end the process (SIGBUS).
        tokens: Tokens = np.frombuffer(self.file.read(start, start + count * self.itemsize), dtype=self._dtype)
        try:
            check_ids(tokens, self._vocab)
        except BadDocument as error:
            place = begin + error.row
            where = f"token {place}" if self._width == 1 else f"row {place // self._width}, column {place % self._width}"
            raise BadInput(f"{self.file.url}: {where}: {error.reason}") from None
        return tokens

    def rows(self, part: int) -> int:
        return 1


def open_bin(file: DataFile, dtype: str, step: int, vocab: int) -> FlatFile:
    """Open a file of token ids without a header, or with the header of llm.c, which states their type.

    Raises:
        BadInput: its size is no multiple of the token's, or its tokens are wider.
    """
    header = np.frombuffer(file.read(0, min(1024, file.size // 4 * 4)), "<i4")
    if len(header) == 256 and int(header[0]) in _LLM_C:
        told, length = np.dtype(_LLM_C[int(header[0])]).newbyteorder("<"), int(header[2])
        if not 0 < length <= (file.size - 1024) // told.itemsize:
            raise DamagedData(f"{file.url} is truncated: its header tells {length} tokens, and {file.size - 1024} bytes follow; {AGAIN}")
        return FlatFile(file, told, 1024, length, step, vocab)
    itemsize = np.dtype(dtype).itemsize
    if file.size % itemsize:
        said = f"{file.size} bytes are not a multiple of {itemsize}, the size of data.dtype = {dtype}"
        raise DamagedData(f"{file.url}: {said}; it is truncated or of another type: {AGAIN}, or set data.dtype")
    head = file.read(0, min(_HEADER, file.size // 8 * 8))
    words = np.frombuffer(head, "<u4")
    if len(words) >= 64 and not words[1::2].any() and np.count_nonzero(words[::2]) > len(words) // 4:
        raise BadInput(f"{file.url}: every second word of 4 bytes is 0, as if its tokens were int64; write them as {dtype}")
    if dtype == "uint16":
        halves = np.frombuffer(head, "<u2")
        if len(halves) >= 128 and halves[1::2].max() < _HALVES <= halves[::2].max():
            raise BadInput(f"{file.url}: every second token is below {_HALVES}, as if they were uint32; set data.dtype to uint32")
    return FlatFile(file, np.dtype(dtype).newbyteorder("<"), 0, file.size // itemsize, step, vocab)


def open_npy(file: DataFile, step: int, vocab: int) -> FlatFile:
    """Open a file of numpy with an array of integers in one or two dimensions; rows follow each other.

    Raises:
        BadInput: it has another type or shape, or is truncated.
    """
    head = io.BytesIO(file.read(0, min(_HEADER, file.size)))
    try:
        version = np.lib.format.read_magic(head)  # type: ignore[no-untyped-call]
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, in_columns, dtype = read(head)  # type: ignore[no-untyped-call]
        if min(shape, default=0) < 0:
            raise ValueError(f"its shape is {shape}")
    except Exception as error:  # a damaged header can fail in any step of numpy's parser
        raise DamagedData(f"{file.url} is damaged or not a .npy file ({reason_of(error)}); {AGAIN}") from None
    by_column = in_columns and len(shape) > 1
    if dtype.kind not in "iu" or dtype.byteorder == ">" or len(shape) not in (1, 2) or by_column:
        form = f"{'column-major ' if by_column else ''}{len(shape)}-D array of {dtype.str}"
        raise BadInput(f"{file.url} holds a {form}; give a 1-D or row-major 2-D array of little-endian integers")
    length, begin = math.prod(shape), head.tell()
    if file.size < begin + length * dtype.itemsize:
        raise DamagedData(f"{file.url} is truncated: {file.size} bytes of {begin + length * dtype.itemsize}; {AGAIN}")
    return FlatFile(file, dtype, begin, length, step, vocab, shape[1] if len(shape) == 2 else 1)
