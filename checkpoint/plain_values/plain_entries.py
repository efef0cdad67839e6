"""Read the plain values of a checkpoint, entry by entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ..errors import CheckpointMismatch
from ..format.digest import view_of
from ..state.flat_state import Saved
from ..state.name_tables import entry_of
from .plain import KIND, EntryBytes, data_name, unpack


def plain_value(where: str, holder: Saved, key: str) -> Any:
    """Return a new copy of one entry's value. An entry of tensors becomes a dict of whole tensors on the CPU."""
    meta, name = holder.meta, data_name(key)
    if key not in meta.get("values", {}) and key not in meta.get("state", {}):
        return {name: holder.read(stored, "param") for name, stored in entry_names(holder, key).items()}
    try:
        if key not in meta.get("values", {}):
            return unpack(meta["state"][key])
        kinds = holder.tensors[name].kinds if name in holder.tensors else {}
        if kinds.get(KIND, torch.uint8) != torch.uint8:
            raise ValueError(f"tensor {name!r} does not hold bytes")
        return unpack(meta["values"][key], EntryBytes(view_of(holder.read(name, KIND).view(-1)) if KIND in kinds else b""))
    except ValueError as error:
        raise CheckpointMismatch(f"{where}: meta.values.{key} can't be taken back: {error}") from error


def entry_names(holder: Saved, key: str) -> dict[str, str]:
    """Return ``{name within the entry: stored name}`` of an entry of tensors, aliases of tied tensors included."""
    models = holder.meta.get("models", ["model"])
    found = {}
    for name, stored in [*((n, n) for n in holder.tensors), *holder.aliases.items()]:
        if entry_of(name, models) == key and "param" in holder.tensors[stored].kinds:
            found[name if key == "model" else name.removeprefix(f"{key}/")] = stored
    return found


class PlainValues(Mapping[str, Any]):
    """The plain entries of a checkpoint by name, and the entries of tensors named in ``asked``. Each access reads the value from the
    store."""

    def __init__(self, where: str, holder: Saved, asked: Iterable[str] = ()) -> None:
        self._where, self._holder, self._asked = where, holder, tuple(asked)

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys():
            raise KeyError(key)
        return plain_value(self._where, self._holder, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def __repr__(self) -> str:
        return f"PlainValues({', '.join(self._keys())})"

    def _keys(self) -> dict[str, None]:
        return dict.fromkeys([*self._holder.meta.get("state", {}), *self._holder.meta.get("values", {}), *self._asked])
