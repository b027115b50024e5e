# SPDX-License-Identifier: Apache-2.0
"""Addresses of object stores: which are taken, and who refuses them by name."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ckptmgr import (
    CheckpointManager,
    CkptmgrError,
    ModelCheckpoint,
    export_weights,
)
from ckptmgr.objects import requests
from ckptmgr.objects.paths import UrlPath
from ckptmgr.objects.requests import checked_url
from tests.cli.running import key_file, run
from tests.support import api

_URL = "s3://bucket/run"


@pytest.mark.parametrize(
    "url", [_URL, "gs://b/a/b", "az://container/run", "file:///tmp/x", "memory://x"]
)
def test_address_is_taken_without_its_last_slash(url: str) -> None:
    assert checked_url(f"{url}/") == url
    assert str(UrlPath(url) / "net.ckpt") == f"{url}/net.ckpt"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("runs/a", "no address of an object store"),
        ("http://host/run", "AWS_ENDPOINT_URL"),
        ("s3://bucket/run?versionId=3", "without"),
        ("s3:///run", "names no bucket"),
        ("s3://bucket/a//b", "empty part"),
        ("s3://bucket/../b", r"\.\. in its path"),
        ("s3://bucket/a/..", r"\.\. in its path"),
        ("s3://bucket/.", r"\.\. in its path"),
        ("s3://bucket/a/%2e%2e/b", "%XX"),
        ("s3://bucket/a%2Fb", "%XX"),
        ("s3://bucket/ru\nn", "control character"),
        ("s3://bucket:9000/run", "AWS_ENDPOINT_URL"),
        ("s3://user:secret@bucket/run", "credentials come from the environment"),
        ("s3://user:se/secret@bucket/run", "credentials come from the environment"),
        ("s3://user:se@secret@bucket/run", "credentials come from the environment"),
        ("s3:/user:secret@bucket/run", "no address of an object store"),
        ("s3:/user:se/secret@bucket/run", "no address of an object store"),
        ("S3://user:secret@bucket/run", "no address of an object store"),
        ("az://container/run?sv=1&sig=secret", "without"),
        ("az://container/run#sig=secret", "without"),
    ],
)
def test_other_address_is_refused_with_the_way_out(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        checked_url(url)
    assert "secret" not in str(caught.value)


def test_address_that_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="is a string"):
        checked_url(Path("runs"))


@pytest.mark.parametrize("place", [_URL, str(Path(_URL))])
def test_callback_refuses_an_address_as_its_directory(place: str) -> None:
    with pytest.raises(ValueError, match="mirror=URL"):
        ModelCheckpoint(directory=place)


@pytest.mark.parametrize("place", ["http://host/run", "s3:/bucket/run", "s3:///run"])
def test_run_refuses_an_address_that_is_none(place: str) -> None:
    with pytest.raises(ValueError, match="s3://bucket/run"):
        CheckpointManager(place)


def test_export_refuses_an_address() -> None:
    with pytest.raises(ValueError, match="ckptmgr copy URL DIR"):
        export_weights("x.ckpt", _URL)


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:secret@bucket/run",
        "s3://user:se/secret@bucket/run",
        "https://account.example/container/run?sv=1&sig=secret",
        "az://container/run#sig=secret",
    ],
)
def test_refusal_shows_no_password(url: str) -> None:
    for make in (CheckpointManager, lambda place: ModelCheckpoint(directory=place)):
        with pytest.raises(ValueError, match="address") as caught:
            make(url)
        assert "secret" not in str(caught.value)


_TAKING = {"copy", "diff", "inspect", "ls", "prune", "storage", "verify"}
_WITHOUT_PLACES = {"completion", "help", "keygen"}
_REFUSING = [
    ("config", "show", _URL),
    ("convert", _URL, "--compression", "zstd"),
    ("decrypt", _URL, "-o", "x"),
    ("doctor", _URL),
    ("encrypt", _URL, "--key", "KEY", "-o", "x"),
    ("export", "1", "--dir", _URL, "--hf", "-o", "x"),
    ("merge", _URL, "x"),
    ("pin", "1", "--dir", _URL),
    ("reencrypt", _URL, "--key", "KEY", "--to", "KEY"),
    ("rekey", _URL, "--key", "KEY", "--add", "KEY"),
    ("repair", _URL),
    ("report", _URL),
    ("sign", _URL, "--private-key", "KEY"),
    ("simulate", "last(2)", _URL),
    ("stats", _URL),
    ("tag", "x", "1", "--dir", _URL),
    ("transform", _URL, "a", "b"),
    ("unify", _URL, "x"),
    ("unpin", f"{_URL}/x.ckpt"),
    ("untag", "x", "1", "--dir", _URL),
    ("watch", _URL, "--once"),
]


@pytest.mark.parametrize("command", _REFUSING, ids=lambda command: command[0])
def test_command_that_takes_paths_only_refuses_an_address(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    key = key_file(tmp_path)
    result = run(*(key if one == "KEY" else one for one in command))
    assert result.exit_code == 2
    assert "ckptmgr copy URL DIR" in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        (("doctor", _URL), "ckptmgr storage probe URL"),
        (("simulate", "last(2)", _URL), "ckptmgr prune URL --keep EXPR --dry-run"),
        (("pin", "1", "--dir", _URL), "never changed"),
        (("watch", _URL, "--once"), "--mirror URL"),
        (("stats", _URL), "ckptmgr ls URL"),
    ],
    ids=lambda one: one[0] if isinstance(one, tuple) else "",
)
def test_refusal_names_the_command_that_works_at_addresses(
    command: tuple[str, ...], instead: str
) -> None:
    assert instead in run(*command).stderr


@pytest.mark.parametrize("call", ["'runs', mirror='s3://b/run'", "'s3://b/run'"])
def test_missing_library_is_named_with_the_way_out(call: str) -> None:
    program = f"""
