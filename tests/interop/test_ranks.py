# SPDX-License-Identifier: Apache-2.0
"""Real ranks of MindSpore, started by `msrun`: they save together, resume bit for bit, and name the one that is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import load_checkpoint
from ckptmgr.core.model import State
from ckptmgr.store.store import Store
from tests.integrations import engine_job
from tests.integrations.engine_job import ROOT, Plan
from tests.integrations.test_engines import TIMEOUT_S, WORLD, check_ranks
from tests.support.ports import free_port

mindspore = pytest.importorskip("mindspore", reason="needs MindSpore: make interop")
training = pytest.importorskip("tests.interop.training")
pytestmark = pytest.mark.interop


def run_msrun(plan: Plan) -> None:
    msrun(Path(plan.directory), Path(engine_job.__file__), json.dumps(asdict(plan)))


def msrun(directory: Path, script: Path, argument: str) -> None:
    scripts = Path(sys.executable).parent
    command = [str(scripts / "msrun"), f"--worker_num={WORLD}", f"--local_worker_num={WORLD}"]
    command += [f"--master_port={free_port()}", f"--log_dir={directory}/log", "--join=True"]
    command += [str(script), argument]
    paths = {"PATH": f"{scripts}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    paths["PYTHONSAFEPATH"] = "1"  # beside the script there is a folder named like a library
    subprocess.run(command, env={**os.environ, **paths}, timeout=TIMEOUT_S, check=True)


def test_ranks_of_msrun_save_together_or_not_at_all(tmp_path: Path) -> None:
    # One that is killed takes the others with it, half a minute later.
    plan = Plan(engine="mindspore", directory=str(tmp_path), until=2)
    check_ranks(run_msrun, plan, "leaves")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of two ranks that have trained three epochs with our callback, the last one after a resume."""
    directory = tmp_path_factory.mktemp("ranks")
    msrun(directory, Path(__file__).with_name("rank_training.py"), str(directory))
    return directory


def told(directory: Path, rank: int) -> dict[str, np.ndarray]:
    with np.load(directory / f"rank-{rank}.npz") as arrays:
        return dict(arrays)


def test_ranks_save_and_resume_through_the_callback_under_mindspores_names(trained: Path) -> None:
    found = Store(trained / "run").scan()
    assert all(one.state is State.OK for one in found)
    names = ["net-1_5.shards", "net-2_5.shards", "net_1-3_5.shards"]
    assert sorted(one.name for one in found) == names
    assert [len(one.shards) for one in found] == [WORLD] * 3


def test_training_of_ranks_that_was_resumed_ends_where_an_uninterrupted_one_ends(
    trained: Path,
) -> None:
    whole = training.numbers_of(training.train([], epochs=3))
    for rank in range(WORLD):
        ended = told(trained, rank)
        assert all(np.array_equal(ended[name], whole[name]) for name in whole)


def test_one_process_loads_what_the_ranks_have_saved_into_a_cell(trained: Path) -> None:
    model = training.new_model(training.new_network(seed=9))
    values = load_checkpoint(trained / "run" / "net_1-3_5.shards", net=model.train_network)
    assert (values["epoch_num"], values["step_num"]) == (3, 5)  # MindSpore counts steps anew
    loaded, ended = training.numbers_of(model.train_network), told(trained, 0)
    assert all(np.array_equal(loaded[name], ended[name]) for name in ended)


def test_ranks_write_what_they_have_alike_once_into_files_that_mindspore_loads(
    trained: Path,
) -> None:
    files = sorted((trained / "run").glob("net_1-3_5.*.ckpt"))
    parts = [mindspore.load_checkpoint(str(file)) for file in files]
    size_bytes = sum(value.asnumpy().nbytes for part in parts for value in part.values())
    assert len(parts) == WORLD
    counters = 2 * 8
    assert size_bytes == counters + sum(array.nbytes for array in told(trained, 0).values())
