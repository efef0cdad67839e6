"""Debug mode: ranks agree on every collective before it starts.

A rank that takes another path through the model than the others starts another collective than they do. Normally that ends in a
timeout, or worse, in numbers that belong elsewhere. Here a message of 256 bytes goes round first, on the same process group, and all
ranks raise alike, naming both collectives. It costs a small all-gather for each of them. Switch it on with :func:`set_debug` or
``VESCALE_RAY_FSDP_DEBUG=1``, on all ranks, before the first forward.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

_TEXT = 256
_enabled = os.environ.get("VESCALE_RAY_FSDP_DEBUG", "0") not in ("", "0")


class OrderError(RuntimeError):
    """The ranks are about to start different collectives."""


def set_debug(enabled: bool) -> None:
    """Switch debug mode on or off, for all modules of this process. On all ranks alike."""
    global _enabled
    _enabled = bool(enabled)


def debugging() -> bool:
    return _enabled


def agree(what: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare ``what`` this rank is about to do with the other ranks of ``group``; nothing outside debug mode.

    Raises:
        OrderError: another rank is about to do something else. On every rank of the group.
    """
    if not _enabled or group.size() == 1:
        return
    data = what.encode()[:_TEXT]
    mine = torch.zeros(_TEXT, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    mine = mine.to(device)
    out = mine.repeat(group.size())
    dist.all_gather_single(out, mine, group=group)
    said = [bytes(part.tolist()).rstrip(b"\0").decode(errors="replace") for part in out.cpu().view(group.size(), _TEXT)]
    rank = group.rank()
    # Every rank names the same pair, so that one log tells as much as all of them.
    other = next((r for r in range(group.size()) if said[r] != said[0]), None)
    if other is not None:
        raise OrderError(
            f"the ranks are about to start different collectives: rank 0 of the group the {said[0]}, rank {other} the {said[other]} "
            f"(this is rank {rank}): let every rank take the same path through the model, or gather unused units with "
            f"set_reduce_scatter_unused_params"
        )
