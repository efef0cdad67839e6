"""Faults of S3, over real sockets: the store retries transient ones; permanent ones fail soon and leave nothing."""

from __future__ import annotations

import errno
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.checkpoint.checkpoint_support import (
    assert_equals,
    random_layout,
    save_in_process,
)
from tests.checkpoint.s3_fake import FakeS3
from tests.checkpoint.s3_saves import AFTER, BEFORE, TOP, save_after
from tests.checkpoint.stores import collect, s3_store
from tests.checkpoint.test_checkpoint_stores import chunks, content, race
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.stores.s3_errors import Undecided


def assert_untouched(store, fake: FakeS3) -> None:
    fake.rules.clear()
    found = ckpt.latest(store)
    assert found is not None and found.step == 10
    assert_equals(store, BEFORE)
    assert not fake.uploads, "an unfinished upload is left"
    collect(store, 1, grace_s=-5.0)
    assert {k.split("/")[3] for k in fake.objects if k.startswith(f"{TOP}data/")} == {found.attempt}


WRITES = ("PUT", "START", "PART", "COMPLETE")


READS = ("GET", "HEAD", "LIST")


TRANSIENT: dict[str, list[tuple[tuple[str, ...], str, dict[str, object]]]] = {
    "statuses": [
        ((*WRITES, *READS), "status", {"code": "SlowDown"}),
        ((*WRITES, *READS), "status", {"code": "ServiceUnavailable"}),
        ((*WRITES, *READS), "status", {"status": 500, "code": "InternalError"}),
        ((*WRITES, *READS), "status", {"status": 502, "code": "BadGateway"}),
        (WRITES, "status", {"status": 400, "code": "RequestTimeout"}),
        (("PUT",), "status", {"status": 409, "code": "ConditionalRequestConflict", "times": 2}),
        (("START",), "status", {}),  # the sixth failure in a row: more tries than the client libraries make
    ],
    "connections and bodies": [
        ((*WRITES, *READS), "reset", {}),
        (("GET", "LIST"), "reset after headers", {}),
        (("GET",), "wrong range", {"times": 2, "key": "*/data/*"}),
        (("PART", "PUT"), "damage", {}),
    ],
    "answers lost or short": [((*WRITES, *READS), "lost", {}), (("GET", "LIST", "START"), "short", {})],
    "nothing moves, or too slowly": [
        (("PART", "GET", "PUT"), "hang", {"seconds": 5.0}),
        (("GET",), "drip", {"seconds": 0.01, "key": "*safetensors"}),
    ],
}


@pytest.mark.parametrize("what", TRANSIENT)
@pytest.mark.fault("K11")
def test_transient_s3_errors_are_retried_and_the_save_succeeds(fake, what):
    """Each request meets the errors of its list one after the other."""
    store = s3_store(fake, timeout_s=0.5, part_timeout_s=1.0)
    rules = [fake.fail(operation, action, **options) for operations, action, options in TRANSIENT[what] for operation in operations]
    began = time.monotonic()
    made = save_after(store)
    assert ckpt.latest(store) == made
    assert_equals(store, AFTER)
    assert time.monotonic() - began < 30
    assert all(rule.done == rule.times for rule in rules), [rule for rule in rules if rule.done != rule.times]
    if what != "answers lost or short":  # an upload whose start had no answer is debris, which is collected later
        assert not fake.uploads
    fake.rules.clear()
    collect(store, 1, grace_s=-5.0)
    assert not fake.uploads and ckpt.verify(store).ok


FATAL = [
    pytest.param({"status": 403, "code": "AccessDenied"}, "need s3:GetObject, PutObject", id="403"),
    pytest.param({"status": 400, "code": "ExpiredToken"}, "have expired: renew them", id="expired credentials"),
    pytest.param({"status": 403, "code": "RequestTimeTooSkewed"}, "set this host's clock", id="clock"),
    pytest.param({"status": 404, "code": "NoSuchBucket"}, "bucket 'bucket' does not exist; create it", id="no bucket"),
    pytest.param({"status": 400, "code": "InvalidRequest"}, "400 InvalidRequest", id="400"),
]


