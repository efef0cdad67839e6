"""The options of the S3 store, in Python and in the URL's query."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

MIB = 1 << 20


@dataclass(frozen=True)
class S3Options:
    """Options to reach a bucket. Fields that are ``None`` come from botocore's sources: ``AWS_*`` variables, ``~/.aws``, the host's role.

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
    """Send a CRC-32 with every upload, which the service checks before it accepts it. ``False`` for services that refuse the
    header."""
    conditional: bool = True
    """True if the service has conditional writes (``If-None-Match``). With ``False`` it may hold commits, but only one process may ever
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
    """Return ``s3://bucket/prefix?region=..&endpoint=..`` as ``(bucket, prefix, options)``; the prefix is empty or ends with a slash.

    Raises:
        ValueError: there is no bucket, an option is unknown or malformed, or the URL has credentials, which must not be in it since URLs
            are logged.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.password:
        raise ValueError(
            "an S3 URL must not hold credentials, because URLs are logged; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
        )
    if parts.scheme != "s3" or not _BUCKET.fullmatch(parts.netloc):
        raise ValueError(f"{url!r} is not of the form s3://bucket/prefix")
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
