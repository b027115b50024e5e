# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr config show`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import key_file, run
from tests.cli.schemas import run_with_schema
from tests.cli.test_shown_names import program_at_terminal
from tests.support.saved import KEY


def settings(directory: Path, **env: str) -> dict[str, tuple[str | None, str]]:
    document = run_with_schema("config", "show", directory, env=env)
    return {item["name"]: (item["value"], item["origin"]) for item in document["items"]}


def test_directory_without_settings_says_so(tmp_path: Path) -> None:
    answer = run("config", "show", tmp_path, "--origin")
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert [line.split(maxsplit=2) for line in answer.stdout.splitlines()] == [
        ["SETTING", "VALUE", "ORIGIN"],
        *(["keep", "-", "not set"], ["key", "-", "not set"]),
        *(["key_service", "-", "not set"], ["key_context", "-", "not set"]),
        ["color", "no", "default: on a terminal"],
    ]
    assert "ORIGIN" not in run("config", "show", tmp_path).stdout
    assert run("config", "show", tmp_path, "-q").stdout == "color\n"


def test_policy_of_the_directory_is_shown_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "ckptmgr.toml").write_text('keep = "last(3)|every(1000)"\n')
    assert settings(tmp_path)["keep"] == ("last(3) | every(1000)", f"{tmp_path}/ckptmgr.toml")
    (tmp_path / "ckptmgr.toml").write_text('kepp = "last(3)"\n')
    answer = run("config", "show", tmp_path)
    assert (answer.exit_code, "did you mean keep?" in answer.stderr) == (2, True)


def test_key_is_named_by_its_source_and_never_shown(tmp_path: Path) -> None:
    path = key_file(tmp_path).removeprefix("file:")
    both = {"CKPTMGR_KEY_FILE": path, "CKPTMGR_KEY": KEY.raw.hex()}
    assert settings(tmp_path, **both)["key"] == (f"file:{path!r}", "variable CKPTMGR_KEY_FILE")
    found = settings(tmp_path, CKPTMGR_KEY=KEY.raw.hex(), CKPTMGR_KEY_SERVICE="local:file:kek")
    assert found["key"] == ("(set, not shown)", "variable CKPTMGR_KEY")
    assert found["key_service"] == ("(set, not shown)", "variable CKPTMGR_KEY_SERVICE")
    shown = run("config", "show", tmp_path, env={"CKPTMGR_KEY_FILE": KEY.raw.hex()})
    assert (shown.exit_code, KEY.raw.hex() in shown.output) == (0, False)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, ("no", "variable NO_COLOR")),
        ({"FORCE_COLOR": "1"}, ("yes", "variable FORCE_COLOR")),
    ],
)
def test_variable_that_decides_on_colour_is_named(
    tmp_path: Path, env: dict[str, str], expected: tuple[str, str]
) -> None:
    assert settings(tmp_path, **env)["color"] == expected


def test_dumb_terminal_is_named(tmp_path: Path) -> None:
    program = (
        "import os; del os.environ['NO_COLOR']; from ckptmgr.cli import cli;"
        f" cli.main(['config', 'show', {str(tmp_path)!r}, '--origin'])"
    )
    assert b"color        no     variable TERM" in program_at_terminal("-c", program)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("show", "nowhere"), 10, "no such directory"),
        (("set", "."), 2, "'show'"),
        ((), 2, "missing argument"),
    ],
)
def test_unusable_call_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = run("config", *arguments)
    assert (answer.exit_code, message in answer.stderr.lower()) == (code, True), answer.stderr
