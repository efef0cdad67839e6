"""Find passwords and keys in URLs, which a run would write to its folder, manifests and logs."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

_OF_BUCKETS = ("s3", "s3a", "gs", "gcs")
"""Schemes of URLs whose first part is a bucket, not a host."""
_SECRET = re.compile(r"(?i)key|token|secret|passw|pwd|credential|bearer|^auth|^sig$|signature")


def holds_credentials(url: str) -> bool:
    """Return whether a URL holds a password or a key.

    It may stand before the host, in the query, in a URL there, or in one of a chain of fsspec's URLs (``simplecache::s3://..``).
    ``abfs://container@account`` holds none.
    """
    if "::" in url and any(holds_credentials(part) for part in url.split("::") if "://" in part):
        return True
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        return False  # opening the URL reports the error
    if not parts.scheme or not parts.netloc:
        return False
    before, at, _ = parts.netloc.rpartition("@")
    if at and (":" in before or parts.scheme in ("s3", "http", "https")):
        return True
    # Many secret keys contain a slash. The part before it is then parsed as the host, and text after a colon as the port. A bucket
    # has no port; an IPv6 host may end with a bracket.
    _, colon, port = parts.netloc.rpartition(":")
    may_be_port = port.endswith("]") or (re.fullmatch("[0-9]{0,5}", port) and parts.scheme not in _OF_BUCKETS)
    if colon and not may_be_port and "@" in parts.path:
        return True
    return any(_SECRET.search(name) or holds_credentials(value) for name, value in query)
