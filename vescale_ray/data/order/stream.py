"""The order of samples: an endless sequence of epochs, each a seeded permutation, addressed by position.

The whole state is one integer, the number of consumed samples. A sample's place in its epoch is computed, not stored. A Feistel
network permutes ``[0, 4 ** k)``, the smallest such range that holds all ids. An id outside ``[0, n)`` is permuted again until it
falls inside (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The range is less than four times
``n``, so this takes fewer than four rounds on average. Memory is O(1) for any number of samples; a batch of positions is one
vectorised pass.

Six Feistel rounds of a 64-bit mixing function are far more than a shuffle of training data needs. The permutation is not a cipher.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vescale_ray.errors import BadInput

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

ROUNDS = 6
_MASK = (1 << 64) - 1
_PARTS = 1 << 32


def _mix(value: int) -> int:
    """splitmix64's finalizer (Steele, Lea, Flood 2014) on one Python integer."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_words(words: _Words) -> _Words:
    """:func:`_mix` on an array; unsigned arithmetic wraps modulo 2**64."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def permute(positions: _Words, count: int, key: int) -> Ids:
    """Return the places of ``positions`` in the permutation of ``[0, count)`` that ``key`` chooses. All positions are below ``count``."""
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = [_mix(key ^ number) for number in range(ROUNDS)]
    words = _feistel(positions, half_bits, keys)
    outside = np.flatnonzero(words >= count)
    while outside.size:
        words[outside] = _feistel(words[outside], half_bits, keys)
        outside = outside[words[outside] >= count]
    return words.astype(np.int64)


def epoch_key(seed: int, epoch: int) -> int:
    """Return the key of :func:`permute` for an epoch."""
    return _mix(_mix(seed) ^ epoch)


def part_key(key: int, part: int) -> int:
    """Return the key for one part of what ``key`` permutes; it is none of ``key``'s round keys."""
    return _mix(_mix(key ^ _PARTS) ^ part)


def _feistel(words: _Words, half_bits: int, keys: list[int]) -> _Words:
    bits = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = words >> bits, words & mask
    for key in keys:
        left, right = right, left ^ (_mix_words(right ^ np.uint64(key)) & mask)
    return (left << bits) | right


def check_positions(start: int, count: int) -> None:
    """Raise ValueError if ``start`` or ``count`` is negative."""
    if start < 0 or count < 0:
        raise ValueError(f"positions [{start}, {start} + {count}): start and count must be at least 0")


class SampleStream:
    """Sample ids at positions ``0, 1, 2, ..``: positions ``[e * n, (e + 1) * n)`` are epoch ``e``, a permutation of ``[0, n)``.

    The stream holds no cursor. The same ``(num_samples, seed)`` gives the same ids in every process and at any world size.

    Raises:
        BadInput: there is no sample, or the seed is negative.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise BadInput(f"a stream of {num_samples} samples: the corpus holds too little text; lower data.seq_len or give more")
        if seed < 0:
            raise BadInput(f"seed = {seed}: give at least 0")
        self.num_samples = num_samples
        self.seed = seed

    def ids(self, start: int, count: int) -> Ids:
        """Return the ids at positions ``[start, start + count)``, int64 ``[count]``, in O(count) time.

        Raises:
            ValueError: ``start`` or ``count`` is negative.
        """
        check_positions(start, count)
        out = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, offset = divmod(start + done, self.num_samples)
            take = min(count - done, self.num_samples - offset)
            out[done : done + take] = permute(
                np.arange(offset, offset + take, dtype=np.uint64), self.num_samples, epoch_key(self.seed, epoch)
            )
            done += take
        return out

    def epoch(self, consumed: int) -> int:
        """Return the epoch of the next sample after ``consumed`` samples."""
        return consumed // self.num_samples
