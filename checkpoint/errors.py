"""What can go wrong with a checkpoint, each with one clear line.

Every error's positional arguments are its fields, so that it survives pickling (a worker's error reaches the driver whole).
"""

from __future__ import annotations

STAGES = "of a pipeline save each stage by itself: its own group, its own root"
"""What ranks that hold different things are told."""


class CheckpointError(Exception):
    """Base of every error of this package that is not a plain ``ValueError`` (bad argument) or ``OSError`` (storage)."""


class NoCheckpoint(CheckpointError):
    """The folder holds no commit that could be loaded."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is sound but belongs to another model or optimizer: names, shapes or dtypes differ."""


class SaveFailed(CheckpointError):
    """This save made no commit; earlier commits are untouched."""


class SaveAborted(SaveFailed):
    """This save was given up on purpose: the saver was closed, or its generation of workers is over."""


class SaveSkipped(SaveFailed):
    """This save was not begun: the ones before it are still being written."""


class CommitRefused(SaveFailed):
    """The votes do not make a whole checkpoint, or the commit would not become the newest (an older epoch or step)."""


class CommitExists(CommitRefused):
    """Another attempt has already committed this epoch and step."""


class ExportFailed(CheckpointError):
    """What an export wrote was read back with other bytes: the disk or its connection is at fault. What is there must not be used."""


class ForeignFileError(CheckpointError):
    """A file of another format (safetensors, PyTorch DCP) is malformed, or holds what can't be read safely.

    The message is one sentence even where it quotes a name of a hundred megabytes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class CheckpointCorrupt(CheckpointError):
    """Stored bytes are not those that were written.

    Args:
        object: key of the object below the checkpoint's root.
        block: number of the damaged checksum block, ``None`` where the object as a whole is meant (missing, truncated).
        tensors: what the damaged bytes hold, e.g. ``("layers.0.w", "layers.0.w (exp_avg)")``, ``("header",)``.
        reason: what was found.
    """

    def __init__(self, object: str, block: int | None, tensors: tuple[str, ...], reason: str) -> None:
        super().__init__(object, block, tensors, reason)
        self.object = object
        self.block = block
        self.tensors = tensors
        self.reason = reason

    @property
    def tensor(self) -> str | None:
        return describe_tensors(self.tensors)

    def __str__(self) -> str:
        where = self.object if self.block is None else f"{self.object}, block {self.block}"
        holding = f" (holds {self.tensor})" if self.tensors else ""
        return printable(f"checkpoint is damaged: {where}{holding}: {self.reason}")


def shortened(message: str, most: int = 1000) -> str:
    """``message``, :func:`printable`; of a longer one its beginning and its end."""
    return printable(message if len(message) <= most else f"{message[: most - 200]} [..] {message[-190:]}")


def printable(message: str) -> str:
    """``message`` with escapes for what names from a file may hold: ends of lines and terminals' commands, which would forge a log, and
    halves of characters, which no log can encode."""
    return message if message.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)


def describe_tensors(tensors: tuple[str, ...], limit: int = 4) -> str | None:
    """``"a, b, c, d and 3 more"``; ``None`` for none."""
    if not tensors:
        return None
    shown = ", ".join(tensors[:limit])
    return shown if len(tensors) <= limit else f"{shown} and {len(tensors) - limit} more"
