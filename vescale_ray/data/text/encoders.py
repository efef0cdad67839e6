"""Encoders turn an Arrow array of documents into token ids: lists of ids, text as bytes, or text by a file of ``tokenizers``."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vescale_ray.data.order.stream import Ids
from vescale_ray.errors import BadInput

Tokens = npt.NDArray[Any]
"""Token ids, of an unsigned or signed integer dtype."""
_BATCH = 1024
"""Documents that ``tokenizers`` encodes at a time; its results take some hundred bytes a token."""


class BadDocument(Exception):
    """A document of an array can't be used.

    ``row``: its index in the array; ``reason``: what is wrong, for a message; ``is_damage``: whether the document itself is damaged."""

    def __init__(self, row: int, reason: str, *, is_damage: bool = False) -> None:
        super().__init__(row, reason)
        self.row, self.reason, self.is_damage = row, reason, is_damage


def half_character(error: UnicodeEncodeError) -> str:
    """Return the reason why a text that holds half of a surrogate pair can't be used."""
    return f"{error.object[error.start]!a} alone is not a character; remove it"


class Encoder(ABC):
    """Encodes documents as token ids.

    Args:
        vocab: number of token ids.
        end: token that ends each document, or None.
        identity: name of the encoding.
    """

    def __init__(self, vocab: int, end: int | None, identity: str) -> None:
        self.vocab, self.end, self.identity = vocab, end, identity
        self.dtype: Any = np.uint16 if vocab <= 1 << 16 else np.uint32
        self.unit = identity.partition(" ")[0]
        """Kind of the tokens: ``ids`` of unknown text, ``bytes``, or a ``tokenizer``'s."""

    @abstractmethod
    def values(self, documents: pa.Array) -> tuple[Tokens, Ids]:
        """Return the tokens of all documents, one after another, and the number of tokens of each; a null is an empty document.

        Raises:
            BadDocument: a document is no text, or has an impossible token.
        """

    def encode(self, documents: pa.Array, *, ends: bool = True) -> Tokens:
        """Return the tokens of all documents, with end tokens (:meth:`with_ends`) unless ``ends`` is false, in :attr:`dtype`."""
        values, lengths = self.values(documents)
        if ends:
            values, _ = self.with_ends(values, lengths)
        return values.astype(self.dtype, copy=False)

    def with_ends(self, values: Tokens, lengths: Ids) -> tuple[Tokens, Ids]:
        """Return the tokens and lengths of the documents with an end token behind each one that lacks it."""
        if self.end is None:
            return values, lengths
        stops, lacking = np.cumsum(lengths), self._lacks_end(values, lengths)
        added = np.cumsum(lacking)
        places = (stops + added - 1)[lacking]
        joined = np.empty(len(values) + len(places), dtype=self.dtype)
        inside = np.ones(len(joined), dtype=bool)
        inside[places] = False
        joined[places] = self.end
        joined[inside] = values
        return joined, lengths + lacking

    def _lacks_end(self, values: Tokens, lengths: Ids) -> npt.NDArray[np.bool_]:
        """Return for each document whether it does not end with the end token."""
        return np.ones(len(lengths), dtype=bool)


class IdEncoder(Encoder):
    """Takes lists of integers as token ids, unchanged."""

    def __init__(self, vocab: int, end: int | None) -> None:
        super().__init__(vocab, end, "ids")

    def values(self, documents: pa.Array) -> tuple[Tokens, Ids]:
        lengths = pc.list_value_length(documents)
        counts = (lengths.fill_null(0) if lengths.null_count else lengths).to_numpy(zero_copy_only=False).astype(np.int64)
        flat = documents.flatten()
        if flat.null_count:
            place = int(np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))[0])
            raise BadDocument(_row_of(counts, place), "a token is null")
        values = flat.to_numpy()
        check_ids(values, self.vocab, counts)
        return values, counts

    def has_ends(self, arrays: Sequence[pa.Array]) -> bool:
        """Return whether the end token occurs in the documents."""
        return any(bool((one.flatten().to_numpy(zero_copy_only=False) == self.end).any()) for one in arrays)


class ByteEncoder(Encoder):
    """Text as UTF-8 bytes; a zero byte ends each document."""

    def __init__(self, vocab: int, end: int = 0) -> None:
        super().__init__(vocab, end, "bytes")

    def values(self, documents: pa.Array) -> tuple[Tokens, Ids]:
        if documents.null_count:
            documents = documents.fill_null(b"" if pa.types.is_binary(documents.type) or pa.types.is_large_binary(documents.type) else "")
        wide = pa.types.is_large_string(documents.type) or pa.types.is_large_binary(documents.type)
        _, places, data = documents.buffers()
        if len(documents) == 0:
            return np.zeros(0, np.uint8), np.zeros(0, np.int64)
        offsets = np.frombuffer(places, dtype=np.int64 if wide else np.int32)[documents.offset : documents.offset + len(documents) + 1]
        content = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, np.uint8)
        return content[offsets[0] : offsets[-1]], np.diff(offsets).astype(np.int64)


