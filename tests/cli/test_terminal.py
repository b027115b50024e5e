# SPDX-License-Identifier: Apache-2.0
"""Commands at a real terminal of 80 columns: questions, progress, colour, the live table, tables that fit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptmgr.formats.tensor import tensor_from_array
from tests.cli.preloaded import Preloaded, preloaded
from tests.cli.running import key_file, run, run_json
from tests.cli.terminal import CTRL_C, CTRL_D, at_terminal
from tests.cli.test_watch import damage
from tests.support import api
from tests.support.foreign import any_run
from tests.support.saved import KEY, OTHER_KEY, items, save_run, tree_of

PLAIN = api.SaveOptions(format="safetensors")
SEALED = api.SaveOptions(format="safetensors", key=KEY)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def forker() -> Iterator[Preloaded]:
    pytest.importorskip("pyte", reason="needs pyte, a terminal emulator: make")
    with preloaded() as one:
        yield one


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three sealed checkpoints, and two keys beside them."""
    save_run(tmp_path / "runs", [10, 20, 30], options=SEALED, content=items()[:1])
    key_file(tmp_path)
    (tmp_path / "keys").mkdir()
    key_file(tmp_path / "keys", hex_digits=OTHER_KEY.raw.hex())
    return tmp_path / "runs"


def asking(command: str, runs: Path) -> tuple[str | Path, ...]:
    """Return the arguments of a command that asks before it changes anything."""
    key, new = f"file:{runs.parent}/run.key", f"file:{runs.parent}/keys/run.key"
    return {
        "prune": ("prune", runs, "--keep", "last(1)", "--key", key),
        "rm": ("rm", "10", "--dir", runs),
        "rekey": ("rekey", runs, "--key", key, "--add", new),
        "reencrypt": ("reencrypt", runs, "--key", key, "--to", new),
    }[command]


@pytest.mark.parametrize(
    ("keys", "code"), [("y\n", 0), ("n\n", 1), (CTRL_C, 130), (CTRL_D, 130)], ids=repr
)
@pytest.mark.parametrize("command", ["prune", "rm", "rekey", "reencrypt"])
def test_command_that_destroys_acts_only_after_a_yes(
    forker: Preloaded, runs: Path, command: str, keys: str, code: int
) -> None:
    before = tree_of(runs)
    with at_terminal(forker, *asking(command, runs)) as terminal:
        terminal.until("? [y/N]:")
        assert tree_of(runs) == before
        terminal.press(keys)
        assert terminal.end() == code
    assert (tree_of(runs) != before) is (code == 0)
    assert ("ckptmgr: interrupted" in terminal.lines) is (code == 130)


