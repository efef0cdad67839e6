"""Checksums of blocks, and the one-ahead pipeline that both writing and reading use.

xxh3 costs 0.06 CPU seconds per GB (SHA-256: 0.7), so that hashing every byte on the way out and on the way in is free
next to any disk. It finds accidents, not forgery.
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

from .store import ALIGNMENT

BLOCK_BYTES = 1 << 20
"""The unit of verification, at most. A read of any range checks every block it touches, so it reads less than 2 blocks too many."""

BLOCKS, ALL_BLOCKS = 1 << 13, 1 << 16
"""Most blocks of one object, and of a checkpoint's objects together, below :data:`BLOCK_BYTES` each: half a MiB of sums."""

CHUNK_BYTES = 4 << 20
"""The unit of reading back in one stream: two buffers of this size are all the memory that it takes.

Small enough that a chunk is still in the cache when it is hashed, and that touching fresh buffers costs little. Of 1, 2, 4, 8 and
16 MiB, interleaved in one run (192 MiB, 12 rounds, 2 cores), 4 read fastest by median and 16 slowest. (Saves, and loads, which have
several streams, take what :attr:`~.store.ObjectStore.request_bytes` says.)
"""

T = TypeVar("T")


def block_bytes_for(nbytes: int, world: int) -> int:
    """The unit of verification for objects of about ``nbytes`` on each of ``world`` ranks: a power of two from 4096 on, small enough that a
    load onto other ranks, whose runs are some hundredths of an object, reads hardly more than it needs (8 ranks' 0.8 GB onto 16: 1.02
    times that; 1.8 with blocks of 1 MiB), large enough that the sums stay a small part of the manifest."""
    most = max(1, min(BLOCKS, ALL_BLOCKS // world))
    block = ALIGNMENT
    while block < BLOCK_BYTES and block * most < nbytes:
        block *= 2
    return block


def block_sums(view: memoryview, block_bytes: int) -> list[int]:
    """xxh3_64 of each block of ``view``; the last block may be shorter."""
    return [xxhash.xxh3_64_intdigest(view[start : start + block_bytes]) for start in range(0, len(view), block_bytes)]


def root_of(sums: np.ndarray) -> str:
    """xxh3_128 (32 hexadecimal digits) over the block sums as little-endian 64-bit words: the digest of the whole object."""
    return xxhash.xxh3_128_hexdigest(sums.astype("<u8").tobytes())


def encode_sums(sums: np.ndarray) -> str:
    return base64.b64encode(sums.astype("<u8").tobytes()).decode("ascii")


def decode_sums(text: str) -> np.ndarray:
    """Raises ValueError if ``text`` is no base64 of whole 64-bit words."""
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"block sums are no base64: {error}") from None
    if len(raw) % 8:
        raise ValueError(f"block sums hold {len(raw)} bytes, no multiple of 8")
    return np.frombuffer(raw, dtype="<u8")


def digest_of(data: bytes) -> str:
    """xxh3_128 of a small object, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


class RangeDigests:
    """xxh3_128 of byte ranges of a stream, which is given chunk by chunk, in order.

    Args:
        ranges: ``{key: (start, end)}``, none empty, none overlapping.
    """

    def __init__(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        self.found: dict[int, str] = {}
        self._ahead = sorted(((start, end, key) for key, (start, end) in ranges.items()), reverse=True)
        self._hash = xxhash.xxh3_128()

    def feed(self, chunk: memoryview, at: int) -> None:
        """The stream's bytes from ``at`` on."""
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
    """The bytes of a uint8 CPU tensor, shared."""
    return buffer.numpy().data


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy flat, contiguous uint8 tensors of one length. Between CPU tensors by memmove: twice as fast as ``Tensor.copy_`` on large ones,
    less per call on small ones, and other threads run meanwhile. The target's version does not change: for a tensor that others may
    know, call ``torch.autograd.graph.increment_version``."""
    if target.is_cuda or source.is_cuda:
        target.copy_(source)
    elif source.numel():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """A contiguous 1-D tensor of any dtype as uint8, shared: bool, bfloat16, float8 and NaN payloads pass bit for bit."""
    if flat.dtype == torch.uint8:
        return flat
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def one_ahead(items: Iterator[T]) -> Generator[T]:
    """The same items, the next one being made in a thread while the caller works on this one.

    Item k + 2 is begun when the caller asks for item k + 1: with two buffers in rotation that is safe if the caller is done with item k by
    then, with three if it is done with it when it asks for item k + 2.
    Close the iterator (``contextlib.closing``) where it may be left early.
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
