"""The interface of a data set: samples by id, the order of a seed, and what identifies the data.

Three classes implement it: :class:`vescale_ray.data.sources.corpus.Corpus` holds bytes of text in memory,
:class:`vescale_ray.data.block_dataset.BlockDataset` reads blocks of tokens from files, and :class:`vescale_ray.data.mixture.Mixture` mixes
such sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy.typing as npt
import torch

from vescale_ray.data.order.stream import Ids
from vescale_ray.errors import BadInput


class SampleOrder(Protocol):
    """An endless sequence of sample ids, addressed by position. Each source repeats its samples in epochs, each a permutation."""

    def ids(self, start: int, count: int) -> Ids:
        """Return the ids at positions ``[start, start + count)``, int64."""
        ...


class Dataset(Protocol):
    """Samples of one length, addressed by id. A sample is ``seq_len`` tokens and, as targets, their successors."""

    @property
    def num_samples(self) -> int:
        """Number of training samples."""
        ...

    @property
    def heldout_samples(self) -> int:
        """Number of held-out samples; may be 0."""
        ...

    @property
    def vocab(self) -> int:
        """Number of token ids; all tokens are below it."""
        ...

    @property
    def unit(self) -> str:
        """Kind of the tokens: ``bytes`` of text, tokens of a ``tokenizer``, tokens of ``chat`` rows, or ``ids`` of unknown text."""
        ...

    @property
    def masked(self) -> bool:
        """True if some targets may be :data:`vescale_ray.data.text.chat.IGNORED`; the same in every process."""
        ...

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of text of a token; None if the text is not known."""
        ...

    @property
    def end_token(self) -> int | None:
        """Token that ends each document; None if it is not known."""
        ...

    def batch(self, ids: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets of the training samples ``ids``, int64 ``[n, seq_len]`` each.

        Raises:
            IndexError: an id is not in ``[0, num_samples)``.
            BadInput: the data is damaged or does not fit the configuration; the message names the file and the place.
            OSError: the storage does not answer.
        """
        ...

    def heldout_batch(self, ids: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets of the held-out samples ``ids``, as :meth:`batch` does."""
        ...

    def order(self, seed: int) -> SampleOrder:
        """Return the order of the training samples for ``seed``, the same in every process."""
        ...

    def read_ahead(self, order: Any, position: int) -> None:
        """Begin to read the data of the samples from ``position`` on. Returns at once.

        ``order`` is a result of :meth:`order`."""
        ...

    def describe(self) -> dict[str, str | int | None]:
        """Return a JSON-compatible description of the data."""
        ...

    def identity(self) -> Mapping[str, str | int]:
        """Return what determines which sample an id stands for: values by configuration key. They must be the same when a run resumes."""
        ...


def check_same_data(dataset: Dataset, begun: Mapping[str, Any]) -> None:
    """Refuse a data set whose samples have other ids than those of the data set that the run has begun with.

    Args:
        begun: values of that data set's :meth:`Dataset.identity`, and others.

    Raises:
        BadInput: files have changed since, or differ on this machine; or an own data set gives other samples in each process.
    """
    for key, value in dataset.identity().items():
        if key in begun and begun[key] != value:
            raise BadInput(
                f"{key}: the data here is not that with which the run began: files have changed since, or differ on this node; put those "
                "back. An own data set must give the same samples in every process"
            )
