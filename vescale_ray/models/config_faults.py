"""Mistakes in the ``config.json`` of a model of transformers, as one clause with the key, its value and a remedy."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_TYPES = {
    "int": "a whole number",
    "float": "a number with a point, as 1.0",
    "str": "a text in quotes",
    "bool": "true or false",
    "NoneType": "null",
    "a list": "a list in brackets",
    "a dict": "keys and values in braces",
}
_DTYPES = ("float32", "bfloat16", "float16")
_ALIKE = 0.85
"""Least likeness of a misspelled key (:mod:`difflib`)."""


def explain(error: BaseException, path: Path) -> str:
    """Return what is wrong with the configuration at ``path``, by the error that transformers raises for it."""
    given = json.loads(path.read_text(encoding="utf-8"))
    inner, text = error, _line(error)
    field = re.search(r"Validation error for field '(\w+)'", text)
    if type(error).__name__.startswith("StrictDataclass") and error.__cause__ is not None:
        inner, text = error.__cause__, _line(error.__cause__)
    expected = [_TYPES[kind] for kind in dict.fromkeys(re.findall(r" expected (a \w+|\w+), got", text)) if kind in _TYPES]
    if field is not None and expected:
        key = field[1] if field[1] in given else next((long for long, _ in _leaves(given) if long.endswith(f".{field[1]}")), field[1])
        return f"{key} = {_shown(given.get(field[1], dict(_leaves(given)).get(key)))}; give {' or '.join(expected)}"
    reason = text if isinstance(inner, ValueError) else f"{type(inner).__name__}: {text}"
    found = [(key, value) for key, value in _leaves(given) if _at_fault(key, value, inner, text)]
    if not found:
        return f"{reason}; correct it"
    told = ", ".join(f"{key} = {_shown(value)}" for key, value in found[:3])
    return f"{told} ({reason}); {_remedy(found[0][0], inner)}"


def below_one(text: Any) -> str | None:
    """Return the size of a text model's configuration that is below 1, and the remedy."""
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"):
        value = _value(text, name)
        if isinstance(value, int) and value < 1 and (name, value) != ("max_position_embeddings", -1):  # XLNet's, for no limit
            return f"{name} = {value}; give at least 1"
    window, layers = _value(text, "sliding_window"), _value(text, "layer_types")
    if isinstance(window, int) and window < 1 and any("sliding" in str(kind) for kind in layers or ["sliding_attention"]):
        return f"sliding_window = {window}; give at least 1, or null for none"
    return None


def _value(config: Any, name: str) -> Any:
    """Return a setting of transformers' configuration; None if there is none, or if layers differ in it."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def misspelled(config: Any, given: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield a warning for each key of ``given`` that transformers does not read, but that is like one that it reads.

    The value must be another one than that which the model has without it: many files have keys of other programs.

    Args:
        config: transformers' configuration, made of ``given``.
        above: path of ``given`` in the file, with a dot at its end.
    """
    has, other_names = vars(config), getattr(config, "attribute_map", {})
    known = {*getattr(config, "__dataclass_fields__", ()), *other_names}
    for key, value in given.items():
        if isinstance(value, Mapping) and hasattr(has.get(key), "attribute_map"):
            yield from misspelled(has[key], value, f"{above}{key}.")
        elif key not in known and (near := difflib.get_close_matches(key.lower(), known - given.keys(), 1, _ALIKE)):
            if value not in (None, has.get(other_names.get(near[0], near[0]))):
                yield f"{above}{key} = {_shown(value)} in its config.json is not read; did you mean {near[0]}?"


def misfit(path: Path) -> str | None:
    """Return two sizes in the configuration at ``path`` by which a forward fails, if they are known."""
    given = json.loads(path.read_text(encoding="utf-8"))
    sizes = {key.rpartition(".")[2]: value for key, value in _leaves(given) if type(value) is int}
    heads, pairs, chosen = (sizes.get(name, 0) for name in ("num_attention_heads", "num_key_value_heads", "num_experts_per_tok"))
    if pairs > 0 and heads % pairs:
        return f"num_key_value_heads = {pairs} does not divide num_attention_heads = {heads}"
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if chosen > sizes.get(name, chosen):
            return f"num_experts_per_tok = {chosen} is more than {name} = {sizes[name]}"
    return None


def _at_fault(key: str, value: Any, error: BaseException, text: str) -> bool:
    """Return whether the error is most likely about this key."""
    name = key.rpartition(".")[2]
    match error:
        case ZeroDivisionError():
            return type(value) is int and value == 0 and not name.endswith("_id")
        case RuntimeError() if "negative dimension" in text:
            return type(value) is int and value < 0 and not name.endswith("_id")
        case AssertionError() if "Padding_idx" in text:
            return name in ("pad_token_id", "vocab_size")
        case TypeError():
            return isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", value, re.IGNORECASE) is not None
    return isinstance(value, str) and re.search(rf"['\"]{re.escape(value)}['\"]", text) is not None


def _remedy(key: str, error: BaseException) -> str:
    name = key.rpartition(".")[2]
    if name in ("rope_type", "type"):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        return f"give one of {', '.join(('default', *ROPE_INIT_FUNCTIONS))}"
    if "dtype" in name:
        return f"give one of {', '.join(_DTYPES)}"
    if "act" in name and isinstance(error, KeyError):
        from transformers.activations import ACT2FN

        return f"give one of {', '.join(ACT2FN)}"
    if "pad" in name:
        return "give a token below vocab_size, or null"
    return "give a number without quotes" if isinstance(error, TypeError) else "correct it"


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their paths."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _shown(value: Any) -> str:
    return json.dumps(value)[:80]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(". ")
