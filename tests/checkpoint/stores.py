"""Every back end, opened empty for a test, with direct access to its objects for inspection and damage."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.checkpoint.checkpoint_support import memory_folder
from tests.checkpoint.s3_fake import FakeS3, fake_s3
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.stores.store import ObjectStore, Root

QUICK = ckpt.S3Options(
    region="us-east-1",
    access_key="test",
    secret_key="test",
    part_bytes=5 << 20,
    retry_s=30.0,
    timeout_s=1.0,
    part_timeout_s=2.0,
    pause_s=0.01,
)
KINDS = ("posix", "s3", "memory", "fsspec memory", "fsspec file")
EXCLUSIVE = ("posix", "s3", "memory")


@dataclass
class Opened:
    """A back end: its store, and direct functions to read, write, remove and list its objects."""

    kind: str
    store: ObjectStore
    read: Callable[[str], bytes]
    write: Callable[[str, bytes], None]
    remove: Callable[[str], object]
    keys: Callable[[], list[str]]
    fake: FakeS3 | None = None


def collect(root: Root, keep: int, *, grace_s: float = 3600.0) -> ckpt.GcReport:
    """Keep the newest ``keep`` checkpoints; debris is older than ``grace_s`` by the store's clock.

    S3 has timestamps in whole seconds, so a test that means "at once" passes a grace of some seconds below zero.
    """
    return ckpt.gc(root, ckpt.Retention(keep_last=keep), grace=ckpt.Grace(grace_s, grace_s, min(grace_s, 0.0)))


def s3_store(fake_or_url: FakeS3 | str, root: str = "s3://bucket/runs/one", **options: object) -> ckpt.S3Store:
    url = fake_or_url if isinstance(fake_or_url, str) else fake_or_url.url
    return ckpt.S3Store(root, replace(QUICK, endpoint=url, **options))  # type: ignore[arg-type]


@contextmanager
def opened(kind: str) -> Iterator[Opened]:
    if kind == "posix" or kind == "fsspec file":
        with memory_folder() as folder:
            root = folder / "ckpt"
            store: ObjectStore = ckpt.PosixStore(root) if kind == "posix" else ckpt.FsspecStore(f"file://{root}")
            yield Opened(
                kind,
                store,
                lambda key: (root / key).read_bytes(),
                lambda key, data: _write(root / key, data),
                lambda key: (root / key).unlink(),
                lambda: sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()),
            )
    elif kind == "s3":
        with fake_s3() as fake:
            top = "runs/one/"

            def write(key: str, data: bytes) -> None:
                fake.objects[top + key] = replace(fake.objects[top + key], data=data, etag=f'"{uuid.uuid4().hex}"')

            yield Opened(
                kind,
                s3_store(fake),
                lambda key: fake.objects[top + key].data,
                write,
                lambda key: fake.objects.pop(top + key),
                lambda: sorted(k.removeprefix(top) for k in fake.objects),
                fake,
            )
    elif kind == "memory":
        memory = ckpt.MemoryStore()
        yield Opened(
            kind,
            memory,
            lambda key: memory.objects[key][0],
            lambda key, data: memory.objects.__setitem__(key, (data, memory.objects[key][1])),
            memory.objects.pop,
            lambda: sorted(memory.objects),
        )
    else:
        import fsspec

        assert kind == "fsspec memory"
        fs = fsspec.filesystem("memory")
        top = f"/{uuid.uuid4().hex}/ckpt"
        try:
            yield Opened(
                kind,
                ckpt.FsspecStore(f"memory:/{top}"),
                lambda key: fs.cat_file(f"{top}/{key}"),
                lambda key, data: fs.pipe_file(f"{top}/{key}", data),
                lambda key: fs.rm_file(f"{top}/{key}"),
                lambda: sorted(path.removeprefix(f"{top}/") for path in fs.find(top)),
            )
        finally:
            fs.rm(top.rpartition("/")[0], recursive=True)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
