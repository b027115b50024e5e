# SPDX-License-Identifier: Apache-2.0
"""What `ckptmgr watch` shows: lines, JSON as its schema says, paths, and a table on a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import pytest

from ckptmgr import Checkpoint
from ckptmgr.cli.watch_view import report_json, table_lines
from ckptmgr.formats.strict_json import Json
from ckptmgr.maintenance.watch.model import AlarmKind, EventName, Report, SeriesHolder, SeriesRow
from tests.cli.running import process_env, run
from tests.cli.test_watch import damage
from tests.cli.watching import SCHEMA, schema, training
from tests.support import api
from tests.support.json_schema import violations
from tests.support.saved import save_run

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
needs_sources = pytest.mark.skipif(not SCHEMA.exists(), reason="needs a checkout")


class Terminal:
    """`ckptmgr watch` on a pseudo-terminal of 80 columns and 24 lines."""

    def __init__(self, *arguments: str | Path, **extra: str) -> None:
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        command = [sys.executable, "-m", "ckptmgr", "watch", *map(str, arguments)]
        self.child = subprocess.Popen(
            command,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            env=process_env(**{"TERM": "xterm", **extra}),
        )
        os.close(follower)
        self.text = ""

    def until(self, pattern: str) -> str:
        """Read until a pattern appears; return all that was shown so far, without colours."""
        while not re.search(pattern, self.shown):
            if not self._read():
                raise AssertionError(f"no {pattern!r} in {self.text!r}")
        return self.shown

    @property
    def shown(self) -> str:
        """The output, without the sequences that steer a terminal."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)

    def press_ctrl_c(self) -> int:
        """Press Ctrl-C, read the rest, and return the exit code."""
        self.child.send_signal(2)  # the terminal is not its controlling one
        while self._read():
            pass
        return self.child.wait()

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._leader)

    def _read(self) -> bool:
        try:
            data = os.read(self._leader, 65536)
        except OSError:  # the other side is closed
            return False
        self.text += data.decode("utf-8", "backslashreplace")
        return bool(data)


@contextlib.contextmanager
def terminal(*arguments: str | Path, **extra: str) -> Iterator[Terminal]:
    one = Terminal(*arguments, **extra)
    try:
        yield one
    finally:
        one.close()


def row(**more: object) -> SeriesRow:
    known = {"directory": Path("/runs/resnet"), "series": "net", **more}
    return SeriesRow(**known)  # type: ignore[arg-type]


def checkpoint(step: int = 7) -> Checkpoint:
    return Checkpoint(
        path=Path(f"/runs/net-{step}.ckpt"),
        series="net",
        step=step,
        saved_at=datetime(2026, 3, 1, 11, 30, tzinfo=UTC),
        size_bytes=10,
    )


def shown(
    *rows: SeriesRow, width: int = 80, height: int = 24, has_several: bool = False
) -> list[str]:
    lines = table_lines(rows, NOW, width=width, height=height, has_several=has_several)
    return ["".join(cell.text for cell in line).rstrip() for line in lines]


def test_table_shows_last_save_rate_disk_and_time_to_full() -> None:
    full = row(
        newest=checkpoint(),
        every_s=90.0,
        bytes_per_s=5e8,
        free_bytes=10**12,
        full_in_s=7300.0,
        holder=SeriesHolder("live", "process 7"),
    )
    assert shown(full) == [
        "SERIES  STEP       SAVED  EVERY       WRITE     FREE  FULL IN  STATE",
        "net        7  30 min ago   90 s  500.0 MB/s  931 GiB      2 h   live",
    ]


def test_rows_with_alarms_come_first_and_states_say_what_is_to_do() -> None:
    rows = [
        row(series="a"),
        row(series="b", unverified=3),
        row(series="c", alarms=("damaged", "disk")),
        row(series=None, holder=SeriesHolder("dead", "process 7")),
    ]
    assert [line.split()[0] for line in shown(*rows)] == ["SERIES", "c", "a", "b", "no"]
    assert [line.split("  ")[-1].strip() for line in shown(*rows)[1:]] == [
        "damaged +1",
        "ok",
        "3 to do",
        "ok",
    ]


@pytest.mark.parametrize("width", [20, 60, 80])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    long = row(
        directory=Path("/runs") / ("d" * 60),
        series="s" * 60,
        newest=checkpoint(123456789),
        every_s=90.0,
        bytes_per_s=5e8,
        free_bytes=10**12,
        full_in_s=7300.0,
        alarms=("unreadable",),
    )
    lines = table_lines([long, row()], NOW, width=width, height=24, has_several=True)
    assert max(sum(len(cell.text) for cell in line) for line in lines) <= width
    assert "".join(cell.text for cell in lines[1]).startswith("...")


def test_rows_that_do_not_fit_the_terminal_are_counted() -> None:
    rows = [row(series=f"s{number}") for number in range(10)]
    rows[9] = row(series="s9", alarms=("damaged",))
    lines = shown(*rows, height=6)
    assert [line.split()[0] for line in lines] == ["SERIES", "s9", "s0", "s1", "s2", "and"]
    assert lines[-1] == "and 6 more"
    assert len(shown(*rows, height=11)) == 11
    assert shown(*rows, height=1)[-1] == "and 10 more"


