"""A store in an S3 bucket, or a compatible service with conditional writes, through s3fs.

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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

from ..faults import fault_point
from ..format.digest import one_ahead
from .fsspec_store import FsspecStore
from .s3_errors import RETRIED_CODES, NotSupported, PreconditionFailed, Transient, Undecided, UploadGone
from .s3_options import MIB, S3Options, parse_s3_url
from .s3_requests import Answer, call, file_system
from .store import Entry, KeyMissing, check_key, delete_each, is_key

_log = logging.getLogger(__name__)
_TOKEN = "vescale-ray-token"
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_MOST_PARTS = 10_000
_MOST_DELETED = 1000


class S3Store(FsspecStore):
    """Objects below ``s3://bucket/prefix``. Makes no request before the first operation, and never creates a bucket.

    Args:
        url: ``s3://bucket/prefix``, optionally with ``?endpoint=..&region=..`` and so on, see :class:`S3Options`.
        options: the same options and more; the URL takes precedence.

    Raises:
        ValueError: the URL or an option is malformed.
    """

    def __init__(self, url: str, options: S3Options | None = None) -> None:
        self._bucket, self._prefix, self.options = parse_s3_url(url, options)
        super().__init__(f"s3://{self._bucket}/{self._prefix}".rstrip("/"))
        self._parallel, self._range_bytes = self.options.parallel, self.options.range_bytes
        self._atomic = self.options.conditional
        self._proven = False
        self._uploads: set[str] = set()
        self._batches = True

    def __reduce__(self) -> tuple[Any, ...]:
        return S3Store, (f"s3://{self._bucket}/{quote(self._prefix)}", self.options)

    # -- creating

    def put_stream(self, key: str, chunks: Iterable[memoryview], size: int) -> None:
        part_bytes = max(self.options.part_bytes, -(-size // _MOST_PARTS // MIB) * MIB)
        if size <= part_bytes:
            (body,) = _parts(key, chunks, size, part_bytes, lambda _: bytearray(size))
            fault_point("data.created")
            fault_point("data.written")
            self._create(key, body)
        else:
            if self.size(key) is not None:
                raise self._taken(key)
            self._upload(key, chunks, size, part_bytes)
        fault_point("data.published")

    def _write(self, key: str, data: bytes | memoryview, token: str) -> None:
        self._call_if_free(f"PUT {self.describe(key)}", "put_object", key, Metadata={_TOKEN: token}, **self._body(data))

    def _call_if_free(self, what: str, method: str, key: str, **params: Any) -> None:
        """Make a request that takes effect only if the key is free, without the condition if the service does not know it."""
        params |= {"Key": self._key(key), "conflict_again": method == "put_object"}
        if self._atomic:
            try:
                self._call(what, method, IfNoneMatch="*", **params)
                return
            except NotSupported:
                # Keys other than commits' are unique to their writer, so the condition guards nothing there.
                if key.startswith("commits/"):
                    raise
                self._atomic = False
        self._call(what, method, **params)

    def _is_mine(self, key: str, data: bytes | memoryview | None, token: str) -> bool:
        try:
            found = self._head(key)
        except KeyMissing:
            return False
        theirs = found.get("Metadata", {}).get(_TOKEN)
        if theirs is not None:
            return bool(theirs == token)
        # If the service drops metadata, the content decides; a commit object names its attempt.
        return data is not None and found["ContentLength"] == len(data) and self.get(key) == data

    def _before_commit(self) -> None:
        """Check, once, with a probe key that the service refuses a second creation."""
        if self._proven:
            return
        if not self.options.conditional:
            _log.warning(
                "%s: conditional writes are off; two processes that commit at once can overwrite each other's commit, so make sure that "
                "only one ever does",
                self.describe(),
            )
        elif not self._refuses_second_creation():
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
        what = f"start of the upload of {self.describe(key)}"
        upload: str = self._call(what, "create_multipart_upload", Key=name, Metadata={_TOKEN: token}, **algorithm)["UploadId"]
        self._uploads.add(upload)
        cancel = threading.Event()
        pool = ThreadPoolExecutor(self._parallel, thread_name_prefix="checkpoint-s3")
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
    ) -> list[Answer]:
        """Send the stream in parts, at most ``parallel`` at a time. A buffer is reused once its part is sent, since touching fresh memory
        costs ten times as much as a copy into used memory."""
        sent: list[Future[Answer]] = []
        buffers: list[bytearray] = []

        def buffer(index: int) -> bytearray:
            if index < self._parallel:
                buffers.append(bytearray(min(part_bytes, size)))
            else:
                sent[index - self._parallel].result()
            return buffers[index % self._parallel]

        def send(number: int, data: memoryview) -> Answer:
            body = self._body(data)
            what = f"PUT {self.describe(key)}, part {number}"
            answer = self._call(what, "upload_part", cancel=cancel, Key=self._key(key), UploadId=upload, PartNumber=number, **body)
            del body["Body"]
            return {"PartNumber": number, "ETag": answer["ETag"], **body}

        with closing(_parts(key, chunks, size, part_bytes, buffer)) as parts:
            for index, part in enumerate(parts):
                sent.append(pool.submit(send, index + 1, part))
                fault_point("data.chunk", index)
        return [part.result() for part in sent]

    def _complete(self, key: str, upload: str, parts: list[Answer], token: str) -> None:
        what = f"completion of {self.describe(key)}"
        try:
            self._call_if_free(what, "complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": parts})
        except (PreconditionFailed, UploadGone, Undecided) as error:
            # This may be a second try, after the first one succeeded.
            if self._is_mine(key, None, token):
                return
            if isinstance(error, PreconditionFailed):
                raise self._taken(key) from error
            raise

    def _abort(self, name: str, upload: str) -> None:
        # The error must not wait for a service that is down; tidy() finds the upload later.
        brief = replace(self.options, retry_s=min(10.0, self.options.retry_s))
        what = f"abort of the upload of s3://{self._bucket}/{name}"
        try:
            call(self._fs, brief, what, "abort_multipart_upload", Bucket=self._bucket, Key=name, UploadId=upload)
        except UploadGone:
            pass
        except OSError as error:
            _log.warning("%s; its parts stay until a collection after the grace time", error.strerror or error)

    # -- reading

    def get(self, key: str) -> bytes:
        return bytes(self._call(f"GET {self.describe(key)}", "get_object", Key=self._key(key))["Body"])

    def _stat(self, key: str) -> tuple[int, str | None]:
        found = self._head(key)
        return int(found["ContentLength"]), found.get("ETag")

    def _fetch(self, key: str, tag: str | None, size: int, offset: int, view: memoryview, cancel: threading.Event) -> None:
        end = offset + len(view)
        condition = {"IfMatch": tag} if tag else {}

        def accept(answer: Answer) -> memoryview:
            stated = _RANGE.fullmatch(answer.get("ContentRange") or "")
            if stated is None and (offset, end) != (0, size) or stated and (int(stated[1]), int(stated[2])) != (offset, end - 1):
                raise Transient(errno.EIO, f"asked for bytes {offset} to {end - 1}, got {answer.get('ContentRange') or 'no range'}")
            return view

        what, part = f"GET {self.describe(key)}, bytes {offset} to {end - 1}", f"bytes={offset}-{end - 1}"
        try:
            self._call(what, "get_object", accept=accept, cancel=cancel, Key=self._key(key), Range=part, **condition)
        except PreconditionFailed as error:
            raise OSError(errno.ESTALE, f"{self.describe(key)} was replaced while it was read") from error

    def list(self, prefix: str) -> list[Entry]:
        found: list[Entry] = []
        for page in self._pages("list_objects_v2", {"ContinuationToken": "NextContinuationToken"}, prefix):
            for item in page.get("Contents", []):
                key = item["Key"].removeprefix(self._prefix)
                if is_key(key):
                    found.append(Entry(key, int(item["Size"]), item["LastModified"].timestamp()))
        return sorted(found, key=lambda entry: entry.key)

    def clock(self) -> float:
        """Return the ``Date`` of an answer, in whole seconds, on the same clock as the objects' times."""
        answer = self._call(f"LIST {self.describe()}", "list_objects_v2", Prefix=f"{self._prefix}commits/", MaxKeys=1)
        stated = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        try:
            return parsedate_to_datetime(stated).timestamp()
        except (TypeError, ValueError):
            return time.time()

    # -- deleting

    def _remove(self, key: str) -> None:
        self._call(f"DELETE {self.describe(key)}", "delete_object", Key=self._key(key))

    def delete_many(self, keys: Sequence[str]) -> Iterator[tuple[str, OSError | None]]:
        """Delete up to a thousand objects per request, or one by one if the service does not support that request."""
        for start in range(0, len(keys), _MOST_DELETED):
            yield from self._delete_batch(keys[start : start + _MOST_DELETED])

    def _delete_batch(self, keys: Sequence[str]) -> Iterator[tuple[str, OSError | None]]:
        left = {self._key(key): key for key in keys} if self._batches else {}
        wanted = {"Objects": [{"Key": name} for name in left], "Quiet": True}
        refused: dict[str, OSError] = {}

        def accept(answer: Answer) -> None:
            """Keep in ``left``, for the next try, only the objects for which the service was too busy."""
            busy = {}
            for item in answer.get("Errors", []):
                name, text = item.get("Key", ""), f"{item.get('Code', '')} ({item.get('Message', '')})"
                if item.get("Code") in RETRIED_CODES:
                    busy[name] = text
                elif name in left:
                    refused[left[name]] = PermissionError(errno.EACCES, f"DELETE {self.describe(left[name])}: {text}")
            for name in left.keys() - busy.keys():
                del left[name]
            wanted["Objects"] = [{"Key": name} for name in left]
            if left:
                raise Transient(errno.EIO, f"{len(left)} objects were not deleted: {busy[next(iter(left))]}")

        again: Sequence[str] = [] if left else keys
        if left:
            try:
                self._call(f"DELETE of {len(keys)} objects below {self.describe()}", "delete_objects", accept=accept, Delete=wanted)
            except Undecided as error:
                refused |= dict.fromkeys(left.values(), error)
            except OSError as error:
                # Some compatible services lack this request and refuse it in many ways. A single deletion tells the real cause.
                _log.warning("%s; they are deleted one by one", error.strerror or error)
                again = list(left.values())
                self._batches = False
        for key in keys:
            if key not in again:
                yield key, refused.get(key)
        yield from delete_each(self, again)

    def tidy(self, prefix: str, older_than_s: float) -> int:
        """Abort uploads and remove probes older than ``older_than_s`` seconds; never abort an upload of this store object."""
        removed = 0
        now = self.clock()
        if prefix == "commits/":
            for entry in self.list("probes/"):
                if now - entry.modified >= older_than_s:
                    self._remove(entry.key)
                    removed += 1
        markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        for page in self._pages("list_multipart_uploads", markers, prefix):
            for item in page.get("Uploads", []):
                old = now - item["Initiated"].timestamp() >= older_than_s
                if old and item["UploadId"] not in self._uploads:
                    self._abort(item["Key"], item["UploadId"])
                    removed += 1
        return removed

    # -- requests

    def _pages(self, method: str, markers: dict[str, str], prefix: str) -> Iterator[Answer]:
        position: dict[str, str] = {}
        while True:
            page = self._call(f"LIST {self.describe(prefix)}", method, Prefix=self._prefix + prefix, **position)
            yield page
            following = {ours: page[theirs] for ours, theirs in markers.items() if page.get(theirs)}
            if not page.get("IsTruncated") or not following or following == position:
                return
            position = following

    def _head(self, key: str) -> Answer:
        return self._call(f"HEAD {self.describe(key)}", "head_object", Key=self._key(key))

    def _call(self, what: str, method: str, **params: Any) -> Answer:
        return call(self._fs, self.options, what, method, Bucket=self._bucket, **params)

    def _make(self) -> tuple[Any, str]:
        return file_system(self.options), f"{self._bucket}/{self._prefix}".rstrip("/")

    def _check_package(self) -> None:
        """Do nothing: s3fs is always installed, and its import, which takes a second, can wait for the first request."""

    def _body(self, data: bytes | memoryview) -> dict[str, Any]:
        if not self.options.checksums:
            return {"Body": data}
        return {"Body": data, "ChecksumCRC32": base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()}

    def _key(self, key: str) -> str:
        return self._prefix + check_key(key)


def _parts(
    key: str, chunks: Iterable[memoryview], size: int, part_bytes: int, buffer: Callable[[int], bytearray]
) -> Generator[memoryview, None, None]:
    """Yield the stream in parts of ``part_bytes``, the last one shorter. ``buffer(i)`` gives the memory of part ``i``."""
    index = filled = total = 0
    part = memoryview(buffer(0))
    with closing(one_ahead(iter(chunks))) as made:
        for chunk in made:
            total += len(chunk)
            if total > size:
                break
            while len(chunk):
                if filled == part_bytes:
                    yield part
                    index, filled = index + 1, 0
                    part = memoryview(buffer(index))
                count = min(len(chunk), part_bytes - filled)
                part[filled : filled + count] = chunk[:count]
                chunk = chunk[count:]
                filled += count
    if total != size:
        raise ValueError(f"{key}: {total} bytes were streamed, {size} announced")
    yield part[:filled]
