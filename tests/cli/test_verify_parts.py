# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr verify` in parts: `--part`, `--subset`, `--sample` and `--jsonl`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import run
from tests.support.json_schema import violations
from tests.support.saved import flip, save_run

_SCHEMA = Path(__file__).parents[2] / "docs/schemas/verify-line.json"
STEPS = list(range(10, 210, 10))


def verified(directory: Path, *options: str, env: dict[str, str] | None = None) -> list[str]:
    """Return the names that a verification takes, in their order."""
    result = run("verify", directory, "--quick", *options, "--jsonl", env=env)
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["event"] for line in lines] == ["verified"] * (len(lines) - 1) + ["summary"]
    assert lines[-1]["count"] == len(lines) - 1
    return [Path(line["path"]).name for line in lines[:-1]]


def test_parts_verify_each_checkpoint_once_in_any_order(tmp_path: Path) -> None:
    paths = save_run(tmp_path, STEPS)
    everything = verified(tmp_path)
    parts = [verified(tmp_path, "--part", f"{index}/3") for index in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(path.name for path in paths)
    assert all(parts)
    assert all(part == [name for name in everything if name in part] for part in parts)


def test_part_of_a_checkpoint_stays_when_others_come(tmp_path: Path) -> None:
    save_run(tmp_path, STEPS[:10])
    before = verified(tmp_path, "--part", "1/2")
    save_run(tmp_path, STEPS[10:], series="other")
    assert [
        name for name in verified(tmp_path, "--part", "1/2") if name.startswith("net")
    ] == before


def test_subset_cuts_across_parts(tmp_path: Path) -> None:
    save_run(tmp_path, STEPS)
    part = verified(tmp_path, "--part", "1/2")
    both = verified(tmp_path, "--part", "1/2", "--subset", "1/2")
    assert set(both) < set(part)
    assert both


@pytest.mark.parametrize(
    ("option", "environment", "same_as"),
    [
        ("auto", {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_COUNT": "4"}, "3/4"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_STEP": "2", "SLURM_ARRAY_TASK_COUNT": "4"}, "3/4"),
        ("auto", {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "2/2"),
        ("auto/4", {"JOB_COMPLETION_INDEX": "0"}, "1/4"),
    ],
)  # fmt: skip
def test_index_comes_from_slurm_or_kubernetes(
    tmp_path: Path, option: str, environment: dict[str, str], same_as: str
) -> None:
    save_run(tmp_path, STEPS)
    chosen = verified(tmp_path, "--part", option, env=environment)
    assert chosen == verified(tmp_path, "--part", same_as)


def test_sample_is_a_share_of_at_least_one(tmp_path: Path) -> None:
    save_run(tmp_path, STEPS)
    assert len(verified(tmp_path, "--sample", "25%")) == 5
    assert len(verified(tmp_path, "--sample", "0.1%")) == 1
    samples = {tuple(verified(tmp_path, "--sample", "5%")) for _ in range(30)}
    assert len(samples) > 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--part", "0/3"], "--part: '0/3' is no part"),
        (["--part", "4/3"], "--part: '4/3' is no part"),
        (["--part", "auto"], "--part: neither SLURM_ARRAY_TASK_ID"),
        (["--part", "auto/x"], "--part: 'auto/x' is no part"),
        (["--subset", "auto"], "--subset: 'auto' is no part"),
        (["--sample", "5"], "--sample: '5' is no share"),
        (["--sample", "0%"], "--sample: '0%' is no share"),
        (["--part", "1/2", "--expect-step", "10"], "--expect-step and --expect-id ask for all"),
        (["--jsonl", "--json"], "--jsonl stands alone"),
    ],
)
def test_wrong_part_is_refused_by_name(tmp_path: Path, options: list[str], reason: str) -> None:
    save_run(tmp_path, [10])
    result = run("verify", tmp_path, *options)
    assert result.exit_code == 2
    assert reason in result.stderr


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"JOB_COMPLETION_INDEX": "0"}, "does not say of how many parts"),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "2"}, "this is process 3, but there are 2 parts"),
        ({"SLURM_ARRAY_TASK_ID": "x", "SLURM_ARRAY_TASK_COUNT": "2"}, "does not say"),
    ],
)
def test_environment_without_an_index_is_refused(
    tmp_path: Path, environment: dict[str, str], reason: str
) -> None:
    save_run(tmp_path, [10])
    result = run("verify", tmp_path, "--part", "auto", env=environment)
    assert result.exit_code == 2
    assert reason in result.stderr


def test_lines_fit_their_schema_and_damage_is_among_them(tmp_path: Path) -> None:
    flip(save_run(tmp_path, [10, 20])[0], 70)
    result = run("verify", tmp_path, "--jsonl")
    assert result.exit_code == 1
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert {line.get("status") for line in lines} == {"damaged", "ok", None}
    if not _SCHEMA.exists():
        pytest.skip("needs the sources: the schemas are not installed")
    schema = json.loads(_SCHEMA.read_text(encoding="utf-8"))
    assert [violation for line in lines for violation in violations(line, schema)] == []
