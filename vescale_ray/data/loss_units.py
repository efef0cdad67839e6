"""Units of a loss on bytes. Imports no torch, so that the control process starts fast."""

from __future__ import annotations

import math


def bits_per_byte(nats: float) -> float:
    """Convert a mean loss from nats per byte to bits per byte; a random guess gives 8."""
    return nats / math.log(2.0)


def perplexity(nats: float) -> float:
    """Convert a mean loss in nats per token to a perplexity, at most ``exp(700)``; a random guess gives the number of tokens."""
    return math.exp(nats if math.isnan(nats) else min(nats, 700.0))