def test_question_is_asked_again_after_another_answer_and_outlives_a_resize(
    forker: Preloaded, runs: Path
) -> None:
    with at_terminal(forker, *asking("rm", runs)) as terminal:
        terminal.until("? [y/N]:")
        terminal.resize(40, 12)
        terminal.press("perhaps\n")
        terminal.until("answer y or n")
        terminal.resize(80, 24)
        terminal.press("y\n")
        assert terminal.end() == 0
    assert [item["step"] for item in run_json("ls", runs)["items"]] == [20, 30]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A plain and a sealed checkpoint of 2 MiB with a long name, and two keys."""
    content = [tensor_from_array("w", np.random.default_rng(0).random(1 << 18))]
    for name, options in (("plain", api.SaveOptions(format="safetensors")), ("sealed", SEALED)):
        series = "a-long-name-of-a-series-" * 4
        save_run(tmp_path / name, [10], series=series, options=options, content=content)
    key_file(tmp_path)
    (tmp_path / "keys").mkdir()
    key_file(tmp_path / "keys", hex_digits=OTHER_KEY.raw.hex())
    return tmp_path


WORKING: dict[str, Callable[[Path], tuple[str | Path, ...]]] = {
    "verify": lambda at: ("verify", at / "plain", "--deep"),
    "diff": lambda at: ("diff", at / "plain", at / "plain"),
    "convert": lambda at: ("convert", at / "plain", "--compression", "zstd"),
    "reencrypt": lambda at: (
        *("reencrypt", at / "sealed", "--key", f"file:{at}/run.key"),
        *("--to", f"file:{at}/keys/run.key", "--yes"),
    ),
    "export": lambda at: (
        *("export", "latest", "--dir", at / "plain", "--to", "ckpt", "-o", at / "x.ckpt"),
    ),
    "decrypt": lambda at: (
        *("decrypt", next((at / "sealed").glob("*.safetensors")), "-o", at / "x.safetensors"),
        *("--key", f"file:{at}/run.key"),
    ),
    "copy": lambda at: ("copy", at / "plain", f"file://{at}/bucket"),
}


def bars(lines: list[str]) -> list[str]:
    """Return the lines of the screen that show progress."""
    return [line for line in lines if re.search(r"\d/\d.*(bytes|[kMG]i?B)", line)]


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("command", WORKING)
def test_progress_is_one_line_that_is_erased_in_the_end(
    forker: Preloaded, large: Path, command: str, columns: int
) -> None:
    if command == "copy":
        pytest.importorskip("obstore")
    arguments = WORKING[command](large)
    with at_terminal(forker, *arguments, columns=columns, patience_s=0.0) as terminal:
        assert terminal.end() == 0
    shown = [bars(lines) for lines in terminal.seen]
    assert any(shown)
    assert max(map(len, shown)) == 1
    assert bars(terminal.lines) == []
    assert "" not in terminal.lines


@pytest.mark.parametrize("option", ["--json", "-q", "-0"])
def test_progress_is_shown_only_beside_text(forker: Preloaded, large: Path, option: str) -> None:
    with at_terminal(forker, "verify", large / "plain", option, patience_s=0.0) as terminal:
        assert terminal.end() == 0
    assert b"\x1b" not in terminal.raw
    assert not any(map(bars, terminal.seen))


def test_short_work_shows_no_progress(forker: Preloaded, large: Path) -> None:
    with at_terminal(forker, "verify", large / "plain", patience_s=60.0, NO_COLOR="1") as terminal:
        assert terminal.end() == 0
    assert b"\x1b" not in terminal.raw


def test_long_work_shows_its_progress_after_half_a_second(
    forker: Preloaded, tmp_path: Path
) -> None:
    seen: list[list[str]] = []
    for mib in (16, 48, 144, 432):  # how much takes longer than that is a matter of the machine
        if any(map(bars, seen)):
            break
        numbers = np.random.default_rng(0).normal(size=mib << 18).astype(np.float32)
        content = [tensor_from_array("w", numbers)]
        save_run(tmp_path / f"{mib}", [10], options=PLAIN, content=content)
        arguments = ("convert", tmp_path / f"{mib}", "--compression", "zstd", "--level", "19")
        with at_terminal(forker, *arguments) as terminal:
            os.sched_setaffinity(terminal.pid, list(os.sched_getaffinity(0))[:1])
            assert terminal.end() == 0
        assert bars(terminal.lines) == []
        seen = terminal.seen
    assert any(map(bars, seen))


def table_of(lines: list[str]) -> list[str]:
    """Return the live table on a screen."""
    header = [number for number, line in enumerate(lines) if line.startswith("SERIES ")]
    return lines[header[-1] :] if header else []


def test_live_table_is_drawn_in_place_and_fits_a_new_size(
    forker: Preloaded, tmp_path: Path
) -> None:
    save_run(tmp_path, [10])
    with at_terminal(forker, "watch", tmp_path) as terminal:
        terminal.until("verified     net-1_10.ckpt ok")
        terminal.until("net       10")
        assert terminal.text.count("SERIES ") == 1
        terminal.resize(50, 24)
        save_run(tmp_path, [20], series="b")
        terminal.until("verified     b-2_10.ckpt ok")
        terminal.until("\nb         20")
        assert max(map(len, table_of(terminal.lines))) <= 50
        terminal.press(CTRL_C)
        assert terminal.end() == 0
    assert terminal.lines[-3].startswith("SERIES ")
    assert "by Ctrl-C; no alarm stands" in terminal.text.replace("\n", " ")


def test_ctrl_c_of_a_watch_with_an_alarm_is_its_answer_no(
    forker: Preloaded, tmp_path: Path
) -> None:
    damage(save_run(tmp_path, [10])[0])
    with at_terminal(forker, "watch", tmp_path, "--poll", "1s") as terminal:
        terminal.until("alarm        damaged: net-1_10.ckpt")
        terminal.until("SERIES ")
        terminal.press(CTRL_C)
        assert terminal.end() == 1
    assert "1 alarm standing" in terminal.text


def test_watch_without_a_terminal_writes_each_line_at_once(
    forker: Preloaded, tmp_path: Path
) -> None:
    save_run(tmp_path, [10])
    reader, writer = os.pipe()
    with at_terminal(forker, "watch", tmp_path, stdout=writer) as terminal, open(reader) as lines:
        os.close(writer)
        shown = [next(lines), next(lines)]
        assert "  watching     1 checkpoint, the newest net-1_10.ckpt of" in shown[0]
        assert shown[1].endswith("  verified     net-1_10.ckpt ok\n")
        terminal.press(CTRL_C)
        assert next(lines).endswith("  stopped      by Ctrl-C; no alarm stands\n")
        assert terminal.end() == 0
    assert terminal.raw in (b"^C", b"^C\r\n")


@pytest.mark.parametrize(
    ("options", "env", "has_color"),
    [
        ((), {}, True),
        ((), {"NO_COLOR": "1"}, False),
        ((), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ((), {"TERM": "dumb"}, False),
        (("--color", "never"), {"FORCE_COLOR": "1"}, False),
        (("--no-color",), {}, False),
        (("--color", "always"), {"NO_COLOR": "1", "TERM": "dumb"}, True),
    ],
)
def test_colour_is_as_the_option_and_the_environment_say(
    forker: Preloaded,
    tmp_path: Path,
    options: tuple[str, ...],
    env: dict[str, str],
    has_color: bool,
) -> None:
    save_run(tmp_path, [10])
    with at_terminal(forker, "verify", tmp_path, *options, patience_s=0.0, **env) as terminal:
        assert terminal.end() == 0
    assert (re.search(rb"\x1b\[[0-9;]*m", terminal.raw) is not None) is has_color
    assert (b"\x1b[?25l" in terminal.raw) is (env.get("TERM") != "dumb")  # the progress
    assert terminal.lines == [
        "ok          net-1_10.ckpt  checked manifest, size, digests, structure",
        "1 checkpoint (full): 1 ok",
    ]


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        (f"{KEY.raw.hex()}\n", 0),
        (f"{OTHER_KEY.raw.hex()}\n", 12),
        (CTRL_D, 12),
        (CTRL_C, 130),
    ],
    ids=["right", "wrong", "Ctrl-D", "Ctrl-C"],
)
def test_key_that_is_asked_for_is_not_shown(
    forker: Preloaded, runs: Path, keys: str, code: int
) -> None:
    with at_terminal(forker, "verify", runs, "--key", "prompt:") as terminal:
        terminal.until("Key (hex or base64)")
        terminal.press(keys)
        assert terminal.end() == code
    assert KEY.raw.hex().encode() not in terminal.raw
    assert OTHER_KEY.raw.hex().encode() not in terminal.raw
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", "$'{}/n\\303\\251t.ckpt'"),
        ("cp1252", "'{}/n\u00e9t.ckpt'"),
        ("utf-8", "'{}/n\u00e9t.ckpt'"),
    ],
)
def test_name_at_a_terminal_is_quoted_where_the_charset_lacks_it(
    forker: Preloaded, tmp_path: Path, encoding: str, shown: str
) -> None:
    (tmp_path / "n\u00e9t.ckpt").write_bytes(b"x")
    with at_terminal(forker, "ls", "-q", tmp_path, encoding=encoding) as terminal:
        assert terminal.end() == 0
    assert terminal.raw.decode(encoding).strip() == shown.format(tmp_path)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_progress_and_table_of_a_terminal_that_is_not_utf8(
    forker: Preloaded, tmp_path: Path, encoding: str
) -> None:
    save_run(tmp_path, [10], series="n\u00e9t\u2192")
    with at_terminal(forker, "verify", tmp_path, encoding=encoding, patience_s=0.0) as terminal:
        assert terminal.end() == 0
    assert "\\u2192-1_10.ckpt  checked manifest" in terminal.raw.decode(encoding)


def test_result_that_is_longer_than_the_screen_is_not_paged(
    forker: Preloaded, tmp_path: Path
) -> None:
    for epoch in range(1, 40):
        (tmp_path / f"CKP-{epoch}_1.ckpt").touch()
    with at_terminal(forker, "ls", tmp_path, PAGER="false") as terminal:
        assert terminal.end() == 0
    assert terminal.raw.count(b"\r\n") > 39


@pytest.mark.parametrize(("columns", "most"), [(80, 78), (40, 50)])  # 50 is the least of click
def test_help_is_as_wide_as_the_terminal(forker: Preloaded, columns: int, most: int) -> None:
    with at_terminal(forker, "rekey", "--help", columns=columns) as terminal:
        assert terminal.end() == 0
    lines = terminal.raw.decode().split("\r\n")
    assert [line for line in lines if len(line) > most and " " in line.strip()] == []


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with long names, metrics, tags and damage, and a directory of another tool."""
    folder = tmp_path_factory.mktemp("tree")
    metrics = {step: {"accuracy": 1 / step, "loss": 12.5} for step in (10, 20, 30)}
    save_run(folder / "a", [10, 20, 30], metrics=metrics)
    series = "an-experiment-with-a-name-that-is-longer-than-many"
    save_run(folder / "b", [10, 20], series=series, metrics=metrics)
    damage(save_run(folder / "b", [10, 20, 30], metrics=metrics)[1])
    any_run("deepspeed", folder / "deepspeed")
    assert run("tag", "20", "a-tag", "--dir", folder / "a").exit_code == 0
    assert run("verify", folder / "b").exit_code == 1
    return folder


