"""Tensors in nested inputs and outputs: dicts, lists, tuples, named tuples and dataclasses, and no other containers.

The functions have fast paths for the usual inputs and outputs of modules: one tensor, or a flat tuple. A changed container is a shallow
copy of its own class, which no constructor of the user's has made.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from vescale_ray.compat.core import are_functorch_transforms_active, get_unwrapped, is_batchedtensor

TensorMap = Callable[[torch.Tensor], torch.Tensor]


class Copies:
    """Lists, dicts and dataclasses that were copied for a forward. Its changes to a copy are repeated on the caller's original."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, Any, _Content, _Content]] = []

    def add(self, original: Any, copied: Any) -> None:
        self._made.append((original, copied, _Content(original), _Content(copied)))

    def give_back(self) -> list[Any]:
        """Repeat the changes of the copies on the originals, and return the new values.

        Entries that were not replaced stay the caller's own objects.
        """
        given: list[Any] = []
        for original, copied, old, new in reversed(self._made):
            now = _Content(copied)
            own = {id(value): old.entries[key] for key, value in new.entries.items() if key in old.entries}
            own.update((id(value), old.attributes[name]) for name, value in new.attributes.items() if name in old.attributes)
            replaced, removed = _changes(new.entries, now.entries, own)
            given += replaced.values()
            if isinstance(original, list):
                if replaced or removed:
                    original[:] = [own.get(id(entry), entry) for entry in copied]
            else:
                for key in removed:
                    del original[key]
                for key, value in replaced.items():
                    original[key] = value
            replaced, removed = _changes(new.attributes, now.attributes, own)
            given += replaced.values()
            for name in removed:
                object.__delattr__(original, name)
            for name, value in replaced.items():
                object.__setattr__(original, name, value)
        return given


class _Content:
    """The entries of a list or dict, and the attributes of an instance, at one time."""

    def __init__(self, of: Any) -> None:
        entries = enumerate(of) if isinstance(of, list) else of.items() if isinstance(of, dict) else ()
        self.entries: dict[Any, Any] = dict(entries)
        attributes = getattr(of, "__dict__", {})
        self.attributes: dict[str, Any] = {} if attributes is of else dict(attributes)
        if dataclasses.is_dataclass(of):  # it may have slots
            self.attributes.update((field.name, getattr(of, field.name)) for field in dataclasses.fields(of) if hasattr(of, field.name))


def _changes(before: dict[Any, Any], after: dict[Any, Any], own: dict[int, Any]) -> tuple[dict[Any, Any], list[Any]]:
    """Return the entries that are new in ``after``, with the caller's objects (``own``) in place of their copies, and the keys that it
    lacks."""
    replaced = {key: own.get(id(value), value) for key, value in after.items() if key not in before or value is not before[key]}
    return replaced, [key for key in before if key not in after]


def map_tensors(function: TensorMap, tree: Any, copies: Copies | None = None, memo: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """Return a copy of ``tree`` with ``function`` applied to every tensor, or ``tree`` itself if nothing changes.

    An object that occurs twice is replaced by one object. New tensors keep the attributes that the user has set on the old ones.

    Args:
        copies: receives the lists and dicts that were copied.
        memo: results for objects that were met before, by their id.
    """
    if tree is None or isinstance(tree, str | int | float):
        return tree
    if memo is None:
        if isinstance(tree, torch.Tensor):
            return _replaced(function, tree)
        memo = {}
    known = memo.get(id(tree))
    if known is None:
        known = memo[id(tree)] = tree, _mapped(function, tree, copies, memo)
    return known[1]


def map_arguments(
    function: TensorMap, args: tuple[Any, ...], kwargs: dict[str, Any], copies: Copies | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """:func:`map_tensors` of a call's arguments."""
    memo: dict[int, tuple[Any, Any]] = {}
    args = map_tensors(function, args, copies, memo)
    return args, {name: map_tensors(function, value, copies, memo) for name, value in kwargs.items()} if kwargs else kwargs


def _replaced(function: TensorMap, tensor: torch.Tensor) -> torch.Tensor:
    new = function(tensor)
    if new is not tensor and type(tensor) in (torch.Tensor, torch.nn.Parameter) and type(new) is torch.Tensor:
        attributes = tensor.__dict__
        if attributes:
            new.__dict__.update((name, value) for name, value in attributes.items() if not name.startswith("_vescale"))
    return new


def _mapped(function: TensorMap, tree: Any, copies: Copies | None, memo: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(tree, torch.Tensor):
        return _replaced(function, tree)
    if isinstance(tree, tuple):
        items = [map_tensors(function, item, copies, memo) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return _tuple_like(tree, items)
    if isinstance(tree, list):
        items = [map_tensors(function, item, copies, memo) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        made = copy.copy(tree)
        made[:] = items
        if copies is not None:
            copies.add(tree, made)
        return made
    if isinstance(tree, dict):
        changed = {}
        for key, value in tree.items():
            new = map_tensors(function, value, copies, memo)
            if new is not value:
                changed[key] = new
        if not changed:
            return tree
        copied = copy.copy(tree)
        if getattr(tree, "__dict__", None) is tree:  # a common way to make the entries attributes
            copied.__dict__ = copied
        for key, value in changed.items():
            copied[key] = value
        if copies is not None:
            copies.add(tree, copied)
        return copied
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        replaced = {}
        for field in dataclasses.fields(tree):
            value = getattr(tree, field.name)
            new = map_tensors(function, value, copies, memo)
            if new is not value:
                replaced[field.name] = new
        if not replaced:
            return tree
        instance = copy.copy(tree)  # dataclasses.replace() would run __post_init__ once more
        for name, value in replaced.items():
            object.__setattr__(instance, name, value)  # frozen ones, too
        if copies is not None:
            copies.add(tree, instance)
        return instance
    return tree


def _tuple_like(tree: Any, items: list[Any]) -> Any:
    """Return a tuple of ``items`` of the class of ``tree``, with its attributes, without calling the class's own ``__new__``."""
    if hasattr(tree, "n_sequence_fields"):  # a result of torch.max, whose class tuple.__new__ refuses
        return type(tree)(items)
    made = tuple.__new__(type(tree), items)
    getattr(made, "__dict__", {}).update(getattr(tree, "__dict__", {}))
    return made


def grad_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in ``tree`` that require a gradient, in traversal order, each once."""
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.requires_grad else []
    found: list[torch.Tensor] = []

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(visit, tree)
    return found


def graph_tensors(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors of :func:`grad_tensors`. Inside vmap, those whose graph the batched tensors stand for."""
    if not are_functorch_transforms_active():
        return grad_tensors(outputs)
    found: list[torch.Tensor] = []

    def visit(tensor: torch.Tensor) -> torch.Tensor:
        inner = tensor
        while is_batchedtensor(inner):
            inner = get_unwrapped(inner)
        found.append(inner)
        return tensor

    map_tensors(visit, outputs)
    return [tensor for tensor in found if tensor.requires_grad]


def floating_as(dtype: torch.dtype) -> TensorMap:
    """Return a function that casts floating-point tensors to ``dtype``."""
    return lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t


def to_device(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the root's inputs on the accelerator, as in DDP and FSDP2."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True) if tensor.device != device else tensor

    return map_arguments(move, args, kwargs)
