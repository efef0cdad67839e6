"""Records of torch's operations inside a block, for tests of copies, casts and collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Collects in ``seen`` what ``note(name, args)`` returns for each operation, None excepted. A name is like ``aten::copy_``."""

    def __init__(self, note: Callable[[str, Any], Any]) -> None:
        super().__init__()
        self.note, self.seen = note, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (found := self.note(func._schema.name, args)) is not None:
            self.seen.append(found)
        return func(*args, **(kwargs or {}))


def collective(name: str, args: Any) -> str | None:
    """The name of a collective, for :class:`Operations`."""
    namespace, _, operation = name.partition("::")
    return operation if namespace in ("c10d", "_c10d_functional", "c10d_functional") else None
