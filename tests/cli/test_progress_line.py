# SPDX-License-Identifier: Apache-2.0
"""The progress line: when it appears, its text, and that it harms nothing."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import load_checkpoint, save_checkpoint
from ckptmgr.cli.progress import ProgressLine
from ckptmgr.io.byte_counters import count_bytes, counting
from tests.support import api

MIB = 1 << 20


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class ClosedTerminal(Terminal):
    """A terminal that is gone."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


def clock_of(*times_s: float) -> Callable[[], float]:
    left = list(times_s)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_line_appears_after_half_a_second_and_goes_away() -> None:
    stream = Terminal()
    with ProgressLine("net.ckpt", 4 * MIB, stream=stream, clock=clock_of(0, 0.4, 0.6)):
        count_bytes("read", MIB)
        assert stream.getvalue() == ""
        count_bytes("read", MIB)
        shown = stream.getvalue()
    assert "net.ckpt" in shown
    assert "2.0/4.0 MiB" in shown
    assert stream.getvalue().endswith("\x1b[2K")  # the line is erased


def test_line_is_redrawn_ten_times_a_second_at_most() -> None:
    stream = Terminal()
    with ProgressLine("net.ckpt", 100, stream=stream, clock=clock_of(0, 2, 2.05, 2.2)):
        count_bytes("read", 10)
        first = len(stream.getvalue())
        count_bytes("read", 10)
        assert len(stream.getvalue()) == first
        count_bytes("read", 10)
        assert "30/100 bytes" in stream.getvalue()[first:]


def test_second_pass_over_a_file_says_so() -> None:
    stream = Terminal()
    with ProgressLine("net.ckpt", 100, stream=stream, clock=clock_of(0, 2)):
        count_bytes("read", 130)
    assert "net.ckpt (pass 2)" in stream.getvalue()
    assert "30/100 bytes" in stream.getvalue()


@pytest.mark.parametrize("direction", ["read", "write"])
def test_only_one_direction_counts(direction: str) -> None:
    stream = Terminal()
    line = ProgressLine("net.ckpt", 100, stream=stream, clock=clock_of(0, 2), direction="write")
    with line:
        count_bytes("read" if direction == "read" else "write", 10)
    assert ("10/100" in stream.getvalue()) is (direction == "write")


def test_names_are_no_markup() -> None:
    stream = Terminal()
    with ProgressLine("[red]net[/x].ckpt", 100, stream=stream, clock=clock_of(0, 2)):
        count_bytes("read", 10)
    assert "[red]net[/x].ckpt" in stream.getvalue()


@pytest.mark.parametrize("has_color", [True, False])
def test_line_without_colour_has_none(has_color: bool) -> None:
    stream = Terminal()
    with ProgressLine("a", 100, stream=stream, clock=clock_of(0, 2), has_color=has_color):
        count_bytes("read", 10)
    assert ("\x1b[3" in stream.getvalue()) is has_color


def test_nothing_is_shown_without_a_terminal() -> None:
    stream = io.StringIO()
    with ProgressLine("net.ckpt", 100, stream=stream, clock=clock_of(0, 2)):
        count_bytes("read", 10)
    assert stream.getvalue() == ""


def test_nothing_is_shown_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with ProgressLine("net.ckpt", 100, stream=stream, clock=clock_of(0, 2)):
        count_bytes("read", 10)
    assert stream.getvalue() == ""


def test_nothing_is_shown_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    stream = Terminal()
    with ProgressLine("net.ckpt", 100, stream=stream, clock=clock_of(0, 2, 4)):
        count_bytes("read", 10)
        count_bytes("read", 10)
    assert stream.getvalue() == ""


def test_terminal_that_is_gone_harms_nothing() -> None:
    stream = ClosedTerminal()
    with ProgressLine("net.ckpt", 100, stream=stream, clock=clock_of(0, 2, 4)):
        count_bytes("read", 10)
        count_bytes("read", 10)


def test_line_is_quiet_when_its_block_is_left() -> None:
    stream = Terminal()
    line = ProgressLine("net.ckpt", 100, stream=stream, clock=clock_of(0, 2))
    with line:
        pass
    count_bytes("read", 10)
    line._count("read", 10)  # a thread that was about to
    assert stream.getvalue() == ""


def test_files_report_what_they_read_and_write(tmp_path: Path) -> None:
    counted = {"read": 0, "write": 0}

    def count(direction: str, size_bytes: int) -> None:
        counted[direction] += size_bytes

    path = tmp_path / "w.ckpt"
    with counting(count):
        saved = save_checkpoint({"w": np.zeros(MIB)}, path)
    manifest_bytes = (tmp_path / "w.ckpt.manifest.json").stat().st_size
    assert counted["write"] == saved.size_bytes + manifest_bytes
    counted["read"] = 0
    with counting(count):
        load_checkpoint(path)
    assert counted["read"] >= saved.size_bytes


def test_counter_of_an_inner_block_takes_the_place_of_the_outer_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    outer: list[int] = []
    inner: list[int] = []
    with counting(lambda _, count: outer.append(count)):
        with counting(lambda _, count: inner.append(count)):
            file = api.OsFileSystem().open(tmp_path / "file")
            file.read_into(0, memoryview(bytearray(10)))
            file.close()
        count_bytes("read", 3)
    assert (outer, inner) == ([3], [10])


def test_without_a_terminal_a_line_comes_every_ten_seconds() -> None:
    stream = io.StringIO()
    times = clock_of(0, 9.9, 10, 15, 20)
    with ProgressLine("net.ckpt", 4 * MIB, stream=stream, clock=times):
        count_bytes("read", MIB)
        assert stream.getvalue() == ""
        count_bytes("read", MIB)
        assert stream.getvalue() == "net.ckpt: 2.0 MiB of 4.0 MiB, 209.7 kB/s\n"
        count_bytes("read", MIB)
        count_bytes("read", 3 * MIB)
    assert stream.getvalue().splitlines()[1:] == [
        "net.ckpt (pass 2): 2.0 MiB of 4.0 MiB, 314.6 kB/s"
    ]


def test_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with ProgressLine("net.ckpt", MIB, stream=stream, clock=clock_of(0, 11)):
        count_bytes("read", MIB // 2)
    assert stream.getvalue() == "net.ckpt: 512 KiB of 1.0 MiB, 47.7 kB/s\n"
