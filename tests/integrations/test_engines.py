# SPDX-License-Identifier: Apache-2.0
"""Real ranks of JAX and MPI: they save together, resume bit for bit, and name the one that is lost."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.integrations.engine_job import ROOT, Plan, trained
from tests.support import api
from tests.support.ports import reserved_port

WORLD = 2
TIMEOUT_S = 120.0


def obstacle(package: str) -> str:
    return "" if importlib.util.find_spec(package) else f"needs {package}"


def mpiexec() -> str:
    """Return the launcher that came with the package, or the one of the system."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec") or ""


def run_jax(plan: Plan) -> None:
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        ranks = [replace(plan, address=address, rank=rank) for rank in range(WORLD)]
        children = [subprocess.Popen(one.command(), cwd=ROOT) for one in ranks]
        ended = [child.wait(TIMEOUT_S) for child in children]
    assert ended == ([0, -9] if plan.ending == "killed" else [0, 0])


def run_mpi(plan: Plan) -> None:
    command = [mpiexec(), "-n", str(WORLD), *plan.command()]
    subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, check=True)


def reference(rank: int, steps: int) -> str:
    weights = np.zeros(1000)
    for step in range(1, steps + 1):
        weights = trained(weights, step, rank)
    return weights.tobytes().hex()


def check_ranks(run: Callable[[Plan], None], plan: Plan, ending: str) -> None:
    """Train two steps with all ranks; start anew, train two more, and lose rank 1 before the last save."""
    run(plan)
    assert [plan.told(rank)["start"] for rank in range(WORLD)] == [0] * WORLD
    plan = replace(plan, until=4, ending=ending)
    run(plan)
    for rank in range(WORLD):
        told = plan.told(rank)
        assert (told["world"], told["start"]) == (WORLD, 2)
        assert told["weights"] == reference(rank, 4)
    assert "rank 1 did not come to" in str(plan.told(0)["failed"])
    found = api.listed(Path(plan.directory) / "run")
    assert sorted(c.step for c in found if c.state is api.State.OK) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.skipif(bool(obstacle("jax")), reason=obstacle("jax") or "-")
def test_ranks_of_jax_save_together_or_not_at_all(tmp_path: Path) -> None:
    plan = Plan(engine="jax", directory=str(tmp_path), until=2)
    check_ranks(run_jax, plan, "killed")


@pytest.mark.slow
@pytest.mark.skipif(bool(obstacle("mpi4py")), reason=obstacle("mpi4py") or "-")
def test_ranks_of_mpi_save_together_or_not_at_all(tmp_path: Path) -> None:
    # One that is killed takes all others of the job with it.
    plan = Plan(engine="mpi", directory=str(tmp_path), until=2)
    check_ranks(run_mpi, plan, "leaves")
