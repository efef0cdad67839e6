"""What tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vescale_ray.fsdp import linear


@pytest.fixture(autouse=True)
def small_linear_layers_write_their_gradients_themselves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As large ones do: the models of these tests are small. (Ranks that are processes of their own have the usual threshold.)"""
    monkeypatch.setattr(linear, "LEAST_NUMEL", 0)
    yield
