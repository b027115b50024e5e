# SPDX-License-Identifier: Apache-2.0
"""The examples run as printed, and are at most three lines longer than without checkpoints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.testing.child import find_program
from ckptmgr.testing.kit import differences

EXAMPLES = Path(__file__).parents[1] / "examples"
LOOPS = {"numpy_loop.py": None, "torch_loop.py": "torch", "jax_loop.py": "flax"}
MOST_LINES = 3

pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="needs the sources")


def without_checkpoints(text: str) -> str:
    """Return the same program without ckptmgr."""
    text = re.sub(r"from ckptmgr import .*\n", "", text)
    text = re.sub(r" +with CheckpointManager.*\n", "", text)
    text = re.sub(r" +manager\.step_end\(.*\n", "", text)
    text = text.replace("manager.resume(state).step", "0")
    text = re.sub(r"manager\.batches\((\w+)\)", r"\1", text)
    text = re.sub(r" (and not|or) manager\.should_stop", "", text)
    assert "manager" not in text
    head, loop, rest = text.partition("        step = 0\n")
    body, end, tail = rest.partition("    return state")
    return head + re.sub("^    ", "", loop + body, flags=re.MULTILINE) + end + tail


def needs(name: str) -> None:
    """Skip where the framework of an example is not installed."""
    framework = LOOPS[name]
    if framework is not None:
        pytest.importorskip(framework, reason=f"needs {framework}")


def lines_of(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_example_is_at_most_three_lines_longer_and_trains_alike(name: str, tmp_path: Path) -> None:
    needs(name)
    text = (EXAMPLES / name).read_text()
    plain = without_checkpoints(text)
    assert 0 < lines_of(text) - lines_of(plain) <= MOST_LINES
    names: dict[str, Any] = {"__name__": "plain"}
    exec(plain, names)  # noqa: S102 - our own example
    expected = names["main"](str(tmp_path / "none"), 13)
    found = find_program(f"{EXAMPLES / name}:main")(str(tmp_path / "runs"), 13)
    assert differences(expected, found) == []
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_example_runs_as_printed_and_again(name: str, tmp_path: Path) -> None:
    needs(name)
    command = [sys.executable, str(EXAMPLES / name)]
    times = 1 if LOOPS[name] else 2  # an import of a framework takes seconds
    printed = [
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for _ in range(times)
    ]
    assert printed[0] == printed[-1] != ""
    assert list((tmp_path / "runs").rglob("*-25.ckpt"))
