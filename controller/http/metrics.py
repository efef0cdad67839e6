"""The controller's HTTP server: Prometheus metrics, a status, and two commands.

    GET  /metrics                       Prometheus or OpenMetrics text, made from one snapshot
    GET  /status                        the same snapshot as JSON
    POST /stop                          checkpoint and end      } need "Authorization: Bearer TOKEN"
    POST /rescale  {"workers": n}       train on with n workers }

:mod:`vescale_ray.controller.http.exposition` makes the content of a scrape.
"""

from __future__ import annotations

import errno
import hmac
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

from vescale_ray.controller.http.exposition import exposition
from vescale_ray.controller.state.snapshot import Snapshot
from vescale_ray.errors import BadInput, one_line
from vescale_ray.runfolder import plain

MAX_BODY = 65536
KNOWN_S = 8.0
"""Longest wait of a scrape for a restarted controller to read its lines. Prometheus' own timeout is 10 s by default."""
MOST_CONNECTIONS = 64
"""Maximum number of open connections. Each takes a thread and a file of the controller. A scrape takes milliseconds, and Prometheus needs
one."""
VISITS = 4
"""Scrapes remembered per client."""
Control = Callable[[str, dict[str, Any]], dict[str, Any]]


class PortInUse(BadInput):
    """Another process listens on the port; the message is one line with it and the remedy."""


