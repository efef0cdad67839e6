"""Sources are parsed once for all tests of this folder."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.packaging.sources import nodes


@pytest.fixture(scope="package", autouse=True)
def _trees_go_with_the_folder() -> Iterator[None]:
    """Keep the parsed files until the tests of this folder end.

    No garbage is collected meanwhile: each collection would visit a million nodes.
    """
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()
