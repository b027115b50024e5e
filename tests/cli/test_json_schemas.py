# SPDX-License-Identifier: Apache-2.0
"""JSON of every command: what real runs print fits the schemas in `docs/schemas`, and so do errors."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.running import run
from tests.cli.test_ranks import SHARDED, STRATEGIES
from tests.cli.world import World, commands, make_world
from tests.support import api
from tests.support.json_schema import violations

PROVEN = Path(__file__).with_name("prove_programs.py")
SCHEMAS = Path(__file__).parents[2] / "docs/schemas"
WITHOUT_JSON = {
    "help": "prints help texts",
    "completion": "prints the script of a shell",
}
ALWAYS_HAVE_ITEMS = {
    "prove": "one item for each cut",
    "diff": "one item for each pair",
    "doctor": "one item for each check",
    "config": "one item for each setting",
    "storage": "one item for each check",
    "encrypt": "the output is the item",
    "decrypt": "the output is the item",
    "export": "the files are the items",
    "keygen": "the key is the item",
    "transform": "the files are the items",
    "unify": "the files are the items",
    "merge": "the file is the item",
    "sign": "the bundle is the item",
    "pin": "the checkpoint is the item",
    "unpin": "the checkpoint is the item",
    "tag": "the checkpoint is the item",
    "untag": "the checkpoint is the item",
    "convert": "an empty selection is an error",
    "rekey": "an empty selection is an error",
    "reencrypt": "an empty selection is an error",
    "copy": "an empty selection is an error",
    "stats": "a tree without checkpoints is an error",
}
KEY, NEW = "--key file:{w}/run.key", "file:{w}/new.key"


class Scenario(NamedTuple):
    """A command line and its exit code; `needs` is a library without which it does not succeed."""

    line: str
    code: int = 0
    needs: str | None = None


SCENARIOS: Mapping[str, tuple[Scenario, ...]] = {
    "ls": (
        Scenario("ls {w}/runs"),
        Scenario("ls -r {w}"),
        Scenario("ls {w}/hf"),
        Scenario("ls --all {w}/damaged"),
        Scenario("ls {w}/empty"),
        Scenario("ls {w}/no", 10),
    ),
    "stats": (Scenario("stats {w}"), Scenario("stats {w}/hf"), Scenario("stats {w}/empty", 10)),
    "inspect": (
        Scenario("inspect 2 --dir {w}/runs --stats"),
        Scenario("inspect {w}/sealed/net-1_1.safetensors.ckpe"),
        Scenario("inspect {w}/set/{set}"),
        Scenario("inspect {w}/tensors/net-1_1.safetensors --tensors no*"),
        Scenario("inspect 99 --dir {w}/runs", 10),
    ),
    "verify": (
        Scenario("verify {w}/runs --deep"),
        Scenario("verify {w}/damaged --quarantine", 1),
        Scenario("verify {w}/hf"),
        Scenario("verify {w}/runs --expect-step 99", 1),
        Scenario("verify {w}/runs --filter step>99"),
        Scenario("verify {w}/no", 10),
    ),
    "diff": (
        Scenario("diff 1 2 --dir {w}/runs", 1),
        Scenario("diff {w}/runs {w}/tensors", 1),
        Scenario("diff 1 99 --dir {w}/runs", 10),
    ),
    "prove": (
        Scenario(f"prove --cuts 1 {sys.executable} {PROVEN} right {{{{}}}}"),
        Scenario(f"prove --cuts 1 {sys.executable} {PROVEN} right", 2),
    ),
    "doctor": (Scenario("doctor {w}/runs"), Scenario("doctor {w}/no", 10)),
    "encrypt": (
        Scenario(f"encrypt {{w}}/runs/net-1_1.ckpt -o {{w}}/out.ckpt {KEY}"),
        Scenario(f"encrypt {{w}}/note.txt -o {{w}}/out.ckpe {KEY}"),
        Scenario(f"encrypt {{w}}/no.ckpt -o {{w}}/out.ckpt {KEY}", 10),
    ),
    "decrypt": (
        Scenario(f"decrypt {{w}}/sealed/net-1_1.safetensors.ckpe -o {{w}}/out.safetensors {KEY}"),
        Scenario("decrypt {w}/sealed/net-1_1.safetensors.ckpe -o {w}/out.safetensors", 12),
    ),
    "convert": (
        Scenario("convert {w}/tensors --compression zstd"),
        Scenario("convert {w}/tensors --compression none"),
        Scenario("convert {w}/runs {w}/tensors --compression zstd", 3),
        Scenario("convert {w}/no --compression zstd", 10),
    ),
    "export": (
        Scenario("export 2 --dir {w}/runs --hf -o {w}/out"),
        Scenario("export 2 --dir {w}/runs --to safetensors -o {w}/out.safetensors"),
        Scenario("export 99 --dir {w}/runs --hf -o {w}/out", 10),
    ),
    "rekey": (
        Scenario(f"rekey {{w}}/sealed {KEY} --add {NEW} --dry-run"),
        Scenario(f"rekey {{w}}/sealed {KEY} --add {NEW} --yes"),
        Scenario(f"rekey {{w}}/sealed --key {NEW} --add {NEW} --yes", 12),
    ),
    "reencrypt": (
        Scenario(f"reencrypt {{w}}/sealed {KEY} --to {NEW} --yes"),
        Scenario(f"reencrypt {{w}}/sealed --key {NEW} --to {NEW} --yes", 12),
    ),
    "keygen": (
        Scenario("keygen --out {w}/another.key"),
        Scenario("keygen --type ed25519 --out {w}/another.pem"),
        Scenario("keygen --out {w}/run.key", 13),
    ),
    "prune": (
        Scenario("prune {w}/runs --keep last(1)|best(1,loss,min) --dry-run"),
        Scenario("prune {w}/runs --keep last(1) --check", 1),
        Scenario("prune {w}/runs --keep last(1) --yes"),
        Scenario("prune {w}/hf --keep last(1) --yes"),
        Scenario("prune {w}/pruned --undo"),
        Scenario("prune {w}/pruned-hf --undo --dry-run"),
        Scenario("prune {w}/empty --keep last(1) --yes"),
        Scenario("prune {w}/runs", 2),
    ),
    "rm": (
        Scenario("rm 1 --dir {w}/runs --dry-run"),
        Scenario("rm 1 --dir {w}/runs --yes"),
        Scenario("rm 1 --dir {w}/runs --filter step>99 --yes"),
        Scenario("rm latest --dir {w}/runs --yes", 13),
    ),
    "simulate": (
        Scenario("simulate last(1)|best(1,loss,min) {w}/runs"),
        Scenario("simulate daily(2) --every 6h --for 5d"),
        Scenario("simulate last(1) {w}/empty"),
        Scenario("simulate frist(1) {w}/runs", 2),
    ),
    "report": (
        Scenario("report {w}/runs --keep last(1)"),
        Scenario("report {w}/empty"),
        Scenario("report {w}/no", 10),
    ),
    "pin": (Scenario("pin 2 --dir {w}/runs"), Scenario("pin 99 --dir {w}/runs", 10)),
    "unpin": (Scenario("unpin 3 --dir {w}/runs"), Scenario("unpin 99 --dir {w}/runs", 10)),
    "tag": (Scenario("tag 2 a b --dir {w}/runs"), Scenario("tag 99 a --dir {w}/runs", 10)),
    "untag": (Scenario("untag 3 paper --dir {w}/runs"), Scenario("untag 3 no --dir {w}/runs", 10)),
    "copy": (
        Scenario("copy {w}/runs memory://schemas/run", needs="obstore"),
        Scenario("copy {w}/runs {w}/other", 2),
    ),
    "storage": (
        Scenario("storage probe memory://schemas/probe", needs="obstore"),
        Scenario("storage probe {w}/runs", 2),
    ),
    "watch": (
        Scenario("watch {w}/runs --once"),
        Scenario("watch {w}/damaged --once", 1),
        Scenario("watch {w}/no --once", 10),
    ),
    "repair": (
        Scenario("repair {w}/damaged-set/{set}"),
        Scenario("repair {w}/set/{set}"),
        Scenario("repair {w}/runs/net-1_1.ckpt", 2),
    ),
    "sign": (
        Scenario("sign {w}/runs --private-key file:{w}/bundle.pem", needs="model_signing"),
        Scenario("sign {w}/no --private-key file:{w}/bundle.pem", 10),
    ),
    "config": (Scenario("config show {w}/runs"), Scenario("config show {w}/no", 10)),
    "transform": (
        Scenario("transform {sharded} -o {w}/out --from {strategies}/dp2_mp2.ckpt"),
        Scenario("transform {w}/empty -o {w}/out", 10),
    ),
    "unify": (Scenario("unify {w}/whole -o {w}/out"), Scenario("unify {w}/empty -o {w}/out", 10)),
    "merge": (
        Scenario("merge {strategies}/pp2_mp2_stages -o {w}/out.ckpt"),
        Scenario("merge {w}/empty -o {w}/out.ckpt", 10),
    ),
}

pytestmark = pytest.mark.skipif(
    not SCHEMAS.exists(), reason="needs the sources: the schemas are not installed"
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Directories of every kind that commands meet."""
    return make_world(tmp_path_factory.mktemp("world"))


