"""Sources are parsed once for each module of tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.packaging.sources import nodes


@pytest.fixture(scope="module", autouse=True)
def _trees_go_with_the_module() -> Iterator[None]:
    """Keep the parsed files for one module, and collect no garbage meanwhile: each collection would visit a million nodes."""
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()
