# SPDX-License-Identifier: Apache-2.0
"""Names of files and tensors: none steers the terminal that it is shown on, and a program reads each one as it is."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import save_checkpoint
from ckptmgr.cli.exits import cut
from ckptmgr.cli.render import quoted_name
from tests.cli.running import key_file, process_env, run, run_process
from tests.support import api
from tests.support.saved import KEY, flip, items, overwrite, save_run

EVIL = "\x1b]0;owned\x07\nx\r"
"""Sets the title of the window, and looks like two names."""


def at_terminal(*arguments: str | Path) -> bytes:
    """Run a command at a terminal, and return all that it shows."""
    return program_at_terminal("-m", "ckptmgr", *map(str, arguments))


def program_at_terminal(*arguments: str) -> bytes:
    """Run Python at a terminal, and return all that it shows."""
    leader, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        env=process_env(NO_COLOR="1", TERM="dumb"),
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an EIO
        while part := os.read(leader, 4096):
            shown += part
    os.close(leader)
    process.wait()
    return shown


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a directory with an evil name, and files and tensors with such names."""
    directory = tmp_path / f"runs{EVIL}"
    save_run(directory, [10, 20, 30], series=f"net{EVIL}")
    return directory


COMMANDS: dict[str, Callable[[Path], tuple[str | Path, ...]]] = {
    "ls": lambda runs: ("ls", runs),
    "ls -q": lambda runs: ("ls", "-q", runs),
    "ls of what is not there": lambda runs: ("ls", runs / "nothing"),
    "verify": lambda runs: ("verify", runs),
    "verify -q": lambda runs: ("verify", "-q", runs),
    "inspect": lambda runs: ("inspect", "latest", "--dir", runs),
    "inspect -q": lambda runs: ("inspect", "-q", "latest", "--dir", runs),
    "pin": lambda runs: ("pin", "latest", "--dir", runs),
    "pin -q": lambda runs: ("pin", "-q", "latest", "--dir", runs),
    "prune": lambda runs: ("prune", runs, "--keep", "last(1)", "-v", "--dry-run"),
    "prune -q": lambda runs: ("prune", "-q", runs, "--keep", "last(1)", "--yes"),
    "prune of what is not there": lambda runs: ("prune", runs / "nothing", "--keep", "last(1)"),
    "keygen": lambda runs: ("keygen", "--out", runs / f"key{EVIL}"),
    "keygen -q": lambda runs: ("keygen", "-q", "--out", runs / f"key{EVIL}"),
    "error with its trace": lambda runs: ("--debug", "inspect", runs / "nothing"),
}


# One process for all commands: most of the time of each would be its imports.
ONE_AFTER_ANOTHER = """
import json, sys
from ckptmgr.cli import cli
for arguments in json.loads(sys.argv[1]):
    try:
        cli.main(arguments)
    except SystemExit:
        pass
    print(end="\\0", flush=True)
"""


def test_no_name_steers_the_terminal(runs: Path, tmp_path: Path) -> None:
    for path in runs.glob("*-3_10.ckpt"):
        flip(path, 20)  # verify names the damaged file
    lines = []
    for index, command in enumerate(COMMANDS.values()):
        own = tmp_path / str(index) / runs.name
        shutil.copytree(runs, own)
        lines.append([*map(str, command(own))])
    shown = program_at_terminal("-c", ONE_AFTER_ANOTHER, json.dumps(lines)).split(b"\0")
    assert shown.pop() == b""
    for name, text in zip(COMMANDS, shown, strict=True):
        assert text, name
        assert not set(text) & {0x1B, 0x07, 0x0B}, name
        # A terminal makes \r\n of each line feed; \r alone comes from a name.
        assert b"\r" not in text.replace(b"\r\n", b""), name


def test_warning_of_the_library_does_not_steer_the_terminal(tmp_path: Path) -> None:
    options = api.SaveOptions(format="safetensors", key=KEY)
    (path,) = save_run(tmp_path / f"runs{EVIL}", [10], options=options, content=items()[:1])
    flip(path, 4096 + 100)
    shown = at_terminal("verify", path, "--quick", "--key", key_file(tmp_path))
    assert b"header copy B" in shown
    assert b"\x1b" not in shown


