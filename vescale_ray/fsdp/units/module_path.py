"""The path of a module in its model, for error messages."""

from __future__ import annotations

from typing import Any


def described(module: Any) -> str:
    """Return the module's class, with its path below the root if it has run there as a unit: ``Linear 'layers.0'``."""
    name, unit = type(module).__name__.removeprefix("FSDP"), getattr(module, "__dict__", {}).get("_vescale_unit")
    return f"{name} {unit.fqn!r}" if unit is not None and unit.fqn else name
