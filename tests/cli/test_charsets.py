# SPDX-License-Identifier: Apache-2.0
"""Output that is not UTF-8, and names that are not: spelled out in ASCII, never an error, never lost in JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.cli.running import process_env, run
from tests.cli.test_shown_names import ONE_AFTER_ANOTHER
from tests.cli.test_watch import damage
from tests.support.saved import save_run

ODD = os.fsdecode(b"\xff\xc3") + "\u00e9 \u2192\n\x1b[2J"
"""Not UTF-8, not Latin-1, not ASCII, not one line, and harmful to a terminal."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory and checkpoints with such names, one of them damaged."""
    folder = tmp_path_factory.mktemp("runs") / f"d{ODD}"
    metrics = {step: {f"l\u00f6ss{number}": 1.5 for number in range(2)} for step in (10, 20, 30)}
    paths = save_run(folder, [10, 20, 30], series="n\u00e9t\u2192", metrics=metrics)
    damage(paths[0])
    (folder / f"x{ODD}.ckpt").write_bytes(b"x")
    return folder


Arguments = tuple[str | Path, ...]
NAMING: Mapping[str, Callable[[Path], Arguments]] = {
    "ls": lambda runs: ("ls", runs),
    "ls --all": lambda runs: ("ls", "--all", runs),
    "ls -r": lambda runs: ("ls", "-r", runs.parent),
    "ls of a folder of runs": lambda runs: ("ls", runs.parent),
    "stats": lambda runs: ("stats", runs.parent),
    "inspect": lambda runs: ("inspect", "20", "--dir", runs),
    "inspect of what is not there": lambda runs: ("inspect", runs / "nothing"),
    "verify": lambda runs: ("verify", runs),
    "diff": lambda runs: ("diff", "20", "30", "--dir", runs),
    "doctor": lambda runs: ("doctor", runs),
    "prune": lambda runs: ("prune", runs, "--keep", "last(1)", "-v", "--dry-run"),
    "rm": lambda runs: ("rm", "20", "--dir", runs, "--dry-run"),
    "simulate": lambda runs: ("simulate", "last(1)", runs),
    "report": lambda runs: ("report", runs, "--terminal"),
    "pin": lambda runs: ("pin", "20", "--dir", runs, "--reason", "f\u00fcr \u2192"),
    "unpin": lambda runs: ("unpin", "20", "--dir", runs),
    "watch": lambda runs: ("watch", runs, "--once"),
    "config": lambda runs: ("config", "show", runs, "--origin"),
    "help": lambda _: ("help", "prune"),
}


@pytest.mark.parametrize("charset", ["ascii", "latin-1", "cp1252", "utf-8"])
@pytest.mark.parametrize("name", NAMING)
def test_names_are_spelled_out_in_every_charset(runs: Path, name: str, charset: str) -> None:
    for options in ((), ("--color", "always")):
        arguments = NAMING[name](runs)
        if options and arguments[0] == "help":
            continue
        result = run(*arguments, *options, charset=charset)
        assert result.exit_code in (0, 1, 10), result.output
        shown = result.stdout_bytes.decode(charset)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
        assert plain.replace("\n", "").isprintable(), ascii(plain)
        assert "\udcff" not in result.stderr
        assert "Traceback" not in result.output


@pytest.mark.parametrize("name", ["ls", "verify", "stats", "doctor", "watch"])
def test_json_is_ascii_and_keeps_every_name(runs: Path, name: str) -> None:
    result = run(*NAMING[name](runs), "--json", charset="ascii")
    assert result.stdout_bytes.isascii()
    documents = [json.loads(line) for line in result.stdout.splitlines()]
    assert "\udcff" in json.dumps(documents, ensure_ascii=False)


@pytest.mark.parametrize("form", ["--markdown", "--csv"])
def test_documents_are_utf8_in_every_charset(runs: Path, form: str) -> None:
    found = [run("report", runs, form, charset=one).stdout_bytes for one in ("ascii", "utf-8")]
    # Other programs write on the disk meanwhile; the forecast is too far for a number.
    shown = {re.sub(rb"[0-9.]+ [kMGTP]?B free", b"", one) for one in found}
    assert len(shown) == 1
    assert "\u2192".encode() in shown.pop()


@pytest.mark.parametrize("charset", ["ascii", "cp1252", "utf-8"])
def test_names_for_programs_are_the_bytes_of_the_disk(runs: Path, charset: str) -> None:
    shown = run("ls", "-0", runs, charset=charset).stdout_bytes
    names = {os.path.basename(name) for name in shown.removesuffix(b"\0").split(b"\0")}
    assert os.fsencode(f"x{ODD}.ckpt") in names


def test_process_in_the_c_locale_spells_names_out(runs: Path) -> None:
    lines = [[os.fsencode(one).hex() for one in command(runs)] for command in NAMING.values()]
    program = "import os\n" + ONE_AFTER_ANOTHER.replace(
        "cli.main(arguments)",
        "cli.main([os.fsdecode(bytes.fromhex(one)) for one in arguments])",
    )
    env = process_env(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(lines)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=env,
        timeout=120,
        check=True,
    )
    shown = done.stdout.split(b"\0")
    assert shown.pop() == b""
    assert len(shown) == len(NAMING)
    assert done.stdout.replace(b"\0", b"").replace(b"\n", b"").decode("ascii").isprintable()
    assert b"Traceback" not in done.stderr
    assert b"internal error" not in done.stderr
    assert done.stderr.isascii()