def test_directory_without_series_says_so() -> None:
    assert shown(row(series=None))[1].startswith("no checkpoints  ")
    assert shown(row(series=None), has_several=True)[1].startswith("resnet/-  ")


def test_table_on_a_terminal_is_live_and_ends_cleanly(tmp_path: Path) -> None:
    with terminal(tmp_path, NO_COLOR="1") as screen, training(tmp_path) as trainer:
        screen.until("no checkpoints ")
        trainer.save(1)
        screen.until(r"net +1 .* live")
        trainer.save(2)
        screen.until(r"verified +net-2\.safetensors ok(?s:.*)net +2 .* live")
        assert screen.press_ctrl_c() == 0
    assert "by Ctrl-C; no alarm stands" in screen.shown
    assert screen.text.rindex("\x1b[?25h") > screen.text.rindex("\x1b[?25l")  # the cursor is back
    assert "\x1b[3" not in screen.text  # no colour
    assert screen.shown.isascii()


def test_alarm_on_a_terminal_is_a_line_and_in_the_table(tmp_path: Path) -> None:
    damage(save_run(tmp_path, [10])[0])
    with terminal(tmp_path, "--poll", "1s") as screen:
        screen.until(r"alarm +damaged: net-1_10\.ckpt")
        screen.until(r"net +10 .* damaged")
        assert screen.press_ctrl_c() == 1
    assert "\x1b[1;31m" in screen.text


def test_terminal_that_is_not_utf8_gets_ascii(tmp_path: Path) -> None:
    save_run(tmp_path, [10], series="n\u00e9t")
    with terminal(tmp_path, PYTHONIOENCODING="ascii", NO_COLOR="1") as screen:
        screen.until(r"n\\xe9t +10 ")
        screen.press_ctrl_c()
    assert screen.shown.isascii()


def test_dumb_terminal_gets_lines(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    with terminal(tmp_path, TERM="dumb") as screen:
        screen.until(r"verified +net-1_10\.ckpt ok")
        assert screen.press_ctrl_c() == 0
    assert "SERIES" not in screen.text
    assert "\x1b" not in screen.text


def test_line_without_a_terminal_says_when_what_and_where(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_run(tmp_path / name, [10])
    result = run("watch", tmp_path / "a", tmp_path / "b", tmp_path / "a", "--once")
    assert result.stdout.splitlines() == [
        f"2026-03-02T10:00:00Z  watching     {tmp_path / name}: 1 checkpoint, the newest"
        " net-1_10.ckpt of 2026-03-01 10:00:00Z"
        for name in ("a", "b")
    ] + [
        f"2026-03-02T10:00:00Z  verified     {tmp_path / name}: net-1_10.ckpt ok"
        for name in ("a", "b")
    ]


def test_names_that_are_not_in_the_charset_are_spelled_out(tmp_path: Path) -> None:
    save_run(tmp_path, [10], series="n\u00e9t\x1b[2J")
    result = run("watch", tmp_path, "--once", charset="ascii")
    assert "n\\xe9t\\x1b[2J-1_10.ckpt ok" in result.stdout


def test_quiet_prints_the_paths_that_alarms_are_about(tmp_path: Path) -> None:
    first, second = save_run(tmp_path, [10, 20])
    damage(first)
    damage(second)
    result = run("watch", tmp_path, "--once", "-q")
    assert set(result.stdout.splitlines()) == {str(first), str(second)}
    assert run("watch", tmp_path, "--once", "-0").stdout.count("\0") == 2


@needs_sources
def test_every_line_of_json_is_as_its_schema_says(tmp_path: Path) -> None:
    first, _ = save_run(tmp_path, [10, 20], metrics={10: {"loss": float("nan")}})
    damage(first)
    result = run("watch", tmp_path, "--once", "--json", "--prune", "--keep", "last(5)")
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert {one["event"] for one in reports} == {"watching", "verified", "alarm"}
    assert [problem for one in reports for problem in violations(one, schema())] == []
    loss = [one["checkpoint"]["metrics"] for one in reports if one["event"] == "alarm"]
    assert loss == [{"loss": None}]


@needs_sources
def test_schema_lists_every_event_alarm_and_status() -> None:
    fields = schema()["properties"]
    assert fields["event"]["enum"] == list(get_args(EventName))
    assert fields["alarm"]["enum"] == [*get_args(AlarmKind), None]
    assert set(fields["status"]["enum"]) == {*(one.value for one in api.Status), None}
    report = Report(event="note", at=0.0, directory=None, message="m")
    assert list(report_json(report)) == list(fields)


@needs_sources
def test_schema_check_finds_each_kind_of_difference() -> None:
    report = report_json(Report(event="note", at=0.0, directory=None, message="m"))
    changes: tuple[dict[str, Json], ...] = (
        {"schema": "other"},
        {"event": "other"},
        {"message": None},
        {"figures": {"seconds": True}},
        {"checkpoint": {}},
        {"other": 1},
    )
    assert all(list(violations({**report, **change}, schema())) for change in changes)
    assert list(violations({}, schema()))
