"""Host buffers for transfers: aligned for direct I/O, page-locked for a GPU, in huge pages if that pays.

A direct transfer hands the disk one segment for each contiguous piece of physical memory. If every segment costs time, as on a virtual
machine's disk, scattered 4 KiB pages are slow. On a Firecracker machine (virtio block, 2 cores), reads of 1 MiB into eight such buffers ran
at 0.6 GB/s. Into huge pages they ran at 1.7 GB/s with a third of the processor time; writes ran at 2.1 and 3.8 GB/s (8 interleaved rounds
of 512 MiB). The placement of an ordinary buffer's pages is random and stays for its life, so one process loads three times as fast as the
next.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import cache

import torch

from ..stores.store import ALIGNMENT

HUGE_BYTES = 2 << 20
"""Bytes of a huge page on x86-64, and on arm64 with 4 KiB pages. Elsewhere the advice below has less effect and does no harm."""

PAYS = 8
"""A buffer is put in huge pages if it moves at least this many times its size. The host may need 8 ms to find one page of 2 MiB."""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


def aligned_buffer(size: int, *, pinned: bool = False) -> torch.Tensor:
    """Return an uninitialised uint8 CPU tensor of ``size`` bytes with an address that is a multiple of 4096 (torch and numpy do not ensure
    that)."""
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    shift = -raw.data_ptr() % ALIGNMENT
    return raw[shift : shift + size]


def transfer_buffers(count: int, size: int, moved: int, *, pinned: bool = False) -> list[torch.Tensor]:
    """Return ``count`` aligned uint8 buffers of ``size`` bytes each, through which ``moved`` bytes in total will go.

    They share one mapping from the system, in huge pages if that pays and the system has some. It is returned at once when the last buffer
    is dropped; an allocator would keep it for the thread. ``pinned``: page-locked, by torch.
    """
    if pinned or count * size == 0:
        return [aligned_buffer(size, pinned=pinned) for _ in range(count)]
    each = -(-size // ALIGNMENT) * ALIGNMENT
    whole, base = count * each, 0
    if whole >= HUGE_BYTES and moved >= PAYS * whole:
        mapping = _mapping(-(-whole // HUGE_BYTES) * HUGE_BYTES + HUGE_BYTES)
        with suppress(OSError):  # the kernel has no huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        base = -memory.data_ptr() % HUGE_BYTES
    else:
        memory = torch.frombuffer(_mapping(whole), dtype=torch.uint8)
    return [memory[base + k * each :][:size] for k in range(count)]


def touched_buffer(size: int) -> torch.Tensor:
    """Return a buffer of at least ``size`` bytes from the system, with every page present. It is freed as a whole with the last view.

    It does not use huge pages: on a virtual machine that returns free memory to its host, 512 MiB of them took 2 s to arrive, against 0.3
    s.
    """
    whole = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
    mapping = _mapping(whole)
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)
    # Not mapping.madvise(): it holds the interpreter lock for 0.8 s per GiB, in which no other thread can train or answer.
    if _libc().madvise(buffer.data_ptr(), whole, _POPULATE_WRITE):
        ctypes.memset(buffer.data_ptr(), 0, whole)
    return buffer


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _mapping(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
