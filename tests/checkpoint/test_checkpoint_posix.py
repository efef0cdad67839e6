"""The POSIX store is exclusive, durable, and correct for every behaviour of a file system with O_DIRECT."""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import os
import random
import re
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from tests.checkpoint.checkpoint_support import assert_equals, random_bits, random_layout, save_in_process
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.format import shard
from vescale_ray.checkpoint.format.digest import one_ahead, view_of
from vescale_ray.checkpoint.format.pages import aligned_buffer, transfer_buffers
from vescale_ray.checkpoint.format.shard import new_attempt, write_shard
from vescale_ray.checkpoint.saving.bounded import DAEMONS
from vescale_ray.checkpoint.stores import posix
from vescale_ray.checkpoint.stores.store import UNDER_WAY, check_key

BIG = {("w", "param"): random_bits((3 << 20,), torch.uint8, 1), ("v", "param"): random_bits((70001,), torch.float32, 2)}


def chunks(size, seed=0, chunk=1 << 20):
    data = random_bits((size,), torch.uint8, seed)
    for start in range(0, size, chunk):
        part = aligned_buffer(min(chunk, size - start))
        part.copy_(data[start : start + part.numel()])
        yield view_of(part)


def test_large_objects_use_direct_io_where_the_disk_allows(tmp_path, monkeypatch):
    flags = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, mode, *a, **k: (flags.append(mode), real(path, mode, *a, **k))[1])
    save_in_process(tmp_path, BIG, random_layout(BIG, 2, seed=1), block_bytes=1 << 20, chunk_bytes=1 << 20)
    assert_equals(tmp_path, BIG)
    assert any(f & os.O_DIRECT and f & os.O_EXCL for f in flags)


