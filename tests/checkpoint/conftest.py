"""Fixtures for all tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.checkpoint_support import memory_folder, random_layout, save_in_process
from tests.checkpoint.s3_fake import FakeS3, fake_s3
from tests.checkpoint.s3_saves import BEFORE
from tests.checkpoint.stores import s3_store
from vescale_ray.checkpoint import S3Store


@pytest.fixture
def root() -> Iterator[Path]:
    """An empty folder, in memory where the system has one."""
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    """A fake S3."""
    with fake_s3() as server:
        yield server


@pytest.fixture
def store(fake: FakeS3) -> S3Store:
    """A store in it with one committed step, saved before any fault."""
    found = s3_store(fake)
    save_in_process(found, BEFORE, random_layout(BEFORE, 2, seed=1), step=10)
    fake.log.clear()
    return found
