# SPDX-License-Identifier: Apache-2.0
"""Arrays of JAX on the devices of several real processes: saved by two, loaded by three and by one, cut another way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

from ckptmgr import CheckpointManager
from tests.integrations.jax_job import WHOLE
from tests.support.ports import reserved_port

ROOT = Path(__file__).parents[2]


def processes(world: int, directory: Path, action: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.integrations.jax_job", str(directory), action]
    with reserved_port() as port:
        running = [
            subprocess.Popen(
                [*command, str(rank), str(world), str(port)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        told = []
        for one in running:
            output, errors = one.communicate(timeout=120)
            assert one.returncode == 0, errors
            told.append(json.loads(output.splitlines()[-1]))
    return told


@pytest.mark.slow
def test_arrays_of_two_processes_are_loaded_by_three_and_by_one(tmp_path: Path) -> None:
    saved = processes(2, tmp_path, "save")
    assert [one["held"] for one in saved] == [{"cut": True, "copied": True}] * 2
    for world in (1, 3):
        loaded = processes(world, tmp_path, "load")
        assert [one["held"] for one in loaded] == [{"cut": True, "copied": True}] * world
        assert [one["own"] for one in loaded] == list(range(world))
        assert all("None, 'x'" in one["spec"] for one in loaded)
    with CheckpointManager(tmp_path, prefix="jax") as ours:
        whole: Any = ours.resume().state
    np.testing.assert_array_equal(whole["cut"], WHOLE)
    np.testing.assert_array_equal(whole["copied"], WHOLE)
