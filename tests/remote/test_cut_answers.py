# SPDX-License-Identifier: Apache-2.0
"""Loads over a network that cuts answers: from a server of S3 that sends half of some of them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import ChecksumMismatch, TamperedCheckpoint, open_checkpoint, save_checkpoint

pytest.importorskip("obstore")

from ckptmgr.objects import requests

URL = "s3://bucket/net.safetensors"
KEY = bytes(32)
HEAD = 128 << 10
STATE = {"w": np.random.default_rng(2).integers(0, 256, 1 << 20, np.uint8)}


class CuttingServer(ThreadingHTTPServer):
    """Serves one object; of `cuts` answers behind the head of the object it sends a half."""

    daemon_threads = True

    def __init__(self, data: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.data = data
        self.version = 1
        self.cuts = 0
        self.next_data: bytes | None = None
        self.status = 206
        self.starts: list[int] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _cutting(self) -> CuttingServer:
        assert isinstance(self.server, CuttingServer)
        return self.server

    def do_HEAD(self) -> None:
        self._begin(200, len(self._cutting.data))

    def do_GET(self) -> None:
        server = self._cutting
        if not self.path.endswith("/net.safetensors") or server.status != 206:
            self._begin(404 if server.status == 206 else server.status, 0)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert wanted is not None
        start, last = int(wanted[1]), min(int(wanted[2]), len(server.data) - 1)
        data = server.data[start : last + 1]
        server.starts.append(start)
        self._begin(206, len(data), f"bytes {start}-{last}/{len(server.data)}")
        if start and server.cuts:
            server.cuts -= 1
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            if server.next_data is not None:
                server.data, server.version = server.next_data, server.version + 1
            return
        self.wfile.write(data)

    def _begin(self, status: int, size_bytes: int, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("ETag", f'"{self._cutting.version}"')
        self.send_header("Last-Modified", "Sun, 01 Mar 2026 10:00:00 GMT")
        self.send_header("Content-Length", str(size_bytes))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuttingServer]:
    """A server of one encrypted file."""
    path = save_checkpoint(STATE, tmp_path / "x", format="safetensors", enc_key=KEY).path
    running = CuttingServer(path.read_bytes())
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{running.server_port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def test_answer_that_is_cut_goes_on_where_it_stopped(server: CuttingServer) -> None:
    server.cuts = 2
    with open_checkpoint(URL, dec_key=KEY) as reader:
        assert np.array_equal(reader.read("w"), STATE["w"])
    first, second, third = [one for one in server.starts if one][:3]
    assert first < second < third


def test_object_that_is_replaced_while_an_answer_goes_on_is_an_error(
    server: CuttingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(requests._RETRIES, "max_retries", 1)
    server.cuts = 1
    server.next_data = bytes(len(server.data))
    with pytest.raises(ChecksumMismatch, match="replaced while it was being read") as caught:
        open_checkpoint(URL, dec_key=KEY)
    assert URL in str(caught.value)
    assert not isinstance(caught.value, TamperedCheckpoint)


def test_answers_that_are_always_cut_are_an_error_that_names_the_address(
    server: CuttingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(requests._RETRIES, "max_retries", 1)
    server.cuts = 1000
    with pytest.raises(ConnectionError, match=URL):
        open_checkpoint(URL, dec_key=KEY)


@pytest.mark.parametrize(("status", "error"), [(403, PermissionError), (400, ConnectionError)])
def test_refusal_of_the_store_names_the_address(
    server: CuttingServer, status: int, error: type[OSError]
) -> None:
    server.status = status
    with pytest.raises(error, match=URL):
        open_checkpoint(URL, dec_key=KEY)
