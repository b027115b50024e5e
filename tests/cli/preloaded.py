# SPDX-License-Identifier: Apache-2.0
"""Real processes of `ckptmgr` that cost no imports: forks of a process that has imported everything.

Each has the standard streams that it is given, and a terminal among them as its controlling one, so
that keys such as Ctrl-C and changes of the size reach it as signals.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TextIO, cast

from tests.cli.running import process_env

_ROOMS = ("cli", "core", "files", "formats", "maintenance", "policy", "series", "store")
_MOST = 1 << 20


class Preloaded:
    """The process that forks; use `preloaded`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.cli.preloaded", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=process_env())
        theirs.close()
        self._socket = ours

    def start(
        self,
        arguments: Sequence[str | Path],
        streams: tuple[int, int, int],
        *,
        closed: Sequence[int] = (),
        encoding: str = "utf-8",
        patience_s: float | None = None,
        **env: str,
    ) -> int:
        """Start `ckptmgr` with standard streams, of which some are closed, and return its id.

        `patience_s` is the time after which it shows its progress, if not the usual one.
        """
        request = {
            "arguments": [*map(str, arguments)],
            "closed": list(closed),
            "encoding": encoding,
            "env": process_env(**env),
            "patience_s": patience_s,
        }
        socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
        return int(self._socket.recv(_MOST))

    def wait(self, pid: int) -> int:
        """Return the exit code of a process, or the negative number of a signal."""
        self._socket.send(json.dumps({"wait": pid}).encode())
        return int(self._socket.recv(_MOST))

    def end(self) -> None:
        """End the process that forks."""
        self._socket.close()
        self._process.wait(timeout=60)


@contextlib.contextmanager
def preloaded() -> Iterator[Preloaded]:
    """Yield a process that forks."""
    one = Preloaded()
    try:
        yield one
    finally:
        one.end()


def _import_everything() -> None:
    for room in _ROOMS:
        package = importlib.import_module(f"ckptmgr.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"ckptmgr.{room}."):
            with contextlib.suppress(ImportError):  # of an optional dependency
                importlib.import_module(module.name)
    for name in ("rich.console", "rich.live", "rich.progress", "rich.text", "rich.markup"):
        importlib.import_module(name)


def _serve(requests: socket.socket) -> Callable[[], None] | None:
    """Answer requests; return None at the end of them, and in a fork its task."""
    while True:
        message, fds, _, _ = socket.recv_fds(requests, _MOST, 3)
        if not message:
            return None
        request: dict[str, Any] = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if not pid:
            requests.close()
            return lambda: _run(request, fds)
        for fd in fds:
            os.close(fd)
        requests.send(str(pid).encode())


def _run(request: dict[str, Any], fds: Sequence[int]) -> None:
    from ckptmgr.cli import cli, progress

    if request["patience_s"] is not None:
        progress._PATIENCE_S = request["patience_s"]
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    for number in range(3):
        if os.isatty(number):
            with contextlib.suppress(OSError):  # the same one, by another stream
                fcntl.ioctl(number, termios.TIOCSCTTY, 0)
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if number in request["closed"]:
            os.close(number)
        stream = None if number in request["closed"] else _stream(number, mode, request["encoding"])
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    cli.main(request["arguments"])


def _stream(number: int, mode: str, encoding: str) -> TextIO:
    """Return a standard stream as Python makes it."""
    raw = cast(IO[bytes], open(number, f"{mode}b", closefd=False))  # noqa: SIM115 - stays open
    errors = "backslashreplace" if number == 2 else "strict"
    is_lines = number == 2 or os.isatty(number)
    return io.TextIOWrapper(raw, encoding, errors, line_buffering=is_lines)


if __name__ == "__main__":
    _import_everything()
    gc.freeze()  # the forks need not look at existing objects when they end
    with socket.socket(fileno=int(sys.argv[1])) as server:
        work = _serve(server)
    if work is not None:
        work()
