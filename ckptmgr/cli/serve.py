# SPDX-License-Identifier: Apache-2.0
"""`watch --serve`: the pages of reports over HTTP, read-only, on loopback unless another address is named."""

from __future__ import annotations

import functools
import ipaddress
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, getfqdn, gethostname
from urllib.parse import urlsplit

from ckptmgr.cli.exits import UsageProblem
from ckptmgr.core.printable import MOST_CHARACTERS
from ckptmgr.maintenance.report.charts import shown

_FRESH_S = 5.0  # a page is not made more often, however often it is asked for
_TIMEOUT_S = 10.0
_OTHER_NAME = "Ask by the IP address of this machine, or by its own name, or as localhost."
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `PORT`, `:PORT`, `HOST:PORT` or `[HOST]:PORT`; loopback without a host.

    Raises:
        UsageProblem: It is no address.

    >>> parse_address("8000"), parse_address("[::1]:80")
    (('127.0.0.1', 8000), ('::1', 80))
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    host = "127.0.0.1" if host == "localhost" else host
    try:
        ipaddress.ip_address(host)
        if not (port.isascii() and port.isdigit() and int(port[:6]) < 65536):
            raise ValueError(port)
    except ValueError:
        raise UsageProblem(
            "--serve takes an IP address and a port",
            hint="write --serve 8000 for this machine only, or --serve 10.0.0.5:8000",
        ) from None
    return host, int(port)


class ReportServer(AbstractContextManager["ReportServer"]):
    """Serves pages by their paths within a `with` block; each is made when it is asked for.

    Raises:
        UsageProblem: The address cannot be used.
    """

    def __init__(self, address: str, pages: Mapping[str, Callable[[], str]]) -> None:
        host, port = parse_address(address)
        kept = {path: _Kept(make) for path, make in pages.items()}
        try:
            self._server = _Server((host, port), lambda *given: _Handler(kept, *given))
        except OSError as error:
            raise UsageProblem(
                f"--serve: {error.strerror or error}", hint="choose another port, or 0 for any"
            ) from error
        shown_host = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown_host}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="ckptmgr-serve", daemon=True
        )

    def __enter__(self) -> ReportServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], handler: Callable[..., BaseHTTPRequestHandler]
    ) -> None:
        if ":" in address[0]:
            self.address_family = AF_INET6
        super().__init__(address, handler)


class _Kept:
    """A page that is made at most every few seconds."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: tuple[float, HTTPStatus, bytes] | None = None

    def get(self) -> tuple[HTTPStatus, bytes]:
        """Return the status and the content."""
        with self._lock:
            now = time.monotonic()
            if self._made is None or now >= self._made[0] + _FRESH_S:
                self._made = (now, *self._new())
            return self._made[1:]

    def _new(self) -> tuple[HTTPStatus, bytes]:
        try:
            return HTTPStatus.OK, self._make().encode()
        except Exception as error:
            why = shown(str(error) or type(error).__name__, MOST_CHARACTERS)
            text = f"<!DOCTYPE html><title>no report</title><p>{why}"
            return HTTPStatus.INTERNAL_SERVER_ERROR, text.encode()


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of known paths."""

    server_version = "ckptmgr"
    sys_version = ""
    timeout = _TIMEOUT_S

    def __init__(self, pages: Mapping[str, _Kept], *given: object) -> None:
        self._pages = pages
        super().__init__(*given)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Send a page."""
        self._answer()

    def do_HEAD(self) -> None:
        """Send the headers of a page."""
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: standard error has the events of the watch."""

    def _answer(self) -> None:
        if not _is_of_this_machine(_host_of(self.headers.get("Host", ""))):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, explain=_OTHER_NAME)
            return
        kept = self._pages.get(_path_of(self.path))
        if kept is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        status, content = kept.get()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _is_of_this_machine(host: str) -> bool:
    """Return whether a host is an address, or a name that no other site can have.

    A page of another site could ask for ours in the browser of a reader, under a name of its own
    that leads here (DNS rebinding). An address cannot be made to lead elsewhere.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host in _own_names()
    return True


@functools.cache
def _own_names() -> tuple[str, str]:
    return gethostname().lower(), getfqdn().lower()  # the second one may ask the network


def _path_of(target: str) -> str:
    try:
        return urlsplit(target).path
    except ValueError:
        return ""


def _host_of(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