PLACES = ["START", "PART", "COMPLETE", "commit"]


@pytest.mark.parametrize(
    ("where", "options", "words"),
    # Every failure runs once and every place once; the other combinations are slow tests.
    [
        pytest.param(where, *case.values, id=f"{case.id} at {where}", marks=[] if i % 4 == k else [pytest.mark.slow])
        for i, case in enumerate(FATAL)
        for k, where in enumerate(PLACES)
    ],
)
@pytest.mark.fault("K12")
def test_permanent_s3_error_fails_at_once_with_the_remedy(store, fake, where, options, words):
    operation, key = ("PUT", "*/commits/*") if where == "commit" else (where, "*")
    rule = fake.fail(operation, "status", key=key, times=99, after=1 if where == "PART" else 0, **options)
    began = time.monotonic()
    with pytest.raises(ckpt.SaveFailed, match=words) as caught:
        save_after(store)
    assert time.monotonic() - began < 2.5 and rule.done <= 3, "it was tried again"
    assert "\n" not in str(caught.value) and "earlier checkpoints are untouched" in str(caught.value)
    assert_untouched(store, fake)


@pytest.mark.parametrize(
    ("where", "action"),
    [
        pytest.param(
            where, action, marks=[] if (where, action) in {("PART", "hang"), ("commit", "status"), ("*", "reset")} else [pytest.mark.slow]
        )
        for where in [*PLACES, "*"]
        for action in ("status", "hang", "reset")
    ],
)
@pytest.mark.fault("K13")
def test_unavailable_service_fails_the_save_by_the_deadline(store, fake, where, action):
    hasty = s3_store(fake, retry_s=0.5, timeout_s=0.5)
    operation, key = ("PUT", "*/commits/*") if where == "commit" else (where, "*")
    fake.fail(operation, action, key=key, times=10_000, seconds=5.0)
    began = time.monotonic()
    with pytest.raises(ckpt.SaveFailed, match=r"tries in \d"):
        save_after(hasty)
    assert time.monotonic() - began < 12
    fake.rules.clear()
    collect(store, 1, grace_s=-5.0)  # a service that does not answer can't abort the upload either
    assert_untouched(store, fake)


@pytest.mark.fault("K14")
def test_commit_with_every_answer_lost_is_still_known_as_ours(store, fake):
    fake.fail("PUT", "lost", key="*/commits/*", times=10_000)
    hasty = s3_store(fake, retry_s=0.3)
    made = save_after(hasty)
    assert fake.requests("PUT") > 3 and ckpt.latest(store) == made


def test_upload_completion_with_a_lost_answer_is_done_once(store, fake):
    fake.fail("COMPLETE", "lost")
    save_after(store)
    assert fake.requests("COMPLETE") == 2 and fake.requests("START") == 1
    assert_equals(store, AFTER)


def test_lost_race_with_a_lost_answer_is_not_taken_for_a_win(fake):
    """Two attempts commit the same step. The second gets an error first, and must not take the first's object for its own."""
    store = s3_store(fake)
    votes = [ckpt.write_shard(store, f"a{i}", 0, [], step=1, epoch=0) for i in range(2)]
    ckpt.commit(store, [votes[0]], step=1, epoch=0, attempt="a0", world=1, meta={})
    fake.fail("PUT", "status", key="*/commits/*", status=500, code="InternalError")
    with pytest.raises(ckpt.CommitExists, match="another attempt .a0"):
        ckpt.commit(store, [votes[1]], step=1, epoch=0, attempt="a1", world=1, meta={})
    again = ckpt.commit(s3_store(fake), [votes[0]], step=1, epoch=0, attempt="a0", world=1, meta={})
    assert again.attempt == "a0", "another process of the same attempt asks again"


