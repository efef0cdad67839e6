"""Queries to a Prometheus, for the page of a run (:mod:`vescale_ray.cli.pages.dash`)."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from vescale_ray.cli.client import body_of
from vescale_ray.config import holds_credentials
from vescale_ray.errors import BadInput

WAIT_S = 30.0


def ask(url: str, what: str, query: Mapping[str, Any]) -> Any:
    """Return the ``data`` of the Prometheus at ``url`` for the endpoint ``what`` (``query``, ``query_range``) of its HTTP API.

    Raises:
        BadInput: ``url`` is not an address or holds a password, or the Prometheus does not answer or refuses.
    """
    if holds_credentials(url):  # checked first, so that a password never appears in a message or on the page
        raise BadInput("--prometheus: give the address without user and password")
    address = f"{url.rstrip('/')}/api/v1/{what}?{urllib.parse.urlencode(query)}"
    if not address.startswith(("http://", "https://")):
        raise BadInput(f"--prometheus {url}: give the address of a Prometheus, such as http://127.0.0.1:9090")
    try:
        with urllib.request.urlopen(address, timeout=WAIT_S) as reply:
            answer = json.loads(body_of(reply, WAIT_S))
    except urllib.error.HTTPError as error:
        raise BadInput(f"--prometheus {url}: it refuses the query (HTTP {error.code}): {_said(error)}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise BadInput(f"--prometheus {url} does not answer as a Prometheus does: no answer ({reason})") from None
    if isinstance(answer, dict) and answer.get("status") == "error":
        raise BadInput(f"--prometheus {url}: {answer.get('error', 'it refuses the query')}")
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, dict) or not isinstance(data.get("result"), list):
        raise BadInput(f"--prometheus {url} does not answer as a Prometheus does: its reply holds no result")
    return data


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return " ".join(body_of(error, 3.0)[:300].decode(errors="replace").split())
    except (OSError, http.client.HTTPException):
        return str(error.reason)
