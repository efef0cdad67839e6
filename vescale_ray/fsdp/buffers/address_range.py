"""Address ranges of host memory whose pages can be freed and allocated again. Linux only."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path


class AddressRange:
    """A range of addresses of this process, with or without memory behind it. It uses huge pages if the kernel has them. Linux only.

    The pages of the bytes ``stays`` have permanent memory.
    """

    supported = sys.platform == "linux"

    def __init__(self, nbytes: int, stays: tuple[int, int], *, huge: bool = True) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # The mapping ends when both this object and the last tensor that views it are gone.
        try:
            self._mapping = mmap.mmap(-1, self.nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _no_memory("reserve", self.nbytes + _HUGE_PAGE, error.errno) from None
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._offset = -start % _HUGE_PAGE
        self.address = start + self._offset
        protect(start, len(self._mapping), 0)
        # The advice excludes the room around the range: an incomplete last huge page stays small pages, and no more memory is used.
        with suppress(OSError):  # this is only an advice; some kernels have no huge pages
            self._mapping.madvise(_MADV_HUGEPAGE if huge else _MADV_NOHUGEPAGE, self._offset, self.nbytes)
        first, last = stays[0] // mmap.PAGESIZE * mmap.PAGESIZE, -(-stays[1] // mmap.PAGESIZE) * mmap.PAGESIZE
        if last > first:
            protect(self.address + first, last - first, mmap.PROT_READ | mmap.PROT_WRITE)
        self._moving = [(start, end - start) for start, end in ((0, first), (last, self.nbytes)) if end > start]
        """Offset and length of the parts whose memory can be freed."""

    @property
    def memory(self) -> memoryview:
        return memoryview(self._mapping)[self._offset : self._offset + self.nbytes]

    def open(self) -> None:
        """Make the range accessible. The kernel zeroes each page on first use."""
        for start, length in self._moving:
            protect(self.address + start, length, mmap.PROT_READ | mmap.PROT_WRITE)

    def close(self) -> None:
        """Free the pages. Later access past torch (a raw pointer) ends in a segmentation fault instead of a wrong number."""
        for start, length in self._moving:
            self._mapping.madvise(mmap.MADV_DONTNEED, self._offset + start, length)
            protect(self.address + start, length, 0)

    def take_over(self, donor: AddressRange) -> bool:
        """Move the donor's pages here and close the donor. Returns False if the kernel can't (before Linux 5.7); then both are closed."""
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        for start, length in self._moving:
            to = self.address + start
            if libc().mremap(donor.address + start, length, length, flags, to) != to:
                # The kernel may have unmapped these addresses before it failed: map them again, empty.
                again = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
                if libc().mmap(to, length, 0, again, -1, 0) != to:
                    raise _no_memory("map", length, ctypes.get_errno())
                self.close()
                donor.close()
                return False
            protect(donor.address + start, length, 0)
        return True


def protect(address: int, nbytes: int, protection: int) -> None:
    if libc().mprotect(address, nbytes, protection):
        raise _no_memory("change the protection of", nbytes, ctypes.get_errno())


def _no_memory(what: str, nbytes: int, errno: int | None) -> MemoryError:
    """Return the error with its likely reason: the kernel limits a process's mappings (three to five per group here) even if memory is
    free."""
    try:
        with open("/proc/self/maps", "rb") as maps:  # read line by line: a process with much memory has many mappings
            used = sum(1 for _ in maps)
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        used, limit = 0, 0
    if limit and used >= 0.95 * limit:
        why = f"this process has {used} of the {limit} mappings that the kernel allows it: raise that with sysctl vm.max_map_count"
        why += ", or make units of more layers"
    else:
        why = "free memory, or raise a limit on this process's addresses (ulimit -v, vm.overcommit_memory)"
    return MemoryError(f"the kernel can't {what} {nbytes} bytes for gathered parameters (errno {errno}): {why}")


_HUGE_PAGE = 1 << 21
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 14, 15
LARGE_IN_PIECES = 2 * _HUGE_PAGE
"""Bytes from which a buffer that is written in pieces gets huge pages. For smaller ones a huge page would be most of the buffer. For
larger ones the page faults of small pages (up to 6,000 per step with 12 MiB buffers) cost more than partly written huge pages."""
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MAP_FIXED = 0x10
_LIBC: list[ctypes.CDLL] = []


def libc() -> ctypes.CDLL:
    """Return the C library with the signatures used here. Python's ``mmap`` can't move or protect pages."""
    if not _LIBC:
        libc, address, size, number = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        libc.mremap.argtypes, libc.mremap.restype = [address, size, size, number, address], address
        libc.mmap.argtypes, libc.mmap.restype = [address, size, number, number, number, ctypes.c_long], address
        libc.mprotect.argtypes, libc.mprotect.restype = [address, size, number], number
        _LIBC.append(libc)
    return _LIBC[0]


def malloc_keeps() -> int:
    """Return the bytes of unused memory that the process may keep: ``MALLOC_TRIM_THRESHOLD_``, which glibc reads for malloc, applies to the
    address ranges, too. 0 if it is not set."""
    value = os.environ.get("MALLOC_TRIM_THRESHOLD_", "")
    return int(value) if value.isdigit() else 0
