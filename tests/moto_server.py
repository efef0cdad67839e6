"""moto's S3 server, an independent implementation of the protocol, in a thread of this process."""

from __future__ import annotations

import contextlib
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """The server's URL. Skips the test if moto is not installed."""
    threaded = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    threaded.start()
    host, port = threaded.get_host_and_port()
    with contextlib.suppress(urllib.error.HTTPError):  # the first request imports moto's back ends, and takes longer than a client waits
        urllib.request.urlopen(f"http://{host}:{port}/nobodys-bucket", timeout=120)
    yield f"http://{host}:{port}"
    threaded.stop()
