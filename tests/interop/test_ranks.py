# SPDX-License-Identifier: Apache-2.0
"""Real ranks of MindSpore, started by `msrun`: they save together, resume bit for bit, and name the one that is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.parallel import engine_job
from tests.parallel.engine_job import ROOT, Plan
from tests.parallel.test_engines import TIMEOUT_S, WORLD, check_ranks, free_address

pytest.importorskip("mindspore", reason="needs MindSpore: make interop")
pytestmark = pytest.mark.interop


def run_msrun(plan: Plan) -> None:
    scripts = Path(sys.executable).parent
    _, port = free_address().split(":")
    command = [str(scripts / "msrun"), f"--worker_num={WORLD}", f"--local_worker_num={WORLD}"]
    command += [f"--master_port={port}", f"--log_dir={plan.directory}/log", "--join=True"]
    command += [str(engine_job.__file__), json.dumps(asdict(plan))]
    paths = {"PATH": f"{scripts}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env={**os.environ, **paths}, timeout=TIMEOUT_S, check=True)


def test_ranks_of_msrun_save_together_or_not_at_all(tmp_path: Path) -> None:
    # One that is killed takes the others with it, half a minute later.
    plan = Plan(engine="mindspore", directory=str(tmp_path), until=2)
    check_ranks(run_msrun, plan, "leaves")
