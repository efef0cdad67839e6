"""Each fault of the list, injected one by one through a faulty store.

The checkpoint before stays whole, no call hangs, and the debris is collected. Kill points are in test_checkpoint_crash (disk) and
test_checkpoint_s3, system calls in test_checkpoint_posix, the S3 protocol's own failures in test_checkpoint_s3, forged manifests in
test_checkpoint_safety.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.checkpoint.checkpoint_support import adam_like, assert_equals, in_subprocess, load_in_process, random_layout, save_in_process
from tests.checkpoint.faulty_store import ACTIONS, OPERATIONS, Fault, FaultyStore
from tests.checkpoint.stores import KINDS, Opened, collect, opened
from vescale_ray import checkpoint as ckpt

BEFORE, AFTER = adam_like(seed=1), adam_like(seed=2)


@pytest.fixture
def memory():
    """A memory store with two committed steps."""
    store = ckpt.MemoryStore()
    save_in_process(store, BEFORE, random_layout(BEFORE, 3, seed=1), step=10)
    save_in_process(store, BEFORE, random_layout(BEFORE, 2, seed=2), step=20)
    return store


def saved_after(store, step=30):
    return save_in_process(store, AFTER, random_layout(AFTER, 2, seed=3), step=step)


def within(seconds, work):
    """Run ``work`` in a thread with a deadline; return its result, or raise its error."""
    result: list[object] = []

    def run():
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"still running after {seconds} s"
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


WRITE_FAULTS = [
    # (fault, whether the new step is committed nevertheless)
    *((Fault("put_stream", a, key="*r00001*", code=errno.ENOSPC), False) for a in ("error", "torn", "lost")),
    (Fault("put_stream", "hang", seconds=0.2), False),
    (Fault("put_stream", "cut", key="*r00001*"), False),
    (Fault("put_stream", "cut", at=0), False),
    (Fault("put_stream", "cut", at=4096), False),
    (Fault("put_stream", "delay", seconds=0.1), True),
    *((Fault("put", a, key="*aux*"), False) for a in ("error", "torn", "hang", "lost", "cut")),
    *((Fault("put", a, key="commits/*"), False) for a in ("error", "torn", "hang", "cut")),
    *((Fault("put", "cut", key="commits/*", at=at), False) for at in (0, 1, 64, 65, 1000)),
    (Fault("put", "lost", key="commits/*"), True),
    (Fault("put", "flip", key="commits/*"), False),
    (Fault("put", "flip", key="commits/*", at=10**9), False),
    (Fault("size", "missing", key="*r00001.s*"), True),  # the listing has the size
    (Fault("list", "stale", key="*r00001.s*", times=None), True),  # a request by name finds the object
    (Fault("list", "stale", key="commits/*", times=1), True),
    (Fault("list", "error"), True),  # each object is requested by name
    (Fault("list", "hang", seconds=0.2), True),
    (Fault("open_read", "error"), True),
    (Fault("clock", "error"), True),
]


@pytest.mark.parametrize(("fault", "committed"), WRITE_FAULTS, ids=[f"{f.operation} {f.action} {f.key} {f.at}" for f, _ in WRITE_FAULTS])
@pytest.mark.fault("K17")
def test_any_save_fault_leaves_a_loadable_commit_and_no_debris(memory, fault, committed):
    store = FaultyStore(memory, [fault])
    try:
        within(20, lambda: saved_after(store))
    except ckpt.SaveFailed as error:
        assert "\n" not in str(error) and ("earlier checkpoints are untouched" in str(error) or isinstance(error, ckpt.CommitRefused))
    found = ckpt.latest(memory)
    assert found is not None and found.step == (30 if committed else 20)
    assert_equals(memory, AFTER if committed else BEFORE)
    # The same step can be saved again, in a higher epoch if a torn commit object holds its name.
    again = save_in_process(memory, AFTER, random_layout(AFTER, 3, seed=5), step=30, epoch=1)
    report = collect(memory, 1, grace_s=-1.0)
    assert report.kept == (again.name,) and not report.problems
    assert {e.key.split("/")[1] for e in memory.list("data/")} == {again.attempt}
    assert_equals(memory, AFTER)


READ_FAULTS = [
    *(Fault("read", a, times=1) for a in ("flip", "wrong_range", "delay")),
    Fault("get", "error", key="commits/*30.json"),
    Fault("get", "missing", key="commits/*30.json"),
    Fault("get", "flip", key="commits/*30.json"),
    Fault("get", "short", key="commits/*30.json"),
    Fault("get", "short", key="commits/*30.json", at=0),
    Fault("get", "hang", key="commits/*30.json", seconds=0.1),
    Fault("list", "stale", key="commits/*30.json"),
]


@pytest.mark.parametrize("fault", READ_FAULTS, ids=[f"{f.operation} {f.action} {f.at}" for f in READ_FAULTS])
def test_transient_read_fault_never_yields_wrong_bytes(memory, fault):
    made = saved_after(memory)
    store = FaultyStore(memory, [fault])
    checkpoint = within(20, lambda: ckpt.open(store))
    expected = AFTER if checkpoint.commit.name == made.name else BEFORE
    assert expected is AFTER if fault.operation == "read" else expected is BEFORE
    load_in_process(checkpoint, expected, random_layout(expected, 2, seed=8))
    assert store.fired
    assert ckpt.latest(store) == made, "the fault has passed"


@pytest.mark.parametrize("action", ["error", "short", "flip", "wrong_range", "missing", "hang"])
@pytest.mark.fault("K30")
def test_persistent_read_fault_is_named_and_load_falls_back(action, caplog):
    store = ckpt.MemoryStore()
    good, bad = torch.nn.Linear(700, 3), torch.nn.Linear(700, 3)
    ckpt.save({"model": good}, store, 1).wait()
    made = ckpt.save({"model": bad}, store, 2).wait()
    operation = "open_read" if action == "missing" else "read"
    faulty = FaultyStore(store, [Fault(operation, action, key=f"*{made.attempt}*", times=None, seconds=0.01, at=5000)])
    target = torch.nn.Linear(700, 3)
    with pytest.raises(ckpt.CheckpointCorrupt, match=made.attempt):
        ckpt.load({"model": target}, faulty, commit=made.name)
    assert {problem.object.split("/")[1] for problem in ckpt.verify(faulty, made.name).problems} == {made.attempt}
    with caplog.at_level(logging.ERROR):
        loaded = within(20, lambda: ckpt.load({"model": target}, faulty))
    assert loaded.step == 1 and loaded.skipped == (made.name,) and torch.equal(target.weight, good.weight)
    assert made.attempt in caplog.text and "going back to checkpoint e0000-s000000000001" in caplog.text


# -- torn, missing, extra


def boundaries(raw: bytes) -> list[int]:
    """Offsets in a data object: the ends of its length field, header and sections, and the offsets next to each."""
    import json

    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    edges = {0, 8, start, *(start + n for name, e in header.items() if name != "__metadata__" for n in e["data_offsets"])}
    return sorted({n + d for n in edges for d in (-1, 0, 1) if 0 <= n + d < len(raw)})


@pytest.mark.parametrize(
    "kind", ["memory", "posix", pytest.param("s3", marks=pytest.mark.slow), pytest.param("fsspec memory", marks=pytest.mark.slow)]
)
@pytest.mark.fault("K31")
def test_verify_finds_a_truncated_or_overwritten_object(kind):
    rng = random.Random(0)
    with opened(kind) as found:
        first = save_in_process(found.store, BEFORE, random_layout(BEFORE, 2, seed=1), step=10)
        second = saved_after(found.store)
        for key in (f"data/{second.attempt}/r00001.safetensors", f"data/{second.attempt}/r00000.aux.json", second.key):
            sound = found.read(key)
            cuts = boundaries(sound) if key.endswith("safetensors") else [0, 1, len(sound) // 2, len(sound) - 66, len(sound) - 1]
            cuts = cuts if kind == "memory" else cuts[:: max(1, len(cuts) // 6)]
            for cut in [c for c in cuts if 0 <= c < len(sound)] + [rng.randrange(len(sound)) for _ in range(3)]:
                found.write(key, sound[:cut])
                assert ckpt.latest(found.store) == first, (key, cut)
                assert key in {p.object for p in ckpt.verify(found.store, second).problems}
                with pytest.raises(ckpt.CheckpointCorrupt, match=key):
                    ckpt.open(found.store, second.name)
                for filler in (bytes(len(sound) - cut), rng.randbytes(len(sound) - cut)):
                    if sound[:cut] + filler != sound:  # the right length with wrong bytes: a hole, or earlier contents of the disk
                        found.write(key, sound[:cut] + filler)
                        assert key in {p.object for p in ckpt.verify(found.store, second).problems}, (key, cut)
            found.write(key, sound + b"x")
            assert ckpt.latest(found.store) == first
            found.write(key, sound)
        assert ckpt.verify(found.store).ok
        for victim in sorted(k for k in found.keys() if second.attempt in k):
            sound = found.read(victim)
            found.remove(victim)
            assert ckpt.latest(found.store) == first and victim in {p.object for p in ckpt.verify(found.store, second).problems}
            found.store.put(victim, sound)
        assert ckpt.latest(found.store) == second
        assert_equals(found.store, BEFORE, first.name)


# -- bit rot


@pytest.mark.parametrize("flips", [60, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.fault("S1", "K30")
def test_a_random_flipped_bit_in_any_object_is_found_and_named(flips):
    """Flips cover every object of a checkpoint: header, padding, manifest, sums and aux.

    The report names the object, the block and the contents at that place.
    """
    store = ckpt.MemoryStore()
    held = random_layout(AFTER, 3, seed=4)
    made = save_in_process(store, AFTER, held, step=10)
    checkpoint = ckpt.open(store)
    rng = random.Random(7)
    keys = sorted(store.objects)
    assert len(keys) == 7
    struck = {"manifest": 0, "aux": 0, "header": 0, "padding": 0, "tensor": 0}
    for index in range(flips):
        # Objects are chosen evenly, so that the small ones are hit too; every 50th flip is at a random byte of the whole checkpoint.
        key = keys[index % len(keys)] if index % 50 else rng.choices(keys, [len(store.objects[k][0]) for k in keys])[0]
        sound, when = store.objects[key]
        bit = rng.choice((0, 8 * len(sound) - 1, *(rng.randrange(8 * len(sound)) for _ in range(4))))
        harmed = bytearray(sound)
        harmed[bit // 8] ^= 1 << bit % 8
        store.objects[key] = (bytes(harmed), when)
        (problem,) = ckpt.verify(store, made.name).problems
        assert problem.object == key
        if key == made.key:
            assert problem.tensors == ("manifest",) and ckpt.latest(store) is None
            struck["manifest"] += 1
        elif key.endswith(".aux.json"):
            rank = int(key.rsplit("/r", 1)[1][:5])
            assert problem.tensors == ("aux",)
            with pytest.raises(ckpt.CheckpointCorrupt, match=key):
                checkpoint.aux(rank)
            struck["aux"] += 1
        else:
            assert problem.block == bit // 8 // 4096
            where = what_lies_at(sound, bit // 8, held[int(key.rsplit("/r", 1)[1][:5])])
            assert where in problem.tensors, (key, bit)
            struck[where if where in struck else "tensor"] += 1
            if where not in struck:
                name, _, kind = where.rstrip(")").partition(" (")
                with pytest.raises(ckpt.CheckpointCorrupt, match=f"{key}, block {problem.block}"):
                    checkpoint.read(name, kind or "param")
        store.objects[key] = (sound, when)
    assert all(struck.values()), struck
    assert ckpt.verify(store).ok


def what_lies_at(raw: bytes, byte: int, intervals) -> str:
    """The oracle, from the safetensors header and the order in which the rank gave its pieces."""
    import json

    start = 8 + int.from_bytes(raw[:8], "little")
    if byte < start:
        return "header"
    groups: list[object] = []
    group_of = {}
    for name in dict.fromkeys(n for n, _ in AFTER):
        signature = tuple((k, t.dtype) for (n, k), t in AFTER.items() if n == name)
        groups += [signature] if signature not in groups else []
        group_of[name] = groups.index(signature)
    for section, entry in json.loads(raw[8:start]).items():
        if section == "__metadata__" or not entry["data_offsets"][0] <= byte - start < entry["data_offsets"][1]:
            continue
        if section.startswith("__pad__"):
            return "padding"
        kind, _, group = section.rpartition(".g")
        position = start + entry["data_offsets"][0]
        for name, of_kind, first, last in intervals:
            if of_kind == kind and group_of[name] == int(group):
                position += (last - first) * AFTER[name, kind].dtype.itemsize
                if byte < position:
                    return name if kind == "param" else f"{name} ({kind})"
    raise AssertionError(f"byte {byte} is in no section")


# -- several at once


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fault("K20")
def test_concurrent_collectors_do_not_disturb_a_reader(kind):
    """Collectors race each other. A reader of a kept commit reads on, and a reader of a deleted commit gets an error."""
    with opened(kind) as found:
        for step in range(1, 6):
            save_in_process(found.store, BEFORE, random_layout(BEFORE, 2, seed=step), step=step)
        going, staying = ckpt.open(found.store, ckpt.ls(found.store)[0]), ckpt.open(found.store)

        def collector():
            for _ in range(2):
                assert not collect(found.store, 2, grace_s=-5.0).problems

        def read():
            for seed in range(2):
                load_in_process(staying, BEFORE, random_layout(BEFORE, 2, seed=seed))

        with ThreadPoolExecutor(3) as pool:
            for work in [pool.submit(work) for work in (collector, collector, read)]:
                work.result(60)
        assert [c.step for c in ckpt.ls(found.store) if c.problem is None] == [4, 5]
        assert_equals(found.store, BEFORE)
        with pytest.raises(ckpt.CheckpointCorrupt, match=r"is missing \(deleted, or collected since"):
            going.read("embed.weight")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fault("K19")
def test_a_zombie_of_an_older_epoch_changes_nothing(kind):
    with opened(kind) as found:
        zombie = ckpt.write_shard(found.store, "zombie", 0, [], step=500, epoch=6)
        early = ckpt.write_shard(found.store, "early", 0, [], step=400, epoch=6)
        ckpt.commit(found.store, [early], step=400, epoch=6, attempt="early", world=1, meta={})
        current = save_in_process(found.store, AFTER, random_layout(AFTER, 2, seed=1), step=100, epoch=7)
        with pytest.raises(ckpt.CommitRefused, match="older than the commit e0007-s000000000100"):
            ckpt.commit(found.store, [zombie], step=500, epoch=6, attempt="zombie", world=1, meta={})
        assert ckpt.latest(found.store) == current
        # The same holds for a commit of the older epoch that is made while the newer one is not yet listed.
        blind = FaultyStore(found.store, [Fault("list", "stale", key="commits/*", times=1)])
        ckpt.commit(blind, [zombie], step=500, epoch=6, attempt="zombie", world=1, meta={})
        assert [(c.epoch, c.step) for c in ckpt.ls(found.store)] == [(6, 400), (6, 500), (7, 100)]
        assert ckpt.latest(found.store) == current
        assert collect(found.store, 1, grace_s=-5.0).kept == (current.name,)
        assert_equals(found.store, AFTER)


@pytest.mark.parametrize("skew", [-86400.0, 86400.0])
@pytest.mark.parametrize("kind", ["posix", "s3"])
@pytest.mark.fault("K28")
def test_host_clock_skew_of_a_day_changes_no_order_or_collection(kind, skew, monkeypatch):
    real = time.time
    with opened(kind) as found:
        save_in_process(found.store, BEFORE, random_layout(BEFORE, 2, seed=1), step=10)
        ckpt.write_shard(found.store, "inflight", 0, [], step=20, epoch=0)
        with monkeypatch.context() as patch:
            patch.setattr("time.time", lambda: real() + skew)
            if found.fake:
                found.fake.now = real
            made = saved_after(found.store)
            assert collect(found.store, 2).swept == () and ckpt.latest(found.store) == made
        assert [c.step for c in ckpt.ls(found.store)] == [10, 30]
        assert_equals(found.store, AFTER)


@pytest.mark.parametrize("fault", ["error", "lost", "hang", "delay"])
@pytest.mark.parametrize("operation", ["delete", "list", "clock", "tidy"])
@pytest.mark.fault("K21")
def test_failed_collection_loses_nothing_and_the_next_finishes(memory, operation, fault):
    made = saved_after(memory)
    ckpt.write_shard(memory, "dead", 0, [], step=25, epoch=0)
    for after in range(4):
        store = FaultyStore(memory, [Fault(operation, fault, after=after, seconds=0.01)])
        try:
            within(20, lambda store=store: collect(store, 1, grace_s=-1.0))
        except OSError:
            assert operation != "delete", "deletions that fail are reported"
        assert ckpt.latest(memory) == made
        assert_equals(memory, AFTER)
    assert not collect(memory, 1, grace_s=-1.0).problems
    assert {e.key.split("/")[1] for e in memory.list("data/")} == {made.attempt}


# -- the wrapper itself


def test_faulty_store_injects_each_fault_as_specified(memory):
    for operation in OPERATIONS:
        for action in ACTIONS:
            try:
                fault = Fault(operation, action)
            except ValueError as error:
                assert "does not apply" in str(error)
                continue
            assert fault.times == 1
    with pytest.raises(ValueError, match="is none of"):
        Fault("rename", "error")
    slept: list[float] = []
    store = FaultyStore(
        ckpt.MemoryStore(),
        [
            Fault("get", "error", after=1, times=2, code=errno.ESTALE),
            Fault("get", "flip", key="b", after=3),
            Fault("size", "hang", seconds=99.0),
        ],
        sleep=slept.append,
    )
    store.put("a", b"1234")
    store.put("b", b"1234")
    assert store.get("a") == b"1234"
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            store.get("a")
        assert caught.value.errno == errno.ESTALE
    assert [store.get("b") for _ in range(5)] == [b"1234"] * 3 + [b"12\x324"] + [b"1234"]
    with pytest.raises(TimeoutError):
        store.size("a")
    assert slept == [99.0] and [(f.action, k) for f, k in store.fired] == [("error", "a"), ("error", "a"), ("flip", "b"), ("hang", "a")]
    assert store.size("a") == 4 and store.describe("a") == "<memory>/a"


def test_opened_helper_and_store_see_the_same_objects():
    """The tests' helper for direct writes: the store reads the objects that the helper wrote."""
    for kind in KINDS:
        with opened(kind) as found:
            assert isinstance(found, Opened)
            found.store.put("commits/a.json", b"1")
            found.write("commits/a.json", b"22")
            assert found.store.get("commits/a.json") == b"22" == found.read("commits/a.json") and found.keys() == ["commits/a.json"]
            found.remove("commits/a.json")
            assert found.store.list("commits/") == [] and found.keys() == []


