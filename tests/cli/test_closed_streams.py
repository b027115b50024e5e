# SPDX-License-Identifier: Apache-2.0
"""Standard streams whose reader is gone, that are closed, or that are full: documented codes, and no traceback."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from ckptmgr.cli import _COMMANDS
from tests.cli.preloaded import Preloaded, preloaded
from tests.cli.running import key_file, process_env
from tests.support import api
from tests.support.saved import KEY, OTHER_KEY, items, save_run

DEVICE = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not DEVICE.exists(), reason=f"needs {DEVICE}")


@pytest.fixture(scope="module")
def forker() -> Iterator[Preloaded]:
    with preloaded() as one:
        yield one


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain and sealed runs, and keys, which all commands share."""
    folder = tmp_path_factory.mktemp("place")
    for name, options in (
        ("plain", None),
        ("sealed", api.SaveOptions(format="safetensors", key=KEY)),
    ):
        save_run(folder / name, [10, 20], options=options, content=items()[:1])
    key_file(folder)
    (folder / "new").mkdir()
    key_file(folder / "new", hex_digits=OTHER_KEY.raw.hex())
    return folder


Arguments = tuple[str | Path, ...]
PRINTING: Mapping[str, Callable[[Path], Arguments]] = {
    "ls": lambda at: ("ls", at / "plain"),
    "stats": lambda at: ("stats", at),
    "inspect": lambda at: ("inspect", "latest", "--dir", at / "plain"),
    "verify": lambda at: ("verify", at / "plain"),
    "diff": lambda at: ("diff", "10", "20", "--dir", at / "plain"),
    "doctor": lambda at: ("doctor", at / "plain"),
    "decrypt": lambda at: (
        *("decrypt", at / "sealed/net-1_10.safetensors", "-o", "-"),
        *("--key", f"file:{at}/run.key"),
    ),
    "encrypt": lambda at: (
        *("encrypt", at / "plain/net-1_10.ckpt", "-o", "-"),
        *("--key", f"file:{at}/run.key"),
    ),
    "convert": lambda at: (
        *("convert", at / "sealed", "--compression", "none", "--key", f"file:{at}/run.key"),
    ),
    "export": lambda at: (
        *("export", "10", "--dir", at / "plain", "--to", "safetensors", "--force"),
        *("-o", at / "x.safetensors"),
    ),
    "rekey": lambda at: (
        *("rekey", at / "sealed", "--key", f"file:{at}/run.key", "--dry-run"),
        *("--add", f"file:{at}/new/run.key"),
    ),
    "reencrypt": lambda at: (
        *("reencrypt", at / "sealed", "--key", f"file:{at}/run.key", "--dry-run"),
        *("--to", f"file:{at}/new/run.key"),
    ),
    "prune": lambda at: ("prune", at / "plain", "--keep", "last(1)", "--dry-run"),
    "rm": lambda at: ("rm", "10", "--dir", at / "plain", "--dry-run"),
    "simulate": lambda at: ("simulate", "last(1)", at / "plain"),
    "report": lambda at: ("report", at / "plain", "--terminal"),
    "pin": lambda at: ("pin", "20", "--dir", at / "plain"),  # not 10, which `rm` would refuse then
    "unpin": lambda at: ("unpin", "20", "--dir", at / "plain"),
    "tag": lambda at: ("tag", "10", "a", "--dir", at / "plain"),
    "watch": lambda at: ("watch", at / "plain", "--once"),
    "config": lambda at: ("config", "show", at / "plain"),
    "completion": lambda _: ("completion", "bash"),
    "help": lambda _: ("help", "exit-codes"),
}
"""What each command prints to stdout. Of the others, which need ranks, an object store, a program or a
new file for each run, `HELP` is printed."""
HELP = sorted({*_COMMANDS, "help"} - PRINTING.keys())
ALL: Mapping[str, Callable[[Path], Arguments]] = {
    **PRINTING,
    **{name: lambda _, name=name: (name, "--help") for name in HELP},  # type: ignore[misc]
    "--help": lambda _: ("--help",),
    "--version": lambda _: ("--version",),
}


