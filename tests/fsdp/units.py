"""Access to the internals of a sharded module, for tests of them. It is untyped, since the tests replace these parts."""

from __future__ import annotations

from typing import Any

from vescale_ray.fsdp.units import schedule


def unit_of(module: Any) -> Any:
    unit = schedule.unit_of(module)
    assert unit is not None, f"{type(module).__name__} is not sharded"
    return unit
