# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "check_coverage.py"
COMPLETE = (
    "formats/mindspore/wire.py",
    "crypto/keys/sources.py",
    "ckptmgr/policy/retention.py",
    "ckptmgr/config/config.py",
    "ckptmgr/config/checks.py",
    "ckptmgr/core/names.py",
)

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs a checkout")


def check(folder: Path, covered: dict[str, tuple[int, int]]) -> tuple[int, str]:
    """Run the script on files given as name to (covered branches of 100, measured lines)."""
    files = {
        name: {
            "summary": {
                "covered_lines": lines,
                "num_statements": lines,
                "covered_branches": branches,
                "num_branches": 100,
            },
        }
        for name, (branches, lines) in covered.items()
    }
    report = folder / "report.json"
    report.write_text(json.dumps({"files": files}))
    outcome = subprocess.run(
        [sys.executable, SCRIPT, report], capture_output=True, text=True, check=False
    )
    return outcome.returncode, outcome.stdout + outcome.stderr


def complete() -> dict[str, tuple[int, int]]:
    return dict.fromkeys(COMPLETE, (100, 1000))


def test_coverage_when_all_promises_hold_passes(tmp_path: Path) -> None:
    code, text = check(tmp_path, complete() | {"ckptmgr/files/save/saver.py": (95, 0)})
    assert (code, "all promises hold" in text) == (0, True)


@pytest.mark.parametrize("path", COMPLETE)
def test_coverage_when_one_branch_of_a_complete_file_is_missing_names_it(
    tmp_path: Path, path: str
) -> None:
    code, text = check(tmp_path, complete() | {path: (99, 1000)})
    assert code == 1
    assert f"{path}: 99.9 %, must be 100 %" in text


@pytest.mark.parametrize("path", COMPLETE)
def test_coverage_when_a_complete_file_was_not_measured_fails(tmp_path: Path, path: str) -> None:
    covered = complete()
    del covered[path]
    code, text = check(tmp_path, covered)
    assert (code, "was not measured" in text) == (1, True)


def test_coverage_of_a_part_split_off_a_complete_module_must_be_complete(tmp_path: Path) -> None:
    code, text = check(tmp_path, complete() | {"ckptmgr/policy/rules.py": (99, 1000)})
    assert (code, "ckptmgr/policy/rules.py: 99.9 %" in text) == (1, True)


def test_coverage_when_the_rest_is_below_its_minimum_fails(tmp_path: Path) -> None:
    code, text = check(tmp_path, complete() | {"ckptmgr/files/save/saver.py": (94, 0)})
    assert (code, "all other files: 94.0 %, must be 95 %" in text) == (1, True)


def test_coverage_when_branches_were_not_measured_fails(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    summary = {"covered_lines": 1, "num_statements": 1}
    report.write_text(json.dumps({"files": {"formats/mindspore/wire.py": {"summary": summary}}}))
    outcome = subprocess.run(
        [sys.executable, SCRIPT, report], capture_output=True, text=True, check=False
    )
    assert (outcome.returncode, "no branches" in outcome.stderr) == (1, True)
