# SPDX-License-Identifier: Apache-2.0
"""The fuzzer: it runs every target, finds planted faults, goes on from its corpus, and survives its inputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / "tools/fuzz").is_dir():
    pytest.skip("needs a checkout", allow_module_level=True)

from tools.fuzz import __main__ as command  # noqa: E402
from tools.fuzz.runner import TooSlow, alarms, fuzz, judge  # noqa: E402
from tools.fuzz.targets import TARGETS, Target  # noqa: E402

INPUTS = 400
(POLICY,) = (target for target in TARGETS if target.name == "policy")


def planted(run: object) -> Target:
    """Return a target with a bug behind a few changes of a seed."""

    def broken(data: bytes) -> object:
        if data.count(b"weekly") > 1:
            return run(data)  # type: ignore[operator]
        return POLICY.run(data)

    return replace(POLICY, run=broken)


def raise_key_error(data: bytes) -> object:
    raise KeyError(data)


def loop_for_ever(data: bytes) -> object:
    while True:
        pass


def take_memory(data: bytes) -> object:
    return bytearray(1 << 30)


def end_the_process(data: bytes) -> object:
    os._exit(9)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_target_takes_its_seeds_and_changes_of_them(target: Target) -> None:
    if target.name == "skeleton":
        pytest.importorskip("torch")
    with alarms():
        figures = fuzz(target, Random(1), goes_on=lambda so_far: so_far.inputs < INPUTS)
        again = fuzz(target, Random(1), goes_on=lambda so_far: so_far.inputs < INPUTS)
    assert [finding.report for finding in figures.findings] == []
    assert figures.inputs == INPUTS
    assert [*figures.new] == [*again.new]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_target_accepts_most_of_its_seeds(target: Target) -> None:
    if target.name == "skeleton":
        pytest.importorskip("torch")
    with alarms():
        outcomes = [judge(target, seed)[0][0] for seed in target.seeds()]
    is_never_accepted = target.name == "lease"  # its text stands in an error
    assert ("value" in outcomes) is not is_never_accepted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "report"),
    [
        (raise_key_error, "KeyError"),
        (loop_for_ever, "TooSlow"),
        (take_memory, "MemoryError"),
        (end_the_process, "the process ended with 9"),
    ],
)
def test_planted_bug_is_found_kept_and_tried_again(
    tmp_path: Path, run: object, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.fuzz.runner.INPUT_CPU_S", 0.1)
    target, limits = planted(run), command.Limits(inputs=1500, cpu_s=None, seconds=None)
    found = command.run_apart(target, limits, seed=3, corpus=tmp_path)
    assert found["findings"] == 1
    (kept,) = (tmp_path / "findings").glob("policy-*.txt")
    assert report in kept.read_text(encoding="utf-8")
    assert kept.with_suffix(".bin").read_bytes().count(b"weekly") > 1
    none = command.Limits(inputs=0, cpu_s=None, seconds=None)
    assert command.run_apart(target, none, seed=4, corpus=tmp_path)["findings"] == 1
    assert command.run_apart(POLICY, none, seed=4, corpus=tmp_path)["findings"] == 0


def test_next_run_goes_on_from_the_corpus(tmp_path: Path) -> None:
    limits = command.Limits(inputs=2000, cpu_s=None, seconds=None)
    command.run_apart(POLICY, limits, seed=5, corpus=tmp_path)
    kept = {path.read_bytes() for path in (tmp_path / "policy").iterdir()}
    assert len(kept) > len(POLICY.seeds())
    with alarms():
        learnt = fuzz(
            POLICY,
            Random(6),
            corpus=sorted(kept),
            goes_on=lambda figures: figures.inputs < len(kept) + len(POLICY.seeds()),
        )
    assert {judge(POLICY, data)[0] for data in kept} == {judge(POLICY, d)[0] for d in learnt.new}


@pytest.mark.slow
def test_command_adds_up_what_all_runs_did(tmp_path: Path) -> None:
    arguments = ["-m", "tools.fuzz", "--target", "policy", "--corpus", str(tmp_path)]
    arguments += ["--seed", "1"]  # what another one finds is for the fuzzer, not for this test
    for more in (["--inputs", "300"], ["--cpu-minutes", "0.001"], ["--seconds", "0.1"]):
        done = subprocess.run(
            [sys.executable, *arguments, *more],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["policy"]
    assert figures["inputs"] > 300
    assert figures["findings"] == 0
    assert 0 < figures["peak_memory_bytes"] < 1 << 30


def test_too_slow_is_no_error_that_a_parser_could_catch() -> None:
    assert not issubclass(TooSlow, Exception)