def test_quiet_names_are_quoted_on_a_terminal_as_a_shell_reads_them(tmp_path: Path) -> None:
    for name in ("a.ckpt", "b b.ckpt", "c\n.ckpt"):
        (tmp_path / name).write_bytes(b"x")
    shown = at_terminal("ls", "-q", tmp_path).decode().splitlines()
    assert [line.removeprefix("$").removeprefix("'") for line in shown] == [
        f"{tmp_path}/a.ckpt",
        f"{tmp_path}/b b.ckpt'",
        f"{tmp_path}/c\\n.ckpt'",
    ]


def test_pipe_gets_names_ended_by_nul(tmp_path: Path) -> None:
    names = [os.fsdecode(b"\xff.ckpt"), "c\n.ckpt"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    expected = {os.fsencode(tmp_path / name) for name in names}
    for options in (("-0",), ("-q", "-0"), ("-q0",), ("--null",)):
        shown = run("ls", *options, tmp_path).stdout_bytes
        assert shown.endswith(b"\0")
        assert set(shown.removesuffix(b"\0").split(b"\0")) == expected


def test_nothing_is_no_name(tmp_path: Path) -> None:
    assert run("ls", "-0", tmp_path).stdout_bytes == b""


def test_line_feed_in_a_name_is_said_to_the_reader_of_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "c\n.ckpt").write_bytes(b"x")
    done = run_process("ls", "-q", tmp_path)
    assert done.stdout == os.fsencode(tmp_path / "c\n.ckpt") + b"\n"
    assert b"-0 separates" in done.stderr


def test_tensors_are_named_like_files(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save_checkpoint({f"a{EVIL}": np.ones(1), "b": np.ones(1)}, path)
    names = run("inspect", "-0", path).stdout_bytes.split(b"\0")
    assert names == [f"a{EVIL}".encode(), b"b", b""]
    shown = at_terminal("inspect", "-q", path)
    assert shown == b"$'a\\033]0;owned\\007\\nx\\r'\r\nb\r\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@given(st.lists(st.binary(min_size=1).filter(lambda name: b"\0" not in name), max_size=20))
def test_shell_reads_a_quoted_name_as_it_is(names: list[bytes]) -> None:
    words = " ".join(map(quoted_name, names))
    command = ["bash", "-c", f'set -- {words}; for one; do printf "%s\\0" "$one"; done']
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    read = subprocess.run(command, capture_output=True, check=True, env=environment).stdout
    assert read == b"".join(name + b"\0" for name in names)


@given(st.binary())
def test_quoted_name_is_printable(name: bytes) -> None:
    assert quoted_name(name).isprintable()


def test_name_as_long_as_a_header_is_cut_in_lines_and_whole_in_json(tmp_path: Path) -> None:
    name = "w" * 5000
    path = tmp_path / "net.safetensors"
    save_checkpoint({name: np.ones(4, np.float32)}, path, format="safetensors")
    (tmp_path / f"{path.name}.manifest.json").unlink()
    overwrite(path, path.read_bytes().replace(b'"F32"', b'"X32"'))
    short = f"tensor '{'w' * 59}...{'w' * 18}')"
    for arguments in (
        ("verify", tmp_path),
        ("inspect", path),
        ("watch", tmp_path, "--once"),
        ("doctor", tmp_path),
    ):
        result = run(*arguments)
        assert result.exit_code in (1, 2)
        shown = result.stdout + result.stderr  # the output of click 8.1 lacks the latter
        assert short in shown
        assert name not in shown
        assert max(map(len, shown.splitlines())) < 300
        as_json = run(*arguments, "--json")
        assert name in as_json.stdout + as_json.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/".join(["d" * 255] * 15), "/".join(["d" * 255] * 15)),
        ("a " * 10_000, f"{('a ' * 10_000)[:8189]}..."),
    ],
)
def test_paths_stay_whole_and_lines_end_somewhere(text: str, shown: str) -> None:
    assert cut(text) == shown
