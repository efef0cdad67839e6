"""Requests to an S3 service: the client, retries, and error messages.

botocore signs, finds credentials and parses; its own retries are off. Every request goes through :meth:`S3Calls.do`. It retries temporary
failures (throttling, 5xx, timeouts, broken connections, damaged or short bodies) with full jitter until a deadline. It turns permanent
failures into an ``OSError`` of one line with the remedy.
"""

from __future__ import annotations

import errno
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from .store import KeyMissing

T = TypeVar("T")
MIB = 1 << 20


@dataclass(frozen=True)
class S3Options:
    """How to reach a bucket. Fields that are ``None`` come from botocore's sources: ``AWS_*`` variables, ``~/.aws``, the host's role.

    ``endpoint, region, profile, addressing, checksums, conditional, parallel`` may also be in the URL's query.
    """

    endpoint: str | None = None
    """``http(s)://host[:port]`` of a service other than AWS (``AWS_ENDPOINT_URL_S3``)."""
    region: str | None = None
    profile: str | None = None
    """Section of ``~/.aws/config`` and ``~/.aws/credentials``."""
    addressing: str = "auto"
    """``path`` (``host/bucket/key``), ``virtual`` (``bucket.host/key``), or ``auto``: path if an endpoint is given."""
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    checksums: bool = True
    """Whether to send a CRC-32 with every upload, which the service checks before it accepts it. ``False`` for services that refuse the
    header."""
    conditional: bool = True
    """Whether the service has conditional writes (``If-None-Match``). With ``False`` it may hold commits, but only one process may ever
    commit."""
    part_bytes: int = 8 * MIB
    """Bytes of an upload's parts, at least 5 MiB; larger for objects of more than 10 000 such parts."""
    range_bytes: int = 4 * MIB
    """Bytes of one ranged read."""
    parallel: int = 8
    """Requests of one object in flight; memory is ``parallel`` parts (or ranges)."""
    connect_timeout_s: float = 10.0
    timeout_s: float = 30.0
    """Seconds without progress after which a request is cancelled and retried."""
    part_timeout_s: float = 120.0
    """Seconds after which an unfinished ranged read is cancelled and retried, even if data still arrives."""
    retry_s: float = 120.0
    """Seconds for which one request is retried before the operation fails."""
    pause_s: float = 0.2
    """Upper limit of the first pause between tries, in seconds; it doubles up to 10 s. The pause is a random part of the limit."""

    def __post_init__(self) -> None:
        if self.addressing not in ("auto", "path", "virtual"):
            raise ValueError(f"S3 addressing is {self.addressing!r}; give auto, path or virtual")
        if not 5 * MIB <= self.part_bytes <= 5 << 30:
            raise ValueError(f"S3 part_bytes is {self.part_bytes}; parts are of 5 MiB to 5 GiB")
        if self.range_bytes < 1 or self.parallel < 1:
            raise ValueError(f"S3 range_bytes ({self.range_bytes}) and parallel ({self.parallel}) must be at least 1")
        if min(self.connect_timeout_s, self.timeout_s, self.part_timeout_s) <= 0 or min(self.retry_s, self.pause_s) < 0:
            raise ValueError("S3 timeouts must be above 0 s, retry_s and pause_s not below")
        if (self.access_key is None) != (self.secret_key is None):
            raise ValueError("S3 access_key and secret_key belong together; give both, or neither to use the environment's")


_IN_URL = ("endpoint", "region", "profile", "addressing", "checksums", "conditional", "parallel")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


