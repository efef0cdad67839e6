"""Errors of the checkpoint package, each with a one-line message.

Every error's positional arguments are its fields, so that it survives pickling and a worker's error reaches the driver intact.
"""

from __future__ import annotations

from collections.abc import Sequence

STAGES = "save each pipeline stage by itself, with its own group and root"
"""Advice to ranks that hold different tensors."""


class CheckpointError(Exception):
    """Base of this package's errors, except for plain ``ValueError`` (bad argument) and ``OSError`` (storage)."""


class NoCheckpoint(CheckpointError):
    """The folder holds no commit that can be loaded."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is intact but belongs to another model or optimizer: names, shapes or dtypes differ."""


class SaveFailed(CheckpointError):
    """The save made no commit; earlier commits are untouched."""


class SaveAborted(SaveFailed):
    """The save was given up on purpose: the saver was closed, or its generation of workers ended."""


class SaveSkipped(SaveFailed):
    """The save did not begin, since earlier ones were still being written."""


class CommitRefused(SaveFailed):
    """The votes do not make a complete checkpoint, or the commit would not become the newest (an older epoch or step)."""


class CommitExists(CommitRefused):
    """Another attempt has already committed this epoch and step."""


class ExportFailed(CheckpointError):
    """An export was read back with other bytes than were written: the disk or its connection is at fault. The export must not be used."""


class ForeignFileError(CheckpointError):
    """A file of another format (safetensors, PyTorch DCP) is malformed, or holds data that cannot be read safely.

    The message stays short even if it quotes a name of a hundred megabytes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class CheckpointCorrupt(CheckpointError):
    """Stored bytes differ from those that were written.

    Args:
        object: key of the object below the checkpoint's root.
        block: number of the damaged checksum block; ``None`` if the whole object is damaged (missing, truncated).
        tensors: contents of the damaged bytes, such as ``("layers.0.w", "layers.0.w (exp_avg)")`` or ``("header",)``.
        reason: description of the damage.
    """

    def __init__(self, object: str, block: int | None, tensors: tuple[str, ...], reason: str) -> None:
        super().__init__(object, block, tensors, reason)
        self.object = object
        self.block = block
        self.tensors = tensors
        self.reason = reason

    @property
    def tensor(self) -> str | None:
        return first_few(self.tensors) or None

    def __str__(self) -> str:
        where = self.object if self.block is None else f"{self.object}, block {self.block}"
        holding = f" (holds {self.tensor})" if self.tensors else ""
        return printable(f"checkpoint is damaged: {where}{holding}: {self.reason}")


def shortened(message: str) -> str:
    """Return ``message``, :func:`printable`. A message over 1,000 characters loses its middle."""
    return printable(message if len(message) <= 1000 else f"{message[:800]} [..] {message[-190:]}")


def printable(message: str) -> str:
    """Return ``message`` with unprintable characters escaped. Names from a file may hold line ends or terminal commands, which would forge
    a log, and lone surrogates, which no log can encode."""
    return message if message.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)


def first_few(names: Sequence[str]) -> str:
    """Return the names as text, at most three of them, such as ``"a, b, c and 4 more"``."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
