"""Data on a web server that does not answer, or that tells too little."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.data.test_data_errors import refused

pytest.importorskip("aiohttp")


class _Endless(BaseHTTPRequestHandler):
    """Tells no size, and has one file."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/a.parquet" else 404)
        self.end_headers()
        self.wfile.write(b"PAR1")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), _Endless)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()


def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/a.parquet"
    said = refused(url)
    assert said.startswith(f"data.corpus = {url}: can't be listed (") and "onnect" in said
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("some text")
    said = refused(tmp_path / "a.txt", tokenizer=url)
    assert said.startswith(f"data.tokenizer = {url}: can't be read (") and "onnect" in said


def test_a_file_without_a_size_is_refused(server: str) -> None:
    url = f"{server}/a.parquet"
    assert refused(url) == f"data.corpus = {url}: the server reports no size for {url}; download it, and give the file"
    assert "no such file" in refused(f"{server}/b.parquet")
