# SPDX-License-Identifier: Apache-2.0
"""`make demo` needs the dependencies of the package alone, lists its installations, and keeps its promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import process_env

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    not (ROOT / "Makefile").exists(), reason="needs the sources: the demo is not installed"
)
_WITHOUT = """
import runpy, sys
sys.modules |= dict.fromkeys(["torch", "jax", "mpi4py", "sklearn", "scipy", "pytest"])
sys.argv = [sys.argv[1]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# Three training jobs and five commands, each a process: nothing shorter shows that the demo runs.
@pytest.mark.slow
def test_demo_runs_to_its_end_without_other_libraries(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, ROOT / "tools/demo.py"],
        cwd=tmp_path,
        env=process_env(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit-identical to the calm run" in done.stdout
    assert "Done." in done.stdout


def test_demo_has_an_environment_of_its_own_and_says_what_it_installs() -> None:
    text = (ROOT / "Makefile").read_text()
    (rule,) = re.findall(r"^\$\(DEMO_VENV\)/\.stamp:(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    prerequisites, said, install = rule.splitlines()
    assert prerequisites.split() == ["pyproject.toml", "constraints.txt"]
    assert "installing ckptmgr and its dependencies" in said
    assert install.endswith("$(call make_venv,$(DEMO_VENV),constraints.txt,)")  # and no group
