# SPDX-License-Identifier: Apache-2.0
"""Servers and libraries that do something else than was asked, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CorruptCheckpoint,
    Mirror,
    UnsafeWrite,
    UnsupportedCheckpoint,
    save_state,
)
from tests.cli.running import run, run_json
from tests.support import api

pytestmark = pytest.mark.slow  # the library repeats refused requests
URL = "s3://bucket/run"
STATE = {"w": np.arange(40_000, dtype=np.float32)}


class S3(BaseHTTPRequestHandler):
    """Enough of S3: objects, ranges, conditional PUT and listings; a test changes the answers."""

    protocol_version = "HTTP/1.1"
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_conditional = self.headers.get("If-None-Match") == "*"
        if is_conditional and self.server.no_conditions:
            self.answer(501, b"<Error><Code>NotImplemented</Code></Error>")
        elif is_conditional and self.key in self.server.objects:
            self.answer(412)
        elif is_conditional and self.server.rival is not None:
            self.server.objects[self.key] = self.server.rival  # it came first, and we are not told
            self.answer(200, ETag='"rival"')
        elif self.server.loses(self.key):
            self.answer(200, ETag='"lost"')
        else:
            self.server.objects[self.key] = self.server.garbled(self.key, body)
            self.answer(200, ETag=f'"{hash(body):x}"')

    def do_GET(self) -> None:
        query: Any = urlsplit(self.path).query
        if "list-type" in query:
            self.list(dict(part.partition("=")[::2] for part in query.split("&")))
            return
        body = self.server.objects.get(self.key)
        if body is None:
            self.answer(404)
            return
        more = {"ETag": f'"{hash(body):x}"', "Last-Modified": "Sun, 01 Mar 2026 10:00:00 GMT"}
        if "Range" not in self.headers:
            self.answer(200, body, **more)
            return
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        stop = min(int(last) + 1, int(first) + self.server.most_bytes, len(body))
        if int(first) >= len(body):
            self.answer(416)
            return
        shown = f"bytes {first}-{stop - 1}/{len(body)}"
        self.answer(206, body[int(first) : stop], **more, **{"Content-Range": shown})

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self.server.objects.pop(self.key, None)
        self.answer(204)

    def do_POST(self) -> None:  # a removal of several
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if "delete" not in urlsplit(self.path).query:
            self.answer(501)  # no uploads in parts
            return
        for key in [unquote(one.partition("<")[0]) for one in body.split("<Key>")[1:]]:
            self.server.objects.pop(key, None)
        self.answer(200, b"<DeleteResult></DeleteResult>")

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/bucket/")

    def list(self, query: dict[str, str]) -> None:
        prefix, delimiter = unquote(query.get("prefix", "")), unquote(query.get("delimiter", ""))
        keys = sorted(key for key in self.server.objects if key.startswith(prefix))
        if delimiter:
            keys = [key for key in keys if delimiter not in key[len(prefix) :]]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.server.objects[key])}</Size>"
            f"<LastModified>2026-03-01T10:00:00.000Z</LastModified>"
            f"<ETag>{hash(self.server.objects[key]):x}</ETag></Contents>"
            for key in keys
        )
        self.answer(200, f"<ListBucketResult>{rows}</ListBucketResult>".encode())

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.server.sent_bytes += len(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), S3)
        self.objects: dict[str, bytes] = {}
        self.sent_bytes = 0
        self.most_bytes = 1 << 40
        self.no_conditions = False
        self.rival: bytes | None = None
        self.loses: Callable[[str], bool] = lambda key: False
        self.garbled: Callable[[str, bytes], bytes] = lambda key, body: body


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{made.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield made
        made.shutdown()
        thread.join()


def save(*steps: int, directory: str | Path = URL, **options: Any) -> None:
    config = CheckpointConfig(save_checkpoint_steps=1, **options.pop("config", {}))
    with CheckpointManager(directory, config, prefix="net", **options) as manager:
        manager.resume({"w": np.zeros_like(STATE["w"])})
        for step in steps:
            manager.save(step, STATE)


@pytest.mark.parametrize("most_bytes", [1, 1000, 65_536])
def test_short_answer_is_asked_again_and_is_no_damage(server: Server, most_bytes: int) -> None:
    data = bytes(range(256)) * (2 if most_bytes == 1 else 600)
    objects = api.open_objects(URL)
    objects.put("x", [data], len(data))
    server.most_bytes = most_bytes
    assert objects.read("x", 3, len(data) - 5) == data[3:-2]
    found = objects.fetch("x", 7, 10**6)
    assert (bytes(found.data), found.stored.size_bytes) == (data[7:], len(data))


def test_resume_behind_a_proxy_that_cuts_ranges_takes_the_newest(
    server: Server, tmp_path: Path
) -> None:
    save(1, 2)
    server.most_bytes = 10_000
    state = {"w": np.zeros_like(STATE["w"])}
    with CheckpointManager(URL, prefix="net") as manager:
        found = manager.resume(state)
        assert (found.step, found.skipped) == (2, ())
    np.testing.assert_array_equal(state["w"], STATE["w"])
    assert run("verify", URL).exit_code == 0
    assert run("copy", URL, tmp_path / "copy").exit_code == 0
    assert run("verify", tmp_path / "copy").exit_code == 0


def test_answer_without_a_byte_is_an_error_of_the_network(server: Server) -> None:
    objects = api.open_objects(URL)
    objects.put("x", [b"0123456789"], 10)
    server.most_bytes = 0
    with pytest.raises(ConnectionError):
        objects.read("x", 0, 5)


def _save_in_background() -> None:
    save(1, config={"async_save": "thread"})


@pytest.mark.parametrize("save_there", [lambda: save(1), _save_in_background])
@pytest.mark.parametrize("cause", ["server", "setting"])
def test_store_that_creates_on_no_condition_is_refused_with_the_setting(
    server: Server, cause: str, save_there: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_conditions(server, cause, monkeypatch)
    with pytest.raises(UnsupportedCheckpoint, match="AWS_CONDITIONAL_PUT"):
        save_there()


def _refuse_conditions(server: Server, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if cause == "server":
        server.no_conditions = True
    else:
        monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")


@pytest.mark.parametrize("cause", ["server", "setting"])
def test_on_error_decides_about_such_a_store(
    server: Server, cause: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _refuse_conditions(server, cause, monkeypatch)
    save(1, 2, config={"async_save": "thread", "on_error": "warn"})
    assert "AWS_CONDITIONAL_PUT" in caplog.text


@pytest.mark.parametrize("cause", ["server", "setting"])
def test_mirror_at_such_a_store_lets_the_training_go_on(
    server: Server, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_conditions(server, cause, monkeypatch)
    events = []
    save(
        1,
        directory=tmp_path,
        mirror=Mirror(URL),
        observe=lambda event: events.append((event.name, event.error or "")),
    )
    assert any("AWS_CONDITIONAL_PUT" in error for _, error in events), events


@pytest.mark.parametrize("cause", ["server", "setting"])
def test_probe_answers_row_by_row_and_leaves_nothing(
    server: Server, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_conditions(server, cause, monkeypatch)
    done = run("storage", "probe", URL, "--json")
    assert done.exit_code == 1, done.stderr
    rows = {row["check"]: row for row in json.loads(done.stdout)["items"]}
    assert len(rows) == 7
    assert rows["conditional put"]["is_ok"] is False
    assert "AWS_CONDITIONAL_PUT" in rows["conditional put"]["detail"]
    assert rows["list after write"]["is_ok"] is True
    assert server.objects == {}


def test_objects_with_names_of_manifests_are_not_read_where_they_are_too_large(
    server: Server, tmp_path: Path
) -> None:
    save(1)
    junk = b"[" + b" " * (5 << 20)
    for number in range(6):
        server.objects[f"run/x-{number}.ckpt.manifest.json"] = junk
    server.sent_bytes = 0
    listed = run_json("ls", URL)
    assert "a manifest at most" in str(listed)
    assert server.sent_bytes < 3 << 20
    save(2)
    assert run("verify", URL).exit_code != 0


@pytest.mark.parametrize("fault", ["rival", "manifest lost", "manifest garbled"])
@pytest.mark.parametrize("way", ["run", "save_state"])
def test_server_that_says_what_it_did_not_do_is_not_believed(
    server: Server, fault: str, way: str
) -> None:
    save(1)
    manifest = server.objects["run/net-1.ckpt.manifest.json"]
    if fault == "rival":
        server.rival = manifest.replace(b"net-1", b"net-2").replace(b'"step": 1', b'"step": 2')
    elif fault == "manifest lost":
        server.loses = lambda key: key.endswith(".manifest.json")
    else:
        server.garbled = lambda key, body: body + b" " if key.endswith(".json") else body
    with pytest.raises((UnsafeWrite, OSError)):
        _save_2(way)


@pytest.mark.parametrize("fault", ["lost", "garbled"])
@pytest.mark.parametrize("way", ["run", "save_state"])
def test_data_that_a_store_did_not_keep_fails_a_save_that_reads_back(
    server: Server, fault: str, way: str
) -> None:
    save(1)
    if fault == "lost":
        server.loses = lambda key: "/data/" in key
    else:
        server.garbled = lambda key, body: body[:-9] + bytes(9) if "/data/" in key else body
    with pytest.raises((CorruptCheckpoint, OSError)):
        _save_2(way, verify_after_write=True)
    assert "run/net-2.ckpt.manifest.json" not in server.objects
    assert [one["step"] for one in run_json("ls", URL)["items"]] == [1]


def _save_2(way: str, **options: bool) -> None:
    if way == "run":
        save(2, config=options)
    else:
        save_state(STATE, f"{URL}/net-2.ckpt", **options)  # type: ignore[arg-type]
