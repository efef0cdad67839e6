"""Check that a manifest's ``meta`` is as :func:`~vescale_ray.checkpoint.save` writes it (section 6 of the format). The seal does not prove
that: another program may store other values there, and a forged manifest anything."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from ..errors import CheckpointMismatch
from ..plain_values.plain import unpack
from .nested_state import unfold


def check_saved_meta(where: str, meta: Mapping[str, Any], *, optimizers: bool = True) -> None:
    """Raise CheckpointMismatch, with the name of the first value that has another type than a save writes.

    Args:
        optimizers: whether to check these too.
    """

    def expect(condition: bool, path: str, what: str) -> None:
        if not condition:
            raise CheckpointMismatch(f"{where}: meta.{path} is not {what}: save() did not write it, so it cannot be loaded as a state")

    def encoded(value: Any, path: str, tensors: Container[str] = ()) -> None:
        def named(name: Any) -> None:
            if not isinstance(name, str) or name not in tensors:
                raise ValueError

        try:
            unfold(value, named)
        except Exception:  # torch raises various types
            expect(False, path, "a number, text or list")

    expect(_texts(meta.get("models", [])), "models", "a list of names")
    expect(isinstance(meta.get("state", {}), dict), "state", "an object")
    for key, value in meta.get("state", {}).items():
        try:
            unpack(value)
        except ValueError:
            expect(False, f"state.{key}", "a plain value")
    expect(isinstance(meta.get("values", {}), dict), "values", "an object")
    known = meta.get("optimizers", {}) if optimizers else {}
    expect(isinstance(known, dict), "optimizers", "an object")
    for key, saved in known.items():
        at = f"optimizers.{key}"
        expect(isinstance(saved, dict), at, "an object")
        expect(isinstance(saved.get("type", ""), str), f"{at}.type", "a name")
        expect(_texts(saved.get("kinds")), f"{at}.kinds", "a list of names")
        for listed in ("nested", "replicated"):
            expect(_texts(saved.get(listed, [])), f"{at}.{listed}", "a list of names")
        groups, scalars = saved.get("groups"), saved.get("scalars")
        expect(isinstance(groups, list), f"{at}.groups", "a list")
        for index, group in enumerate(groups):
            inner = f"{at}.groups[{index}]"
            expect(isinstance(group, dict) and _texts(group.get("params")), f"{inner}.params", "a list of names")
            expect(isinstance(group.get("hyper"), dict), f"{inner}.hyper", "an object")
            for name, value in group["hyper"].items():
                encoded(value, f"{inner}.hyper.{name}")
        shared = saved.get("shared", {})
        expect(isinstance(shared, dict), f"{at}.shared", "an object")
        for name, value in shared.items():
            encoded(value, f"{at}.shared.{name}")
        expect(isinstance(scalars, dict), f"{at}.scalars", "an object")
        for state_key, by_name in scalars.items():
            expect(isinstance(by_name, dict), f"{at}.scalars.{state_key}", "an object")
            for name, value in by_name.items():
                encoded(value, f"{at}.scalars.{state_key}.{name}", saved.get("nested", []))


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