class TokenizerEncoder(Encoder):
    """Text by a ``tokenizer.json`` of the package ``tokenizers``; its special tokens are not added.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        vocab: number of token ids, at least the tokenizer's.
        digest: hash of the tokenizer's file.
    """

    def __init__(self, tokenizer: Any, vocab: int, end: int, digest: str) -> None:
        super().__init__(vocab, end, f"tokenizer {digest}")
        self._tokenizer = tokenizer

    def values(self, documents: pa.Array) -> tuple[Tokens, Ids]:
        ids: list[list[int]] = []
        for texts in _texts(documents):
            try:
                ids += [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
            except Exception as error:  # the package raises no narrower class
                raise BadDocument(len(ids) + self._first_refused(texts), f"data.tokenizer can't encode it ({error})") from None
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        return np.fromiter(chain.from_iterable(ids), dtype=self.dtype, count=int(lengths.sum())), lengths

    def _lacks_end(self, values: Tokens, lengths: Ids) -> npt.NDArray[np.bool_]:
        lacking = np.ones(len(lengths), dtype=bool)
        lacking[lengths > 0] = values[np.cumsum(lengths)[lengths > 0] - 1] != self.end
        return lacking

    def _first_refused(self, texts: list[str]) -> int:
        for row, text in enumerate(texts):
            try:
                self._tokenizer.encode(text, add_special_tokens=False)
            except Exception:
                return row
        return 0


def _texts(documents: pa.Array) -> Iterator[list[str]]:
    # As bytes, since files may hold text that is not UTF-8.
    documents = documents if pa.types.is_binary(documents.type) else documents.cast(pa.large_binary())
    for start in range(0, len(documents), _BATCH):
        texts = documents.slice(start, _BATCH).to_pylist()
        try:
            yield [(text or b"").decode() for text in texts]
        except UnicodeDecodeError:
            bad = next(row for row, text in enumerate(texts) if not _is_utf8(text or b""))
            raise BadDocument(start + bad, "is not UTF-8; write it as UTF-8", is_damage=True) from None


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the plain text type for categories and views, in which other programs write text. Any other type is returned unchanged."""
    types = pa.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    return pa.large_string() if types.is_string_view(kind) else pa.large_binary() if types.is_binary_view(kind) else kind


def plain(documents: pa.Array) -> pa.Array:
    """Return the documents in the type that :func:`plain_type` returns."""
    kind = plain_type(documents.type)
    return documents if kind == documents.type else documents.cast(kind)


def load_tokenizer(path: str) -> tuple[Any, str]:
    """Return the tokenizer of a ``tokenizer.json`` at a path or URL, and a hash of the file.

    The file may switch on truncation, padding and BPE dropout, which would drop text, add tokens and change the tokens of each read. They
    are switched off.

    Raises:
        BadInput: the package or the file is missing, or the file is no tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise BadInput(f"data.tokenizer = {path}: the package tokenizers is not installed; pip install 'vescale-ray[hf]'") from None
    try:
        with fsspec.open(path, "rb") as file:
            content = file.read()
    except Exception as error:
        told = " ".join(str(error.__cause__ or error).split())[:200]  # HTTP's error names the URL alone
        raise BadInput(f"data.tokenizer = {path}: can't be read ({told}); give a tokenizer.json") from None
    try:
        made = Tokenizer.from_str(content.decode())
    except Exception as error:
        told = " ".join(str(error).split())[:200]
        raise BadInput(f"data.tokenizer = {path}: is not a tokenizer.json ({told}); give one that the package tokenizers wrote") from None
    made.no_truncation()
    made.no_padding()
    if getattr(made.model, "dropout", None):
        made.model.dropout = None
    return made, hashlib.sha256(content).hexdigest()[:16]


def id_count(tokenizer: Any) -> int:
    """Return one more than the tokenizer's largest token id, which exceeds the number of its tokens if some ids are not used."""
    return 1 + max(tokenizer.get_vocab().values(), default=0)


def end_token_beside(path: str) -> str | None:
    """Return the token that ends a document, from the ``transformers`` files beside the tokenizer at ``path``: its name, or its number."""
    folder = path.rpartition("/")[0]
    for name, key in (("tokenizer_config.json", "eos_token"), ("config.json", "eos_token_id")):
        try:
            with fsspec.open(f"{folder}/{name}" if folder else name, "rb") as file:
                found = json.loads(file.read()).get(key)
        except Exception:  # many tokenizers come without these files
            continue
        found = found.get("content") if isinstance(found, dict) else found[0] if isinstance(found, list) and found else found
        if isinstance(found, (str, int)):
            return str(found)
    return None


def check_ids(values: Tokens, vocab: int, lengths: Ids | None = None) -> None:
    """Check that all ids are in ``[0, vocab)``. ``lengths``: tokens of each row; None: each value is a row.

    Raises:
        BadDocument: an id is out of range.
    """
    if not values.size or (values.dtype.kind == "u" and np.iinfo(values.dtype).max < vocab):
        return
    if int(values.max()) >= vocab or (values.dtype.kind == "i" and int(values.min()) < 0):
        place = int(np.flatnonzero((values >= vocab) | (values < 0))[0])
        row = place if lengths is None else _row_of(lengths, place)
        if values[place] < 0:
            raise BadDocument(row, f"token {values[place]} is negative; give token ids, not labels")
        remedy = "use tokens of the model's tokenizer, or data.dtype as the file has it; without model.hf, data.vocab may be larger"
        raise BadDocument(row, f"token {values[place]} is not below the vocabulary's size, {vocab}; {remedy}")


def _row_of(lengths: Ids, place: int) -> int:
    return int(np.searchsorted(np.cumsum(lengths), place, side="right"))
