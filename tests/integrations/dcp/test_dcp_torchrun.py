# SPDX-License-Identifier: Apache-2.0
"""Four ranks over a store as torchrun gives it: FSDP2 over gloo, saved and loaded through DCP."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
dcp: Any = pytest.importorskip("torch.distributed.checkpoint")

from ckptmgr import open_checkpoint  # noqa: E402 - only where there is torch
from ckptmgr.config.config import CheckpointConfig  # noqa: E402
from ckptmgr.core.model import State  # noqa: E402
from ckptmgr.integrations.dcp import LoadPlanner, StorageReader  # noqa: E402
from ckptmgr.store.store import Store  # noqa: E402
from tests.integrations.dcp.dcp_job import KEY, STATE_STEP  # noqa: E402

ROOT = Path(__file__).parents[3]
WORLD = 4


def loaded(directory: Path, config: CheckpointConfig | None = None) -> dict[str, Any]:
    """Load everything with one process that is no rank, into the shapes that the job trains."""
    shapes = {"0": (33, 7), "1": (5, 33), "2": (2, 5)}
    weights = {f"{layer}.weight": torch.zeros(shape) for layer, shape in shapes.items()}
    weights |= {f"{layer}.bias": torch.zeros(shape[0]) for layer, shape in shapes.items()}
    slots = {
        name: {"exp_avg": torch.zeros_like(one), "step": torch.tensor(0.0)}
        for name, one in weights.items()
    }
    state: dict[str, Any] = {"model": weights, "optimizer": {"state": slots}, "step": None}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader = StorageReader(directory, config, prefix="net", step=1)
        dcp.load(state, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
    return state


def pieces(directory: Path, tensor: str) -> int:
    """Return in how many pieces a tensor lies in the files of all ranks."""
    found = 0
    for file in directory.glob("*.safetensors"):
        with open_checkpoint(file) as reader:
            found += sum(name.partition("~")[0] == tensor for name in reader.names())
    return found


@pytest.mark.slow
def test_four_ranks_save_what_four_three_two_and_one_load_or_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integrations.dcp.dcp_job", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    told = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda t: t["rank"])
    assert [one["rank"] for one in told] == [0, 1, 2]  # rank 3 died
    assert [one["loaded by 4, 3 and 2"] for one in told] == [True] * 3
    assert [one["full disk"] for one in told] == [["CheckpointException", {"2": "StoreFull"}]] * 3
    assert all(one["death"][0] != "CheckpointException" for one in told)

    whole = [c for c in Store(tmp_path / "plain").scan() if c.state is State.OK]
    assert sorted((c.name, len(c.shards)) for c in whole) == [
        ("net-1.shards", WORLD),
        ("net-2.shards", WORLD),
    ]
    assert pieces(tmp_path / "two", "model.0.weight") == 2
    assert pieces(tmp_path / "replicas", "model.0.weight") > 2
    plain = loaded(tmp_path / "plain")
    for other in (
        loaded(tmp_path / "encrypted", CheckpointConfig(enc_key=KEY)),
        loaded(tmp_path / "two"),
        loaded(tmp_path / "replicas"),
    ):
        for name, weight in plain["model"].items():
            assert torch.equal(weight, other["model"][name])
            slots, expected = (one["optimizer"]["state"][name] for one in (other, plain))
            assert torch.equal(slots["exp_avg"], expected["exp_avg"])
            assert slots["step"].item() == 2
    assert plain["step"] == STATE_STEP
