"""A shuffle in two levels, for samples that are read in blocks: first the blocks, then the samples of a few blocks together.

A sample costs a whole block, for example a row group of a Parquet file. So each epoch permutes the blocks and cuts them into windows of
a fixed number of blocks. Within a window, all samples are permuted. Both levels are the Feistel permutation of
:mod:`vescale_ray.data.order.stream`, and the whole state is the position::

    blocks           0 1 2 3 4 5 6 7            file order
    epoch 0          5 2 7 | 0 6 3 | 1 4        windows of 3 blocks; a reader holds one window and reads the next one ahead
    window 0         samples of blocks 5, 2 and 7, shuffled

The places of the windows in an epoch need a cumulative sum over the blocks, computed once per epoch. A window needs memory for its own
samples only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vescale_ray.data.order.stream import Ids, check_positions, epoch_key, part_key, permute
from vescale_ray.errors import BadInput


@dataclass(frozen=True)
class _Epoch:
    """Order of one epoch: its blocks, and the position of each window in the epoch, with the epoch's length at the end."""

    key: int
    blocks: Ids
    windows: Ids


class BlockOrder:
    """Sample ids by position, like :class:`vescale_ray.data.order.stream.SampleStream`, in an order that reads one block after another.

    The ids of block ``b`` are ``[sum(samples[:b]), sum(samples[: b + 1]))``. Every epoch is a permutation of all ids.

    Args:
        samples: number of samples of each block, int64; each at least 1.
        window: number of blocks whose samples are shuffled together.

    Raises:
        BadInput: there is no sample, or the seed is negative.
    """

    def __init__(self, samples: Ids, seed: int, window: int) -> None:
        if not samples.size:
            raise BadInput("an order of 0 samples: give more data, or lower data.seq_len")
        if seed < 0:
            raise BadInput(f"seed = {seed}: give at least 0")
        if samples.min() < 1 or window < 1:
            raise ValueError(f"blocks of {samples.min()} samples, windows of {window} blocks: both must be at least 1")
        self.seed, self.window = seed, window
        self._samples = samples
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(samples)])
        self.num_samples = int(self._starts[-1])
        self._epochs: dict[int, _Epoch] = {}
        self._last: tuple[int, int, Ids] | None = None
        """Key of the epoch, number and ids of the window that was used last."""

    def ids(self, start: int, count: int) -> Ids:
        """Return the ids at positions ``[start, start + count)``, int64 ``[count]``.

        Raises:
            ValueError: ``start`` or ``count`` is negative.
        """
        check_positions(start, count)
        out = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            number, offset = divmod(start + done, self.num_samples)
            epoch = self._epoch(number)
            window = int(np.searchsorted(epoch.windows, offset, side="right")) - 1
            begin, end = int(epoch.windows[window]), int(epoch.windows[window + 1])
            take = min(count - done, end - offset)
            out[done : done + take] = self._window_ids(epoch, window, end - begin)[offset - begin : offset - begin + take]
            done += take
        return out

    def epoch(self, consumed: int) -> int:
        """Return the epoch of the next sample after ``consumed`` samples."""
        return consumed // self.num_samples

    def blocks(self, position: int) -> Iterator[int]:
        """Yield the blocks that are needed from ``position`` on, window by window, without end."""
        number, offset = divmod(position, self.num_samples)
        while True:
            epoch = self._epoch(number)
            first = int(np.searchsorted(epoch.windows, offset, side="right")) - 1
            yield from epoch.blocks[first * self.window :].tolist()
            number, offset = number + 1, 0

    def stays_until(self, position: int) -> int:
        """Return the position at which the next window begins."""
        number, offset = divmod(position, self.num_samples)
        windows = self._epoch(number).windows
        return number * self.num_samples + int(windows[np.searchsorted(windows, offset, side="right")])

    def _window_ids(self, epoch: _Epoch, window: int, size: int) -> Ids:
        """Return the ids of a whole window. The last window is kept, since its permutation takes half a millisecond even for a single
        batch."""
        if self._last is None or self._last[:2] != (epoch.key, window):
            places = permute(np.arange(size, dtype=np.uint64), size, part_key(epoch.key, window))
            self._last = epoch.key, window, self._ids_of(self._blocks_of(epoch, window), places)
        return self._last[2]

    def _blocks_of(self, epoch: _Epoch, window: int) -> Ids:
        return epoch.blocks[window * self.window : (window + 1) * self.window]

    def _ids_of(self, blocks: Ids, places: Ids) -> Ids:
        """Return the ids of ``places``, which count the samples of ``blocks`` one block after another."""
        before = np.cumsum(self._samples[blocks])
        which = np.searchsorted(before, places, side="right")
        chosen = blocks[which]
        return self._starts[chosen] + places - (before[which] - self._samples[chosen])

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            for old in [one for one in self._epochs if abs(one - number) > 2]:  # a reader looks two ahead
                del self._epochs[old]
            key = epoch_key(self.seed, number)
            count = len(self._samples)
            blocks = permute(np.arange(count, dtype=np.uint64), count, key)
            sizes = np.add.reduceat(self._samples[blocks], np.arange(0, count, self.window))
            self._epochs[number] = _Epoch(key, blocks, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))
        return self._epochs[number]
