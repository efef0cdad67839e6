"""Fixtures for all tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.checkpoint_support import memory_folder


@pytest.fixture
def root() -> Iterator[Path]:
    """An empty folder, in memory where the system has one."""
    with memory_folder() as folder:
        yield folder