def ended(
    forker: Preloaded, arguments: Arguments, *, out: int, err: int, **more: object
) -> tuple[int, str]:
    """Run a command with these streams, and return its exit code and its output to a pipe at -1."""
    reader, writer = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    streams = (null, writer if out < 0 else out, writer if err < 0 else err)
    pid = forker.start(arguments, streams, **more)  # type: ignore[arg-type]
    os.close(writer)
    os.close(null)
    with open(reader, "rb") as pipe:
        written = pipe.read()
    return forker.wait(pid), written.decode()


@contextlib.contextmanager
def broken_pipe() -> Iterator[int]:
    """Yield the end of a pipe for writing whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("name", ALL)
def test_reader_that_is_gone_ends_a_command_quietly(
    forker: Preloaded, place: Path, name: str
) -> None:
    with broken_pipe() as out:
        assert ended(forker, ALL[name](place), out=out, err=-1) == (141, "")


@pytest.mark.parametrize("name", PRINTING)
def test_closed_stdout_changes_no_exit_code(forker: Preloaded, place: Path, name: str) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    code, shown = ended(forker, ALL[name](place), out=null, err=-1, closed=[1])
    os.close(null)
    assert (code, "Traceback" in shown) == (0, False)


FAILING: Mapping[str, tuple[Callable[[Path], Arguments], int]] = {
    "no such directory": (lambda at: ("ls", at / "nothing"), 10),
    "no such option": (lambda _: ("ls", "--nothing"), 2),
    "no arguments": (lambda _: (), 2),
    "no key": (lambda at: ("decrypt", at / "sealed/net-1_10.safetensors", "-o", "-"), 12),
    "nobody to ask": (lambda at: ("rm", "10", "--dir", at / "plain"), 13),
    "error with its trace": (lambda at: ("--debug", "ls", at / "nothing"), 10),
    "error as JSON": (lambda at: ("ls", at / "nothing", "--json"), 10),
}


@pytest.mark.parametrize("name", FAILING)
def test_error_that_cannot_be_shown_has_its_exit_code(
    forker: Preloaded, place: Path, name: str
) -> None:
    arguments, code = FAILING[name]
    with broken_pipe() as err:
        assert ended(forker, arguments(place), out=-1, err=err) == (code, "")
        assert ended(forker, arguments(place), out=-1, err=err, closed=[2]) == (code, "")


@needs_full_device
@pytest.mark.parametrize("name", FAILING)
def test_error_that_finds_no_space_has_its_exit_code(
    forker: Preloaded, place: Path, name: str
) -> None:
    arguments, code = FAILING[name]
    full = os.open(DEVICE, os.O_WRONLY)
    assert ended(forker, arguments(place), out=-1, err=full) == (code, "")
    os.close(full)


@needs_full_device
@pytest.mark.parametrize("name", ["ls", "verify", "decrypt", "watch", "help", "--version"])
def test_result_that_finds_no_space_is_an_error(forker: Preloaded, place: Path, name: str) -> None:
    full = os.open(DEVICE, os.O_WRONLY)
    code, shown = ended(forker, ALL[name](place), out=full, err=-1)
    os.close(full)
    assert (code, shown) == (2, "ckptmgr: error: standard output: No space left on device\n")


def test_note_that_cannot_be_shown_does_not_end_the_command(
    forker: Preloaded, tmp_path: Path
) -> None:
    with broken_pipe() as err:
        code, shown = ended(forker, ("keygen", "--out", tmp_path / "k"), out=-1, err=err)
    assert code == 0
    assert str(tmp_path / "k") in shown


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_shell_sees_the_same_codes_of_whole_processes(place: Path) -> None:
    ckptmgr = f"{sys.executable} -m ckptmgr"
    script = f"""
        set +e
        {ckptmgr} ls {place}/nothing 2> {DEVICE}; echo $?
        {ckptmgr} ls {place}/nothing 2>&- >&-; echo $?
        {ckptmgr} ls {place}/plain >&-; echo $?
        {ckptmgr} completion bash | true; echo ${{PIPESTATUS[0]}}
    """
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=process_env(), check=True
    )
    assert done.stdout.split() == ["10", "10", "0", "141"]
    assert done.stderr == ""