def parse_s3_url(url: str, options: S3Options | None = None) -> tuple[str, str, S3Options]:
    """``s3://bucket/prefix?region=..&endpoint=..`` as ``(bucket, prefix, options)``; the prefix is empty or ends with a slash.

    Raises:
        ValueError: there is no bucket, an option is unknown or malformed, or the URL has credentials, which must not be in it since URLs
            are logged.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.password:
        raise ValueError(
            "an S3 URL must not hold credentials, URLs are logged; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
        )
    if parts.scheme != "s3" or not _BUCKET.fullmatch(parts.netloc):
        raise ValueError(f"{url!r} is no s3://bucket/prefix")
    prefix = unquote(parts.path).strip("/")
    if any(word in ("", ".", "..") for word in prefix.split("/")) and prefix:
        raise ValueError(f"{url!r}: the prefix has an empty part, '.' or '..'")
    found = options or S3Options()
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _IN_URL:
            secret = name in {f.name for f in fields(S3Options)} and ("key" in name or "token" in name)
            hint = "credentials do not belong into a URL, it is logged" if secret else f"known are {', '.join(_IN_URL)}"
            raise ValueError(f"S3 URL option {name!r} is not possible: {hint}")
        found = replace(found, **{name: _value(name, value)})
    return parts.netloc, f"{prefix}/" if prefix else "", found


def _value(name: str, text: str) -> Any:
    if name in ("checksums", "conditional"):
        if text not in ("on", "off"):
            raise ValueError(f"S3 URL option {name}={text!r}: give on or off")
        return text == "on"
    if name == "parallel":
        if not text.isdecimal() or len(text) > 4:
            raise ValueError(f"S3 URL option parallel={text!r}: give a number")
        return int(text)
    if name == "endpoint" and not text.startswith(("http://", "https://")):
        raise ValueError(f"S3 URL option endpoint={text!r}: give http://host:port or https://host:port")
    return text


class Transient(ConnectionError):
    """The answer is not what was requested (short, or another range); a retry may help."""


class PreconditionFailed(OSError):
    """A conditional request's condition does not hold (412)."""


class NotSupported(OSError):
    """The service does not know the request or one of its headers (501)."""


class UploadGone(OSError):
    """The multipart upload is no longer open: it was completed or aborted."""


class Cancelled(OSError):
    """Another part of the same operation failed."""


class Undecided(OSError):
    """The request was retried until the deadline; it is unknown whether one of the tries took effect."""


class S3Calls:
    """One bucket's client. A forked process makes a new one, since sockets cannot be shared."""

    def __init__(self, bucket: str, options: S3Options) -> None:
        self.bucket = bucket
        self.options = options
        self._made: tuple[int, Any] | None = None

    @property
    def client(self) -> Any:
        # Without a lock, which a fork could leave locked: two threads may each make a client, and the later one stays.
        made = self._made
        if made is None or made[0] != os.getpid():
            made = self._made = (os.getpid(), self._make())
        return made[1]

    def do(self, what: str, call: Callable[[Any], T], *, cancel: threading.Event | None = None, conflict_again: bool = True) -> T:
        """Run ``call(client)`` until it succeeds, fails for good, or ``retry_s`` have passed.

        Args:
            what: description for messages, such as ``"PUT s3://bucket/key"``.
            cancel: event that other threads set to stop the retries.
            conflict_again: whether to retry a 409 (conflict of two conditional requests).

        Raises:
            KeyMissing, PreconditionFailed, NotSupported, UploadGone: the service's answer.
            OSError: the service refused for good; the message has the remedy. Undecided: it never answered properly.
        """
        began = time.monotonic()
        stop = cancel or threading.Event()
        tries = 0
        while True:
            if stop.is_set():
                raise Cancelled(errno.ECANCELED, f"{what} was given up: another part of it failed")
            tries += 1
            try:
                return call(self.client)
            except Exception as error:
                problem = _judge(error, what, self.bucket, conflict_again)
                if problem is None:
                    raise
                if not isinstance(problem, Transient):
                    raise problem from error
                spent = time.monotonic() - began
                if spent >= self.options.retry_s:
                    text = f"{what}: {problem.strerror} ({tries} tries in {spent:.1f} s)"
                    raise Undecided(errno.ETIMEDOUT if "timed out" in text else errno.EIO, text) from error
            limit = min(10.0, self.options.pause_s * 2 ** min(tries - 1, 20))
            stop.wait(min(random.uniform(0, limit), max(0.0, self.options.retry_s - spent)))

    def _make(self) -> Any:
        import botocore.session
        from botocore.config import Config

        o = self.options
        style = "path" if o.addressing == "auto" and o.endpoint else o.addressing
        config = Config(
            region_name=o.region,
            connect_timeout=o.connect_timeout_s,
            read_timeout=o.timeout_s,
            max_pool_connections=2 * o.parallel + 4,
            retries={"total_max_attempts": 1, "mode": "standard"},
            # Bodies carry our own CRC-32 in a signed header. Signing their SHA-256 as well would cost 0.7 CPU seconds per GB.
            s3={"addressing_style": style, "payload_signing_enabled": False},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        session = botocore.session.Session(profile=o.profile)
        session.register_component("data_loader", _loader())
        return session.create_client(
            "s3",
            endpoint_url=o.endpoint,
            aws_access_key_id=o.access_key,
            aws_secret_access_key=o.secret_key,
            aws_session_token=o.session_token,
            config=config,
        )


@cache
def _loader() -> Any:
    """botocore's service descriptions, parsed once per process. With them a client takes 10 ms, without 70 ms."""
    import botocore.loaders

    return botocore.loaders.create_loader()


_RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}
RETRIED_CODES = {"SlowDown", "InternalError", "RequestTimeout", "ServiceUnavailable", "Throttling", "ThrottlingException", "BadDigest"}
_RENEW = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired"}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch"}


