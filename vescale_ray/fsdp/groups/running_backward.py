"""Questions about the running backward that autograd's engine answers."""

from __future__ import annotations

from typing import Any

from vescale_ray.compat.core import current_graph_task_id, will_engine_execute_node


def in_backward() -> bool:
    """True if the calling thread is inside a backward."""
    return current_graph_task_id() != -1


def will_accumulate(node: Any) -> bool | None:
    """True if the running backward will add to ``.grad`` of the leaf behind ``node``; None: it returns the gradient to its caller."""
    try:
        return bool(will_engine_execute_node(node))
    except RuntimeError:  # torch raises this for a leaf in autograd.grad
        return None
