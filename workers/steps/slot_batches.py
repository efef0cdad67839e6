"""The batches of one rank's slots in a step, and the number of targets that divides the losses of the global batch.

Targets of fine-tuning data may not count, so only the batches tell their number. All ranks add up theirs before the first backward, and the
loss is the mean over the targets of the global batch at every world size. Other data has a target for each token, and needs no collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_ray.communication import wait_notes
from vescale_ray.data.text.chat import IGNORED

if TYPE_CHECKING:
    from vescale_ray.data.dataset import Dataset


def targets_in(targets: Tensor) -> int:
    """Return how many targets count."""
    return int((targets != IGNORED).sum())


def positions_in(tokens: Tensor, end_token: int) -> Tensor:
    """Return the position of each token within its document, int64 ``[B, S]``. A document ends with ``end_token``.

    A document that a sample begins in the middle of counts from the sample's first token.
    """
    index = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
    begins = torch.zeros_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == end_token
    return index - torch.where(begins, index, 0).cummax(-1).values


class SlotBatches:
    """Tokens and targets of each slot.

    Args:
        ids: sample ids of each of this rank's slots.
        tokens: tokens of the global batch.

    Attributes:
        divisor: number of targets of the global batch that count, at least 1.
    """

    def __init__(self, dataset: Dataset, ids: Sequence[Any], tokens: int) -> None:
        self._dataset, self.ids, self.divisor = dataset, ids, tokens
        self._made: list[tuple[Tensor, Tensor]] = []
        if dataset.masked:
            self._made = [dataset.batch(one) for one in ids]

    def agree(self) -> None:
        """Add up the targets of all ranks, if some may not count. Collective."""
        if self._dataset.masked:
            count = torch.tensor(sum(targets_in(targets) for _, targets in self._made))
            with wait_notes.counted("all_reduce"):
                dist.all_reduce(count)
            self.divisor = max(1, int(count))

    def batch(self, turn: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of this rank's slot number ``turn``."""
        return self._made[turn] if self._made else self._dataset.batch(self.ids[turn])
