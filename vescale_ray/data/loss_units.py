"""Units of a loss. Imports no torch, so that the control process starts fast."""

from __future__ import annotations

import math


def bits_per_byte(nats: float, bytes_per_token: float | None = 1.0) -> float | None:
    """Convert a mean loss from nats per token to bits per byte of the text; a random guess at bytes gives 8.

    Args:
        bytes_per_token: mean bytes of text of a token; None: unknown, and the result is None.
    """
    return nats / math.log(2.0) / bytes_per_token if bytes_per_token else None


def perplexity(nats: float) -> float:
    """Convert a mean loss in nats per token to a perplexity, at most ``exp(700)``; a random guess gives the number of tokens."""
    return math.exp(nats if math.isnan(nats) else min(nats, 700.0))
