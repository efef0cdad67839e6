"""A data set that takes its samples from several sources, in proportion to weights.

Each source has its own order, epochs and blocks. The sample at a position follows from the position alone: :class:`Shares` tells its source
and how many samples that source has given before. So the state of a mixture is one integer, too, and a resumed run reads no sample twice::

    position           0   1   2   3   4   5   6   7   8   9
    source             a   b   a   c   a   b   a   b   a   c
    position in it     0   0   1   0   2   1   3   2   4   1     an epoch of a source ends when its own samples are used up

Ids number the training samples of all sources, one source after another. Ids of held-out samples do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from vescale_ray.data.dataset import Dataset, SampleOrder
from vescale_ray.data.order.shares import Shares
from vescale_ray.data.order.stream import Ids, check_positions, part_key
from vescale_ray.errors import BadInput

Batch = tuple[torch.Tensor, torch.Tensor]
_OWN = frozenset({"data.corpus", "data.column", "data.end_token", "data.format"})
"""Keys of the identity that each source has for itself."""


class MixtureOrder:
    """Sample ids of a mixture by position.

    Args:
        orders: order of each source.
        starts: id of each source's first sample.
    """

    def __init__(self, orders: Sequence[SampleOrder], starts: Ids, shares: Shares) -> None:
        self.orders, self.shares, self._starts = orders, shares, starts

    def ids(self, start: int, count: int) -> Ids:
        """Return the ids at positions ``[start, start + count)``, int64 ``[count]``.

        Raises:
            ValueError: ``start`` or ``count`` is negative.
        """
        check_positions(start, count)
        sources, taken = self.shares.sources(start, count), self.shares.taken(start)
        out = np.empty(count, dtype=np.int64)
        for source in np.flatnonzero(np.bincount(sources)).tolist():
            places = np.flatnonzero(sources == source)
            out[places] = self._starts[source] + self.orders[source].ids(taken[source], len(places))
        return out


class Mixture:
    """A :class:`vescale_ray.data.dataset.Dataset` of several sources.

    Args:
        sources: at least one; their samples have the same length.
        names: name of each source, for messages.

    Raises:
        BadInput: some sources hold bytes and others token ids, or a weight can't be used.
    """

    def __init__(self, sources: Sequence[Dataset], weights: Sequence[float], names: Sequence[str]) -> None:
        check_unit(sources, names)
        self.sources, self.names = sources, names
        try:
            self.shares = Shares(weights)
        except BadInput as error:
            raise BadInput(f"data.mixture: {error}") from None
        self._starts = _starts([source.num_samples for source in sources])
        self._heldout_starts = _starts([source.heldout_samples for source in sources])

    @property
    def num_samples(self) -> int:
        """Number of training samples of all sources."""
        return int(self._starts[-1])

    @property
    def heldout_samples(self) -> int:
        """Number of held-out samples of all sources."""
        return int(self._heldout_starts[-1])

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return max(source.vocab for source in self.sources)

    @property
    def unit(self) -> str:
        """Kind of the tokens (:class:`vescale_ray.data.dataset.Dataset`)."""
        return self.sources[0].unit

    @property
    def masked(self) -> bool:
        """True if a source may have targets that do not count."""
        return any(source.masked for source in self.sources)

    @property
    def end_token(self) -> int | None:
        """Token that ends each document, if it is the same in all sources."""
        ends = {source.end_token for source in self.sources}
        return ends.pop() if len(ends) == 1 else None

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of text of a token, if all sources know theirs."""
        known = [source.bytes_per_token for source in self.sources]
        counts = self.shares.counts.tolist()
        whole = [one * count for one, count in zip(known, counts, strict=True) if one is not None]
        return sum(whole) / sum(counts) if len(whole) == len(known) else None

    def batch(self, ids: npt.ArrayLike) -> Batch:
        """Return tokens and targets of training samples (:meth:`vescale_ray.data.dataset.Dataset.batch`)."""
        return _gather(ids, self._starts, [source.batch for source in self.sources])

    def heldout_batch(self, ids: npt.ArrayLike) -> Batch:
        """Return tokens and targets of held-out samples, as :meth:`batch` does."""
        return _gather(ids, self._heldout_starts, [source.heldout_batch for source in self.sources])

    def order(self, seed: int) -> MixtureOrder:
        """Return the order of the training samples. Each source has a seed of its own."""
        orders = [source.order(part_key(seed, number)) for number, source in enumerate(self.sources)]
        return MixtureOrder(orders, self._starts, self.shares)

    def read_ahead(self, order: MixtureOrder, position: int) -> None:
        """Begin to read the blocks of the samples from ``position`` on, of each source."""
        for source, own, taken in zip(self.sources, order.orders, self.shares.taken(position), strict=True):
            source.read_ahead(own, taken)

    def describe(self) -> dict[str, str | int | None]:
        """Return a JSON-compatible description of the data, with the number of each source before its keys."""
        every = enumerate(source.describe() for source in self.sources)
        return {f"{number}.{key}": value for number, told in every for key, value in told.items()}

    def identity(self) -> Mapping[str, str | int]:
        """Return what determines which sample an id stands for: values by configuration key."""
        counts = " : ".join(map(str, self.shares.counts.tolist()))
        found: dict[str, str | int] = {"data.corpus": "a mixture", "data.mixture": f"weights {counts}"}
        for number, source in enumerate(self.sources):
            for key, value in source.identity().items():
                found[key.replace("data.", f"data.mixture.{number}.", 1) if key in _OWN else key] = value
        return found


def check_unit(sources: Sequence[Dataset], names: Sequence[str]) -> None:
    """Check that either all sources hold text as bytes, or none does.

    Raises:
        BadInput: some sources hold bytes, and others do not.
    """
    units = {("bytes" if source.unit == "bytes" else "token ids"): name for source, name in zip(sources, names, strict=True)}
    if len(units) > 1:
        (one, here), (other, there) = units.items()
        raise BadInput(
            f"{here} holds {one}, but {there} holds {other}: one model can't be trained on both; set data.tokenizer for the text, "
            "or leave one of them out"
        )


def _starts(counts: Sequence[int]) -> Ids:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _gather(ids: npt.ArrayLike, starts: Ids, reads: Sequence[Callable[[Ids], Batch]]) -> Batch:
    """Return the samples ``ids``. Each is read from its source, by its id in that source."""
    index = np.asarray(ids, dtype=np.int64).reshape(-1)
    if index.size and (index.min() < 0 or index.max() >= starts[-1]):
        raise IndexError(f"sample ids {index.min()}..{index.max()}: there are {starts[-1]} samples")
    which = np.searchsorted(starts, index, side="right") - 1
    sources = np.flatnonzero(np.bincount(which)).tolist() or [0]
    if len(sources) == 1:
        return reads[sources[0]](index - starts[sources[0]])
    out: list[npt.NDArray[np.int64]] = []
    for source in sources:
        rows = np.flatnonzero(which == source)
        parts = [part.numpy() for part in reads[source](index[rows] - starts[source])]
        out = out or [np.empty((len(index), part.shape[1]), dtype=np.int64) for part in parts]
        for whole, part in zip(out, parts, strict=True):
            whole[rows] = part
    return torch.from_numpy(out[0]), torch.from_numpy(out[1])
