"""Debug mode: the ranks agree on every collective before it starts.

If one rank takes another path through the model, it starts another collective than the others. Normally that ends in a timeout or in wrong
numbers. In debug mode the ranks first exchange a message of 256 bytes on the same process group. If the messages differ, all ranks raise an
error that names both collectives. This costs one small all-gather per collective. Switch it on with :func:`set_debug` or
``VESCALE_RAY_FSDP_DEBUG=1`` on all ranks before the first forward.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

_TEXT = 256
_enabled = os.environ.get("VESCALE_RAY_FSDP_DEBUG", "0") not in ("", "0")


class OrderError(RuntimeError):
    """The ranks are about to start different collectives."""


def set_debug(enabled: bool) -> None:
    """Switch debug mode on or off for all modules of this process. Call it on all ranks."""
    global _enabled
    _enabled = bool(enabled)


def debugging() -> bool:
    return _enabled


def agree(what: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that all ranks of ``group`` are about to do the same ``what``. Does nothing outside debug mode.

    Raises:
        OrderError: on every rank, if another rank is about to do something else.
    """
    if not _enabled or group.size() == 1:
        return
    said = [part.rstrip(b"\0").decode(errors="replace") for part in _gathered(what.encode()[:_TEXT].ljust(_TEXT, b"\0"), group, device)]
    rank = group.rank()
    # Every rank names the same pair, so one log is enough.
    other = next((r for r in range(group.size()) if said[r] != said[0]), None)
    if other is not None:
        raise OrderError(
            f"the ranks are about to start different collectives: rank 0 of the group the {said[0]}, rank {other} the {said[other]} "
            f"(this is rank {rank}): run each unit on every rank, in the same order, and where the loss does not need one, add its result "
            f"times 0 to the loss"
        )


def agree_on_gradients(params: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that the same ``params`` have a gradient on all ranks of ``group``, after a backward. Does nothing outside debug mode.

    Every rank passes the same parameters.

    Raises:
        OrderError: on every rank, if a parameter has a gradient on some ranks only.
    """
    if not _enabled or group.size() == 1:
        return
    said = _gathered(bytes(param.grad is not None for _, param in params), group, device)
    for index, (name, _) in enumerate(params):
        there = [rank for rank, bits in enumerate(said) if bits[index]]
        if there and len(there) < group.size():
            without = next(rank for rank in range(group.size()) if rank not in there)
            raise OrderError(
                f"the gradient of {name!r} is there on rank {there[0]} of the group, not on rank {without} (this is rank {group.rank()}): "
                f"let hooks and other code in a backward set or drop .grad on all ranks alike"
            )


def _gathered(data: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Return every rank's ``data``, which must have the same size on all ranks. Collective."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    out = mine.repeat(group.size())
    dist.all_gather_single(out, mine, group=group)
    return [bytes(part.tolist()) for part in out.cpu().view(group.size(), len(data))]
