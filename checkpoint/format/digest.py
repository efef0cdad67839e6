"""Block checksums, and the pipeline with which reads run one item ahead.

xxh3 costs 0.06 CPU seconds per GB (SHA-256: 0.7), so hashing every byte on write and read is negligible next to any disk. It detects
accidents, not forgery.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
import xxhash

from ..stores.store import ALIGNMENT

BLOCK_BYTES = 1 << 20
"""Largest unit of verification, in bytes. A read of a range checks every block it touches, so it reads less than 2 extra blocks."""

BLOCKS, ALL_BLOCKS = 1 << 13, 1 << 16
"""Maximum number of blocks of one object, and of all objects of a checkpoint, for blocks below :data:`BLOCK_BYTES`: half a MiB of
checksums."""

CHUNK_BYTES = 4 << 20
"""Unit of reading back in one stream, in bytes; it needs two buffers of this size.

A chunk this small is still in the cache when it is hashed, and fresh buffers cost little. Sizes of 1, 2, 4, 8 and 16 MiB were interleaved
in one run (192 MiB, 12 rounds, 2 cores): by median, 4 MiB read fastest and 16 MiB slowest. Saves and loads use several streams, with the
size of :attr:`~.store.ObjectStore.request_bytes`.
"""

T = TypeVar("T")


def block_bytes_for(nbytes: int, world: int) -> int:
    """Unit of verification for objects of about ``nbytes`` on each of ``world`` ranks: a power of two from 4096 on.

    A load onto other ranks reads runs of about a hundredth of an object. With small blocks it reads little more than it needs: 1.02 times
    for 8 ranks' 0.8 GB onto 16, but 1.8 with blocks of 1 MiB. The checksums must still stay a small part of the manifest.
    """
    most = max(1, min(BLOCKS, ALL_BLOCKS // world))
    block = ALIGNMENT
    while block < BLOCK_BYTES and block * most < nbytes:
        block *= 2
    return block


def block_sums(view: memoryview, block_bytes: int) -> list[int]:
    """xxh3_64 of each block of ``view``; the last block may be shorter."""
    return [xxhash.xxh3_64_intdigest(view[start : start + block_bytes]) for start in range(0, len(view), block_bytes)]


def root_of(sums: np.ndarray) -> str:
    """Digest of the whole object: xxh3_128 (32 hexadecimal digits) over the block sums as little-endian 64-bit words."""
    return xxhash.xxh3_128_hexdigest(sums.astype("<u8").tobytes())


def encode_sums(sums: np.ndarray) -> str:
    return base64.b64encode(sums.astype("<u8").tobytes()).decode("ascii")


def decode_sums(text: str) -> np.ndarray:
    """Return the block sums in ``text``. Raises ValueError if it is not base64 of whole 64-bit words."""
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"block sums are not base64: {error}") from None
    if len(raw) % 8:
        raise ValueError(f"block sums hold {len(raw)} bytes, not a multiple of 8")
    return np.frombuffer(raw, dtype="<u8")


def digest_of(data: bytes) -> str:
    """xxh3_128 of a small object, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


class RangeDigests:
    """xxh3_128 of byte ranges of a stream that is fed in chunks, in order.

    Args:
        ranges: ``{key: (start, end)}``, none empty, none overlapping.
    """

    def __init__(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        self.found: dict[int, str] = {}
        self._ahead = sorted(((start, end, key) for key, (start, end) in ranges.items()), reverse=True)
        self._hash = xxhash.xxh3_128()

    def feed(self, chunk: memoryview, at: int) -> None:
        """Add the stream's bytes from position ``at``."""
        while self._ahead:
            start, end, key = self._ahead[-1]
            low, high = max(start, at), min(end, at + len(chunk))
            if low >= high:
                return
            self._hash.update(chunk[low - at : high - at])
            if high < end:
                return
            self.found[key] = self._hash.hexdigest()
            self._hash.reset()
            self._ahead.pop()


def view_of(buffer: torch.Tensor) -> memoryview:
    """Return the bytes of a uint8 CPU tensor, shared."""
    return buffer.numpy().data


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy flat, contiguous uint8 tensors of equal length.

    CPU tensors are copied by memmove. It is twice as fast as ``Tensor.copy_`` on large tensors, costs less per call on small ones, and lets
    other threads run. The target's version does not change; if others may know the tensor, call ``torch.autograd.graph.increment_version``.
    """
    if target.is_cuda or source.is_cuda:
        target.copy_(source)
    elif source.numel():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """Return a contiguous 1-D tensor of any dtype as uint8, shared: bool, bfloat16, float8 and NaN payloads pass bit for bit."""
    if flat.dtype == torch.uint8:
        return flat
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def one_ahead(items: Iterator[T]) -> Generator[T]:
    """Yield the same items, while a thread makes the next one.

    Item k + 2 begins when the caller asks for item k + 1. With two rotating buffers, the caller must then be done with item k. With three,
    it must be done with item k when it asks for item k + 2. If the caller may stop early, it must close the iterator
    (``contextlib.closing``).
    """
    stop = object()

    def make() -> T | object:
        return next(items, stop)

    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-io") as pool:
        pending: Future[T | object] = pool.submit(make)
        while True:
            item = pending.result()
            if item is stop:
                return
            pending = pool.submit(make)
            yield item  # type: ignore[misc]