import sys
sys.modules["obstore"] = None
from ckptmgr import CheckpointManager, CkptmgrError
try:
    CheckpointManager({call})
except CkptmgrError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'ckptmgr[s3]'" in done.stdout


@pytest.fixture
def refusing_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Return a port of this machine that refuses connections; no request is tried again."""
    pytest.importorskip("obstore", reason="needs obstore: ckptmgr[s3]")
    monkeypatch.setattr(requests, "_RETRIES", {"max_retries": 0})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    "form", ["http://user:secret@127.0.0.1:{}", "http://127.0.0.1:{}/a?k=secret"]
)
def test_error_of_a_request_shows_no_password_of_the_endpoint(
    form: str, refusing_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", form.format(refusing_port))
    objects = api.open_objects(_URL)
    for ask in (objects.list, lambda: objects.get("k"), lambda: objects.put("k", [b"x"], 1)):
        with pytest.raises(ConnectionError) as caught:
            ask()
        assert "secret" not in "".join(traceback.format_exception(caught.value))
        assert str(refusing_port) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("AWS_ENDPOINT_URL", "://", "begins with http:// or https://"),
        ("AWS_ENDPOINT_URL", "localhost:9000", "is 'localhost:9000'"),
        ("AWS_ENDPOINT", "minio", "begins with http:// or https://"),
        ("AWS_SECRET_ACCESS_KEY", "secret\n", "has a line end"),
        ("AWS_ACCESS_KEY_ID", "\x00secret", "control character"),
        ("AZURE_STORAGE_ACCOUNT_KEY", "secret\r\n", "has a line end"),
        ("GOOGLE_SERVICE_ACCOUNT", "secret\t", "control character"),
    ],
)
def test_setting_that_would_stop_the_library_is_named(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "\x00" in value:
        monkeypatch.setattr(os, "environ", {**os.environ, name: value})
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(CkptmgrError, match=f"variable {name} ") as caught:
        api.open_objects(_URL)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


class _Answer(BaseHTTPRequestHandler):
    """Answers each request with the status that ends its key."""

    def do_GET(self) -> None:
        self.send_response(int(self.path[-3:]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, FileNotFoundError),
        (412, FileExistsError),
        (403, PermissionError),
        (400, ConnectionError),
    ],
)
def test_answer_of_a_server_shows_no_password_of_the_endpoint(
    status: int, kind: type[OSError], refusing_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:secret@{place}")
        with pytest.raises(kind) as caught:
            api.open_objects(_URL).get(f"key-{status}")
        server.shutdown()
    assert "secret" not in "".join(traceback.format_exception(caught.value))


class _HostileAnswer(_Answer):
    """Answers each request with a text that would steer a terminal and fill a log."""

    def do_GET(self) -> None:
        text = b"<Error><Message>\x1b[2J\x1b]0;x\x07no\rckptmgr: note: all is well" + b"y" * 100_000
        self.send_response(int(self.path[-3:]))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.mark.parametrize(("status", "kind"), [(400, ConnectionError), (403, PermissionError)])
def test_answer_of_a_server_steers_no_terminal_and_fills_no_log(
    status: int, kind: type[OSError], refusing_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _HostileAnswer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(kind) as caught:
            api.open_objects(_URL).get(f"key-{status}")
        result = run("ls", f"{_URL}-{status}")
        server.shutdown()
    trace = "".join(traceback.format_exception(caught.value))
    for text in (str(caught.value), *trace.splitlines(), *result.stderr.splitlines()):
        assert text.isprintable()
    assert len(str(caught.value)) < 1000
    assert "\nckptmgr: note: all is well" not in result.stderr
