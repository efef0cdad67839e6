"""Units of a loss on bytes. Without torch, so that a process that only keeps the books starts fast."""

from __future__ import annotations

import math


def bits_per_byte(nats: float) -> float:
    """A mean loss in nats per byte as bits per byte; 8 is what guessing gives."""
    return nats / math.log(2.0)
