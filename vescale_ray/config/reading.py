"""Read a configuration from YAML, and apply overrides of single keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from vescale_ray.config.mistakes import describe, shown
from vescale_ray.config.peers import no_such_key, our_key
from vescale_ray.config.run_config import RunConfig
from vescale_ray.config.sections import ConfigError

_SHOWN = 4
"""Maximum number of wrong keys that an error names. A job file of another trainer has many."""


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read ``path`` (None: all defaults), then apply ``overrides`` of the form ``section.key=value`` (the value is YAML) in order.

    Raises:
        ConfigError: a file, key or value can't be used; one line for the first one.
    """
    return parse_config({} if path is None else _read(Path(path)), overrides)


def read_config(text: str, where: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration from ``text``; ``where`` names its source in errors."""
    return parse_config(_tree(text, where), overrides)


def parse_config(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Check a plain nested mapping (as from YAML or JSON), apply ``overrides``, and build the :class:`RunConfig`."""
    known, changed = dict(_keys()), dict(tree)
    _check_keys(tree, known)
    for text in overrides:
        _apply(changed, text, known)
    try:
        return RunConfig.model_validate({name: keys for name, keys in changed.items() if keys is not None})
    except ValidationError as error:
        raise ConfigError("; ".join(describe(one, _beside(one["loc"], known)) for one in error.errors(include_url=False))) from None


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield each section's name and model, in the order of the file."""
    for name, field in RunConfig.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        yield name, field.annotation


def nested(field: FieldInfo | None) -> type[BaseModel] | None:
    """Return the pydantic model of a key that contains further keys, such as ``metrics.wandb``; None for other keys."""
    kinds: tuple[Any, ...] = get_args(field.annotation) if field is not None and isinstance(field.annotation, UnionType) else ()
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _beside(place: Sequence[int | str], known: Mapping[str, FieldInfo]) -> list[str]:
    """Return the keys beside ``place``, if a key such as ``metrics.wandb`` contains them; else an empty list."""
    holder = nested(known.get(".".join(map(str, place[:2]))))
    return list(holder.model_fields) if holder is not None else []


def _keys() -> Iterator[tuple[str, FieldInfo]]:
    for name, section in sections():
        for key, field in section.model_fields.items():
            yield f"{name}.{key}", field


class _UniqueKeys(yaml.SafeLoader):
    """YAML loader that refuses a key given twice, because PyYAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *other`, which PyYAML replaces by the keys of the other mapping
                continue
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if isinstance(key, (str, int, float, bool)) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            if isinstance(key, (str, int, float, bool)):
                seen.add(key)
        return super().construct_mapping(node, deep)


def _load_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeys)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {' '.join(str(error.problem or error.context).split())}{_hint(error)}") from None
    except RecursionError:
        raise ConfigError(f"{where}: brackets or braces are nested too deeply to be read; give sections of keys and values") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _hint(error: yaml.MarkedYAMLError) -> str:
    """Return the remedy for signs that mean something else in YAML."""
    said = f"{error.context} {error.problem}"
    if "alias" in said:  # corpus: *.parquet
        return "; put a text that begins with * in quotes"
    if "cannot start any token" in said:
        return "; indent with spaces" if "'\\t'" in said else "; put the text in quotes"
    if "'<document start>'" in said:  # [train] and steps = 5, as in TOML
        return "; write sections of keys, for example `train: {steps: 100}`"
    return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a run's YAML file (`vescale-ray demo` needs none)") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; give the path of a run's YAML file, for example {path / 'config.yaml'}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text; give the path of a run's YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    return _tree(text, str(path))


def _tree(text: str, path: str) -> dict[str, Any]:
    tree = _load_yaml(text, path)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds a {type(tree).__name__}; a run's file holds sections, for example `train: {{steps: 100}}`")
    return tree


def _apply(tree: dict[str, Any], text: str, known: Mapping[str, FieldInfo]) -> None:
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"override {text!r}: write section.key=value, for example train.steps=100")
    value = _text(raw, known[key]) if key in known and _is_text(known[key]) else _load_yaml(raw, f"override {text!r}")
    path = key.split(".")
    if len(path) == 1 and isinstance(value, dict):
        addition: dict[str, Any] = {key: value}
    elif key in known:
        addition = {path[0]: {path[1]: value}}
    elif len(path) == 3 and nested(known.get(".".join(path[:2]))) is not None:
        before = (tree.get(path[0]) or {}).get(path[1])
        addition = {path[0]: {path[1]: {**(before if isinstance(before, dict) else {}), path[2]: value}}}
    elif len(path) == 1 and any(other.startswith(f"{key}.") for other in known):
        addition = {key: value if value is not None else "null"}  # a section needs keys; the check below gives the error
    else:
        raise ConfigError(_unknown(key, known))
    _check_keys(addition, known)
    for name, keys in addition.items():
        tree[name] = {**(tree.get(name) or {}), **keys}


def _is_text(field: FieldInfo) -> bool:
    """Return whether a key takes only text (or null, or a list of texts)."""
    kinds = {field.annotation} if get_origin(field.annotation) is list else set(get_args(field.annotation)) or {field.annotation}
    return str in kinds and kinds <= {str, NoneType, list[str]}


def _text(raw: str, field: FieldInfo) -> str | list[str] | None:
    """Return the value of a key that takes text: run.name=2026, metrics.host=:: and ray.address=[::1]:6379 stay text, unlike in YAML."""
    try:
        value = _load_yaml(raw, "")
    except ConfigError:
        return raw.strip()
    if isinstance(value, list) and list[str] in get_args(field.annotation):
        return value
    return value if value is None or isinstance(value, str) else raw.strip()


def _check_keys(tree: Mapping[str, Any], known: Mapping[str, FieldInfo]) -> None:
    """Raise ConfigError with one line for the first keys that are unknown or out of place."""
    problems = list(_wrong_keys(tree, known))
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConfigError("; ".join(problems[:_SHOWN]) + more)


def _wrong_keys(tree: Mapping[str, Any], known: Mapping[str, FieldInfo]) -> Iterator[str]:
    names = {name for name, _ in sections()}
    for name, keys in tree.items():
        if name in known:
            section, _, key = name.partition(".")
            yield f"{name}: only the command line takes a key with its section; write {section}: {{{key}: {shown(keys)}}}"
        elif name not in names:
            first = next(iter(keys), None) if isinstance(keys, dict) else None
            yield _unknown(str(name) if first is None else f"{name}.{first}", known)
        elif isinstance(keys, dict):
            for key in keys:
                if f"{name}.{key}" not in known:
                    yield _unknown(f"{name}.{key}", known)
        elif keys is not None:
            example = next(key for key in known if key.startswith(f"{name}."))
            yield f"{name} = {shown(keys)}: {name} is a section; set its keys, for example {example}"


def _unknown(key: str, known: Mapping[str, FieldInfo]) -> str:
    """Return one line for an unknown key, with the known key that is probably meant.

    That is our name for a key of another trainer, or the nearest key. Keys are compared by their last word, in this section and in others,
    and as a whole."""
    section, _, leaf = key.rpartition(".")
    holder = ".".join(key.split(".")[:2])
    if holder in known and holder != key:
        return f"unknown key {key}: give the whole value of {holder}, a list in brackets, or keys and values in braces"
    if absent := no_such_key(key):
        return f"unknown key {key}: {absent}"
    if ours := our_key(key):
        return f"unknown key {key}: did you mean {ours}?"
    leaves, name = {other: other.rpartition(".")[2] for other in known}, leaf.lower()
    siblings = [other for other in known if other.startswith(f"{section}.")]
    # `lora: {rank: 8}` means model.lora.
    equal = [other for other in known if leaves[other] == name] or [other for other in known if leaves[other] == section]
    # `trian.steps` means train.steps and not another section's key of the same name.
    near = [max(equal, key=lambda other: difflib.SequenceMatcher(None, other, key).ratio())] if equal else []
    near = near or [f"{section}.{one}" for one in difflib.get_close_matches(name, [leaves[other] for other in siblings], n=1)]
    if not near and not siblings:  # in a known section, whole keys would be alike by the section's name alone
        near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.75)
    if not near:
        by_leaf = {word: other for other, word in leaves.items()}
        near = [by_leaf[word] for word in difflib.get_close_matches(name, list(by_leaf), n=1, cutoff=0.85)]
    if near:
        return f"unknown key {key}: did you mean {near[0]}?"
    if siblings:
        return f"unknown key {key}: {section} has {', '.join(other.rpartition('.')[2] for other in siblings)}"
    return f"unknown key {key}: the sections are {', '.join(name for name, _ in sections())}"
