"""A small S3 service in this process, with a script of faults.

The faults are those that moto lacks: 409, lost answers, hangs, short and wrong ranges. The service speaks the part of the protocol that the
store uses, over real sockets. It compares the CRC-32 of an upload with its header, and honours ``If-None-Match`` unless a rule disables
that. It shares no code with the store.
"""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import re
import socket
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

ACTIONS = ("status", "lost", "reset", "short", "wrong range", "hang", "stall", "flip", "reset after headers", "drip", "damage", "company")


@dataclass
class Rule:
    """Apply ``action`` to ``times`` matching requests, after the first ``after`` of them have passed.

    ``operation``: GET, HEAD, PUT, PART, START, COMPLETE, ABORT, DELETE, BATCH (DeleteObjects), LIST, UPLOADS or ``*``. ``lost``: carry out
    the request, then close without an answer. ``stall``: read nothing of the request's body. ``damage``: flip a bit of it on arrival.
    ``company``: answer when another request is being answered.
    """

    operation: str
    action: str
    key: str = "*"
    times: int = 1
    after: int = 0
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 30.0
    seen: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        assert self.action in ACTIONS, self.action


@dataclass
class Stored:
    data: bytes
    metadata: dict[str, str]
    modified: float
    etag: str


@dataclass
class Upload:
    key: str
    metadata: dict[str, str]
    began: float
    parts: dict[int, bytes] = field(default_factory=dict)


