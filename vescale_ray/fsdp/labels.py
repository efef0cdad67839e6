"""What logs and profilers show of a step, under the names that torch's ``fully_shard`` gives it: who reads traces looks for these.

``TORCH_LOGS=fsdp`` (or the logger below at DEBUG) prints them; ``torch.profiler`` and ``emit_nvtx`` show them as ranges. With neither,
one costs about 0.4 us.
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
    """A context that profilers show as ``FSDP::label (unit)``, or with the unit where the label has ``{}``; ``logged``: also a
    line of the log."""
    if logged:
        log(label, unit)
    return record_function(_named(label, unit)) if profiler_enabled() else _UNSEEN


def log(label: str, unit: str = "") -> None:
    """A line of the log."""
    if _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("%s", _named(label, unit))


def _named(label: str, unit: str) -> str:
    if "{}" in label:
        return "FSDP::" + label.format(unit)
    return f"FSDP::{label} ({unit})" if unit else f"FSDP::{label}"
