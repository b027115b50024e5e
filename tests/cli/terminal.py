# SPDX-License-Identifier: Apache-2.0
"""Terminal of a test: a pseudo-terminal, the screen that an emulator makes of it, and its keys."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.preloaded import Preloaded
from tests.support.held import wait_until_asleep

_DEADLINE_S = 30.0
CTRL_C = "\x03"
CTRL_D = "\x04"


class Terminal:
    """One command at a terminal; `at_terminal` makes it."""

    def __init__(
        self,
        forker: Preloaded,
        *arguments: str | Path,
        columns: int = 80,
        lines: int = 24,
        stdout: int | None = None,
        **extra: Any,
    ) -> None:
        pyte = pytest.importorskip("pyte", reason="needs pyte: make")
        self.raw = b""
        self.seen: list[list[str]] = []  # all that the screen has shown
        self._screen: Any = pyte.Screen(columns, lines)
        self._stream: Any = pyte.ByteStream(self._screen)
        self._leader, follower = pty.openpty()
        self._forker = forker
        self._is_apart = stdout is not None
        self.resize(columns, lines)
        self._settings = termios.tcgetattr(self._leader)
        streams = (follower, follower if stdout is None else stdout, follower)
        self.pid = forker.start(arguments, streams, **{"TERM": "xterm-256color", **extra})
        self._code: int | None = None
        os.close(follower)

    @property
    def lines(self) -> list[str]:
        """The lines on the screen, without those that are empty at its end."""
        lines: list[str] = [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self) -> str:
        """The text on the screen, lines joined."""
        return "\n".join(self.lines)

    @property
    def has_cursor(self) -> bool:
        """Whether the cursor is visible, and at the beginning of a line."""
        return not self._screen.cursor.hidden and self._screen.cursor.x == 0

    def until(self, text: str) -> str:
        """Wait until a text is on the screen; return the screen."""
        end = time.monotonic() + _DEADLINE_S
        while text not in self.text:
            if not self._read(end - time.monotonic()):
                raise AssertionError(f"no {text!r} on the screen:\n{self.text}\n{self.raw!r}")
        return self.text

    def until_raw(self, data: bytes) -> None:
        """Wait until the command has written something, which the screen may hide again."""
        end = time.monotonic() + _DEADLINE_S
        while data not in self.raw:
            if not self._read(end - time.monotonic()):
                raise AssertionError(f"no {data!r} in {self.raw!r}")

    def press(self, keys: str) -> None:
        """Type; Ctrl-C when the command waits, because one that comes just before is not heard."""
        if keys == CTRL_C:
            wait_until_asleep(self.pid)
        os.write(self._leader, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the terminal, which tells the command."""
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, size)
        self._screen.resize(lines, columns)

    def end(self) -> int:
        """Read the rest and return the exit code; the terminal is as it was before."""
        end = time.monotonic() + _DEADLINE_S
        while self._read(end - time.monotonic()):
            pass
        assert time.monotonic() < end, f"still running:\n{self.text}"
        self._code = self._forker.wait(self.pid)
        assert termios.tcgetattr(self._leader) == self._settings
        assert self.has_cursor or self._is_apart, self.raw
        return self._code

    def close(self) -> None:
        """Give the terminal back; kill the command if it goes on."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._forker.wait(self.pid)
        os.close(self._leader)

    def _read(self, patience_s: float) -> bool:
        if patience_s <= 0 or not select.select([self._leader], [], [], patience_s)[0]:
            return False
        try:
            data = os.read(self._leader, 65536)
        except OSError:  # the command has ended
            return False
        self.raw += data
        for part in re.split(rb"(?=\r)", data):  # one read may bring a line and its removal
            self._stream.feed(part)
            self.seen.append(self.lines)
        return bool(data)


@contextlib.contextmanager
def at_terminal(forker: Preloaded, *arguments: str | Path, **more: Any) -> Iterator[Terminal]:
    """Yield a command at a terminal of 80 columns and 24 lines, or of another size."""
    terminal = Terminal(forker, *arguments, **more)
    try:
        yield terminal
    finally:
        terminal.close()
