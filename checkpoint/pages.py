"""Host memory that bytes are moved through: aligned for direct transfers, page-locked beside a GPU, in huge pages where that pays.

A direct transfer hands the disk the memory's physical pages, a segment for each piece that lies together. Where every segment costs
something (a virtual machine's disk takes them apart one by one), memory in pages of 4 KiB that lie anywhere is slow: on a Firecracker
machine (virtio block, 2 cores) reads of 1 MiB into eight such buffers came at 0.6 GB/s, into buffers in huge pages at 1.7, for a third of
the processor time; writes at 2.1 and 3.8 (8 interleaved rounds of 512 MiB). How the pages of an ordinary buffer lie is luck, and stays
so for its life: one process loads three times as fast as the next.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import cache

import torch

from .store import ALIGNMENT

HUGE_BYTES = 2 << 20
"""A huge page's, on x86-64 and on arm64 with pages of 4 KiB. Elsewhere the advice below has less effect, and does no harm."""

PAYS = 8
"""How many times its size a buffer must move to be put in huge pages: one that the host has to find first took 8 ms, of 2 MiB."""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


def aligned_buffer(size: int, *, pinned: bool = False) -> torch.Tensor:
    """An uninitialised uint8 CPU tensor of ``size`` bytes whose address is a multiple of 4096 (neither torch nor numpy give that)."""
    raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    shift = -raw.data_ptr() % ALIGNMENT
    return raw[shift : shift + size]


def transfer_buffers(count: int, size: int, moved: int, *, pinned: bool = False) -> list[torch.Tensor]:
    """``count`` aligned uint8 buffers of ``size`` bytes each, through which ``moved`` bytes will go in all.

    Of one piece of memory, from the system itself (given back at once when the last is dropped; an allocator would keep it for the
    thread), in huge pages if that pays and the system has some. ``pinned``: page-locked, by torch.
    """
    if pinned or count * size == 0:
        return [aligned_buffer(size, pinned=pinned) for _ in range(count)]
    each = -(-size // ALIGNMENT) * ALIGNMENT
    whole, base = count * each, 0
    if whole >= HUGE_BYTES and moved >= PAYS * whole:
        mapping = _mapping(-(-whole // HUGE_BYTES) * HUGE_BYTES + HUGE_BYTES)
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        base = -memory.data_ptr() % HUGE_BYTES
    else:
        memory = torch.frombuffer(_mapping(whole), dtype=torch.uint8)
    return [memory[base + k * each :][:size] for k in range(count)]


def touched_buffer(size: int) -> torch.Tensor:
    """At least ``size`` bytes from the system itself (freed as a whole when the last view goes), every page there.

    Not in huge pages: on a virtual machine that gives free memory back to its host, 512 MiB of them took 2 s to come, against 0.3.
    """
    whole = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
    mapping = _mapping(whole)
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)
    # Not mapping.madvise(): it keeps the interpreter's lock, for 0.8 s a GiB, in which no other thread trains or answers.
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