def schema_of(name: str) -> Mapping[str, Any]:
    """Return the schema of `ckptmgr.NAME/1`."""
    found = json.loads((SCHEMAS / f"{name.replace('.', '-')}.json").read_text(encoding="utf-8"))
    assert found["$id"] == f"ckptmgr.{name}/1"
    assert isinstance(found, dict)
    return found


def check_document(document: Mapping[str, Any], command: str) -> None:
    """Check one object against the schema that it names."""
    name, number = document["schema"].removeprefix("ckptmgr.").split("/")
    assert (name.split(".")[0], number) == (command, "1")
    assert list(violations(document, schema_of(name))) == []


def errors_in(stderr: str) -> list[dict[str, Any]]:
    """Return the errors of a command with `--json`; every other line is a note."""
    lines = stderr.splitlines()
    errors = [json.loads(line) for line in lines if line.startswith("{")]
    for error in errors:
        assert list(violations(error, schema_of("error"))) == []
    others = [line for line in lines if not line.startswith("{")]
    assert all(re.match(r"ckptmgr: note: |\S.* WARNING |ckptmgr", line) for line in others), others
    return errors


def test_every_command_has_json_and_a_scenario_or_a_reason() -> None:
    with_json = {
        name for name, one in commands() if any("--json" in param.opts for param in one.params)
    }
    assert {name for name, _ in commands()} - with_json == set(WITHOUT_JSON)
    assert set(SCENARIOS) == with_json
    assert all((SCHEMAS / f"{name}.json").exists() for name in with_json)


