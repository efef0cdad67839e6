"""Every back end keeps the promises of the store interface, and every operation of the package works on it."""

from __future__ import annotations

import errno
import functools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.checkpoint.checkpoint_support import adam_like, assert_equals, load_in_process, random_bits, random_layout, save_in_process
from tests.checkpoint.faulty_store import FaultyStore
from tests.checkpoint.stores import EXCLUSIVE, KINDS, collect, opened
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.format.digest import view_of
from vescale_ray.checkpoint.format.pages import aligned_buffer
from vescale_ray.checkpoint.stores.opening import store_of
from vescale_ray.checkpoint.stores.store import UNDER_WAY, KeyExists, KeyMissing, ObjectStore

A, B = adam_like(seed=1), adam_like(seed=2)


@pytest.fixture(params=[*KINDS, "faulty memory"])
def backend(request):
    kind = request.param
    with opened(kind.removeprefix("faulty ")) as found:
        if kind.startswith("faulty"):
            found.store = FaultyStore(found.store)
        yield found


def chunks(size, seed=0, chunk=1 << 20):
    """Chunks whose memory is reused, as the interface allows, once the fourth chunk after them is requested."""
    data = data_of(size, seed)
    buffers = [aligned_buffer(chunk) for _ in range(UNDER_WAY)]
    for index, start in enumerate(range(0, size, chunk)):
        buffers[index % UNDER_WAY].zero_()
        part = buffers[index % UNDER_WAY][: min(chunk, size - start)]
        part.copy_(data[start : start + part.numel()])
        yield view_of(part)


def content(size, seed=0):
    return data_of(size, seed).numpy().tobytes()


@functools.lru_cache(4)
def data_of(size, seed):
    return random_bits((size,), torch.uint8, seed)


def test_object_reads_back_equal_whole_and_by_ranges(backend):
    store: ObjectStore = backend.store
    assert isinstance(store, ObjectStore)
    for key, size in (("data/a/small", 5000), ("data/a/large", (11 << 20) + 77), ("data/a/parts", 10 << 20), ("data/b/empty", 0)):
        store.put_stream(key, chunks(size), size)
        whole = content(size)
        assert store.get(key) == backend.read(key) == whole and store.size(key) == size
        with store.open_read(key) as reader:
            announced = [(offset, 1 << 20) for offset in range(0, size, 1 << 20)]
            reader.expect(announced)
            # In order, with a gap, backwards, past the end, and more than was announced.
            for offset, length in [*announced[:3], *announced[4:], (max(0, size - 100), 4096), (0, 5 << 20), (size, 10), (size + 4096, 10)]:
                view = memoryview(bytearray(length))
                count = reader.read_into(offset, view)
                assert count == max(0, min(length, size - offset)) and view[:count] == whole[offset : offset + count], (key, offset)


def test_creation_is_exclusive_and_leaves_the_first_alone(backend):
    store: ObjectStore = backend.store
    for key in ("commits/a.json", "attempts/x/r00000.json"):
        store.put(key, b"1")
        for again in (b"2", b"1"):
            with pytest.raises(KeyExists):
                store.put(key, again)
        assert store.get(key) == b"1"
    for size in (10_000, 6 << 20):
        store.put_stream(f"data/x/r{size}", chunks(size), size)
        with pytest.raises(KeyExists):
            store.put_stream(f"data/x/r{size}", chunks(size, seed=1), size)
        assert store.get(f"data/x/r{size}") == content(size)
    assert len(backend.keys()) == 4, "no temporary object is left"


@pytest.mark.parametrize("size", [9000, (10 << 20) + 9])
def test_failed_or_mismeasured_stream_leaves_no_object(backend, size):
    store: ObjectStore = backend.store
    for announced in (size - 5, size + 1000):
        with pytest.raises(ValueError, match=f"bytes were streamed, {announced} announced"):
            store.put_stream("data/x/r", chunks(size), announced)

    def failing(error):
        yield from chunks(size)
        raise error("the tensor went away")

    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error, match="went away"):
            store.put_stream("data/x/r", failing(error), size + 4096)
    assert store.size("data/x/r") is None and store.list("data/") == [] and backend.keys() == []
    if backend.fake:
        assert not backend.fake.uploads, "an unfinished upload is left"


