"""Commands over HTTP, and failing, slow and foreign requests."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

import pytest

from tests.controller.served_metrics import FULL, Box, get, value
from vescale_ray.controller.http import metrics
from vescale_ray.controller.http.metrics import MetricsServer, PortInUse
from vescale_ray.controller.state.snapshot import Snapshot
from vescale_ray.errors import BadInput


def post(
    server: MetricsServer, path: str, body: Any = None, token: str | None = "secret", raw: bytes | None = None
) -> tuple[int, dict[str, Any]]:
    data = raw if raw is not None else json.dumps(body if body is not None else {}).encode()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url() + path, data=data, headers=headers), timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_commands_reach_the_controller_and_its_answer_comes_back(server: MetricsServer, box: Box) -> None:
    assert post(server, "/stop") == (200, {"done": "stop"})
    assert post(server, "/rescale", {"workers": 2}) == (200, {"done": "rescale"})
    assert box.commands == [("stop", {}), ("rescale", {"workers": 2})]


@pytest.mark.parametrize("token", [None, "", "wrong", "secre", "secret2", "sécret"])
@pytest.mark.parametrize("path", ["/stop", "/rescale"])
def test_command_without_a_valid_token_is_refused_without_effect(server: MetricsServer, box: Box, path: str, token: str | None) -> None:
    header = None if token is None else token.encode().decode("latin-1")
    status, answer = post(server, path, {"workers": 2}, token=header)
    assert status == 401 and "control.json" in answer["error"]
    assert box.commands == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{}", "workers = None"),
        (b'{"workers": 0}', "workers = 0: give a whole number of at least 1"),
        (b'{"workers": -1}', "workers = -1"),
        (b'{"workers": true}', "workers = True"),
        (b'{"workers": "2"}', "workers = '2'"),
        (b"[1]", "must be a JSON object"),
        (b"{", "not JSON"),
        (b"x" * 70000, "at most 65536 bytes"),
    ],
)
def test_invalid_rescale_is_refused_with_the_reason(server: MetricsServer, box: Box, body: bytes, words: str) -> None:
    status, answer = post(server, "/rescale", raw=body)
    assert status == 400 and words in answer["error"]
    assert box.commands == []


def test_controllers_refusal_is_returned_to_the_caller(server: MetricsServer, box: Box) -> None:
    box.raises = BadInput("9 workers: there are 6 slots")
    assert post(server, "/rescale", {"workers": 9}) == (400, {"error": "9 workers: there are 6 slots"})
    box.raises = RuntimeError("broken\nhere")
    assert post(server, "/stop") == (500, {"error": "RuntimeError: broken here"})
    assert value(get(server, "/metrics"), "vescale_step") == 40  # and the server lives on


def test_a_server_without_control_takes_no_commands() -> None:
    server = MetricsServer("127.0.0.1", 0, lambda: FULL, None, "secret")
    try:
        assert post(server, "/stop")[0] == 405
    finally:
        server.close()


@pytest.mark.parametrize("path", ["/", "/nothing", "/metrics/x", "/stop"])
def test_an_unknown_page_is_404(server: MetricsServer, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(server, path)
    assert caught.value.code == 404
    caught.value.close()


def test_failing_snapshot_returns_500_and_the_server_lives_on() -> None:
    def fail() -> Snapshot:
        raise KeyError("gone")

    server = MetricsServer("127.0.0.1", 0, fail, None, "t")
    try:
        for path in ("/metrics", "/status", "/metrics"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                get(server, path)
            assert caught.value.code == 500
            caught.value.close()
    finally:
        server.close()


def test_a_port_in_use_is_named_with_the_remedy() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=f"metrics.port = {port}: in use .*0 for any free port") as caught:
            MetricsServer("127.0.0.1", port, lambda: FULL, None, "t")
    assert isinstance(caught.value, BadInput) and "\n" not in str(caught.value)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(BadInput, match=r"metrics.host = 192\.0\.2\.1"):
        MetricsServer("192.0.2.1", 0, lambda: FULL, None, "t")


def test_close_frees_the_port_despite_an_open_connection(box: Box) -> None:
    first = MetricsServer("127.0.0.1", 0, lambda: box.snapshot, None, "t")
    port = first.port
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")  # never ends its request
        first.close()
        second = MetricsServer("127.0.0.1", port, lambda: box.snapshot, None, "t")
    assert second.port == port
    second.close()


@pytest.mark.fault("S10")
def test_slow_connections_neither_block_others_nor_pile_up(
    server: MetricsServer, box: Box, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A slow connection holds a thread and a file of the controller, for as long as it sends a byte every 10 s."""
    monkeypatch.setattr(metrics, "MOST_CONNECTIONS", 4)
    clients: list[socket.socket] = []
    try:
        for _ in range(12):
            clients.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            clients[-1].sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: a")
        for client in clients[:8]:
            with suppress(ConnectionResetError):
                assert client.recv(1) == b"", "the oldest was ended"
        assert get(server, "/metrics") and json.loads(get(server, "/status"))["run"] == "r1"
        held, deadline = server._server._held, time.monotonic() + 10  # type: ignore[attr-defined]
        while len(held) >= 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(held) < 4, "who was served takes no room: else one that is slow would be ended for those that are gone"
        clients[-1].sendall(b"\r\n\r\n")
        assert clients[-1].recv(15) == b"HTTP/1.0 200 OK", "one that is slow is served, as long as there is room"
    finally:
        for client in clients:
            client.close()
    assert "Traceback" not in "".join(capfd.readouterr())
