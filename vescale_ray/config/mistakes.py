"""One line for each mistake in a configuration, with the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from pydantic_core import ErrorDetails

from vescale_ray.config.peers import our_key
from vescale_ray.config.sections import ConfigError


def describe(error: ErrorDetails, beside: Sequence[str] = ()) -> str:
    """Return one line for one of pydantic's errors. ``beside``: the keys of the section within a section that the error is about."""
    inner = (error.get("ctx") or {}).get("error")
    if isinstance(inner, ConfigError):
        return str(inner)
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing" and not key.rpartition(".")[2].isdigit():
        return f"{key} must be given"
    if error["type"] == "extra_forbidden" and beside:
        section, _, name = key.rpartition(".")
        near = [section + "." + one for one in difflib.get_close_matches(name, beside, n=1)]
        ours = our_key(key)
        near = [ours] if ours is not None and ours.startswith(f"{section}.") else near
        return f"unknown key {key}: " + (f"did you mean {near[0]}?" if near else f"{section} has {', '.join(beside)}")
    if error["type"] == "missing":  # an entry of a list, whose input is the list
        key = key.rpartition(".")[0]
    names = f", with {', '.join(beside)}" if error["type"] == "model_type" and beside else ""
    return f"{key} = {shown(error['input'])}: {_remedy(error, inner)}{names}"


def _remedy(error: ErrorDetails, inner: Any) -> str:
    context: Mapping[str, Any] = error.get("ctx") or {}
    match error["type"]:
        case "greater_than_equal":
            return f"give at least {number(context['ge'])}"
        case "greater_than":
            return f"give more than {number(context['gt'])}"
        case "less_than_equal":
            return f"give at most {number(context['le'])}"
        case "less_than":
            return f"give less than {number(context['lt'])}"
        case "int_parsing" | "int_type" | "int_from_float":
            return "give a whole number"
        case "float_parsing" | "float_type" | "finite_number":
            return "give a finite number"
        case "bool_parsing" | "bool_type":
            return "give true or false"
        case "string_type" if isinstance(error["input"], date):  # name: 2026-01-01
            return "give a text, in quotes"
        case "string_type" | "string_unicode":
            return "give a text"
        case "string_too_short":
            return "must not be empty"
        case "literal_error":
            return f"give one of {context['expected'].replace(chr(39), '')}"
        case "string_pattern_mismatch" if error["loc"][-1] == "name":
            return "give letters, digits, '.', '_' and '-' (63 at most, a letter or digit first)"
        case "string_pattern_mismatch":
            return "give module and function as pkg.mod:fn"
        case "list_type" | "tuple_type":
            return "give a list in brackets"
        case "extra_forbidden":
            return "there is no such key; docs/reference/configuration.md lists all"
        case "model_type":
            return "give keys and values in braces"
        case "dict_type":
            return "give keys and values in braces"
        case "too_short":
            return f"give a list of {number(context['min_length'])} or more"
        case "too_long":
            return f"give a list of at most {number(context['max_length'])}"
        case "missing":
            return "give as many entries as the default has"
        case "value_error":
            return str(inner)
        case _:
            return " ".join(str(error["msg"]).split())


def number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def shown(value: Any) -> str:
    text = " ".join(str(value).split()) if isinstance(value, str | date) else repr(value)
    text = {"True": "true", "False": "false", "None": "null", "": "''"}.get(text, text)
    return text if len(text) <= 60 else text[:57] + "..."
