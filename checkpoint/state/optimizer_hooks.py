"""Warn of code of an optimizer that neither a save nor a load calls: hooks of ``state_dict`` and ``load_state_dict``, and overrides."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

_log = logging.getLogger(__name__)
_warned: set[tuple[str, str, str]] = set()
"""(entry, class, method) of warnings given, so that each is given once."""

_HOOKS = {
    "state_dict": ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
    "load_state_dict": ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
}
_LOST = {
    "state_dict": "give what they add as another entry of the state",
    "load_state_dict": "do after load() what they do",
}


def warn_of_hooks(state: Mapping[str, Any], method: Literal["state_dict", "load_state_dict"]) -> None:
    """Log one warning for each optimizer in ``state`` that extends ``method``; the optimizers of this package do not count."""
    for key, value in state.items():
        for one in _parts(value):
            about = key, type(one).__name__, method
            if _extends(one, method) and about not in _warned:
                _warned.add(about)
                text = "a checkpoint calls no hooks or overrides of %s(), and optimizer %r (%s) has some: %s"
                _log.warning(text, method, key, type(one).__name__, _LOST[method])


def _parts(value: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(value, torch.optim.Optimizer):
        yield value
        for part in getattr(value, "optimizers", None) or ():
            yield from _parts(part)


def _extends(optimizer: torch.optim.Optimizer, method: str) -> bool:
    at = getattr(getattr(optimizer, method), "__module__", None) or ""
    hooks = any(getattr(optimizer, name, None) for name in _HOOKS[method])  # a wrapper may have none
    return hooks or not at.startswith(("torch.optim.", "vescale_ray."))
