"""TensorBoard's event files, written without TensorBoard's package.

A file is a sequence of records: the length of the data as 8 bytes, a checksum of these, the data, and its checksum. The data is a message
``Event`` in the encoding of protocol buffers, which is a sequence of fields: number and type in one byte, then the value.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_LARGEST = 3.4028234e38
"""Largest number of 32 bits, as which the figures are written."""
_START = b"\x3a\x02\x08\x01"
"""Field ``session_log`` with the status START."""


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC_TABLE = _table()


def _checksum(data: bytes) -> bytes:
    """The CRC-32C, masked as in TFRecord files."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _number(value: int) -> bytes:
    """A whole number >= 0: 7 bits a byte, the lowest ones first."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))


def _text(field: int, data: bytes) -> bytes:
    """A field that holds text, bytes or a message."""
    return bytes((field << 3 | 2,)) + _number(len(data)) + data


class EventFile:
    """A new event file in ``folder``. TensorBoard reads the files of a folder as one run, in the order of their names, thus of time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        seconds, rest = divmod(time.time_ns(), 10**9)
        self._file = open(folder / f"events.out.tfevents.{seconds:010d}.{rest:09d}.{socket.gethostname()}", "xb")
        self._write(time.time(), 0, _text(3, b"brain.Event:2"))

    def restart(self, step: int) -> None:
        """Let TensorBoard forget the figures of ``step`` and later steps that were written before."""
        self._write(time.time(), step, _START)

    def write(self, step: int, when: float, figures: Mapping[str, float]) -> None:
        """Write the figures of a step by their tags."""
        values = (
            _text(1, name.encode()) + struct.pack("<Bf", 2 << 3 | 5, max(-_LARGEST, min(_LARGEST, value)))
            for name, value in figures.items()
        )
        self._write(when, step, _text(5, b"".join(_text(1, value) for value in values)))

    def flush(self) -> None:
        """Give the records to the operating system."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, when: float, step: int, what: bytes) -> None:
        data = struct.pack("<Bd", 1 << 3 | 1, when) + bytes((2 << 3,)) + _number(step) + what
        length = struct.pack("<Q", len(data))
        self._file.write(length + _checksum(length) + data + _checksum(data))
