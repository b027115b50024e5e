# SPDX-License-Identifier: Apache-2.0
"""Every error has an exit code, every help shows the codes, and errors look alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

import ckptmgr.policy.text
from ckptmgr.cli import _COMMANDS, cli, options
from ckptmgr.cli.exits import CODES, MEANINGS, Exit, code_of, escape, report, report_all
from ckptmgr.core import errors
from tests.cli.running import process_env, run, run_process
from tests.support.saved import save_run, tree_of

DOCUMENTED = {0, 1, 2, 3, 10, 11, 12, 13, 130, 141}


def all_errors(kind: type[errors.CkptmgrError]) -> set[type[errors.CkptmgrError]]:
    """Return a class and all that inherit from it."""
    return {kind}.union(*(all_errors(child) for child in kind.__subclasses__()))


def test_every_error_of_the_tree_has_its_own_entry() -> None:
    tree = {kind for kind in all_errors(errors.CkptmgrError) if kind.__module__ == errors.__name__}
    assert set(CODES) == tree


def test_errors_of_other_modules_take_the_code_of_their_parent() -> None:
    error = ckptmgr.policy.text.PolicyTextError("no", text="last", offset=0)
    assert code_of(error) is Exit.FAILED


def test_codes_are_the_documented_ones() -> None:
    assert {int(code) for code in Exit} == DOCUMENTED
    assert set(MEANINGS) == set(Exit)


def test_foreign_errors_mean_failure() -> None:
    assert code_of(OSError(5, "Input/output error")) is Exit.FAILED
    assert code_of(RuntimeError()) is Exit.FAILED


def test_failure_after_a_part_was_done_is_partly_done(capsys: pytest.CaptureFixture[str]) -> None:
    failures = [OSError(5, "Input/output error", "/x")]
    assert report_all(failures, is_partial=True, as_json=False) is Exit.PARTLY
    assert report_all(failures, is_partial=False, as_json=False) is Exit.FAILED
    assert "Input/output error" in capsys.readouterr().err


@pytest.mark.parametrize("command", [None, *_COMMANDS, "help"])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_help_shows_an_example_or_topic_and_the_exit_codes(
    command: str | None, option: str
) -> None:
    result = run(*([command] if command else []), option)
    assert result.exit_code == 0
    said = " ".join(result.stdout.split())  # as on any width
    for code in DOCUMENTED:
        assert f" {code} {MEANINGS[Exit(code)]}" in said
    if command != "help":
        assert "  $ ckptmgr " in result.stdout


def test_help_of_a_topic_prints_the_table() -> None:
    result = run("help", "exit-codes")
    assert (result.exit_code, result.stdout.count("\n")) == (0, len(DOCUMENTED) + 1)


def test_help_of_a_command_is_its_help() -> None:
    assert run("help", "ls").stdout.split("\n")[1:] == run("ls", "--help").stdout.split("\n")[1:]
    assert run("help").stdout == run("--help").stdout


def test_help_lists_exactly_the_commands_that_exist() -> None:
    with click.Context(cli) as context:
        names = cli.list_commands(context)
        assert all(cli.get_command(context, name) for name in names)
    assert set(names) == {*_COMMANDS, "help"}


@pytest.mark.parametrize("arguments", [["lss"], ["help", "lss"]])
def test_typing_error_gets_a_suggestion(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr == (
        "ckptmgr: error: no such command 'lss'\nckptmgr: hint: did you mean ls?\n"
    )


@pytest.mark.parametrize(("typed", "meant"), [("lst", "ls"), ("Verfiy", "verify"), ("dif", "diff")])
def test_mistyped_command_is_shown_with_the_one_that_was_meant(typed: str, meant: str) -> None:
    assert run(typed).stderr == (
        f"ckptmgr: error: no such command {typed!r}\nckptmgr: hint: did you mean {meant}?\n"
    )


@pytest.mark.parametrize("typed", ["abcdefabcdefabcdefabcdef", "correct horse", "p4ssw0rd"])
def test_command_that_may_be_a_key_is_not_shown(typed: str) -> None:
    answer = run(typed)
    assert "no such command (not shown: it may be a key)" in answer.stderr
    assert typed not in answer.output


@pytest.mark.parametrize("before", [[], ["--debug"], ["help"]])
def test_hopeless_command_is_pointed_to_the_help_and_not_repeated(before: list[str]) -> None:
    result = run(*before, "0123456789abcdef" * 4)
    assert "hint: see ckptmgr --help" in result.stderr
    assert "0123" not in result.output


def test_no_command_shows_the_help_as_an_error() -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: ckptmgr" in result.stderr


def test_wrong_option_is_a_usage_error_that_names_the_help() -> None:
    result = run("ls", "--nope")
    assert result.exit_code == 2
    assert "ckptmgr: error: no such option" in result.stderr
    assert "ckptmgr: hint: see ckptmgr ls --help" in result.stderr


@pytest.mark.parametrize("extra", [["0123456789abcdef"], ["0123456789abcdef", "a) (b\nc"]])
@pytest.mark.parametrize("options", [["ls"], ["ls", "--json"], ["--debug", "ls"]])
def test_extra_argument_is_refused_and_not_repeated(extra: list[str], options: list[str]) -> None:
    result = run(*options, "folder", *extra)
    assert result.exit_code == 2
    assert "got unexpected extra argument" in result.stderr
    assert "(not shown: it may be a key)" in result.stderr
    assert not any(word in result.output for word in ("0123", "a) (b"))


@pytest.mark.parametrize("level", ["1", "2"])
def test_help_explains_the_command_however_python_is_started(level: str) -> None:
    shown = run_process("prune", "--help", PYTHONOPTIMIZE=level)
    assert b"Remove the checkpoints that a policy does not keep.\n" in shown.stdout


def test_help_without_docstring_and_source_has_its_examples() -> None:
    names: dict[str, Any] = {}
    exec("def act(): return 0", names)  # noqa: S102 - such a function has no source
    made = options.command("act", examples=("act DIR",))(names["act"])
    assert made.help is not None
    assert "$ ckptmgr act DIR" in made.help


def test_error_names_the_path_and_the_way_out(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    result = run("inspect", "99", "--dir", tmp_path)
    assert result.exit_code == 10
    assert result.stderr == (
        f"ckptmgr: error: {tmp_path}: no checkpoint is '99'\n"
        f"ckptmgr: hint: ckptmgr ls {tmp_path} lists what is there\n"
    )


def test_error_with_json_is_one_object(tmp_path: Path) -> None:
    result = run("ls", tmp_path / "no", "--json")
    assert (result.exit_code, result.stdout) == (10, "")
    assert json.loads(result.stderr) == {
        "code": 10,
        "error": "CheckpointNotFound",
        "message": "no such directory",
        "hint": None,
        "path": str(tmp_path / "no"),
    }


def test_usage_error_with_json_is_one_object() -> None:
    result = run("ls", "--json", "--nope")
    assert json.loads(result.stderr)["code"] == 2


def test_json_behind_two_dashes_is_no_option(tmp_path: Path) -> None:
    assert run("inspect", "--dir", tmp_path, "--", "--json").stderr.startswith("ckptmgr: error: ")


def test_version_is_printed() -> None:
    assert run("--version").stdout.startswith("ckptmgr ")


def test_traceback_comes_only_with_debug(tmp_path: Path) -> None:
    assert "Traceback" not in run("ls", tmp_path / "no").stderr
    assert "Traceback" in run("--debug", "ls", tmp_path / "no").stderr


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device", "/x"), "error: /x: No space left on device"),
        (OSError("odd"), "error: odd"),
        (click.FileError("x", "gone"), "error: could not open file 'x': gone"),
        (ZeroDivisionError("oops"), "internal error: ZeroDivisionError: oops"),
    ],
)
def test_foreign_errors_are_one_sentence(
    error: Exception, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error, as_json=False) is Exit.FAILED
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--version",), ("ls", ""), ("verify", "")])
def test_process_without_standard_streams_answers_by_its_code(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "ckptmgr", *arguments]
    closed = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command]
    done = subprocess.run(closed, env=process_env(), timeout=60, check=False)
    assert done.returncode == (2 if "" in arguments else 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", ""),
        ("prune", "", "--keep", "last(1)", "--yes"),
        ("verify", ""),
        ("pin", "latest", "--dir", ""),
        ("decrypt", ""),
    ],
)
def test_empty_path_is_not_taken_for_this_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    save_run(tmp_path, [10, 20])
    before = tree_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    shown = run(*arguments, "--key", "env:KEY", env={"KEY": "00" * 32})
    assert (shown.exit_code, "a path is empty" in shown.stderr) == (2, True)
    assert tree_of(tmp_path) == before


def test_message_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report(errors.CorruptCheckpoint("\x1b[2J\nname \udcff"), as_json=False)
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert "\\x1b[2J" in shown
    assert escape("plain ä") == "plain ä"


def test_missing_choice_is_one_line_that_names_the_choices() -> None:
    assert run("convert", ".").stderr == (
        "ckptmgr: error: missing option '--compression'; choose from zstd, none\n"
        "ckptmgr: hint: see ckptmgr convert --help\n"
    )


@pytest.mark.parametrize("command", [("ls",), ("inspect", "latest", "--dir"), ("verify",)])
def test_name_with_a_line_break_passes_for_no_message(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("here\nckptmgr: note: all is well", "gone\r\u2028ckptmgr: note: all is well"):
        if name.startswith("here"):
            (tmp_path / name).mkdir()
        lines = run(*command, tmp_path / name).stderr.splitlines()
        assert not [line for line in lines if line.startswith("ckptmgr: note: all is well")]
