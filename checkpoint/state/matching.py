"""Match wanted tensors with stored ones by name, shape and dtype. Differences are errors, unless the caller allows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import CheckpointMismatch, first_few
from ..format.object_layout import dtype_name
from .name_tables import entry_of, matches, nearest

Pair = tuple[str, str]
"""(name, kind)."""


@dataclass(frozen=True)
class StoredTensor:
    """Shape of one stored tensor, and dtype of each of its kinds."""

    shape: tuple[int, ...]
    kinds: Mapping[str, torch.dtype]


def match(
    where: str,
    tensors: Mapping[str, StoredTensor],
    aliases: Mapping[str, str],
    wanted: Mapping[Pair, tuple[Sequence[int], torch.dtype]],
    among: Iterable[Pair] | None = None,
    *,
    source: Mapping[Pair, Pair] | None = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    cast: bool = False,
    models: Sequence[str] = (),
) -> dict[Pair, Pair]:
    """Match wanted pairs with stored ones. Return ``{wanted pair: stored pair}`` for the wanted pairs that are stored.

    Args:
        where: description of the holder of ``tensors`` and ``aliases``, for the message.
        wanted: ``{(name, kind): (shape, dtype)}``.
        among: stored pairs that must not be left over; by default all of the kinds that ``wanted`` mentions.
        source: stored pair of each wanted pair whose name differs.
        allow_missing, allow_unexpected: globs of wanted names that may be missing, and of stored names that may be left over.
        cast: whether floating-point dtypes, or integer dtypes, may differ.
        models: the state's entries that are tensors, for the message.

    Raises:
        CheckpointMismatch: one line with the first differences of each kind.
    """
    source = source or {}
    stored = {(name, kind) for name, tensor in tensors.items() for kind in tensor.kinds}
    kinds = {kind for _, kind in wanted}
    there: dict[Pair, Pair] = {}
    missing, wrong, odd = [], [], []
    for pair, (shape, dtype) in wanted.items():
        name, kind = source.get(pair, pair)
        found = (aliases.get(name, name), kind)
        if found not in stored:
            if not matches(pair[0], allow_missing):
                renamed = "" if name == pair[0] else f" (stored as {name!r})"
                missing.append((label(*pair) + renamed, name))
                odd.append(pair[0])
            continue
        there[pair] = found
        tensor = tensors[found[0]]
        kept = tensor.kinds[kind]
        if tuple(shape) != tensor.shape or (dtype != kept and not (cast and castable(kept, dtype))):
            odd.append(pair[0])
        if tuple(shape) != tensor.shape:
            wrong.append(f"{label(*pair)} has shape {tensor.shape}, wanted {tuple(shape)}")
        elif dtype != kept and not (cast and castable(kept, dtype)):
            remedy = "; cast=True converts" if not cast and castable(kept, dtype) else ""
            wrong.append(f"{label(*pair)} is {dtype_name(kept)}, wanted {dtype_name(dtype)}{remedy}")
    scope = set(among) if among is not None else {pair for pair in stored if pair[1] in kinds}
    resolved = {(aliases.get(n, n), k) for n, k in (source.get(pair, pair) for pair in wanted)}
    left = sorted((scope & stored) - resolved)
    unexpected = [pair for pair in left if not matches(pair[0], allow_unexpected)]
    if not (missing or unexpected or wrong):
        return there
    parts = []
    if missing:
        free = list(dict.fromkeys(name for name, _ in left)) or list(tensors)
        parts.append("it lacks " + first_few([text + (nearest(name, free) if i < 3 else "") for i, (text, name) in enumerate(missing)]))
    if unexpected:
        parts.append("it also has " + first_few([label(*pair) for pair in unexpected]))
    if wrong:
        parts.append(first_few(wrong))
    parts += _prefixed([name for _, name in missing], [name for name, _ in unexpected])
    model = any(entry_of(name, models) == "model" for name in (*odd, *(name for name, _ in unexpected)))
    raise CheckpointMismatch(f"{where} {'is of another model' if model else 'does not fit the state'}: {'; '.join(parts)}")


def _prefixed(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """Return the remedy if all missing names equal unexpected names except for the beginning, such as ``module.`` of DDP."""
    for here, there, longer in ((missing, unexpected, False), (unexpected, missing, True)):
        first = next((name for name in there if here and name.endswith(f".{here[0]}")), None)
        prefix = first.removesuffix(here[0]) if first is not None else None
        if prefix and {prefix + name for name in here} == set(there):
            rule = (f"{prefix}*", "*") if longer else ("*", f"{prefix}*")
            return [f"give rename={{{rule[0]!r}: {rule[1]!r}}}"]
    return []


def castable(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a cast stays within floating point or within integers. Other casts are for the caller to define."""
    if stored.is_floating_point or wanted.is_floating_point:
        return stored.is_floating_point and wanted.is_floating_point
    return not any(d.is_complex or d == torch.bool for d in (stored, wanted))


def label(name: str, kind: str) -> str:
    return repr(name) if kind == "param" else f"{kind} of {name!r}"