def test_missing_objects_listing_and_deletion(backend):
    store: ObjectStore = backend.store
    assert store.list("data/") == [] and store.size("data/x") is None and not store.delete("data/x") and store.tidy("data/", 0.0) == 0
    with pytest.raises(KeyMissing):
        store.get("data/x")
    with pytest.raises(KeyMissing), store.open_read("data/x"):
        pass
    before = store.clock()
    store.put("data/b/2", b"22")
    store.put("data/a/1", b"1")
    store.put("commits/c.json", b"333")
    found = store.list("data/")
    assert [(e.key, e.bytes) for e in found] == [("data/a/1", 1), ("data/b/2", 2)]
    assert all(before - 2 <= e.modified <= store.clock() + 2 for e in found)
    assert store.delete("data/a/1") and not store.delete("data/a/1") and [e.key for e in store.list("data/")] == ["data/b/2"]
    for key in ("../x", "/x", "a//b", "", "a b"):
        for call in (store.get, store.size, store.delete):
            with pytest.raises(ValueError, match="not an object key"):
                call(key)


def test_every_back_end_saves_loads_verifies_and_collects(backend):
    store: ObjectStore = backend.store
    assert ckpt.latest(store) is None and ckpt.ls(store) == []
    held = random_layout(A, 3, seed=1)
    save_in_process(store, A, held, step=10)
    second = save_in_process(store, B, random_layout(B, 2, seed=2), step=20)
    assert [c.step for c in ckpt.ls(store)] == [10, 20] and ckpt.latest(store) == second
    assert_equals(store, B)
    load_in_process(ckpt.open(store, ckpt.ls(store)[0]), A, random_layout(A, 5, seed=9))
    report = ckpt.verify(store)
    assert report.ok and report.objects == 4
    ckpt.write_shard(store, "orphan", 0, [], step=30, epoch=0)
    collected = collect(store, 1, grace_s=-5.0)
    assert collected.kept == (second.name,) and collected.swept == ("orphan",) and not collected.problems
    assert {key.split("/")[1] for key in backend.keys() if key.startswith("data/")} == {second.attempt}
    assert_equals(store, B)


def test_every_back_end_round_trips_a_training_state(backend):
    net = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    for step in (1, 2, 3):
        ckpt.save({"model": net, "optimizer": optimizer, "stream": {"at": step}}, backend.store, step).wait()
    other = torch.nn.Linear(5, 3)
    state = {"model": other, "optimizer": torch.optim.AdamW(other.parameters()), "stream": None}
    assert ckpt.load(state, backend.store).step == 3 and state["stream"] == {"at": 3}
    assert torch.equal(net.weight, other.weight) and [c.step for c in ckpt.ls(backend.store)] == [1, 2, 3]


def race(store_of_racer, step, racers=6):
    """Six committers race for the same step, each with its own attempt.

    Returns the winners' attempts and the losers' errors.
    """
    votes = [ckpt.write_shard(store_of_racer(i), f"a{step}-{i}", 0, [], step=step, epoch=0) for i in range(racers)]
    barrier = threading.Barrier(racers)

    def one(i):
        barrier.wait(20)
        return ckpt.commit(store_of_racer(i), [votes[i]], step=step, epoch=0, attempt=f"a{step}-{i}", world=1, meta={"i": i}).attempt

    with ThreadPoolExecutor(racers) as pool:
        errors = {done: done.exception(60) for done in [pool.submit(one, i) for i in range(racers)]}
    lost = [error for error in errors.values() if error]
    assert all(isinstance(error, ckpt.CommitExists) for error in lost), lost
    return [done.result() for done, error in errors.items() if not error], lost


@pytest.mark.parametrize("kind", EXCLUSIVE)
@pytest.mark.fault("K18")
def test_exactly_one_of_six_creators_of_a_commit_wins(kind):
    with opened(kind) as found:
        for step in range(1, 4):
            won, lost = race(lambda _i: found.store, step)
            assert len(won) == 1 and len(lost) == 5
            newest = ckpt.latest(found.store)
            assert newest is not None and newest.step == step and newest.attempt == won[0]
        assert sum(key.startswith("commits/") for key in found.keys()) == 3, "no temporary object is left"


