# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Transformers goes on bit for bit: `make kit FRAMEWORK=transformers`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.testing.child import find_program
from ckptmgr.testing.kit import differences
from tests.kit.cuts import every_cut
from tests.test_examples import MOST_LINES, lines_of

pytest.importorskip("torch")
pytest.importorskip("accelerate", reason="needs accelerate: make kit FRAMEWORK=transformers")
pytest.importorskip("transformers", reason="needs transformers: make kit FRAMEWORK=transformers")

pytestmark = pytest.mark.kit
EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_trainer.py"
NAMES = (
    "evaluated",
    "evaluated_by_epoch",
    "accumulated",
    "shuffled_globally",
    "encrypted_in_background",
    "scaled",
)
PROGRAMS = {
    "examples/transformers_trainer.py:main": {"steps_per_epoch": 10, "keep": 2, "fork": True},
    **{
        f"tests/kit/transformers_programs.py:{name}": {"steps_per_epoch": 4, "fork": True}
        for name in NAMES
    },
}


@every_cut(PROGRAMS)
@pytest.mark.usefixtures("kit")
def test_training_goes_on_as_if_it_had_not_been_cut(cut: str, check: Callable[[str], None]) -> None:
    check(cut)


def without_checkpoints(text: str) -> str:
    """Return the same program without ckptmgr."""
    text = re.sub(r"from ckptmgr.*\n", "", text)
    head, _, body = re.split(r"( +with TrainerCheckpoints.*\n)", text)
    block, end, tail = body.partition("    return {")
    text = head + re.sub("^    ", "", block, flags=re.MULTILINE) + end + tail
    text = text.replace(", callbacks=[checkpoints]", "")
    text = text.replace("resume_from_checkpoint=checkpoints.materialize()", "")
    assert "checkpoints." not in text
    return text


def test_example_is_at_most_three_lines_longer_and_trains_alike(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    plain = without_checkpoints(text)
    assert 0 < lines_of(text) - lines_of(plain) <= MOST_LINES
    names: dict[str, Any] = {"__name__": "plain"}
    exec(plain, names)  # noqa: S102 - our own example
    expected = names["main"](str(tmp_path / "none"), 13)
    found = find_program(f"{EXAMPLE}:main")(str(tmp_path / "runs"), 13)
    assert differences(expected, found) == []


def test_example_runs_as_printed(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert list((tmp_path / "runs").rglob("*-25.ckpt"))