def _judge(error: Exception, what: str, bucket: str, conflict_again: bool) -> OSError | None:
    """Classify an exception: ``Transient`` is retried, another ``OSError`` is raised, ``None`` means a bug of ours."""
    from botocore import exceptions as b

    if isinstance(error, b.ClientError):
        return _judge_answer(error.response, what, bucket, conflict_again)
    if isinstance(error, b.NoCredentialsError | b.PartialCredentialsError | b.TokenRetrievalError | b.ProfileNotFound):
        return PermissionError(
            errno.EACCES, f"{what}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile or role that has access"
        )
    if isinstance(error, b.SSLError) and "CERTIFICATE" in str(error).upper():
        return OSError(errno.EACCES, f"{what}: {error}; set AWS_CA_BUNDLE to the service's certificate authority")
    if isinstance(
        error,
        b.HTTPClientError
        | b.ConnectionError
        | b.IncompleteReadError
        | b.ResponseStreamingError
        | b.CredentialRetrievalError
        | b.MetadataRetrievalError,
    ):
        return Transient(errno.EIO, str(error))
    if isinstance(error, KeyMissing | PreconditionFailed | NotSupported | UploadGone | Cancelled | Undecided):
        return error
    if isinstance(error, ConnectionError | TimeoutError):
        return Transient(errno.EIO, error.strerror or str(error))
    if isinstance(error, b.BotoCoreError):
        return OSError(errno.EINVAL, f"{what}: {error}")
    return error if isinstance(error, OSError) else None


def _judge_answer(answer: dict[str, Any], what: str, bucket: str, conflict_again: bool) -> OSError:
    stated = answer.get("Error", {})
    code, text = str(stated.get("Code", "")), str(stated.get("Message", ""))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{status} {code}" + (f" ({text})" if text and text != code else "")
    if code == "NoSuchBucket":
        return OSError(errno.ENOENT, f"bucket {bucket!r} does not exist; create it, since saves never do")
    if code == "NoSuchUpload":
        return UploadGone(errno.ENOENT, f"{what}: {said}")
    if status == 404:
        return KeyMissing(errno.ENOENT, "no such object", what)
    if status == 412:
        return PreconditionFailed(errno.EEXIST, f"{what}: {said}")
    if status == 501:
        return NotSupported(errno.ENOTSUP, f"{what}: {said}")
    if code in _RENEW:
        return PermissionError(
            errno.EACCES, f"{what}: {said}; the credentials have expired: renew them, or use a role that renews by itself"
        )
    if code == "RequestTimeTooSkewed":
        return PermissionError(errno.EACCES, f"{what}: {said}; set this host's clock, since the service refuses wrongly dated requests")
    if code in _WRONG_KEY:
        return PermissionError(errno.EACCES, f"{what}: {said}; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if status == 400 and code == "400":  # an answer to HEAD has no body
        return OSError(errno.EIO, f"{what}: 400 without a reason; often the credentials have expired, or the bucket is in another region")
    if status in (401, 403):
        return PermissionError(
            errno.EACCES,
            f"{what}: {said}; the credentials need s3:GetObject, PutObject, DeleteObject, ListBucket, AbortMultipartUpload and "
            "ListBucketMultipartUploads here",
        )
    if status in (301, 307, 400) and code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "301"):
        return OSError(errno.EINVAL, f"{what}: {said}; the bucket is in another region: set AWS_REGION or ?region=")
    if status == 409 and conflict_again or status in _RETRIED_STATUS or code in RETRIED_CODES:
        return Transient(errno.EIO, said)
    return OSError(errno.EIO, f"{what}: {said}")