def test_identical_content_of_another_creator_is_not_ours(fake):
    store = s3_store(fake)
    store.put("attempts/x/outcome.json", b"same")
    fake.fail("PUT", "lost", times=2)
    with pytest.raises(FileExistsError):
        store.put("attempts/x/outcome.json", b"same")


@pytest.mark.parametrize("rounds", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.fault("K18")
def test_one_of_six_racing_writers_wins_despite_s3_errors(fake, rounds):
    for step in range(1, rounds + 1):
        stores = [s3_store(fake) for _ in range(6)]
        for action in ("lost", "status", "reset"):
            fake.fail("PUT", action, key="*/commits/*", times=3)
        fake.fail("GET", "status", times=2)
        won, lost = race(lambda i, stores=stores: stores[i], step)
        assert len(won) == 1 and len(lost) == 5
        newest = ckpt.latest(stores[0])
        assert newest is not None and (newest.step, newest.attempt) == (step, won[0])
        fake.rules.clear()


@pytest.mark.parametrize("how", ["ignored", "501"])
@pytest.mark.fault("K16")
def test_commit_needs_conditional_writes_unless_switched_off(fake, how, caplog):
    fake.conditional = False
    if how == "501":
        fake.fail("PUT", "status", key="*probes*", status=501, code="NotImplemented", times=99)
        fake.fail("PUT", "status", key="*aux*", status=501, code="NotImplemented")
    with pytest.raises(ckpt.SaveFailed, match=r"If-None-Match.*\?conditional=off"):
        save_in_process(s3_store(fake), BEFORE, random_layout(BEFORE, 1, seed=1))
    assert not [k for k in fake.objects if "commits" in k or "probes" in k]
    alone = s3_store(fake, "s3://bucket/runs/one?conditional=off")
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            save_in_process(alone, BEFORE, random_layout(BEFORE, 1, seed=1), step=step)
    assert caplog.text.count("conditional writes are off") == 1
    assert_equals(alone, BEFORE)
    votes = [ckpt.write_shard(alone, "other", 0, [], step=2, epoch=0)]
    with pytest.raises(ckpt.CommitExists):
        ckpt.commit(alone, votes, step=2, epoch=0, attempt="other", world=1, meta={})


def test_conditional_write_probe_runs_once_and_leaves_nothing(fake):
    store = s3_store(fake)
    for step in (1, 2):
        save_in_process(store, BEFORE, random_layout(BEFORE, 1, seed=1), step=step)
    assert sum("probes" in key for operation, key in fake.log if operation == "PUT") == 2
    assert not [k for k in fake.objects if "probes" in k]
    fake.objects[f"{TOP}probes/left"] = fake.objects[next(iter(fake.objects))]
    collect(store, 1, grace_s=3600.0)
    assert f"{TOP}probes/left" in fake.objects
    collect(store, 1, grace_s=-5.0)
    assert f"{TOP}probes/left" not in fake.objects


def test_wrong_range_or_replaced_object_never_yields_wrong_bytes(store, fake):
    made = save_after(store)
    key = f"{TOP}data/{made.attempt}/r00000.safetensors"
    hasty = s3_store(fake, retry_s=0.3)
    fake.fail("GET", "wrong range", key="*safetensors", times=10_000)
    with pytest.raises(ckpt.CheckpointCorrupt, match="asked for bytes"):
        ckpt.open(hasty).read("large")
    fake.rules.clear()
    with hasty.open_read(f"data/{made.attempt}/r00000.safetensors") as reader:
        fake.objects[key].etag = '"another"'
        with pytest.raises(OSError, match="was replaced while it was read"):
            reader.read_into(0, memoryview(bytearray(4096)))
    assert_equals(store, AFTER)


def test_upload_that_the_service_stops_taking_is_sent_again(fake):
    """The body is larger than the sockets' buffers, so the client waits for the service while it sends."""
    store = s3_store(fake, part_bytes=64 << 20, retry_s=20.0)
    fake.fail("PUT", "stall", seconds=60.0)
    began = time.monotonic()
    store.put_stream("data/x/r", chunks(40 << 20), 40 << 20)
    assert time.monotonic() - began < 30 and fake.requests("PUT") == 2
    assert store.get("data/x/r") == content(40 << 20)


def test_verify_finds_upload_damage_without_s3_checksums(fake):
    store = s3_store(fake, checksums=False)
    fake.fail("PART", "damage", after=1)
    save_after(store)
    (problem,) = ckpt.verify(store).problems
    assert "large" in problem.tensors
    assert not [h for h in fake.log if h[0] == "x-amz-checksum-crc32"]


@pytest.mark.fault("K29")
def test_stale_listing_hides_no_data_and_revives_no_lost_commit(store, fake):
    attempt = ckpt.latest(store).attempt  # type: ignore[union-attr]
    fake.hidden = {k for k in fake.objects if attempt in k}
    assert ckpt.latest(store).step == 10, "data that the listing lacks is asked for by name"  # type: ignore[union-attr]
    made = save_after(store)
    fake.hidden = {f"{TOP}{made.key}"}
    assert ckpt.latest(store).step == 10  # type: ignore[union-attr]
    fake.hidden = set()
    assert ckpt.latest(store) == made
    gone = fake.objects.pop(f"{TOP}data/{made.attempt}/r00000.safetensors")
    assert ckpt.latest(store).step == 10  # type: ignore[union-attr]
    fake.objects[f"{TOP}data/{made.attempt}/r00000.safetensors"] = gone
    fake.fail("GET", "status", key=f"*{made.key}", status=404, code="NoSuchKey")
    assert ckpt.latest(store).step == 10, "listed, then gone"  # type: ignore[union-attr]


def test_parts_go_in_parallel_within_the_budget(fake):
    store = s3_store(fake, parallel=3)
    fake.fail("PART")
    fake.fail("PART", "company")
    store.put_stream("data/x/r", chunks(40 << 20), 40 << 20)
    assert fake.requests("PART") == 9 and 2 <= fake.busiest <= 3
    fake.busiest = 0
    with store.open_read("data/x/r") as reader:
        reader.expect([(offset, 1 << 20) for offset in range(0, 40 << 20, 1 << 20)])
        view = memoryview(bytearray(1 << 20))
        for offset in range(0, 40 << 20, 1 << 20):
            reader.read_into(offset, view)
    assert fake.busiest <= 3 and fake.requests("GET") == 40, "each announced range is fetched once"


def test_listings_of_many_pages_are_whole(store, fake):
    fake.page = 2
    assert len(store.list("data/")) == 4 and [c.step for c in ckpt.ls(store)] == [10]
    assert_equals(store, BEFORE)


def test_batch_deletion_names_each_object_that_stays(store, fake):
    keys = [f"data/many/r{n:05d}.safetensors" for n in range(1003)]
    for key in keys:
        fake.objects[TOP + key] = next(iter(fake.objects.values()))
    fake.undeletable = {TOP + keys[7]: ["AccessDenied"], TOP + keys[8]: ["SlowDown", "InternalError"], TOP + keys[1001]: ["AccessDenied"]}
    fake.fail("BATCH")
    gone = dict(store.delete_many([*keys, "data/many/never-there.json"]))
    assert {k for k, error in gone.items() if error} == {keys[7], keys[1001]} and len(gone) == 1004
    assert all("AccessDenied" in str(gone[k]) and k in str(gone[k]) for k in (keys[7], keys[1001]))
    assert {k for k in keys if TOP + k in fake.objects} == {keys[7], keys[1001]}
    # One request was throttled as a whole, and one more was needed for an object whose deletion failed twice.
    assert fake.requests("BATCH") == 1 + 3 + 1 and fake.requests("DELETE") == 0
    fake.fail("BATCH", times=1000)
    stays = dict(s3_store(fake, retry_s=0.3).delete_many(keys[:9]))
    assert all(isinstance(error, OSError) and "SlowDown" in str(error) for error in stays.values()), "a service that stays down"


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (405, "MethodNotAllowed"), (400, "MissingContentMD5")])
def test_a_service_without_batches_gets_single_requests(store, fake, status, code):
    fake.fail("BATCH", status=status, code=code, times=1000)
    save_after(store)
    report = collect(store, 1, grace_s=-5.0)
    assert not report.problems and len(report.deleted) == 1 and fake.requests("BATCH") == 1 and fake.requests("DELETE") > 4
    assert len({k.split("/")[3] for k in fake.objects if k.startswith(f"{TOP}data/")}) == 1


