"""Address ranges of host memory whose pages come and go. Linux only."""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from pathlib import Path


class AddressRange:
    """Addresses of this process, with or without memory behind them; huge pages where the kernel has any. Linux only.

    The pages that bytes ``stays`` lie in have memory for good.
    """

    supported = sys.platform == "linux"

    def __init__(self, nbytes: int, stays: tuple[int, int], *, huge: bool = True) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # Unmapped when both this object and the last tensor that views it are gone.
        try:
            self._mapping = mmap.mmap(-1, self.nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _no_memory("reserve", self.nbytes + _HUGE_PAGE, error.errno) from None
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._offset = -start % _HUGE_PAGE
        self.address = start + self._offset
        protect(start, len(self._mapping), 0)
        # Not for the room around: the last, incomplete huge page stays small pages, and no more memory is used than asked for.
        with suppress(OSError):  # an advice; some kernels have no huge pages
            self._mapping.madvise(_MADV_HUGEPAGE if huge else _MADV_NOHUGEPAGE, self._offset, self.nbytes)
        first, last = stays[0] // mmap.PAGESIZE * mmap.PAGESIZE, -(-stays[1] // mmap.PAGESIZE) * mmap.PAGESIZE
        if last > first:
            protect(self.address + first, last - first, mmap.PROT_READ | mmap.PROT_WRITE)
        self._moving = [(start, end - start) for start, end in ((0, first), (last, self.nbytes)) if end > start]
        """Offset and length of what has memory only at times."""

    @property
    def memory(self) -> memoryview:
        return memoryview(self._mapping)[self._offset : self._offset + self.nbytes]

    def open(self) -> None:
        """Accessible; pages are zeroed by the kernel when they are first touched."""
        for start, length in self._moving:
            protect(self.address + start, length, mmap.PROT_READ | mmap.PROT_WRITE)

    def close(self) -> None:
        """Drop the pages. Access past torch (a raw pointer) ends with a segmentation fault, not with a wrong number."""
        for start, length in self._moving:
            self._mapping.madvise(mmap.MADV_DONTNEED, self._offset + start, length)
            protect(self.address + start, length, 0)

    def take_over(self, donor: AddressRange) -> bool:
        """Move the donor's pages here, and close it; False if the kernel can't (before Linux 5.7): then neither is open."""
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        for start, length in self._moving:
            to = self.address + start
            if libc().mremap(donor.address + start, length, length, flags, to) != to:
                # The kernel may have unmapped these addresses before it gave up; map them again, empty.
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
    """Why the kernel refused: it counts a process's mappings (three to five a group here), and bounds them, whatever memory is free."""
    try:
        with open("/proc/self/maps", "rb") as maps:  # line by line: large memory is a mapping, too
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
"""What is written in pieces has huge pages from this size on. Below, one would be most of it; above, the page faults of small ones (up to
6,000 more in a step with buffers of 12 MiB) cost more than a part of a huge page that is written later."""
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MAP_FIXED = 0x10
_LIBC: list[ctypes.CDLL] = []


def libc() -> ctypes.CDLL:
    """The C library, with the few signatures that are needed. Python's ``mmap`` can't move pages or protect them."""
    if not _LIBC:
        libc, address, size, number = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        libc.mremap.argtypes, libc.mremap.restype = [address, size, size, number, address], address
        libc.mmap.argtypes, libc.mmap.restype = [address, size, number, number, number, ctypes.c_long], address
        libc.mprotect.argtypes, libc.mprotect.restype = [address, size, number], number
        _LIBC.append(libc)
    return _LIBC[0]
