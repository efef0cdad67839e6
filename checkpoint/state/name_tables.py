r"""Choose tensors by glob, and map one program's names to another's by tables.

Globs are those of the shell: ``*`` is any characters (including dots), ``?`` one character, ``[ab]`` one of these (not in tables). A
table's rules are tried in order, and the first one that matches the whole name applies. A name without a matching rule stays unchanged:

    "layers.*.attention.*_proj.weight": "model.layers.*.self_attn.*_proj.weight"     each star copies the text of its counterpart
    "re:blocks\.(\d+)\.(.*)":          "model.layers.\1.\2"                          a regular expression after ``re:``
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from ..errors import CheckpointMismatch

Globs = str | Iterable[str]


def globs(patterns: Globs) -> tuple[str, ...]:
    """Return one glob or several, as a tuple. Raises ValueError for any other value."""
    found = (patterns,) if isinstance(patterns, str) else tuple(patterns) if isinstance(patterns, Iterable) else (patterns,)
    for one in found:
        if not isinstance(one, str):
            raise ValueError(f"{one!r} is not a glob of names; give text, such as 'layers.*', or several")
    return found


def entry_of(name: str, entries: Iterable[str]) -> str:
    """Return the state's entry that the tensor stored as ``name`` belongs to: the longest one that is a prefix of the name, or "model"."""
    return max((entry for entry in entries if entry != "model" and name.startswith(f"{entry}/")), key=len, default="model")


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def chosen(name: str, include: Iterable[str], exclude: Iterable[str]) -> bool:
    """Return whether some glob of ``include`` matches ``name`` and none of ``exclude`` does."""
    return matches(name, include) and not matches(name, exclude)


def nearest(name: str, among: Iterable[str]) -> str:
    """Return `` (nearest there: 'x')`` for the most similar name, or an empty text if no name is similar."""
    near = difflib.get_close_matches(name, list(among), n=1, cutoff=0.6)
    return f" (nearest there: {near[0]!r})" if near else ""


class NameTable:
    """An ordered table of rules from this program's names to another's, as described at the head of this module.

    Raises:
        ValueError: a rule is invalid; the message names it.
    """

    def __init__(self, rules: Mapping[str, str] | None = None) -> None:
        self.rules = dict(rules or {})
        self._compiled = [_rule(pattern, to) for pattern, to in self.rules.items()]

    def __call__(self, name: str) -> str:
        for pattern, replaced in self._compiled:
            found = pattern.fullmatch(name)
            if found is not None:
                return replaced(found)
        return name

    def inverse(self) -> NameTable:
        """Return the table of the opposite direction.

        Raises:
            ValueError: a rule has a regular expression or a ``?``, which has no opposite.
        """
        for pattern, to in self.rules.items():
            if pattern.startswith("re:") or "?" in pattern or pattern.count("*") != to.count("*"):
                raise ValueError(f"the rule {pattern!r}: {to!r} has no inverse: give the table of the other direction")
        return NameTable({to: pattern for pattern, to in self.rules.items()})

    def map(self, names: Iterable[str]) -> dict[str, str]:
        """Return ``{name: its new name}``.

        Raises:
            CheckpointMismatch: two names would become one.
        """
        mapped: dict[str, str] = {}
        taken: dict[str, str] = {}
        for name in names:
            new = mapped[name] = self(name)
            if taken.setdefault(new, name) != name:
                raise CheckpointMismatch(f"the names {taken[new]!r} and {name!r} both become {new!r}: correct the table of names")
        return mapped


def table_of(rename: Mapping[str, str] | NameTable | None) -> NameTable:
    """Return ``rename`` as a table. Raises ValueError for any other type."""
    if rename is not None and not isinstance(rename, (NameTable, Mapping)):
        raise ValueError(f"rename is a {type(rename).__name__}; give a table {{name here: name there}}")
    return rename if isinstance(rename, NameTable) else NameTable(rename)


def _rule(pattern: str, to: str) -> tuple[re.Pattern[str], Callable[[re.Match[str]], str]]:
    if pattern.startswith("re:"):
        try:
            compiled = re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"the rule {pattern!r}: {to!r}: {pattern[3:]!r} is not a regular expression: {error}") from None

        def expanded(found: re.Match[str]) -> str:
            try:
                return found.expand(to)
            except (re.error, IndexError) as error:
                raise ValueError(f"the rule {pattern!r}: {to!r}: the replacement does not fit: {error}") from None

        return compiled, expanded
    stars = pattern.count("*")
    if to.count("*") not in (0, stars):
        raise ValueError(f"the rule {pattern!r}: {to!r} has {stars} stars on one side and {to.count('*')} on the other")
    compiled = re.compile("".join("(.*)" if c == "*" else "." if c == "?" else re.escape(c) for c in pattern), re.DOTALL)
    parts = to.split("*")

    def replaced(found: re.Match[str]) -> str:
        texts = found.groups() if len(parts) > 1 else ()
        return parts[0] + "".join(text + part for text, part in zip(texts, parts[1:], strict=True))

    return compiled, replaced
