"""Text to token ids and back, as the training data is encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from vescale_ray.data.text.encoders import load_tokenizer
from vescale_ray.errors import BadInput


class TextCodec(Protocol):
    """The interface that encodes prompts and decodes completions."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class ByteCodec:
    """Text as UTF-8 bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; ids that are no bytes are left out, and broken characters are replaced."""
        return bytes(one for one in ids if one < 256).decode(errors="replace")


class TokenizerCodec:
    """Text by a ``tokenizer.json``. No special tokens are added to those in the text."""

    def __init__(self, path: str) -> None:
        self._tokenizer: Any = load_tokenizer(path)[0]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def encoded_prompts(prompts: Sequence[str], tokenizer: str | None, unit: str, vocab: int) -> tuple[TextCodec, list[list[int]]]:
    """Return the codec of a data set, and the token ids of the prompts.

    Args:
        unit: kind of the data set's tokens (:class:`vescale_ray.data.dataset.Dataset`).
        vocab: number of token ids.

    Raises:
        BadInput: there is no tokenizer for token ids, or a prompt can't be used.
    """
    if tokenizer is None and unit != "bytes":
        raise BadInput("train.completions: the data holds token ids, and nothing tells their text; set data.tokenizer")
    codec: TextCodec = ByteCodec() if tokenizer is None else TokenizerCodec(tokenizer)
    found = [codec.encode(prompt) for prompt in prompts]
    for prompt, ids in zip(prompts, found, strict=True):
        if not ids:
            raise BadInput(f"train.completions.prompts: {prompt!r} has no token; give a longer text")
        if max(ids) >= vocab:
            raise BadInput(f"train.completions.prompts: {prompt!r} has token {max(ids)}, but there are {vocab}; set data.vocab")
    return codec, found
