"""A store in an S3 bucket, or a compatible service with conditional writes.

A commit object is one PUT that the service performs only if the key is free (``If-None-Match: *``). Larger objects are uploaded in parts,
and nothing is visible until all are there. On any exception the upload is aborted, never completed. Each creation carries a unique token,
so that a request whose answer was lost is recognised and not taken for another's.
"""

from __future__ import annotations

import base64
import errno
import logging
import re
import threading
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from functools import partial
from importlib.util import find_spec
from typing import Any

from ..faults import fault_point
from ..format.digest import one_ahead
from .ranges import ParallelReader
from .s3_calls import (
    MIB,
    RETRIED_CODES,
    NotSupported,
    PreconditionFailed,
    S3Calls,
    S3Options,
    Transient,
    Undecided,
    UploadGone,
    parse_s3_url,
)
from .store import Entry, KeyExists, KeyMissing, check_key, delete_each, is_key

_log = logging.getLogger(__name__)
_TOKEN = "vescale-ray-token"
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_MOST_PARTS = 10_000
_MOST_DELETED = 1000


class S3Store:
    """Objects below ``s3://bucket/prefix``. Makes no request before the first operation, and never creates a bucket.

    Args:
        url: ``s3://bucket/prefix``, optionally with ``?endpoint=..&region=..`` and so on, see :class:`S3Options`.
        options: the same options and more; the URL takes precedence.

    Raises:
        ValueError: the URL or an option is malformed, or botocore is not installed.
    """

    request_bytes = 4 << 20

    def __init__(self, url: str, options: S3Options | None = None) -> None:
        if find_spec("botocore") is None:
            raise ValueError(f"checkpoint root {url!r}: S3 needs botocore; pip install 'vescale-ray[s3]'")
        self._url = url
        self._bucket, self._prefix, self.options = parse_s3_url(url, options)
        self._given = options
        self._calls = S3Calls(self._bucket, self.options)
        self._conditional: bool | None = None if self.options.conditional else False
        self._proven = False
        self._uploads: set[str] = set()
        self._batches = True

    def __repr__(self) -> str:
        return f"S3Store({self.describe()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return S3Store, (self._url, self._given)

    def describe(self, key: str = "") -> str:
        return f"s3://{self._bucket}/{self._prefix}{key}" if key else f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    # -- creating

    def put_stream(self, key: str, chunks: Iterable[memoryview], size: int) -> None:
        part_bytes = max(self.options.part_bytes, -(-size // _MOST_PARTS // MIB) * MIB)
        if size <= part_bytes:
            body = bytearray(size)
            _gather(key, chunks, body)
            fault_point("data.created")
            fault_point("data.written")
            self._create(key, body)
        else:
            if self.size(key) is not None:
                raise KeyExists(errno.EEXIST, "exists already", self.describe(key))
            self._upload(key, chunks, size, part_bytes)
        fault_point("data.published")

    def put(self, key: str, data: bytes) -> None:
        commit = check_key(key).startswith("commits/")
        if commit:
            self._require_exclusive_creation()
            fault_point("commit.tmp_synced")
        self._create(key, data)
        if commit:
            fault_point("commit.linked")
            fault_point("commit.published")

    def _create(self, key: str, body: bytes | bytearray) -> None:
        """One PUT that succeeds only if the key is free. After a lost answer, checks whether it took effect."""
        token = uuid.uuid4().hex
        if self._conditional is False and self.size(key) is not None:
            raise KeyExists(errno.EEXIST, "exists already", self.describe(key))

        def request(client: Any) -> None:
            condition = {} if self._conditional is False else {"IfNoneMatch": "*"}
            metadata = {_TOKEN: token}
            client.put_object(Bucket=self._bucket, Key=self._key(key), Body=body, Metadata=metadata, **condition, **self._checksum(body))

        what = f"PUT {self.describe(key)}"
        try:
            try:
                self._calls.do(what, request)
            except NotSupported:
                if self._conditional is False or key.startswith("commits/"):
                    raise
                # Keys other than commits' are unique to their writer, so the condition guards nothing there.
                self._conditional = False
                self._calls.do(what, request)
        except PreconditionFailed as error:
            if not self._is_mine(key, token, body):
                raise KeyExists(errno.EEXIST, "exists already", self.describe(key)) from error
        except Undecided:
            with suppress(OSError):
                if self._is_mine(key, token, body):
                    return
            raise
        if self._conditional is False and not self._is_mine(key, token, body):
            raise KeyExists(errno.EEXIST, "was replaced by another writer", self.describe(key))

    def _is_mine(self, key: str, token: str, body: bytes | bytearray | None) -> bool:
        """Whether this call created the object at ``key``."""
        try:
            found = self._head(key)
        except KeyMissing:
            return False
        theirs = found.get("Metadata", {}).get(_TOKEN)
        if theirs is not None:
            return bool(theirs == token)
        # If the service drops metadata, the content decides; a commit object names its attempt.
        return body is not None and found["ContentLength"] == len(body) and self.get(key) == body

    def _require_exclusive_creation(self) -> None:
        """Before the first commit, check with a probe key that the service refuses a second creation. Runs once."""
        if self._proven:
            return
        if not self.options.conditional:
            _log.warning(
                "%s: conditional writes are off; two processes that commit at once can overwrite each other's commit, so make sure that "
                "only one ever does",
                self.describe(),
            )
            self._proven = True
            return
        key = f"{self._prefix}probes/{uuid.uuid4().hex}"
        where = f"PUT s3://{self._bucket}/{key}"

        def request(client: Any) -> None:
            client.put_object(Bucket=self._bucket, Key=key, Body=b"1", IfNoneMatch="*", **self._checksum(b"1"))

        refused = False
        try:
            with suppress(PreconditionFailed):  # the answer to the first PUT was lost
                self._calls.do(where, request)
            try:
                self._calls.do(where, request)
            except PreconditionFailed:
                refused = True
        except NotSupported:
            pass
        finally:
            with suppress(OSError):
                self._calls.do(f"DELETE s3://{self._bucket}/{key}", partial(self._delete, key))
        if not refused:
            raise OSError(
                errno.ENOTSUP,
                f"{self.describe()}: this service performs a PUT with If-None-Match: * though the key exists (or does not know the "
                "header), so two processes could both commit; use one with conditional writes, or add ?conditional=off if only one "
                "process ever commits",
            )
        self._proven = True

    def _upload(self, key: str, chunks: Iterable[memoryview], size: int, part_bytes: int) -> None:
        token, name = uuid.uuid4().hex, self._key(key)
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self.options.checksums else {}
        upload: str = self._calls.do(
            f"start of the upload of {self.describe(key)}",
            lambda c: c.create_multipart_upload(Bucket=self._bucket, Key=name, Metadata={_TOKEN: token}, **algorithm)["UploadId"],
        )
        self._uploads.add(upload)
        cancel = threading.Event()
        pool = ThreadPoolExecutor(self.options.parallel, thread_name_prefix="checkpoint-s3")
        try:
            fault_point("data.created")
            parts = self._send_parts(key, upload, chunks, size, part_bytes, pool, cancel)
            fault_point("data.written")
            self._complete(key, upload, parts, token)
        except BaseException:
            # Also on Ctrl-C: first let parts in flight end (their time is bounded), or the service might keep them.
            cancel.set()
            pool.shutdown(wait=True, cancel_futures=True)
            self._abort(name, upload)
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            self._uploads.discard(upload)

    def _send_parts(
        self,
        key: str,
        upload: str,
        chunks: Iterable[memoryview],
        size: int,
        part_bytes: int,
        pool: ThreadPoolExecutor,
        cancel: threading.Event,
    ) -> list[dict[str, Any]]:
        """Fill parts from the chunks and send them, at most ``parallel`` at a time. A buffer is reused once its part is sent, since
        touching fresh memory costs ten times as much as a copy into used memory."""
        pending: dict[Future[dict[str, Any]], bytearray] = {}
        free: list[bytearray] = []
        parts: list[dict[str, Any]] = []

        def take_finished(until: int) -> None:
            while len(pending) > until:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    free.append(pending.pop(future))
                    parts.append(future.result())

        def send(number: int, body: bytearray) -> dict[str, Any]:
            checksum = self._checksum(body)
            answer = self._calls.do(
                f"PUT {self.describe(key)}, part {number}",
                lambda c: c.upload_part(Bucket=self._bucket, Key=self._key(key), UploadId=upload, PartNumber=number, Body=body, **checksum),
                cancel=cancel,
            )
            return {"PartNumber": number, "ETag": answer["ETag"], **checksum}

        number, total, filled = 0, 0, 0
        body = bytearray(min(part_bytes, size))

        def submit() -> None:
            nonlocal number, body, filled
            number += 1
            pending[pool.submit(send, number, body)] = body
            take_finished(self.options.parallel - 1)
            fault_point("data.chunk", number - 1)
            body = free.pop() if free else bytearray(part_bytes)
            filled = 0

        with closing(one_ahead(iter(chunks))) as made:
            for chunk in made:
                total += len(chunk)
                if total > size:
                    break
                while len(chunk):
                    count = min(len(chunk), part_bytes - filled)
                    memoryview(body)[filled : filled + count] = chunk[:count]
                    chunk = chunk[count:]
                    filled += count
                    if filled == part_bytes and number * part_bytes + filled < size:
                        submit()
        if total != size:
            raise _another_length(key, total, size)
        del body[filled:]
        submit()
        take_finished(0)
        return sorted(parts, key=lambda part: int(part["PartNumber"]))

    def _complete(self, key: str, upload: str, parts: list[dict[str, Any]], token: str) -> None:
        def request(client: Any) -> None:
            condition = {} if self._conditional is False else {"IfNoneMatch": "*"}
            client.complete_multipart_upload(
                Bucket=self._bucket, Key=self._key(key), UploadId=upload, MultipartUpload={"Parts": parts}, **condition
            )

        what = f"completion of {self.describe(key)}"
        try:
            try:
                self._calls.do(what, request, conflict_again=False)
            except NotSupported:
                if self._conditional is False:
                    raise
                self._conditional = False
                self._calls.do(what, request, conflict_again=False)
        except (PreconditionFailed, UploadGone, Undecided) as error:
            # This may be a second try, after the first one succeeded.
            if self._is_mine(key, token, None):
                return
            if isinstance(error, PreconditionFailed):
                raise KeyExists(errno.EEXIST, "exists already", self.describe(key)) from error
            raise

    def _abort(self, name: str, upload: str) -> None:
        def request(client: Any) -> None:
            client.abort_multipart_upload(Bucket=self._bucket, Key=name, UploadId=upload)

        # The error must not wait for a service that is down; tidy() finds the upload later.
        brief = S3Calls(self._bucket, replace(self.options, retry_s=min(10.0, self.options.retry_s)))
        brief._made = self._calls._made
        try:
            brief.do(f"abort of the upload of s3://{self._bucket}/{name}", request)
        except UploadGone:
            pass
        except OSError as error:
            _log.warning("%s; its parts stay until a collection after the grace time", error.strerror or error)

    # -- reading

    def get(self, key: str) -> bytes:
        def request(client: Any) -> bytes:
            answer = client.get_object(Bucket=self._bucket, Key=self._key(key))
            data = bytearray(answer["ContentLength"])
            with closing(answer["Body"]) as body:
                _receive(body, memoryview(data), self.options.part_timeout_s, None)
            return bytes(data)

        return self._calls.do(f"GET {self.describe(key)}", request)

    @contextmanager
    def open_read(self, key: str) -> Iterator[ParallelReader]:
        found = self._head(key)
        size, etag = int(found["ContentLength"]), found.get("ETag")

        def fetch(offset: int, view: memoryview, cancel: threading.Event) -> None:
            self._fetch(key, etag, size, offset, view, cancel)

        reader = ParallelReader(fetch, size, parallel=self.options.parallel, range_bytes=self.options.range_bytes)
        try:
            yield reader
        finally:
            reader.close()

    def _fetch(self, key: str, etag: str | None, size: int, offset: int, view: memoryview, cancel: threading.Event) -> None:
        end = offset + len(view)
        condition = {"IfMatch": etag} if etag else {}

        def request(client: Any) -> None:
            answer = client.get_object(Bucket=self._bucket, Key=self._key(key), Range=f"bytes={offset}-{end - 1}", **condition)
            with closing(answer["Body"]) as body:
                stated = _RANGE.fullmatch(answer.get("ContentRange") or "")
                if stated is None and (offset, end) != (0, size) or stated and (int(stated[1]), int(stated[2])) != (offset, end - 1):
                    raise Transient(errno.EIO, f"asked for bytes {offset} to {end - 1}, got {answer.get('ContentRange') or 'no range'}")
                _receive(body, view, self.options.part_timeout_s, cancel)

        try:
            self._calls.do(f"GET {self.describe(key)}, bytes {offset} to {end - 1}", request, cancel=cancel)
        except PreconditionFailed as error:
            raise OSError(errno.ESTALE, f"{self.describe(key)} was replaced while it was read") from error

    def size(self, key: str) -> int | None:
        try:
            return int(self._head(key)["ContentLength"])
        except KeyMissing:
            return None

    def list(self, prefix: str) -> list[Entry]:
        found: list[Entry] = []
        for page in self._pages("list_objects_v2", {"ContinuationToken": "NextContinuationToken"}, prefix):
            for item in page.get("Contents", []):
                key = item["Key"].removeprefix(self._prefix)
                if is_key(key):
                    found.append(Entry(key, int(item["Size"]), item["LastModified"].timestamp()))
        return sorted(found, key=lambda entry: entry.key)

    def clock(self) -> float:
        """The ``Date`` of an answer, in whole seconds, on the same clock as the objects' times."""
        answer = self._calls.do(
            f"LIST {self.describe()}", lambda c: c.list_objects_v2(Bucket=self._bucket, Prefix=f"{self._prefix}commits/", MaxKeys=1)
        )
        stated = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        try:
            return parsedate_to_datetime(stated).timestamp()
        except (TypeError, ValueError):
            return time.time()

    # -- deleting

    def delete(self, key: str) -> bool:
        if self.size(key) is None:  # the service answers the same whether the object existed or not
            return False
        self._calls.do(f"DELETE {self.describe(key)}", partial(self._delete, self._key(key)))
        return True

    def delete_many(self, keys: Sequence[str]) -> Iterator[tuple[str, OSError | None]]:
        """Delete up to a thousand objects per request, or one by one if the service does not support that request."""
        for start in range(0, len(keys), _MOST_DELETED):
            yield from self._delete_batch(keys[start : start + _MOST_DELETED])

    def _delete_batch(self, keys: Sequence[str]) -> Iterator[tuple[str, OSError | None]]:
        left = {self._key(key): key for key in keys} if self._batches else {}
        what = f"DELETE of {len(keys)} objects below {self.describe()}"
        refused: dict[str, OSError] = {}

        def request(client: Any) -> None:
            """Delete the objects in ``left``. On a retry it requests only those for which the service was too busy."""
            wanted = {"Objects": [{"Key": name} for name in left], "Quiet": True}
            told = {}
            for item in client.delete_objects(Bucket=self._bucket, Delete=wanted).get("Errors", []):
                told[item.get("Key", "")] = f"{item.get('Code', '')} ({item.get('Message', '')})"
            busy = {name: text for name, text in told.items() if name in left and text.split(" ")[0] in RETRIED_CODES}
            for name, text in told.items():
                if name in left and name not in busy:
                    refused[left[name]] = PermissionError(errno.EACCES, f"DELETE {self.describe(left[name])}: {text}")
            for name in [name for name in left if name not in busy]:
                del left[name]
            if busy:
                raise Transient(errno.EIO, f"{len(busy)} objects were not deleted: {next(iter(busy.values()))}")

        again: list[str] = []
        if left:
            try:
                self._calls.do(what, request)
            except Undecided as error:
                refused |= dict.fromkeys(left.values(), error)
            except OSError as error:
                # Some compatible services lack this request and refuse it in many ways. A single deletion tells the real cause.
                _log.warning("%s; they are deleted one by one", error.strerror or error)
                again = list(left.values())
                self._batches = False
        else:
            again = list(keys)
        for key in keys:
            if key not in again:
                yield key, refused.get(key)
        yield from delete_each(self, again)

    def tidy(self, prefix: str, older_than_s: float) -> int:
        """Abort uploads and remove probes older than ``older_than_s`` seconds; never abort an upload of this store object."""
        removed = 0
        now = self.clock()
        if prefix == "commits/":
            for page in self._pages("list_objects_v2", {"ContinuationToken": "NextContinuationToken"}, "probes/"):
                for item in page.get("Contents", []):
                    if now - item["LastModified"].timestamp() >= older_than_s:
                        self._calls.do("DELETE probe", partial(self._delete, item["Key"]))
                        removed += 1
        markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        for page in self._pages("list_multipart_uploads", markers, prefix):
            for item in page.get("Uploads", []):
                old = now - item["Initiated"].timestamp() >= older_than_s
                if old and item["UploadId"] not in self._uploads:
                    self._abort(item["Key"], item["UploadId"])
                    removed += 1
        return removed

    def _pages(self, operation: str, markers: dict[str, str], prefix: str) -> Iterator[dict[str, Any]]:
        position: dict[str, str] = {}

        def request(client: Any) -> dict[str, Any]:
            page: dict[str, Any] = getattr(client, operation)(Bucket=self._bucket, Prefix=self._prefix + prefix, **position)
            return page

        while True:
            page = self._calls.do(f"LIST {self.describe(prefix)}", request)
            yield page
            following = {ours: page[theirs] for ours, theirs in markers.items() if page.get(theirs)}
            if not page.get("IsTruncated") or not following or following == position:
                return
            position = following

    def _delete(self, name: str, client: Any) -> None:
        client.delete_object(Bucket=self._bucket, Key=name)

    def _head(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self._calls.do(
            f"HEAD {self.describe(key)}", lambda c: c.head_object(Bucket=self._bucket, Key=self._key(key))
        )
        return found

    def _checksum(self, body: bytes | bytearray) -> dict[str, str]:
        if not self.options.checksums:
            return {}
        return {"ChecksumCRC32": base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()}

    def _key(self, key: str) -> str:
        return self._prefix + check_key(key)


def _receive(body: Any, view: memoryview, timeout_s: float, cancel: threading.Event | None) -> None:
    """Fill ``view`` from a response's body within ``timeout_s``, however slowly data arrives.

    A read returns only once all requested bytes are there, and the socket's timeout restarts with every byte. So each read requests what
    should arrive in a quarter of a second at the pace so far.
    """
    began = time.monotonic()
    done, ask = 0, 4096
    while done < len(view):
        data = body.read(min(ask, len(view) - done))
        if not data:
            raise Transient(errno.EIO, f"{done} bytes came of {len(view)}")
        view[done : done + len(data)] = data
        done += len(data)
        spent = time.monotonic() - began
        if spent > timeout_s or cancel is not None and cancel.is_set():
            raise Transient(errno.ETIMEDOUT, f"timed out: {done} of {len(view)} bytes in {spent:.1f} s")
        ask = max(1024, min(MIB, int(done / max(spent, 1e-3) / 4)))


def _gather(key: str, chunks: Iterable[memoryview], body: bytearray) -> None:
    position, total = 0, len(body)
    for chunk in chunks:
        if position + len(chunk) <= total:
            body[position : position + len(chunk)] = chunk
        position += len(chunk)
    if position != total:
        raise _another_length(key, position, total)


def _another_length(key: str, found: int, size: int) -> ValueError:
    return ValueError(f"{key}: {found} bytes were streamed, {size} announced")