SHOWING: dict[str, Callable[[Path], tuple[str | Path, ...]]] = {
    "ls": lambda at: ("ls", at / "a"),
    "ls of two series": lambda at: ("ls", at / "b", "--all"),
    "ls -r": lambda at: ("ls", "-r", at),
    "ls of another tool": lambda at: ("ls", at / "deepspeed"),
    "ls of a folder of runs": lambda at: ("ls", at),
    "stats": lambda at: ("stats", at),
    "inspect": lambda at: ("inspect", "latest", "--dir", at / "a"),
    "verify": lambda at: ("verify", at / "b"),
    "diff": lambda at: ("diff", "10", "20", "--dir", at / "a"),
    "doctor": lambda at: ("doctor", at / "a"),
    "prune": lambda at: ("prune", at / "b", "--keep", "last(1)", "--dry-run", "-v"),
    "rm": lambda at: ("rm", "10", "--dir", at / "a", "--dry-run"),
    "simulate": lambda at: ("simulate", "last(1) | best(1, loss, min)", at / "a"),
    "report": lambda at: ("report", at / "b", "--terminal"),
    "config": lambda at: ("config", "show", at / "a", "--origin"),
    "watch": lambda at: ("watch", at / "b", "--once"),
    "exit codes": lambda _: ("help", "exit-codes"),
}


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("name", SHOWING)
def test_no_line_is_wider_than_the_terminal_but_for_a_long_word(
    forker: Preloaded, tree: Path, name: str, columns: int
) -> None:
    arguments = SHOWING[name](tree)
    with at_terminal(forker, *arguments, columns=columns, NO_COLOR="1") as terminal:
        assert terminal.end() in (0, 1, 10)
    lines = ANSI.sub("", terminal.raw.decode()).split("\r\n")
    assert len(lines) > 1
    assert [line for line in lines if len(line) > columns and " " in line.strip()] == []


def test_interrupt_with_json_is_one_object(forker: Preloaded, runs: Path) -> None:
    with at_terminal(forker, *asking("rm", runs), "--json") as terminal:
        terminal.until("? [y/N]:")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    shown = "".join(terminal.lines)  # of 80 columns each
    error = json.loads(shown[shown.index("{") : shown.rindex("}") + 1])
    assert (error["code"], error["error"]) == (130, "Interrupted")