def killed_on_fsspec(url: str, point: str) -> None:
    os.environ[ckpt.FAULT_ENV] = point
    saved_after(ckpt.FsspecStore(url))
    collect(url, 1, grace_s=-5.0)


@pytest.mark.parametrize(
    "point",
    [
        "data.chunk#1",
        "commit.linked",
        *(
            pytest.param(p, marks=pytest.mark.slow)
            for p in ("data.created", "data.written", "data.published", "aux.written", "commit.validated")
        ),
    ],
)
@pytest.mark.fault("K3")
def test_kill_during_an_fsspec_save_leaves_a_loadable_commit(point):
    with opened("fsspec file") as found:
        save_in_process(found.store, BEFORE, random_layout(BEFORE, 2, seed=1), step=10)
        assert in_subprocess(killed_on_fsspec, found.store.describe(), point) == -9
        done = point == "commit.linked"
        newest = ckpt.latest(found.store)
        assert newest is not None and newest.step == (30 if done else 10)
        assert_equals(found.store, AFTER if done else BEFORE)
        assert not collect(found.store, 1, grace_s=-5.0).problems
        assert {key.split("/")[1] for key in found.keys() if key.startswith("data/")} == {newest.attempt}
        assert_equals(found.store, AFTER if done else BEFORE)
