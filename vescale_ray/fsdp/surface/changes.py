"""Methods of ``nn.Module`` that change all parameters, for modules whose parameters are sharded."""

from __future__ import annotations

from typing import Any

from vescale_ray.fsdp.layouts.phases import Residency
from vescale_ray.fsdp.surface.lookup import units_below


class ChangesParameters:
    """The part of ``FSDPModule`` that overrides methods of ``nn.Module``.

    Between a forward and its backward some units stay gathered, as the root does. Their modules hold the gathered parameters, but gradients
    and ``requires_grad`` belong to the sharded ones.
    """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``, also for the gradients of sharded parameters while they are gathered."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for sharded in _hidden(self):
            if sharded.grad is not None and set_to_none:
                sharded.grad = None
            elif sharded.grad is not None:
                sharded.grad.detach_().zero_()

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """As ``nn.Module.requires_grad_``, also for sharded parameters while they are gathered."""
        result = super().requires_grad_(requires_grad)  # type: ignore[misc]
        for sharded in _hidden(self):
            sharded.requires_grad_(requires_grad)
        return result


def _hidden(module: Any) -> list[Any]:
    """Return the sharded parameters whose modules hold the gathered ones."""
    groups = (group for unit in units_below(module, recurse=True) for group in unit.groups)
    return [param.sharded for group in groups if group.residency is Residency.UNSHARDED for param in group.params]
