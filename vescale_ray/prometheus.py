"""Asking a Prometheus: for the page of a run (:mod:`vescale_ray.dash`) and the picture of the dashboard (``deploy/draw.py``)."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from vescale_ray.errors import BadInput


def ask(url: str, what: str, query: Mapping[str, Any]) -> Any:
    """What the Prometheus at ``url`` answers to ``what`` (``query``, ``query_range``): the ``data`` of its HTTP interface's JSON.

    Raises:
        BadInput: no address, no answer, or a refusal.
    """
    address = f"{url.rstrip('/')}/api/v1/{what}?{urllib.parse.urlencode(query)}"
    if not address.startswith(("http://", "https://")):
        raise BadInput(f"--prometheus {url}: give the address of a Prometheus, such as http://127.0.0.1:9090")
    try:
        with urllib.request.urlopen(address, timeout=30) as reply:
            answer = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        said = error.read(300).decode(errors="replace")
        raise BadInput(f"--prometheus {url}: it refuses the query (HTTP {error.code}): {' '.join(said.split())}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise BadInput(f"--prometheus {url} does not answer as a Prometheus does: no answer ({reason})") from None
    if answer.get("status") != "success":
        raise BadInput(f"--prometheus {url}: {answer.get('error', 'it refuses the query')}")
    return answer["data"]