class MetricsServer:
    """Serves the snapshot on ``host:port`` from a thread of its own until :meth:`close`.

    Args:
        port: 0 takes any free port; the real one is :attr:`port`.
        snapshot: called once per scrape, from the server's threads; must not block.
        control: called with ``("stop", {})`` or ``("rescale", {"workers": n})``, from the server's threads; its result is the
            answer. A ``ValueError`` is answered with 400 and its message, any other error with 500. None: no commands.
        token: secret that commands must carry.
        known: set once counters have their values from before a restart. Until then there is no scrape, because Prometheus would count
            the jump from 0 to the old value as an increase.

    Raises:
        PortInUse: another process has the port.
        BadInput: the address can't be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        snapshot: Callable[[], Snapshot],
        control: Control | None,
        token: str,
        known: threading.Event | None = None,
    ) -> None:
        self.scrapes = Scrapes()
        about: dict[str, Any] = {"snapshot": staticmethod(snapshot), "exposition": staticmethod(exposition), "token": token}
        about |= {"known": known, "scrapes": self.scrapes, "timeout": 10.0, "control": control and staticmethod(control)}
        handler = type("Handler", (_Handler,), about)
        server_type = type("Server", (_Server,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET})
        try:
            self._server: ThreadingHTTPServer = server_type((host, port), handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(f"metrics.port = {port}: in use on {host}; choose another, or 0 for any free port") from None
            raise BadInput(f"metrics.host = {host}, metrics.port = {port}: can't be listened on ({error.strerror or error})") from None
        self.host = host
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="vescale-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The server's port."""
        return int(self._server.server_address[1])

    def url(self, host: str | None = None) -> str:
        """Base address. ``host`` replaces the server's own address, for servers on ``0.0.0.0``."""
        name = host or ("127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host)
        return f"http://[{name}]:{self.port}" if ":" in name else f"http://{name}:{self.port}"

    def close(self) -> None:
        """Stop listening and free the port; may be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class Scrapes:
    """The clients that scrape the metrics, and the times of their scrapes. Thread-safe. Two Prometheus servers count as two clients; a user
    who opens the page is no regular client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._visits: dict[str, deque[float]] = {}
        self._awaited: set[str] | None = None

    def came(self, now: float, client: str = "") -> None:
        with self._lock:
            visits = self._visits.pop(client, deque(maxlen=VISITS))
            visits.append(now)
            self._visits[client] = visits
            if len(self._visits) > MOST_CONNECTIONS:
                del self._visits[next(iter(self._visits))]  # the client that has been away for longest
            if self._awaited is not None:
                self._awaited.discard(client)

    def final_scrape(self, now: float) -> tuple[float, int]:
        """Return the seconds until every regular client should have scraped once more, and 1 if all have, else 0.

        Half an interval is added to the seconds; 0 means that there is no regular client. The first call marks the end of the run."""
        with self._lock:
            due = {client: seconds for client, visits in self._visits.items() if (seconds := _due(visits, now)) is not None}
            if self._awaited is None:
                self._awaited = set(due)
            return max((due[client] for client in self._awaited if client in due), default=0.0), int(not self._awaited)


def _due(visits: Sequence[float], now: float) -> float | None:
    gap = max((after - before for before, after in pairwise(visits)), default=None)
    if gap is None or now - visits[-1] > 2 * gap:
        return None
    return max(0.0, visits[-1] + 1.5 * gap + 0.5 - now)


class _Server(ThreadingHTTPServer):
    """Ends the oldest connection if there are too many, so that a connection that is held open does not keep other clients out."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS  # with socketserver's 5, a sixth client would try again after a second
    block_on_close = False  # a client that holds its connection must not hold up the end of the run

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._held: dict[Any, None] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            while len(self._held) >= MOST_CONNECTIONS:
                oldest = next(iter(self._held))
                del self._held[oldest]
                with suppress(OSError):  # its thread has closed it meanwhile
                    oldest.shutdown(socket.SHUT_RDWR)  # ends the wait of its thread
            self._held[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._held.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect during a request."""


class _Handler(BaseHTTPRequestHandler):
    snapshot: Callable[[], Snapshot]
    control: Control | None
    exposition: Callable[[Snapshot, str], tuple[bytes, str]]
    token: str
    known: threading.Event | None
    scrapes: Scrapes
    server_version = "vescale-ray"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            if self.known is not None and not self.known.wait(KNOWN_S):
                return self._json(503, {"error": "the controller was restarted and reads its run's files; ask again in a few seconds"})
            try:
                body, content_type = self.exposition(self.snapshot(), self.headers.get("Accept", ""))
            except Exception as error:
                return self._json(500, {"error": f"no snapshot: {one_line(error) or type(error).__name__}"})
            self._send(200, body, content_type)
            return self.scrapes.came(time.monotonic(), f"{self.client_address[0]} {self.headers.get('User-Agent', '')[:100]}")
        if path == "/status":
            try:
                return self._json(200, self.snapshot().to_json())
            except Exception as error:
                return self._json(500, {"error": f"no snapshot: {one_line(error) or type(error).__name__}"})
        return self._json(404, {"error": f"{path}: there are /metrics, /status, and POST /stop and /rescale"})

    def do_POST(self) -> None:
        action = self.path.partition("?")[0].removeprefix("/")
        if action not in ("stop", "rescale"):
            return self._json(404, {"error": f"/{action}: the commands are /stop and /rescale"})
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {self.token}".encode()):
            return self._json(401, {"error": "the token is missing or not this run's; it stands in control.json in the run's folder"})
        if self.control is None:
            return self._json(405, {"error": "this run takes no commands"})
        try:
            body = self._body(action)
            return self._json(200, plain(type(self).control(action, body) or {}))  # type: ignore[misc]
        except ValueError as error:
            return self._json(400, {"error": one_line(error)})
        except Exception as error:
            return self._json(500, {"error": f"{type(error).__name__}: {one_line(error)}"})

    def _body(self, action: str) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > MAX_BODY:
            raise ValueError(f"Content-Length = {length}: give at most {MAX_BODY} bytes of JSON")
        raw = self.rfile.read(int(length))
        try:
            body = json.loads(raw) if raw.strip() else {}
        except ValueError:
            raise ValueError("the body is not JSON") from None
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        if action == "rescale":
            workers = body.get("workers")
            if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
                raise ValueError(f"workers = {workers!r}: give a whole number of at least 1")
        return body

    def _json(self, status: int, value: Mapping[str, Any]) -> None:
        self._send(status, json.dumps(value).encode() + b"\n", "application/json")

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            if status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client went away

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because scrapes come every few seconds."""
