"""The same operations against moto's S3 server, an independent implementation of the protocol.

moto never fails and never answers 409. It dates every unfinished upload to 2010, and reads the whole object for a ranged request, so the
objects here are small. Failures here come from a proxy before moto; all other failures are in test_checkpoint_s3.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.checkpoint.checkpoint_ranks import load_rank, save_rank
from tests.checkpoint.checkpoint_support import adam_like, assert_equals, load_in_process, random_bits, random_layout, save_in_process
from tests.checkpoint.stores import collect, s3_store
from tests.checkpoint.test_checkpoint_stores import chunks, content
from tests.moto_server import moto_server
from tests.ranks import run_gloo
from vescale_ray import checkpoint as ckpt
from vescale_ray.checkpoint.stores.store import KeyExists, KeyMissing

A, B = adam_like(seed=1), {**adam_like(seed=2), ("large", "param"): random_bits((1_600_000,), torch.float32, 3)}


@pytest.fixture(scope="module")
def server():
    with moto_server() as url:
        yield url


@pytest.fixture
def bucket(server):
    """Root URL of a bucket of the test's own."""
    name = f"bucket-{np.random.default_rng().integers(1 << 60)}"
    s3_store(server)._fs.call_s3("create_bucket", Bucket=name)
    return f"s3://{name}/runs/one"


def test_s3_store_operations_work_against_moto(server, bucket):
    store = s3_store(server, bucket)
    assert store.list("data/") == [] and store.size("data/x") is None and not store.delete("data/x")
    with pytest.raises(KeyMissing):
        store.get("data/x")
    for key, size in (("data/a/small", 5000), ("data/a/parts", (6 << 20) + 77)):
        store.put_stream(key, chunks(size), size)
        assert store.get(key) == content(size) and store.size(key) == size
        with pytest.raises(KeyExists):
            store.put_stream(key, chunks(size, seed=1), size)
        with store.open_read(key) as reader:
            view = memoryview(bytearray(4096))
            assert reader.read_into(size - 100, view) == 100 and view[:100] == content(size)[-100:]
    store.put("commits/a.json", b"1")
    with pytest.raises(KeyExists):
        store.put("commits/a.json", b"1")
    assert [(e.key, e.bytes) for e in store.list("data/a/")] == [("data/a/parts", (6 << 20) + 77), ("data/a/small", 5000)]
    assert abs(store.list("commits/")[0].modified - store.clock()) < 30
    assert store.delete("commits/a.json") and store.list("commits/") == []


def test_two_creators_of_one_large_object_have_one_winner(server, bucket):
    """The completion has the condition too. Both upload, but only one upload is completed."""
    store, other = s3_store(server, bucket), s3_store(server, bucket)

    def meanwhile():
        for index, chunk in enumerate(chunks(6 << 20)):
            if index == 3:
                other.put_stream("data/x/r", chunks(6 << 20, seed=1), 6 << 20)
            yield chunk

    with pytest.raises(KeyExists):
        store.put_stream("data/x/r", meanwhile(), 6 << 20)
    assert store.get("data/x/r") == content(6 << 20, seed=1)
    assert store.tidy("data/", 0.0) == 0, "the loser's upload was aborted"


@contextlib.contextmanager
def before(server: str, answer: Callable[[str, str], str | None]) -> Iterator[str]:
    """A proxy before moto that asks ``answer(method, path)`` for an error.

    An S3 error code is sent in place of moto's answer, as status 400 or 503. "lost" carries out the request and closes without an answer.
    """

    class Proxy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            error = answer(self.command, self.path)
            if error in (None, "lost"):
                onward = http.client.HTTPConnection(server.removeprefix("http://"), timeout=30)
                onward.request(self.command, self.path, body, {k: v for k, v in self.headers.items() if k.lower() != "expect"})
                response = onward.getresponse()
                status, headers, content = response.status, response.getheaders(), response.read()
                onward.close()
                if error == "lost":
                    self.close_connection = True
                    return
            else:
                status, headers = 503 if error == "SlowDown" else 400, [("Content-Type", "application/xml")]
                content = f"<Error><Code>{error}</Code><Message>no</Message></Error>".encode()
            self.send_response_only(status)
            length = next((v for k, v in headers if k.lower() == "content-length"), str(len(content)))
            for name, value in headers:
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        proxy.daemon_threads = True
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{proxy.server_port}"
        proxy.shutdown()
        thread.join()


