# SPDX-License-Identifier: Apache-2.0
"""Programs of others that serve the tests: called, or run until the end of a block."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_START_S = 60.0
_CALL_S = 300.0
_PAUSE_S = 0.1


class Unavailable(Exception):
    """A server cannot be had on this machine; the text says why."""


def free_port() -> int:
    """Return a port of this machine that no process uses now."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


def output_of(
    command: Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program to its end; return its output.

    Raises:
        Unavailable: It cannot be run, or fails.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env=environment,
            timeout=_CALL_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{Path(command[0]).name} failed: {_reason(done.stderr)}")
    return done.stdout


@contextlib.contextmanager
def running(
    command: Sequence[str], *, environment: Mapping[str, str] | None, log: Path
) -> Iterator[None]:
    """Run a program until the end of the block; its output goes to a file."""
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def until_reached(port: int, *, what: str, log: Path) -> None:
    """Wait until a server accepts connections.

    Raises:
        Unavailable: It does not within a minute.
    """
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(_PAUSE_S)
    text = log.read_text(errors="replace") if log.exists() else ""
    raise Unavailable(f"{what} does not start: {_reason(text)}")


def _reason(text: str) -> str:
    """Return the first line about an error, or the last one."""
    lines = text.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line.lower()), lines[-1])
