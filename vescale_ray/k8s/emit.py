"""YAML with reasons: a value may carry a :class:`Why`, which becomes a comment above it.

Texts that YAML 1.1, YAML 1.2 and Go's reader might take for different things (``on``, ``1e3``, ``0x1f``) are always quoted.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

WIDTH = 140
_PLAIN = re.compile(r"[A-Za-z/][\w ./:=@%+$()-]*|\d+(?:m|[KMGT]i)")
_BLOCK = re.compile(r"[!-~][ -~]*\n(?:(?:[!-~ ][ -~]*)?\n)*(?<!\n\n)")
"""Texts of several lines that can be shown as they are: of plain letters, not indented at the beginning, with one line's end at the end."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with it
_WORDS = {"y", "yes", "n", "no", "on", "off", "true", "false", "null"}


@dataclass(frozen=True)
class Why:
    """A value, and why it is what it is. In a list or a mapping; not of another ``Why``."""

    value: Any
    reason: str


def plain(tree: Any) -> Any:
    """The tree without its reasons."""
    if isinstance(tree, Why):
        return plain(tree.value)
    if isinstance(tree, Mapping):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain(value) for value in tree]
    return tree


def to_yaml(documents: Sequence[Any], head: str) -> str:
    """The documents as one YAML text, below the comment ``head``."""
    text = "\n".join([*_comment(head, 0), *("\n".join(["---", *_lines(document, 0)]) for document in documents)]) + "\n"
    if list(yaml.load_all(text, Loader=_LOADER)) != [plain(document) for document in documents]:
        raise AssertionError("what was written does not read back as what was meant")
    return text


def _lines(tree: Any, indent: int) -> Iterator[str]:
    """A document, or what stands under a key that is itself on the line before."""
    pad = " " * indent
    if isinstance(tree, Why):
        yield from _comment(tree.reason, indent)
        yield from _lines(tree.value, indent)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            if isinstance(value, Why):
                yield from _comment(value.reason, indent)
                value = value.value
            yield from _pair(f"{pad}{_scalar(key)}:", value, indent)
    else:
        for value in tree:
            if isinstance(value, Why):
                yield from _comment(value.reason, indent)
                value = value.value
            short = _scalar(value) if _is_leaf(value) else _flow(value)
            if short is not None and (_is_leaf(value) or indent + 2 + len(short) <= WIDTH):
                yield f"{pad}- {short}"
            else:
                first, *rest = list(_lines(value, indent + 2))
                yield from _hang(pad, first, rest)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, (Mapping, list, tuple))


def _hang(pad: str, first: str, rest: Sequence[str]) -> Iterator[str]:
    """An entry of a list: the dash goes before the first line that is not a comment."""
    if first.lstrip().startswith("#"):
        yield pad + first.lstrip()
        yield from _hang(pad, rest[0], rest[1:])
        return
    yield f"{pad}- {first.lstrip()}"
    yield from rest


def _pair(start: str, value: Any, indent: int) -> Iterator[str]:
    short = _flow(value)
    if isinstance(value, str) and _BLOCK.fullmatch(value):
        yield f"{start} |"
        yield from (" " * (indent + 2) + line if line else "" for line in value.removesuffix("\n").split("\n"))
    elif short is not None and (_is_leaf(value) or len(start) + 1 + len(short) <= WIDTH):
        yield f"{start} {short}"
    else:
        yield start
        yield from _lines(value, indent + 2)


def _flow(value: Any, nested: bool = False) -> str | None:
    """The value on one line, if it is a scalar, is empty, or holds scalars and little else; None: it needs lines of its own."""
    if isinstance(value, Why):
        return None
    if isinstance(value, Mapping):
        if value and (nested and len(value) > 2 or len(value) > 6):
            return None
        parts = {key: _flow(one, nested=True) for key, one in value.items()}
        if any(part is None for part in parts.values()):
            return None
        return "{" + ", ".join(f"{_scalar(key)}: {part}" for key, part in parts.items()) + "}"
    if isinstance(value, (list, tuple)):
        if any(isinstance(one, (Mapping, list, tuple, Why)) for one in value):
            return None
        return "[" + ", ".join(_scalar(one) for one in value) + "]"
    if isinstance(value, str) and _BLOCK.fullmatch(value):
        return None
    return _scalar(value)


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    safe = _PLAIN.fullmatch(value) and value.lower() not in _WORDS and ": " not in value and not value.endswith((":", " "))
    return value if safe else yaml.safe_dump(value, default_style='"', width=float("inf")).removesuffix("\n")


def _comment(text: str, indent: int) -> list[str]:
    """The lines of a comment; a line of ``text`` that begins with spaces is kept as it is."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        lines += [paragraph] if paragraph.startswith(" ") else textwrap.wrap(paragraph, WIDTH - indent - 2) or [""]
    return [f"{' ' * indent}# {line}".rstrip() for line in lines]
