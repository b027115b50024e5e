# SPDX-License-Identifier: Apache-2.0
"""Figures, ages, colour, and the streams of a real process."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ckptmgr.cli import _COMMANDS, render
from ckptmgr.cli.key_options import keys_of_command
from ckptmgr.cli.progress import ProgressLine
from tests.cli.running import process_env, run, run_process
from tests.support.saved import save_run

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize(
    ("ago", "text"),
    [
        (timedelta(0), "now"),
        (timedelta(seconds=59), "59 s ago"),
        (timedelta(hours=3, minutes=59), "3 h ago"),
        (timedelta(days=800), "2 y ago"),
        (timedelta(hours=-1), "2026-03-02 13:00Z"),
    ],
)
def test_ages_are_short(ago: timedelta, text: str) -> None:
    assert render.age(NOW - ago, NOW) == text


@pytest.mark.parametrize(
    ("option", "environment", "is_terminal", "expected"),
    [
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": ""}, True, True),
        ("auto", {"FORCE_COLOR": "1", "TERM": "dumb"}, False, True),
        ("auto", {"TERM": "dumb"}, True, False),
        ("auto", {}, True, True),
        ("auto", {}, False, False),
    ],
)
def test_colour_is_decided_by_option_then_environment_then_terminal(
    option: str, environment: Mapping[str, str], is_terminal: bool, expected: bool
) -> None:
    assert render.wants_color(option, environment, is_terminal=is_terminal) is expected


def test_colour_adds_nothing_but_colour(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20], metrics={10: {"loss": 0.5}})
    plain = run("ls", tmp_path).stdout
    for arguments in (["--color", "always", "ls"], ["ls", "--color", "always"]):
        colored = run(*arguments, tmp_path).stdout
        assert "\x1b[" in colored
        assert ANSI.sub("", colored) == plain
    assert run("ls", tmp_path, env={"FORCE_COLOR": "1"}).stdout != plain
    for arguments in (["--no-color", "ls"], ["ls", "--no-color"]):
        assert run(*arguments, tmp_path, env={"FORCE_COLOR": "1"}).stdout == plain


def test_json_is_never_coloured(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    assert "\x1b" not in run("ls", tmp_path, "--json", "--color", "always").stdout


def test_unknown_stdout_encoding_counts_as_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        encoding = "no-such-codec"

    assert not render._is_utf8(Odd())  # type: ignore[arg-type]


def test_environment_names_the_key_only_when_it_says_something() -> None:
    assert keys_of_command((), {}) is None
    assert keys_of_command((), {"CKPTMGR_KEY": "", "CKPTMGR_KEY_FILE": ""}) is None


def test_terminal_gets_colour_and_a_pipe_does_not(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    assert b"\x1b[" not in run_process("ls", tmp_path).stdout
    leader, terminal = pty.openpty()
    command = [sys.executable, "-m", "ckptmgr", "ls", str(tmp_path)]
    env = process_env(TERM="xterm")
    subprocess.run(command, stdout=terminal, env=env, timeout=60, check=True)
    os.close(terminal)
    shown = os.read(leader, 65536)
    os.close(leader)
    assert b"\x1b[" in shown


def test_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    for epoch in range(1, 3000):
        (tmp_path / f"CKP-{epoch}_1.ckpt").touch()
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "ckptmgr", "ls", "-q", str(tmp_path)]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, env=process_env())
    os.close(writer)
    os.close(reader)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (141, b"")


def test_process_keeps_stdout_for_the_result(tmp_path: Path) -> None:
    done = run_process("ls", tmp_path / "no")
    assert (done.returncode, done.stdout) == (10, b"")
    assert done.stderr.startswith(b"ckptmgr: error: ")


def test_process_in_an_ascii_locale_spells_names_out(tmp_path: Path) -> None:
    save_run(tmp_path, [10], series="ä")
    save_run(tmp_path, [10], series="b")
    done = run_process("ls", tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, b"\\xe4" in done.stdout) == (0, True)


HEAVY = ("numpy", "rich", "cryptography", "torch", "mindspore", "blake3", "ml_dtypes")


def test_help_imports_nothing_heavy() -> None:
    lines = [["--help"], *([command, "--help"] for command in _COMMANDS)]
    program = (
        "import sys\n"
        "from ckptmgr.cli import cli\n"
        f"for line in {lines!r}:\n"
        "  try: cli.main(line)\n"
        "  except SystemExit: pass\n"
        f"  for name in {HEAVY!r}:\n"
        "    if name in sys.modules: sys.exit(f'{line} has imported {name}')\n"
    )
    command_line = [sys.executable, "-c", program]
    done = subprocess.run(
        command_line, capture_output=True, env=process_env(), timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_plain_list_imports_neither_numpy_nor_rich(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    program = (
        "import sys\n"
        "from ckptmgr.cli import cli\n"
        f"try: cli.main(['ls', {str(tmp_path)!r}])\n"
        "except SystemExit: pass\n"
        "print([n for n in ('numpy', 'rich') if n in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        env=process_env(),
        timeout=60,
        check=True,
    )
    assert done.stderr == b"[]\n"


@pytest.mark.parametrize(
    ("options", "has_line"), [({}, True), ({"is_json": True}, False), ({"is_quiet": True}, False)]
)
def test_progress_is_shown_only_beside_text(options: dict[str, bool], has_line: bool) -> None:
    output = render.Output(command="verify", root=Path(), **options)
    with output.progress("net.ckpt", 10) as line:
        assert isinstance(line, ProgressLine) is has_line


@pytest.mark.parametrize("has_color", [False, True])
def test_line_on_a_narrow_terminal_is_broken_between_words(
    has_color: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    output = render.Output(command="verify", root=Path(), columns=30, has_color=has_color)
    name = "a-name-of-a-checkpoint-that-is-longer-than-a-line.safetensors"
    output.line(
        render.Cell("ok", "green"), f"  {name}  checked manifest, size, digests, records, seal"
    )
    lines = ANSI.sub("", capsys.readouterr().out).splitlines()
    assert " ".join(" ".join(lines).split()) == (
        f"ok {name} checked manifest, size, digests, records, seal"
    )
    assert all(len(line) <= 30 for line in lines if name not in line)
    assert len(lines) > 2


def test_table_on_a_narrow_terminal_is_broken_between_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = render.Output(command="ls", root=Path(), columns=20)
    output.table(
        ("STEP", "WHY"),
        [[render.Cell("10"), render.Cell("nearest: last (3rd of 2)")]],
        right="STEP",
    )
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["STEP  WHY", "  10  nearest: last", "      (3rd of 2)"]