@pytest.mark.parametrize("kind", KINDS)
def test_damage_in_the_storage_is_found_and_its_commit_skipped(kind):
    with opened(kind) as found:
        first = save_in_process(found.store, A, random_layout(A, 2, seed=1), step=10)
        second = save_in_process(found.store, B, random_layout(B, 2, seed=2), step=20)
        key = f"data/{second.attempt}/r00001.safetensors"
        sound = found.read(key)
        found.write(key, sound[:4096] + bytes([sound[4096] ^ 1]) + sound[4097:])
        (problem,) = ckpt.verify(found.store).problems
        assert (problem.object, problem.block) == (key, 1)
        found.write(key, sound[:-1])
        assert ckpt.latest(found.store) == first
        found.write(key, sound)
        assert ckpt.latest(found.store) == second
        manifest = found.read(second.key)
        for torn in (b"", manifest[:100], manifest[:-66], manifest[:-1]):
            found.write(second.key, torn)
            assert ckpt.latest(found.store) == first
        found.write(second.key, manifest)
        found.remove(key)
        assert ckpt.latest(found.store) == first
        assert_equals(found.store, A)


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_objects_in_the_root_are_ignored(kind):
    with opened(kind) as found:
        save_in_process(found.store, A, random_layout(A, 2, seed=1), step=10)
        ours = found.keys()
        for name in ("commits/readme.txt", "commits/e1-s2.json", "commits/latest", "other/file", "data/x/r00000.safetensors"):
            found.store.put(name, b"a stranger's")
        assert [c.step for c in ckpt.ls(found.store)] == [10]
        assert_equals(found.store, A)
        assert collect(found.store, 1).problems == ()
        assert set(ours) < set(found.keys())


def test_a_root_is_resolved_to_its_back_end(tmp_path):
    assert isinstance(store_of(tmp_path), ckpt.PosixStore) and isinstance(store_of(f"file://{tmp_path}"), ckpt.PosixStore)
    assert store_of(f"file://{tmp_path}").describe() == str(tmp_path)
    assert isinstance(store_of("s3://bucket/x"), ckpt.S3Store) and isinstance(store_of("memory://x/y"), ckpt.FsspecStore)
    memory = ckpt.MemoryStore()
    assert store_of(memory) is memory
    for root, words in [
        ("", "is empty"),
        ("file://relative", "file:///absolute"),
        ("nonsense://x", "nonsense"),
        ("s3://", "not of the form s3://bucket/prefix"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://key:secret@bucket/x", "must not hold credentials"),
        ("s3://bucket/x?secret_key=abc", "credentials do not belong into a URL"),
        ("s3://bucket/x?regoin=eu", "known are endpoint, region"),
        ("s3://bucket/x?endpoint=localhost:9000", "http://host:port"),
        ("s3://bucket/x?conditional=no", "on or off"),
        ("s3://bucket/x?addressing=odd", "path or virtual"),
    ]:
        with pytest.raises(ValueError, match=words) as caught:
            store_of(root)
        assert "\n" not in str(caught.value) and "abc" not in str(caught.value)


def test_stores_pickle_and_never_print_their_secrets(tmp_path):
    for root in ("s3://bucket/x?region=eu-west-1&endpoint=http://h:1", "memory://x"):
        store = store_of(root)
        again = pickle.loads(pickle.dumps(store))
        assert type(again) is type(store) and again.describe() == store.describe()
        if isinstance(store, ckpt.S3Store):
            assert again.options == store.options and again.options.region == "eu-west-1"
    store = ckpt.S3Store("s3://bucket/x", ckpt.S3Options(access_key="a", secret_key="very secret", session_token="also secret"))
    assert "secret" not in repr(store.options).replace("secret_key", "") and pickle.loads(pickle.dumps(store)).options == store.options


@pytest.mark.parametrize("kind", KINDS)
def test_no_thread_is_left_behind(kind):
    before = set(threading.enumerate())  # an earlier test may have left a hung write on purpose
    with opened(kind) as found:
        save_in_process(found.store, A, random_layout(A, 2, seed=1), step=1)
        assert_equals(found.store, A)
        assert not [t.name for t in set(threading.enumerate()) - before if t.name.startswith("checkpoint")]


def test_listing_an_unreachable_fsspec_service_raises():
    """fsspec's walks skip folders that can't be listed."""

    fsspec = pytest.importorskip("fsspec")

    class Silent(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        protocol, cachable = "silent-for-a-test", False

        def ls(self, path, detail=True, **options):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    fsspec.register_implementation("silent-for-a-test", Silent, clobber=True)
    store = ckpt.FsspecStore("silent-for-a-test://runs")
    with pytest.raises(ConnectionRefusedError):
        store.list("commits/")
    with pytest.raises(OSError, match="refused"):
        ckpt.ls(store)
    assert ckpt.FsspecStore("memory://nothing-was-ever-written-here").list("commits/") == []
