"""Map a stock DCP checkpoint's keys to our tensors with kinds, scalars and hyperparameters, by the table at the head of ``dcp.py``.

DCP records each key's path in the saved nested state dict. The path tells ``("model", "layers.0.w")`` from ``("model.layers.0.w",)``, a
bare model whose names begin with ``model.``. Both of torch's forms of optimizer state are supported, nested and flattened.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..errors import CheckpointMismatch, ForeignFileError
from ..plain_values.plain import KIND, Packed, data_name, pack
from ..plain_values.scalars import encode
from ..state.flat_state import is_extra
from ..state.matching import StoredTensor
from ..state.name_tables import chosen
from ..state.nested_state import fold, is_nested
from .dcp_files import DcpFiles

_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})", re.ASCII)


class DcpSource:
    """The tensors of a DCP checkpoint by our names and kinds, as a :class:`~vescale_ray.checkpoint.bridges.foreign.TensorSource`.

    Args:
        entries: ``{our entry: DCP's}``.
        table: function from DCP's names of tensors to ours.
        include, exclude: globs of our names; excluded tensors are ignored.
        only: our entries to read; others are ignored. Default: all.

    Raises:
        ForeignFileError: the checkpoint is malformed, or holds values that our format cannot store. The message names them and the remedy.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        entries: Mapping[str, str],
        table: Callable[[str], str] = str,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        *,
        only: Collection[str] | None = None,
    ) -> None:
        self._files = DcpFiles(folder)
        self._paths = _unwrapped(self._files.paths)
        self._table, self._include, self._exclude = table, include, exclude
        self._ours = {theirs: ours for ours, theirs in entries.items()}
        self._keys: dict[tuple[str, str], str] = {}
        self._aliases: dict[str, str] = {}
        self._tensors: dict[str, StoredTensor] = {}
        self._models: list[str] = []
        self._optimizers: dict[str, _Optimizer] = {}
        self._values: dict[tuple[Any, ...], str] = {}
        states: list[tuple[str, str, str, str]] = []  # our optimizer, name, state key, DCP's key
        bare = not any(len(path) > 1 and self._entry(path) == "model" for path in self._paths.values())
        mixed = self._mixed()
        for key, path in self._paths.items():
            entry = self._entry(path)
            inner = [str(part) for part in path[1:]]
            part, extra = _optimizer_part(inner), self._extra(path)
            if only is not None and ("model" if bare and len(path) == 1 and key in self._files.tensors else entry) not in only:
                continue
            if part is not None:
                found = self._optimizers.setdefault(entry, _Optimizer({}, {}, {}))
                kind, name, field = part
                if kind == "state":
                    states.append((entry, name, field, key))
                else:
                    found.groups.setdefault(name, {})[field] = key
            elif extra is not None and (len(extra) > 1 or key not in self._files.tensors):
                self._values[extra] = key
            elif key in self._files.tensors and not (len(path) > 1 and entry in mixed):
                if len(path) == 1 and not bare:
                    if chosen(key, include, exclude):
                        raise ForeignFileError(f"{folder}: the tensor {key!r} belongs to no entry of the state dict: exclude it")
                    continue
                self._param(entry if len(path) > 1 else "model", ".".join(inner) if len(path) > 1 else key, key)
            else:
                self._values[path] = key
        for entry, name, field, key in states:
            self._state(entry, name, field, key)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        data = {data_name(key): len(value.data) for key, value in self._packed.items() if value.data}
        return {**self._tensors, **{name: StoredTensor((size,), {KIND: torch.uint8}) for name, size in data.items()}}

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def tie(self, aliases: Mapping[str, str]) -> None:
        """Treat each ``{other name: name}`` as one tensor from now on. The caller must know that they are equal."""
        self._aliases = dict(aliases)
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if name not in aliases}

    def describe(self) -> str:
        return str(self._files.folder)

    def check_room(self) -> None:
        """Raises ForeignFileError if the tensors claim more bytes than the files have."""
        self._files.check_room(self._keys.values())

    def read_into(self, name: str, kind: str, start: int, out: torch.Tensor) -> None:
        if kind == KIND:
            raw = next(value.data for key, value in self._packed.items() if data_name(key) == name)
            out.copy_(torch.frombuffer(bytearray(raw[start : start + len(out)]), dtype=torch.uint8))
        else:
            self._files.read_into(self._keys[name, kind], start, out)

    @cached_property
    def _packed(self) -> dict[str, Packed]:
        """The plain values. Reads the small objects, and the tensors among them."""
        values = _Node()
        for path, key in self._values.items():
            if chosen(str(path[0]), self._include, self._exclude):
                _put(values, [self._entry(path), *path[1:]], self._value(key))
        try:
            return {key: pack(f"state.{key}", _whole(value)) for key, value in values.items()}
        except ValueError as error:
            raise ForeignFileError(f"{self.describe()}: {error}; exclude it to import the rest") from None

    def _value(self, key: str) -> Any:
        tensor = self._files.tensors.get(key)
        if tensor is None:
            return self._files.object(key)
        self._files.check_room([key])
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._files.read_into(key, 0, out.view(-1))
        return out

    def _mixed(self) -> set[str]:
        """Entries that mix tensors and other values, such as a data loader's state; each becomes one plain value. A module with extra state
        does not count."""
        sorts: dict[str, set[bool]] = {}
        for key, path in self._paths.items():
            if len(path) > 1 and _optimizer_part([str(part) for part in path[1:]]) is None and self._extra(path) is None:
                sorts.setdefault(self._entry(path), set()).add(key in self._files.tensors)
        return {entry for entry, found in sorts.items() if len(found) == 2 and entry != "model"}

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The manifest's meta as ``save`` would make it. Reads the small objects."""
        values = {key: value.json for key, value in self._packed.items() if value.extended}
        return {
            "models": self._models or ["model"],
            "state": {key: value.json for key, value in self._packed.items() if not value.extended},
            **({"values": values} if values else {}),
            "optimizers": {key: self._optimizer_meta(key, found) for key, found in self._optimizers.items()},
            "meta": {"imported": {"from": self.describe(), "format": "dcp"}},
        }

    def _extra(self, path: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return the path under which to keep the value at ``path`` if that is, or lies in, a module's extra state; else None."""
        at = next((at for at, part in enumerate(path[:2]) if is_extra(str(part))), None)
        return None if at is None else (f"{self._entry(path) if at else 'model'}.{self._table(str(path[at]))}", *path[at + 1 :])

    def _entry(self, path: Sequence[Any]) -> str:
        first = str(path[0])
        return self._ours.get(first, first)

    def _param(self, entry: str, name: str, key: str) -> None:
        stored = self._stored(entry, name)
        if not chosen(stored, self._include, self._exclude):
            return
        if entry not in self._models:
            self._models.append(entry)
        self._add(stored, "param", key)

    def _stored(self, entry: str, name: str) -> str:
        return self._table(name) if entry == "model" else f"{entry}/{self._table(name)}"

    def _add(self, name: str, kind: str, key: str) -> None:
        tensor = self._files.tensors[key]
        if (name, kind) in self._keys:
            raise CheckpointMismatch(f"{self.describe()}: {self._keys[name, kind]!r} and {key!r} both become {name!r}")
        self._keys[name, kind] = key
        kinds = dict(self._tensors[name].kinds) if name in self._tensors else {}
        self._tensors[name] = StoredTensor(tensor.shape, {**kinds, kind: tensor.dtype})

    def _owner(self, optimizer: str, name: str) -> str:
        """Return the stored name of an optimizer's parameter, in the model after which the optimizer is named, or in the first model that
        has it."""
        others = sorted((entry for entry in self._models if entry != "model"), key=lambda entry: not optimizer.startswith(entry))
        first = [entry for entry in others if optimizer.startswith(entry)]
        for entry in [*first, "model", *others]:
            if self._stored(entry, name) in self._tensors:
                return self._stored(entry, name)
        return self._stored("model", name)

    def _state(self, entry: str, name: str, field: str, key: str) -> None:
        owner = self._owner(entry, name)
        if not chosen(owner, self._include, self._exclude):
            return
        found = self._optimizers[entry]
        tensor = self._files.tensors.get(key)
        held = self._tensors.get(owner)
        nested = len(self._paths[key]) > 4
        if tensor is None or (tensor.shape == () and (nested or field == "step" or held is None or held.shape != ())):
            found.scalars.setdefault(field, {})[owner] = key
            return
        kind = field if entry == "optimizer" else f"{entry}.{field}"
        if nested:
            found.nested.setdefault(field, {})[owner] = key
        else:
            found.kinds.setdefault(field)
        if held is None or held.shape == tensor.shape:
            self._add(owner, kind, key)
        else:
            self._add(f"{owner}/{kind}", "state", key)

    def _scalar(self, key: str) -> Any:
        if key not in self._files.tensors:
            return self._files.object(key)
        tensor = self._files.tensors[key]
        if math.prod(tensor.shape) != 1:
            raise ForeignFileError(f"{self.describe()}: {key!r} is a tensor of shape {tensor.shape}, not of one element: exclude it")
        out = torch.empty(1, dtype=tensor.dtype)
        self._files.read_into(key, 0, out)
        return out.view(tensor.shape)

    def _optimizer_meta(self, key: str, found: _Optimizer) -> dict[str, Any]:
        def encoded(what: str, value: Any, *, field: str = "", paths: Mapping[int, str] | None = None) -> Any:
            try:
                return fold(what, field, value, paths or {}) if field and is_nested(value) else encode(what, value)
            except ValueError as error:
                raise ForeignFileError(f"{self.describe()}: optimizer {key!r}: {error}") from None

        states, paths = self._states(found)
        scalars = {
            field: {name: encoded(f"{field!r} of {name!r}", _whole(value), field=field, paths=paths) for name, value in by_name.items()}
            for field, by_name in states.items()
        }
        groups: list[dict[str, Any]] = []
        flattened = False
        for name, fields in found.groups.items():
            loaded = {field: self._scalar(where) for field, where in fields.items()}
            params = loaded.pop("params", None)
            hyper = {field: encoded(f"hyperparameter {field!r}", value) for field, value in loaded.items() if field != "param_names"}
            if params is not None:
                members = [self._owner(key, str(param)) for param in params]
            else:  # flattened: one entry per parameter. Parameters with equal values are taken as one group.
                flattened = True
                members = [self._owner(key, name)]
                same = next((group for group in groups if group["hyper"] == hyper), None)
                if same is not None:
                    same["params"] += members
                    continue
            groups.append({"params": members, "hyper": hyper})
        for group in groups:
            group["params"] = [name for name in group["params"] if chosen(name, self._include, self._exclude)]
        about = {"kinds": list(found.kinds), "groups": groups, "scalars": scalars}
        about |= {"nested": list(found.nested)} if found.nested else {}
        return {**about, **({"by_parameter": True} if flattened else {})}

    def _states(self, found: _Optimizer) -> tuple[dict[str, dict[str, Any]], dict[int, str]]:
        """Return the states that are numbers or nested values, by state key and name, and the paths of the tensors in them, by the id of a
        stand-in."""
        states: dict[str, dict[str, Any]] = {}
        paths: dict[int, str] = {}
        for path, by_name in (*found.scalars.items(), *found.nested.items()):
            for name, where in by_name.items():
                apart = where == found.nested.get(path, {}).get(name)
                value = torch.empty(0) if apart else self._scalar(where)
                if apart:
                    paths[id(value)] = path
                inner = self._paths[where][4:]
                if inner:
                    _put(states.setdefault(str(self._paths[where][3]), {}).setdefault(name, _Node()), inner, value)
                else:
                    states.setdefault(path, {})[name] = value
        return states, paths


@dataclass
class _Optimizer:
    """The data of one optimizer, by DCP's keys: ``scalars[state][name]``, ``groups[group][field]``, kinds in order.

    ``nested[path][name]``: tensors within states that are dicts or lists.
    """

    scalars: dict[str, dict[str, str]]
    groups: dict[str, dict[str, str]]
    kinds: dict[str, None]
    nested: dict[str, dict[str, str]] = field(default_factory=dict)


def _optimizer_part(inner: Sequence[str]) -> tuple[str, str, str] | None:
    """("state" or "param_groups", parameter or group, field) of an optimizer's entry; ``None`` for anything else."""
    if len(inner) == 3 and inner[0] in ("state", "param_groups"):
        return inner[0], inner[1], inner[2]
    if len(inner) > 3 and inner[0] == "state":  # within a state that is a dict or a list
        return inner[0], inner[1], "/".join(inner[2:])
    if len(inner) == 1:
        kind, _, rest = inner[0].partition(".")
        name, _, field = rest.rpartition(".")
        if kind in ("state", "param_groups") and name:
            return kind, name, field
    return None


def _unwrapped(paths: Mapping[str, tuple[Any, ...]]) -> Mapping[str, tuple[Any, ...]]:
    """Return ``paths`` without the name of one object around the model and the optimizers, such as ``app`` in torch's tutorial."""

    def around(path: Sequence[Any]) -> bool:
        texts = [str(part) for part in path]
        whole = texts[0] != "model" and texts[1:2] == ["model"]
        return len(path) > 2 and (whole or _optimizer_part(texts[2:]) is not None) and _optimizer_part(texts[1:]) is None

    names = {path[0] for path in paths.values() if around(path)}
    inner = {path[1] for path in paths.values() if path[0] in names and len(path) > 1}
    if len(names) != 1 or inner & {path[0] for path in paths.values()}:
        return paths
    return {key: path[1:] if path[0] in names and len(path) > 1 else path for key, path in paths.items()}


class _Node(dict[Any, Any]):
    """A list or dict that DCP took apart and stored member by member."""


def _put(values: _Node, path: Iterable[Any], value: Any) -> None:
    *parents, last = path
    for part in parents:
        values = values.setdefault(part, _Node())
        if not isinstance(values, _Node):
            raise ForeignFileError(f"malformed: {part!r} is a value and holds others")
    values[last] = value


def _whole(value: Any) -> Any:
    """Rebuild a nested value: a path of numbers was a list.

    DCP turns a dict's keys into texts, and any mapping into a dict. If keys and values are whole numbers, it was a Counter, as in
    schedulers (milestones that are texts would never match). If only the keys are, it was a dict.
    """
    if not isinstance(value, _Node):
        return value
    if all(isinstance(key, int) for key in value):
        return [_whole(value[key]) for key in sorted(value)]
    numbers = all(isinstance(key, str) and _NUMBER.fullmatch(key) for key in value)
    whole = {int(key) if numbers else str(key): _whole(one) for key, one in value.items()}
    return Counter(whole) if numbers and all(type(one) is int for one in whole.values()) else whole