@pytest.mark.parametrize("command", SCENARIOS)
def test_json_of_a_command_fits_its_schema(command: str, world: World, tmp_path: Path) -> None:
    seen: set[str] = set()
    for number, scenario in enumerate(SCENARIOS[command]):
        if scenario.needs is not None and find_spec(scenario.needs) is None:
            seen.add("some")  # the lane with this library tries it
            continue
        work = Path(shutil.copytree(world.directory, tmp_path / f"{number}"))
        places = {"w": work, "set": world.set_name, "sharded": SHARDED / "src_ckpt"}
        line = [part.format(**places, strategies=STRATEGIES) for part in scenario.line.split(" ")]
        result = run(*line, "--json")
        assert result.exit_code == scenario.code, (line, result.output)
        errors = errors_in(result.stderr)
        lines = result.stdout.splitlines()
        assert len(lines) <= 1 or command == "watch"
        for text in lines:
            document = json.loads(text)
            check_document(document, command)
            seen.add("some" if command == "watch" or document["items"] else "none")
        if not lines:
            assert [error["code"] for error in errors] == [scenario.code]
            seen.add("error")
    empty = () if command in ALWAYS_HAVE_ITEMS or command == "watch" else ("none",)
    assert seen == {"some", "error", *empty}


def test_each_line_of_a_verify_fits_its_schema(world: World, tmp_path: Path) -> None:
    work = Path(shutil.copytree(world.directory, tmp_path / "work"))
    for place, code in (("runs", 0), ("damaged", 1), ("hf", 0)):
        result = run("verify", work / place, "--jsonl")
        assert result.exit_code == code
        for line in result.stdout.splitlines():
            check_document(json.loads(line), "verify")
    refused = run("verify", work / "no", "--jsonl")
    assert (refused.exit_code, [one["code"] for one in errors_in(refused.stderr)]) == (10, [10])


def test_page_links_every_schema() -> None:
    linked = re.findall(r"\(schemas/([a-z-]+)\.json\)", (SCHEMAS.parent / "json.md").read_text())
    assert sorted(linked) == sorted(path.stem for path in SCHEMAS.glob("*.json"))


def test_states_of_the_schemas_are_those_of_the_code() -> None:
    fields = schema_of("ls")["properties"]["items"]["items"]["properties"]
    assert set(fields["state"]["enum"]) == {one.value for one in api.State}


def test_schemas_hold_every_object_of_ours_to_its_keys() -> None:
    def check(schema: Mapping[str, Any], place: str) -> None:
        kinds = schema.get("type", ())
        if "object" in ([kinds] if isinstance(kinds, str) else kinds):
            extra = schema.get("additionalProperties")
            assert extra is not None, place
            named = schema.get("properties", {})
            assert set(schema.get("required", ())) == set(named), place
        inner = dict(schema.get("properties", {}))
        inner |= {key: schema[key] for key in ("items", "additionalProperties") if key in schema}
        inner |= {str(number): one for number, one in enumerate(schema.get("oneOf", ()))}
        for name, one in inner.items():
            if isinstance(one, dict):
                check(one, f"{place}.{name}")

    for path in sorted(SCHEMAS.glob("*.json")):
        check(json.loads(path.read_text(encoding="utf-8")), path.stem)


@pytest.mark.providers
def test_json_of_a_bundle_fits_its_schema(world: World, tmp_path: Path) -> None:
    pytest.importorskip("model_signing")
    shutil.copytree(world.directory / "runs", tmp_path / "runs")
    result = run("sign", tmp_path / "runs", "--private-key", f"file:{world.directory}/bundle.pem", "--json")  # fmt: skip
    assert result.exit_code == 0
    check_document(json.loads(result.stdout), "sign")
