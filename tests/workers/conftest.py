"""Fixtures for all tests of the workers."""

from __future__ import annotations

import pytest

from tests.workers.tiny import write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of text, which no test changes."""
    return write_text(tmp_path_factory.mktemp("text"))
