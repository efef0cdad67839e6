"""Fixtures for all tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vescale_ray.fsdp.groups import linear

USUAL = linear.LEAST_NUMEL


@pytest.fixture(autouse=True)
def small_linear_layers_write_their_gradients_themselves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make small linear layers write their own gradients, as large ones do, because these tests have small models.

    Ranks that are separate processes keep the usual threshold.
    """
    monkeypatch.setattr(linear, "LEAST_NUMEL", 0)
    yield


@pytest.fixture
def usual_threshold(small_linear_layers_write_their_gradients_themselves: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the threshold of products: small linear layers leave their gradients to autograd."""
    monkeypatch.setattr(linear, "LEAST_NUMEL", USUAL)
