"""Labels of a step's parts in logs and profiles, with the names that torch's ``fully_shard`` uses, since readers of traces know these.

``TORCH_LOGS=fsdp`` (or the logger below at DEBUG) prints them; ``torch.profiler`` and ``emit_nvtx`` show them as ranges. If neither is
on, a label costs about 0.4 us.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

from torch.profiler import record_function

from vescale_ray.compat.core import profiler_enabled

_LOG = logging.getLogger("torch.distributed.fsdp.fully_shard")
_UNSEEN: Any = nullcontext()


def span(label: str, unit: str = "", *, logged: bool = False) -> Any:
    """Return a profiler range named ``FSDP::label (unit)``; ``{}`` in the label stands for the unit. ``logged``: write a log line, too."""
    if logged:
        log(label, unit)
    return record_function(_named(label, unit)) if profiler_enabled() else _UNSEEN


def log(label: str, unit: str = "") -> None:
    """Write a log line at DEBUG."""
    if _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("%s", _named(label, unit))


def _named(label: str, unit: str) -> str:
    if "{}" in label:
        return "FSDP::" + label.format(unit)
    return f"FSDP::{label} ({unit})" if unit else f"FSDP::{label}"
