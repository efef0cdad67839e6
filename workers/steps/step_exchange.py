"""The last collective before the optimizer's step: one all-gather of a few int64 words per rank, with floats as their bits.

It is the step's commit point. No rank passes it before every rank has all of its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from vescale_ray.communication import wait_notes
from vescale_ray.workers.monitoring.process import resident_bytes


class Seconds(NamedTuple):
    """Seconds of one rank's step: until the exchange, for all its slots, per slot on average, and until the gradient norm."""

    whole: float
    loop: float
    per_slot: float
    together: float


class RankSeconds(NamedTuple):
    """The values of :class:`Seconds` of all ranks, by rank."""

    whole: tuple[float, ...]
    loop: tuple[float, ...]
    per_slot: tuple[float, ...]
    together: tuple[float, ...]


@dataclass(frozen=True)
class RankStep:
    """This rank's contribution: flags, losses and sample ids of its slots, and times."""

    flags: int
    nlls: Sequence[float]
    ids: Sequence[int]
    seconds: Seconds


@dataclass(frozen=True)
class GatheredStep:
    """Data of all ranks: losses and sample ids in slot order, merged flags, and times and resident bytes by rank."""

    nlls: list[float]
    ids: tuple[int, ...]
    flags: int
    seconds: RankSeconds
    memory: tuple[int, ...]


_HEADER = 3 + len(Seconds._fields)  # flags, memory, number of slots, seconds


def exchange(own: RankStep, table: Sequence[Sequence[int]], batch: int) -> GatheredStep:
    """Gather the data of all ranks. Collective.

    Args:
        table: each rank's slots.
        batch: samples per slot.
    """
    rounds = max(map(len, table))
    words = torch.zeros(_HEADER + rounds * (1 + batch), dtype=torch.int64)
    words[0], words[1], words[2] = own.flags, resident_bytes(), len(own.nlls)
    floats = words.view(torch.float64)
    floats[3:_HEADER] = torch.tensor(own.seconds, dtype=torch.float64)
    floats[_HEADER : _HEADER + len(own.nlls)] = torch.tensor(own.nlls, dtype=torch.float64)
    words[_HEADER + rounds : _HEADER + rounds + len(own.ids)] = torch.tensor(own.ids, dtype=torch.int64)
    everyone = [torch.empty_like(words) for _ in table]
    with wait_notes.counted("step_end"):
        dist.all_gather(everyone, words)
    slots = sum(map(len, table))
    losses = [0.0] * slots
    samples: list[list[int]] = [[] for _ in losses]
    clocks: list[list[float]] = []
    merged = 0
    for row, mine in zip(everyone, table, strict=True):
        count = int(row[2])
        merged |= int(row[0])
        real = row.view(torch.float64)
        clocks.append(real[3:_HEADER].tolist())
        ids = row[_HEADER + rounds : _HEADER + rounds + count * batch].view(count, batch).tolist()
        for slot, loss, batch_ids in zip(mine, real[_HEADER : _HEADER + count].tolist(), ids, strict=True):
            losses[slot], samples[slot] = loss, batch_ids
    memory = tuple(int(row[1]) for row in everyone)
    return GatheredStep(losses, tuple(sample for one in samples for sample in one), merged, RankSeconds(*zip(*clocks, strict=True)), memory)