@pytest.mark.parametrize("error", [pytest.param("SlowDown", marks=pytest.mark.slow), "lost"])
def test_a_checkpoints_whole_life_survives_failing_s3_requests(server, bucket, error):
    """Every third request of any kind fails until the collection."""
    count = iter(range(1_000_000))
    with before(server, lambda *_: error if next(count) % 3 == 2 else None) as url:
        store = s3_store(url, bucket, retry_s=20.0)
        save_in_process(store, A, random_layout(A, 3, seed=1), step=10)
        made = save_in_process(store, B, random_layout(B, 2, seed=2), step=20, block_bytes=1 << 20, chunk_bytes=4 << 20)
        assert ckpt.latest(store) == made and next(count) > 30
        load_in_process(ckpt.open(store), B, random_layout(B, 5, seed=9))
    direct = s3_store(server, bucket)
    assert ckpt.verify(direct).ok
    assert_equals(direct, A, ckpt.ls(direct)[0].name)
    upload = direct._fs.call_s3("create_multipart_upload", Bucket=bucket.split("/")[2], Key="runs/one/data/dead/r")["UploadId"]
    assert collect(direct, 1).deleted == ("e0000-s000000000010",) and [c.step for c in ckpt.ls(direct)] == [20]
    assert upload not in json.dumps(direct._fs.call_s3("list_multipart_uploads", Bucket=bucket.split("/")[2]), default=str)
    assert len(direct.list("data/")) == 4
    assert_equals(direct, B)


@pytest.mark.parametrize("where", ["partNumber=2", "/commits/"])
def test_credentials_expiring_mid_upload_fail_only_that_save(server, bucket, where):
    direct = s3_store(server, bucket)
    made = save_in_process(direct, A, random_layout(A, 2, seed=1), step=10)
    expired = threading.Event()

    def answer(method: str, path: str) -> str | None:
        if method == "PUT" and where in path:
            expired.set()
        return "ExpiredToken" if expired.is_set() else None

    with before(server, answer) as url, pytest.raises(ckpt.SaveFailed, match="have expired: renew them"):
        save_in_process(
            s3_store(url, bucket, retry_s=3.0), B, random_layout(B, 1, seed=2), step=20, block_bytes=1 << 20, chunk_bytes=4 << 20
        )
    assert expired.is_set() and ckpt.latest(direct) == made
    assert_equals(direct, A)
    ckpt.gc(direct, ckpt.Retention(keep_last=2), grace=ckpt.Grace(-5.0, -5.0, -5.0))
    assert len(direct.list("data/")) == 4
    assert not direct._fs.call_s3("list_multipart_uploads", Bucket=bucket.split("/")[2]).get("Uploads")


def test_missing_bucket_raises_a_clear_error_and_is_not_created(server):
    store = s3_store(server, "s3://nobodys-bucket/x")
    with pytest.raises(ckpt.SaveFailed, match="bucket 'nobodys-bucket' does not exist; create it"):
        save_in_process(store, A, random_layout(A, 1, seed=1))
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{server}/nobodys-bucket", timeout=10)


@pytest.mark.slow
def test_ranks_save_to_s3_by_url_and_others_load(server, bucket, monkeypatch):
    """Votes, outcome and data go through the bucket. Two ranks save, three load, and torchrun's environment alone sets them up."""
    aws = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL_S3": server, "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in aws.items():
        monkeypatch.setenv(name, value)
    truth = run_gloo(2, with_environment, aws, "save", bucket)[0]["fsdp2"][1]
    back = run_gloo(3, with_environment, aws, "load", bucket)
    for rank in back:
        ((facts, _, state),) = rank
        assert facts[:2] == (2, {"consumed": 12})
        assert truth.keys() == state.keys() and all(truth[k].tobytes() == state[k].tobytes() for k in truth)
    assert ckpt.verify(bucket).ok


def with_environment(rank, world, environment, what, root):
    os.environ.update(environment)  # the fork server has its own environment
    return save_rank(rank, world, {"fsdp2": root}) if what == "save" else load_rank(rank, world, [(root, "fsdp2")])
