# SPDX-License-Identifier: Apache-2.0
"""`-q` and `-v` of every command: identifiers alone, and every field; or a refusal by name."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from tests.cli.running import run
from tests.cli.test_json_schemas import SCENARIOS, SCHEMAS, WITHOUT_JSON, Scenario
from tests.cli.test_ranks import SHARDED, STRATEGIES
from tests.cli.world import World, commands, make_world

FURTHER = {
    "diff": "diff 1 1 --dir {w}/runs",
    "prune": "prune {w}/runs --keep last(1) --dry-run",
    "simulate": "simulate last(1) {w}/runs",
}
"""Lines with a difference between what `-v` shows and what it does not."""

pytestmark = pytest.mark.skipif(not SCHEMAS.exists(), reason="needs the sources")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def scenarios(command: str) -> Iterator[Scenario]:
    """Yield the command lines that print a result here."""
    lines = [one for one in SCENARIOS[command] if one.code in (0, 1)]
    yield from (one for one in lines if one.needs is None or find_spec(one.needs) is not None)


def printed(scenario: Scenario, world: World, work: Path, *options: str) -> str:
    """Run a command line in a copy of the directories; return its output without figures and places."""
    shutil.copytree(world.directory, work)
    places = {"w": work, "set": world.set_name, "sharded": SHARDED / "src_ckpt"}
    text = scenario.line.replace("memory://schemas", f"memory://verbosity-{work.name}")
    line = [part.format(**places, strategies=STRATEGIES) for part in text.split(" ")]
    result = run(*line, *options)
    assert result.exit_code == scenario.code, (line, options, result.output)
    shown = result.stdout.replace(str(work), "W").replace(f"verbosity-{work.name}", "V")
    return re.sub(r"\b[0-9a-f]{16}\b|\d+(\.\d+)?", "0", shown)


@pytest.mark.parametrize("command", SCENARIOS)
def test_quiet_prints_identifiers_alone_and_verbose_adds_lines(
    command: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where report writes its page
    first = next(scenarios(command), None)
    if first is None:
        pytest.skip("needs a library; the lane that has it tries it")
    scenario = first._replace(line=FURTHER.get(command, first.line), code=0)
    scenario = scenario if command in FURTHER else first
    text, quiet, verbose = (
        printed(scenario, world, tmp_path / name, *options)
        for name, options in (("text", ()), ("quiet", ("-q",)), ("verbose", ("-v",)))
    )
    assert quiet != text
    assert all(len(line.split()) <= 1 for line in quiet.splitlines()), quiet
    assert len(verbose.splitlines()) > len(text.splitlines())
    if command != "watch":  # whose lines come in the order of the work
        shown = verbose.splitlines()
        assert [line for line in text.splitlines() if line not in shown] == []


@pytest.mark.parametrize("option", ["-q", "--quiet", "-v", "--verbose"])
@pytest.mark.parametrize("command", WITHOUT_JSON)
def test_command_with_one_output_refuses_the_option_by_name(command: str, option: str) -> None:
    line = {"completion": ("completion", "bash"), "help": ("help", "ls")}[command]
    refused = run(*line, option)
    assert refused.exit_code == 2
    assert (
        f"{option[:2] if len(option) == 2 else '-' + option[2]} has no effect here"
        in refused.stderr
    )
    assert refused.stdout == ""


def test_every_command_of_the_tree_takes_both_options() -> None:
    for name, command in commands():
        taken = {option for param in command.params for option in param.opts}
        assert {"-q", "--quiet", "-v", "--verbose"} <= taken, name
        assert not isinstance(command, click.Group), "test the commands in it, too"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-v", "-q"), "-v adds detail, and -q leaves it out"),
        (("-0", "-v"), "-v adds detail, and -q leaves it out"),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_the_work(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    refused = run("keygen", "--out", tmp_path / "key", *options)
    assert (refused.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert message in refused.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("decrypt {w}/sealed/net-1_1.safetensors.ckpe -o - -v", "-v has no effect with -o -"),
        ("encrypt {w}/note.txt -o - --json", "--json has no effect with -o -"),
        ("keygen --out - -v", "-v has no effect with -o -"),
        ("report {w}/runs --csv -q", "-q has no effect on a report that is printed"),
        ("report {w}/runs -o - -v", "-v has no effect on a report that is printed"),
        ("verify {w}/runs --jsonl -v", "--jsonl stands alone"),
    ],
)
def test_option_beside_another_form_of_output_is_refused_by_name(
    line: str, message: str, world: World
) -> None:
    key = ["--key", f"file:{world.directory}/run.key"] if "crypt" in line else []
    refused = run(*(part.format(w=world.directory) for part in line.split(" ")), *key)
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_fields_of_verbose_are_those_of_json_that_have_a_value(world: World) -> None:
    shown = run("ls", world.directory / "runs", "-v").stdout
    assert re.search(r"^  path +\S+/net-1_3\.ckpt$", shown, re.MULTILINE)
    assert re.search(r"^  metrics\.loss +0\.5$", shown, re.MULTILINE)
    assert re.search(r"^  pins +name=\S+ reason=paper$", shown, re.MULTILINE)
    assert re.search(r"^  tags +paper$", shown, re.MULTILINE)
    assert "problem" not in shown
