"""The losses of a batch: the one that is reported, and the one that is trained, which may have a load-balancing loss in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_ray.workers.building.model_factory import loss_function
from vescale_ray.workers.steps.slot_batches import positions_in, targets_in

if TYPE_CHECKING:
    from vescale_ray.config import RunConfig
    from vescale_ray.data.dataset import Dataset

_WEIGHTS_OF_BALANCE = ("router_aux_loss_coef", "aux_loss_coef")
"""Attributes of models of transformers with the weight of the load-balancing loss."""


class BatchLosses:
    """Compute the losses of a batch by a forward of the model.

    Args:
        model: the model, sharded or not. It returns logits, or an object with ``logits`` and perhaps ``aux_loss``. This load-balancing loss
            is a mean over the batch's tokens, and the model's ``router_aux_loss_coef`` or ``aux_loss_coef`` is its weight.
        device: device of the model.
    """

    def __init__(self, config: RunConfig, model: Any, dataset: Dataset, device: torch.device) -> None:
        self._model, self._device = model, device
        self._end_token = dataset.end_token if config.data.document_mask else None
        self._function = None if config.model.loss is None else loss_function(config.model.loss)

    def __call__(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return two sums over the batch's targets: negative log-likelihood, and the same plus the load-balancing loss. Float32 0-d.

        ``model.loss`` gives both if it is set, and may read the load-balancing loss from the model's output.
        """
        output = self.output(inputs)
        if self._function is not None:
            loss: Tensor = self._function(output, self._sent(targets))
            return loss, loss
        logits = output if isinstance(output, Tensor) else output.logits
        nll = F.cross_entropy(logits.flatten(0, 1).float(), self._sent(targets).flatten(), reduction="sum")
        balance = getattr(output, "aux_loss", None)
        weight = next((getattr(self._model, name) for name in _WEIGHTS_OF_BALANCE if hasattr(self._model, name)), 0.0)
        if not isinstance(balance, Tensor) or not weight:
            return nll, nll
        # The caller divides sums by the targets of the global batch. So each slot counts by its targets, at every world size.
        return nll, nll + balance.float() * (weight * targets_in(targets))

    def output(self, inputs: Tensor) -> Any:
        """Return the model's output for a batch of tokens ``(B, S)``."""
        tokens = self._sent(inputs)
        more = {} if self._end_token is None else {"position_ids": positions_in(tokens, self._end_token)}
        return self._model(tokens, **more)

    def _sent(self, batch: Tensor) -> Tensor:
        """Return the batch on the device. Only a copy from page-locked memory does not wait for the device's earlier work."""
        return batch.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else batch.to(self._device)
