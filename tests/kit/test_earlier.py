# SPDX-License-Identifier: Apache-2.0
"""Runs go on across versions: from checkpoints of commit 3b48e63e to this one, and back."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ckptmgr.files.state_file import load_state
from ckptmgr.testing.kit import differences
from tests.kit.earlier_programs import CUT, GOLDEN, STEPS, plain, run

ROOT = Path(__file__).parents[2]
EARLIER = "3b48e63e"
PROGRAMS = {
    "plain": "numpy",
    "torch_loader": "torch",
    "jax_keys": "jax",
    "lightning": "lightning",
    "keras": "keras",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "mindspore_callback": "mindspore",
    "model_checkpoint": "mindspore",
}
IN_THE_SUITE = ("plain", "torch_loader", "jax_keys")


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


every_program = pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            name,
            marks=[
                *([] if name in IN_THE_SUITE else [pytest.mark.kit]),
                pytest.mark.skipif(not has(module), reason=f"needs {module}: make kit"),
            ],
        )
        for name, module in PROGRAMS.items()
    ],
)


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the earlier version."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("needs git")
    command = [git, "-C", str(ROOT), "archive", EARLIER, "ckptmgr", "crypto", "formats"]
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"needs a clone that has the commit {EARLIER}")
    place = tmp_path_factory.mktemp("earlier")
    subprocess.run(["tar", "-x", "-C", str(place)], input=archive.stdout, check=True)
    return place


def started_from(place: Path) -> str:
    """Return the id of the run that the newest checkpoint was resumed from."""
    manifests = [json.loads(one.read_text()) for one in place.glob("*.manifest.json")]
    (parent,) = max(manifests, key=lambda one: one["saved_at"])["run"]["parents"]
    return str(parent)


def id_of_run(place: Path) -> str:
    (manifest,) = place.glob("*.manifest.json")
    return str(json.loads(manifest.read_text())["run"]["id"])


def check_going_on(sources: Path, program: str, place: Path) -> None:
    first = id_of_run(place)
    code, result = run(sources, program, place)
    assert code == 0
    assert started_from(place) == first
    expected = load_state(GOLDEN / program / "returned.safetensors")
    assert differences(expected, load_state(result)) == []


@every_program
def test_checkpoint_of_the_earlier_version_resumes_bit_for_bit(
    program: str, tmp_path: Path
) -> None:
    shutil.copytree(GOLDEN / program / "run", tmp_path / "run")
    check_going_on(ROOT, program, tmp_path / "run")


@every_program
def test_checkpoint_of_this_version_resumes_in_the_earlier_one(
    program: str, earlier: Path, tmp_path: Path
) -> None:
    code, _ = run(ROOT, program, tmp_path / "run", cut=CUT)
    assert code == -9
    check_going_on(earlier, program, tmp_path / "run")


def test_one_sentence_says_what_is_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(GOLDEN / "plain" / "run", tmp_path / "run")
    with caplog.at_level("INFO"):
        plain(str(tmp_path / "run"), STEPS)
    (said,) = (one for one in caplog.messages if "not compared" in one)
    assert said.endswith("flags, options and steps are not compared: none are recorded")