@pytest.mark.parametrize("where", ["open", "first write", "first read"])
@pytest.mark.fault("K10")
def test_a_file_system_without_o_direct_gets_buffered_calls(tmp_path, monkeypatch, where):
    real_open, real_pwrite, real_preadv = os.open, os.pwrite, os.preadv

    def direct(fd):
        import fcntl

        return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT

    def refuse():
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def opened(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            if flags & os.O_CREAT:  # some kernels create the file and then refuse
                os.close(real_open(path, flags & ~os.O_DIRECT, *args, **kwargs))
            refuse()
        return real_open(path, flags, *args, **kwargs)

    if where == "open":
        monkeypatch.setattr(os, "open", opened)
    elif where == "first write":
        monkeypatch.setattr(os, "pwrite", lambda fd, *a: refuse() if direct(fd) else real_pwrite(fd, *a))
    else:
        monkeypatch.setattr(os, "preadv", lambda fd, *a: refuse() if direct(fd) else real_preadv(fd, *a))
    save_in_process(tmp_path, BIG, random_layout(BIG, 2, seed=1), block_bytes=1 << 20, chunk_bytes=1 << 20)
    assert_equals(tmp_path, BIG)
    assert ckpt.verify(tmp_path).ok


@pytest.mark.fault("K10")
def test_short_writes_and_reads_are_continued(tmp_path, monkeypatch):
    real_pwrite, real_preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real_pwrite(fd, data[: max(1, len(data) // 3 // 4096 * 4096) or 1], offset))
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, offset: real_preadv(fd, [views[0][: max(4096, len(views[0]) // 3 // 4096 * 4096)]], offset)
    )
    tensors = {("w", "param"): random_bits((100_000,), torch.uint8, 1)}
    save_in_process(tmp_path, tensors, random_layout(tensors, 2, seed=1), aux=False)
    monkeypatch.setattr(os, "pwrite", real_pwrite)
    assert_equals(tmp_path, tensors)


@pytest.mark.timeout(30)
def test_short_direct_write_within_a_page_is_continued(tmp_path, monkeypatch):
    real = os.pwrite

    def short(fd, data, offset):
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            return real(fd, data, offset)
        with open(f"/proc/self/fd/{fd}", "r+b") as buffered:
            return real(buffered.fileno(), data[:512], offset)

    monkeypatch.setattr(os, "pwrite", short)
    store = ckpt.PosixStore(tmp_path)
    store.put_stream("data/x/r", chunks(16384), 16384)
    assert store.get("data/x/r") == random_bits((16384,), torch.uint8, 0).numpy().tobytes()


def test_listing_an_unreadable_folder_raises(tmp_path, monkeypatch):
    """A file server gave a folder's attributes but not its names. The run saw no checkpoint and began from its first step."""
    store = ckpt.PosixStore(tmp_path)
    store.put("commits/a.json", b"{}")
    scan = os.scandir

    def broken(number):
        def fail(path):
            if str(path).endswith("commits"):
                raise OSError(number, os.strerror(number), str(path))
            return scan(path)

        return fail

    for number in (errno.EIO, errno.EACCES, errno.ESTALE):
        monkeypatch.setattr(os, "scandir", broken(number))
        with pytest.raises(OSError, match=os.strerror(number)):
            store.list("commits/")
    monkeypatch.setattr(os, "scandir", broken(errno.ENOENT))
    assert store.list("commits/") == [], "another collector has just deleted it"
    monkeypatch.setattr(os, "scandir", scan)
    assert [entry.key for entry in store.list("commits/")] == ["commits/a.json"]


def test_unlistable_attempt_folder_damages_no_checkpoint(tmp_path, monkeypatch):
    ckpt.save({"model": {"w": torch.arange(9.0)}}, tmp_path, step=3)
    scan = os.scandir

    def broken(path):
        if Path(path).parent.name == "data":
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", broken)
    (commit,) = ckpt.ls(tmp_path)
    assert commit.problem is None and ckpt.latest(tmp_path) == commit
    assert ckpt.PosixStore(tmp_path).list("data/") == []


def test_four_concurrent_writes_never_reuse_unwritten_buffers(tmp_path, monkeypatch):
    real, lock = os.pwrite, threading.Lock()
    now, most, delays = 0, 0, random.Random(7)

    def slow(fd, data, offset):
        nonlocal now, most
        with lock:
            now += 1
            most, wait = max(most, now), delays.uniform(0, 0.01)
        time.sleep(wait)  # late, and in another order
        try:
            return real(fd, data, offset)
        finally:
            with lock:
                now -= 1

    monkeypatch.setattr(os, "pwrite", slow)
    save_in_process(tmp_path, BIG, random_layout(BIG, 2, seed=3), block_bytes=1 << 16, chunk_bytes=1 << 16)
    assert most == UNDER_WAY == 4
    assert_equals(tmp_path, BIG)
    named = [thread.name for thread in threading.enumerate()]
    assert DAEMONS + "write" not in named


def test_write_error_waits_for_running_writes_and_leaves_nothing(tmp_path, monkeypatch):
    store = ckpt.PosixStore(tmp_path)
    real, begun, late, over = os.pwrite, threading.Event(), threading.Event(), []

    def failing(fd, data, offset):
        if offset == 4096:
            assert begun.wait(10)
            late.set()
            raise OSError(errno.EIO, "the disk is gone")
        if offset == 8192:
            begun.set()
            late.wait(10)
            time.sleep(0.2)
        written = real(fd, data, offset)  # would go to another file if the descriptor had been closed and reused
        over.append(offset)
        return written

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        store.put_stream("data/x/r", chunks(5 * 4096, chunk=4096), 5 * 4096)
    assert over[-1] == 8192 and 4096 not in over, "the write that was under way was waited for"
    assert store.size("data/x/r") is None and store.list("data/") == []


def test_unaligned_chunk_and_its_successors_are_written_in_order(tmp_path, monkeypatch):
    real, lock, now = os.pwrite, threading.Lock(), []

    def slow(fd, data, offset):
        with lock:
            now.append(offset)
            beside = {0, 4096, 8192} & set(now)
            assert offset < 12288 or not beside, f"{offset} was begun beside {beside}"
        time.sleep(0.02)
        written = real(fd, data, offset)
        with lock:
            now.remove(offset)
        return written

    def odd():
        data = random_bits((20_000,), torch.uint8, 0)
        for start, end in ((0, 4096), (4096, 8192), (8192, 12288), (12288, 15000), (15000, 20_000)):
            part = aligned_buffer(end - start)
            part.copy_(data[start:end])
            yield view_of(part)

    monkeypatch.setattr(os, "pwrite", slow)
    store = ckpt.PosixStore(tmp_path)
    store.put_stream("data/x/r", odd(), 20_000)
    assert store.get("data/x/r") == random_bits((20_000,), torch.uint8, 0).numpy().tobytes()


def test_transfer_buffers_use_huge_pages_within_a_memory_bound():
    def huge_and_resident():
        text = Path("/proc/self/smaps_rollup").read_text()
        return tuple(int(re.findall(rf"^{name}: +(\d+) kB", text, re.M)[0]) << 10 for name in ("AnonHugePages", "Rss"))

    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    huge, resident = huge_and_resident()
    buffers = transfer_buffers(8, (1 << 20) - 100, 1 << 30)
    assert [b.numel() for b in buffers] == [(1 << 20) - 100] * 8 and all(b.data_ptr() % 4096 == 0 for b in buffers)
    addresses = sorted(b.data_ptr() for b in buffers)
    assert all(second - first >= 1 << 20 for first, second in itertools.pairwise(addresses)), "none lies in another"
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    assert [int(b.max()) for b in buffers] == list(range(8))
    now_huge, now_resident = huge_and_resident()
    assert now_resident - resident < 11 << 20
    if mode.exists() and "[never]" not in mode.read_text():
        assert now_huge - huge >= 4 << 20, "a machine that is short of them may give a part"
    few = transfer_buffers(2, 1 << 20, 4 << 20)
    few[1].fill_(1)
    assert huge_and_resident()[0] <= now_huge, "what moves little is not worth a huge page"
    assert transfer_buffers(0, 1 << 20, 1 << 30) == [] and transfer_buffers(1, 0, 0)[0].numel() == 0
    one = transfer_buffers(1, 2 << 20, 1 << 30)[0][5:6]
    one.fill_(7)
    del buffers, few
    assert int(one[0]) == 7, "a view keeps the memory"


@pytest.mark.parametrize("waits", ["in a write", "in the store", "in the save"])
def test_thread_left_by_a_second_interrupt_touches_no_other_file(tmp_path, monkeypatch, waits):
    held, begun, opened, asked = threading.Event(), threading.Event(), [], []
    join, create, write = threading.Thread.join, posix._create, os.pwrite

    def creating(path):
        opened.append(create(path))
        return opened[-1]

    def impatient(thread, timeout=None):
        if thread.name == DAEMONS + "write":
            assert begun.wait(20)
            raise KeyboardInterrupt
        join(thread, timeout)

    def slow(chunk=0):
        if begun.is_set() or chunk == 0:
            begun.set()
            assert held.wait(20)
        return False

    def slowly():
        for part in chunks(8192, chunk=4096):
            asked.append(part)
            slow()
            yield part

    monkeypatch.setattr(posix, "_create", creating)
    monkeypatch.setattr(threading.Thread, "join", impatient)
    if waits == "in a write":
        monkeypatch.setattr(os, "pwrite", lambda *args: slow() or write(*args))
    with pytest.raises(KeyboardInterrupt):
        if waits == "in the save":
            data = torch.arange(4096)
            piece = ckpt.ShardPiece("w", "param", 0, 4096, (4096,), data.dtype, data)
            write_shard(tmp_path, new_attempt(), 0, [piece], step=1, epoch=0, cancelled=slow)
        else:
            parts = slowly() if waits == "in the store" else chunks(4096)
            ckpt.PosixStore(tmp_path).put_stream("data/x/r", parts, 8192 if waits == "in the store" else 4096)
    monkeypatch.undo()
    left = [thread for thread in threading.enumerate() if thread.name == DAEMONS + "write"]
    others = [open(tmp_path / f"other{i}", "xb") for i in range(6)]
    assert left and (waits == "in a write" or opened[0][0] in [other.fileno() for other in others]), "the number is used again"
    held.set()
    for thread in left:
        thread.join(20)
    for other in others:
        other.close()
    assert [path.stat().st_size for path in sorted(tmp_path.glob("other*"))] == [0] * 6
    assert len(asked) == (waits == "in the store"), "no chunk is requested after an interrupt"


def test_failed_save_releases_its_tensors_at_once(tmp_path, monkeypatch):
    def failing(fd, data, offset):
        raise OSError(errno.EIO, "the disk is gone")

    def fail():
        data = torch.zeros(1 << 20)
        piece = ckpt.ShardPiece("w", "param", 0, 1 << 20, (1 << 20,), data.dtype, data)
        with pytest.raises(ckpt.SaveFailed, match="the disk is gone"):
            write_shard(tmp_path, new_attempt(), 0, [piece], step=1, epoch=0)
        return weakref.ref(data.untyped_storage())

    monkeypatch.setattr(os, "pwrite", failing)
    gc.collect()
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


def test_save_allocates_its_buffers_in_the_calling_thread(tmp_path, monkeypatch):
    """Pinning memory in another thread would open a context on GPU 0, regardless of the rank's GPU."""
    makers = []

    def making(*arguments, **options):
        makers.append(threading.current_thread())
        return transfer_buffers(*arguments, **options)

    monkeypatch.setattr(shard, "transfer_buffers", making)
    data = torch.zeros(3 << 20, dtype=torch.uint8)
    piece = ckpt.ShardPiece("w", "param", 0, len(data), (len(data),), data.dtype, data)
    write_shard(tmp_path, new_attempt(), 0, [piece], step=1, epoch=0)
    assert makers == [threading.current_thread()]


def test_store_syncs_each_file_and_its_folders_before_returning(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
    root = tmp_path / "new" / "deep" / "root"
    store = ckpt.PosixStore(root)
    store.put_stream("data/x/r", chunks(5000), 5000)
    assert str(root / "data/x/r") in synced
    folders = [str(f) for f in (root / "data/x", root / "data", root, root.parent, root.parent.parent, tmp_path)]
    assert set(folders) <= set(synced), "also those above the root that were made for it"
    assert set(folders[:4]) <= set(synced[synced.index(str(root / "data/x/r")) :])
    synced.clear()
    store.put("commits/a.json", b"1")
    assert synced[0].startswith(str(root / "commits/.tmp-")) and str(root / "commits") in synced[1:]
    synced.clear()
    store.put("attempts/x/r00001.json", b"1")
    assert synced == [] and store.get("attempts/x/r00001.json") == b"1", "what the ranks tell each other is as old as they are"


@pytest.mark.parametrize("key", ["../x", "/x", "a/../b", "a//b", "", ".hidden", "a/.tmp", "a\0b", "a b", "a/", "..", "a/.."])
def test_a_key_cannot_leave_the_root(key):
    with pytest.raises(ValueError, match="not an object key"):
        check_key(key)


def test_one_ahead_keeps_order_stops_early_and_raises_errors():
    assert list(one_ahead(iter(range(5)))) == [0, 1, 2, 3, 4]
    stream = one_ahead(iter(range(10**9)))
    assert next(stream) == 0
    stream.close()

    def failing():
        yield 1
        raise OSError("gone")

    source = one_ahead(failing())
    assert next(source) == 1
    with pytest.raises(OSError, match="gone"):
        next(source)
