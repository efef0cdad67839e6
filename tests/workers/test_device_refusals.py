"""Settings that a worker's device can't have end the run: another attempt would fail, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.workers.tiny import tiny
from vescale_ray.workers.building.model_building import build_sharded
from vescale_ray.workers.messages import FaultKind
from vescale_ray.workers.worker_fault import fault_of


def test_fp8_products_on_a_device_without_them_are_wrong_input() -> None:
    config = tiny("text.txt", train_quantize="fp8", train_quantize_products=True)
    unused: Any = None
    with pytest.raises(ValueError) as caught:
        build_sharded(config, torch.device("mps"), unused, unused, filled=False)
    fault = fault_of(caught.value)
    assert fault.kind is FaultKind.INPUT
    assert "train.quantize_products = true: mps has no products of FP8 blocks: they need a Hopper or Blackwell GPU" in fault.text