class FakeS3:
    """The service's state, the script, and a log of (operation, key) of every request."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, Upload] = {}
        self.rules: list[Rule] = []
        self.log: list[tuple[str, str]] = []
        self.tokens: list[str | None] = []
        self.now: Callable[[], float] = time.time
        self.conditional = True
        self.page = 1000
        self.hidden: set[str] = set()
        self.undeletable: dict[str, list[str]] = {}
        self.stop = threading.Event()
        self.busy = self.busiest = 0
        self.url = ""

    def fail(self, operation: str, action: str = "status", **options: object) -> Rule:
        rule = Rule(operation, action, **options)  # type: ignore[arg-type]
        with self.lock:
            self.rules.append(rule)
        return rule

    def requests(self, operation: str) -> int:
        return sum(1 for done, _ in self.log if done == operation)

    def matching(self, operation: str, key: str) -> Rule | None:
        with self.lock:
            self.log.append((operation, key))
            for rule in self.rules:
                if rule.operation in ("*", operation) and fnmatch.fnmatch(key, rule.key) and rule.done < rule.times:
                    rule.seen += 1
                    if rule.seen > rule.after:
                        rule.done += 1
                        return rule
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fake: FakeS3

    def log_message(self, *_: object) -> None:
        pass

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        _, _, key = unquote(url.path).lstrip("/").partition("/")
        operation = self._operation(key)
        rule = self.fake.matching(operation, key)
        if rule and rule.action == "stall":
            self.fake.stop.wait(rule.seconds)
            return self._drop()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if rule and rule.action == "damage" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        with self.fake.lock:
            self.fake.busy += 1
            self.fake.busiest = max(self.fake.busiest, self.fake.busy)
        if rule and rule.action == "company":
            for _ in range(int(rule.seconds / 0.01)):
                if self.fake.busy > 1 or self.fake.stop.wait(0.01):
                    break
        try:
            self._serve(operation, key, body, rule)
        finally:
            with self.fake.lock:
                self.fake.busy -= 1

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    def _operation(self, key: str) -> str:
        method, query = self.command, self.query
        if method == "GET" and not key:
            return "UPLOADS" if "uploads" in query else "LIST"
        if method == "POST" and "delete" in query:
            return "BATCH"
        if method == "POST":
            return "START" if "uploads" in query else "COMPLETE"
        if "uploadId" in query:
            return {"PUT": "PART", "DELETE": "ABORT"}[method]
        return method

    def _serve(self, operation: str, key: str, body: bytes, rule: Rule | None) -> None:
        action = rule.action if rule else None
        if rule and action == "status":
            return self._error(rule.status, rule.code)
        if rule and action == "hang":
            self.fake.stop.wait(rule.seconds)
            return self._drop()
        if action == "reset":
            return self._reset()
        status, headers, answer = self._answer(operation, key, body, wrong_range=action == "wrong range")
        if action == "lost":
            return self._drop()
        if action == "flip" and answer:
            answer = bytes([answer[0] ^ 4]) + answer[1:]
        self.send_response_only(status)
        self.send_header("Date", formatdate(self.fake.now(), usegmt=True))
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if action in ("short", "reset after headers"):
            self.wfile.write(answer[: len(answer) // 2])
            self.wfile.flush()
            return self._reset() if action == "reset after headers" else self._drop()
        if rule and action == "drip":
            for start in range(0, len(answer), 64):
                if self.fake.stop.wait(rule.seconds):
                    return self._drop()
                self.wfile.write(answer[start : start + 64])
                self.wfile.flush()
            return None
        self.wfile.write(answer)
        return None

    def _answer(self, operation: str, key: str, body: bytes, wrong_range: bool) -> tuple[int, dict[str, str], bytes]:
        fake = self.fake
        with fake.lock:
            if operation in ("PUT", "PART"):
                stated = self.headers.get("x-amz-checksum-crc32")
                if stated and base64.b64decode(stated) != zlib.crc32(body).to_bytes(4, "big"):
                    return self._xml(400, "BadDigest")
            taken = fake.conditional and self.headers.get("If-None-Match") == "*" and key in fake.objects
            metadata = {n.lower(): v for n, v in self.headers.items() if n.lower().startswith("x-amz-meta-")}
            if operation == "PUT":
                if taken:
                    return self._xml(412, "PreconditionFailed")
                fake.objects[key] = Stored(body, metadata, fake.now(), f'"{uuid.uuid4().hex}"')
                return 200, {"ETag": fake.objects[key].etag}, b""
            if operation == "START":
                name = uuid.uuid4().hex
                fake.uploads[name] = Upload(key, metadata, fake.now())
                return 200, {}, _document("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
            if operation in ("PART", "COMPLETE", "ABORT"):
                upload = fake.uploads.get(self.query["uploadId"])
                if upload is None or upload.key != key:
                    return self._xml(404, "NoSuchUpload")
                if operation == "PART":
                    upload.parts[int(self.query["partNumber"])] = body
                    return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""
                if operation == "ABORT":
                    del fake.uploads[self.query["uploadId"]]
                    return 204, {}, b""
                if taken:
                    return self._xml(412, "PreconditionFailed")
                listed = re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)
                tags = re.findall(rb"<ETag>(?:&quot;|\")?([0-9a-f]+)", body)
                parts = [upload.parts.get(int(number)) for number in listed]
                if any(p is None or hashlib.md5(p).hexdigest().encode() != t for p, t in zip(parts, tags, strict=True)):
                    return self._xml(400, "InvalidPart")
                if any(len(p or b"") < 5 << 20 for p in parts[:-1]):
                    return self._xml(400, "EntityTooSmall")
                fake.objects[key] = Stored(b"".join(p or b"" for p in parts), upload.metadata, fake.now(), f'"{uuid.uuid4().hex}"')
                del fake.uploads[self.query["uploadId"]]
                return 200, {}, _document("CompleteMultipartUploadResult", f"<Key>{escape(key)}</Key>")
            if operation == "LIST":
                prefix, start = self.query.get("prefix", ""), self.query.get("continuation-token", "")
                names = sorted(k for k in fake.objects if k.startswith(prefix) and k > start and k not in fake.hidden)
                page, more = names[: fake.page], len(names) > fake.page
                rows = "".join(
                    f"<Contents><Key>{escape(k)}</Key><Size>{len(fake.objects[k].data)}</Size><LastModified>{_iso(fake.objects[k].modified)}"
                    "</LastModified></Contents>"
                    for k in page
                )
                token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
                return 200, {}, _document("ListBucketResult", f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}")
            if operation == "UPLOADS":
                rows = "".join(
                    f"<Upload><Key>{escape(u.key)}</Key><UploadId>{name}</UploadId><Initiated>{_iso(u.began)}</Initiated></Upload>"
                    for name, u in fake.uploads.items()
                    if u.key.startswith(self.query.get("prefix", ""))
                )
                return 200, {}, _document("ListMultipartUploadsResult", f"<IsTruncated>false</IsTruncated>{rows}")
            if operation == "BATCH":
                names = [unescape(k.decode()) for k in re.findall(rb"<Key>(.*?)</Key>", body)]
                if len(names) > 1000 or not (self.headers.get("Content-MD5") or self.headers.get("x-amz-checksum-crc32")):
                    return self._xml(400, "MalformedXML")
                rows = ""
                for name in names:
                    if fake.undeletable.get(name):
                        code = fake.undeletable[name].pop(0)
                        rows += f"<Error><Key>{escape(name)}</Key><Code>{code}</Code><Message>scripted</Message></Error>"
                    else:
                        fake.objects.pop(name, None)
                return 200, {}, _document("DeleteResult", rows)
            if operation == "DELETE":
                fake.objects.pop(key, None)
                return 204, {}, b""
            found = fake.objects.get(key)
            if found is None:
                return self._xml(404, "NoSuchKey")
            if self.headers.get("If-Match") not in (None, found.etag):
                return self._xml(412, "PreconditionFailed")
            headers = {"ETag": found.etag, "Last-Modified": formatdate(found.modified, usegmt=True), **found.metadata}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            if operation == "HEAD":
                return 200, {**headers, "Content-Length": str(len(found.data))}, b""
            if wanted is None:
                return 200, headers, found.data
            first, last = int(wanted[1]), min(int(wanted[2]), len(found.data) - 1)
            if wrong_range:
                first, last = (first - 512, last - 512) if first >= 512 else (first + 1, last)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(found.data)}"
            return 206, headers, found.data[first : last + 1]

    def _error(self, status: int, code: str) -> None:
        status, headers, answer = self._xml(status, code)
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def _xml(self, status: int, code: str) -> tuple[int, dict[str, str], bytes]:
        return status, {}, f"<Error><Code>{code}</Code><Message>scripted {code}</Message></Error>".encode()

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        pass  # clients may be killed, and the script may close connections


@contextmanager
def fake_s3() -> Iterator[FakeS3]:
    fake = FakeS3()
    handler = type("BoundHandler", (Handler,), {"fake": fake})
    server = Server(("127.0.0.1", 0), handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.stop.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


def _document(name: str, inner: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}</{name}>'.encode()


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))