@pytest.mark.fault("K28")
def test_collection_uses_the_clock_of_the_service_not_the_host(store, fake, monkeypatch):
    real = time.time
    for skew in (-86400.0, 86400.0):
        monkeypatch.setattr("time.time", lambda skew=skew: real() + skew)
        fake.now = real
        ckpt.write_shard(store, "inflight", 0, [], step=20, epoch=0)
        assert collect(store, 1).swept == ()
        fake.now = lambda: real() + 4000
        assert collect(store, 1).swept == ("inflight",)
    save_in_process(store, BEFORE, random_layout(BEFORE, 1, seed=1), step=30)
    assert [c.step for c in ckpt.ls(store)] == [10, 30]


def test_collection_aborts_only_stale_uploads_of_its_own_root(store, fake):
    young = s3_store(fake)._fs.call_s3("create_multipart_upload", Bucket="bucket", Key=f"{TOP}data/y/r")["UploadId"]
    old = s3_store(fake)._fs.call_s3("create_multipart_upload", Bucket="bucket", Key=f"{TOP}data/o/r")["UploadId"]
    other = s3_store(fake)._fs.call_s3("create_multipart_upload", Bucket="bucket", Key="runs/two/data/o/r")["UploadId"]
    fake.uploads[old].began -= 4000
    fake.uploads[other].began -= 4000
    collect(store, 1)
    assert set(fake.uploads) == {young, other}
    fake.uploads[young].began -= 20 * 3600  # another process, which may be sending a large object over a slow line
    ckpt.gc(store, ckpt.Retention())
    assert set(fake.uploads) == {young, other}
    fake.uploads[young].began -= 5 * 3600
    ckpt.gc(store, ckpt.Retention())
    assert set(fake.uploads) == {other}

    def while_uploading():
        for index, chunk in enumerate(chunks(12 << 20)):
            if index == 8:
                for upload in fake.uploads.values():
                    upload.began -= 4000
                collect(store, 1)
            yield chunk

    store.put_stream("data/z/r", while_uploading(), 12 << 20)
    assert store.get("data/z/r") == content(12 << 20), "its own upload, though it looks old"


def test_missing_credentials_or_service_raise_a_clear_error(fake, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(PermissionError, match="AWS_ACCESS_KEY_ID") as caught:
        ckpt.S3Store("s3://bucket/x", ckpt.S3Options(endpoint=fake.url)).get("commits/x")
    assert caught.value.errno == errno.EACCES
    gone = s3_store("http://127.0.0.1:9", retry_s=0.2)
    with pytest.raises(Undecided, match=r"s3://bucket/runs/one.*127.0.0.1:9.*tries in"):
        ckpt.latest(gone)


def test_ranks_on_threads_share_a_store(fake):
    store = s3_store(fake)

    def rank(i):
        for k in range(3):
            store.put_stream(f"data/a{k}/r{i}", chunks(6 << 20, seed=i), 6 << 20)
            assert store.get(f"data/a{k}/r{i}") == content(6 << 20, seed=i)

    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(rank, range(4), timeout=60))
