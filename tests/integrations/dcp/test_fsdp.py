# SPDX-License-Identifier: Apache-2.0
"""FSDP2: checkpoints of four real ranks of gloo load bit by bit on other numbers of ranks; and one rank by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from ckptmgr import Ranks  # noqa: E402
from ckptmgr.config.config import CheckpointConfig  # noqa: E402
from ckptmgr.core.errors import UnsupportedState  # noqa: E402
from ckptmgr.files.load.state import state_metadata  # noqa: E402
from ckptmgr.parallel.errors import RankFailed  # noqa: E402
from ckptmgr.parallel.layout import ParallelLayout  # noqa: E402
from ckptmgr.parallel.slicer import LayoutSlicer  # noqa: E402
from ckptmgr.state import tree  # noqa: E402
from ckptmgr.training.manager import CheckpointManager  # noqa: E402
from tests.integrations.dcp.fsdp_job import digest  # noqa: E402
from tests.parallel.ranks import Meeting, Seat  # noqa: E402

ROOT = Path(__file__).parents[3]


def run_job(directory: Path, *worlds: int) -> dict[int, list[dict[str, Any]]]:
    """Save with the first number of ranks and load with the others; return what each rank printed."""
    command = [sys.executable, "-m", "tests.integrations.dcp.fsdp_job", directory, "ckpt", *worlds]
    done = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(map(json.loads, done.stdout.splitlines()), key=lambda line: line["rank"])
    return {world: [line for line in lines if line["world"] == world] for world in worlds}


@pytest.mark.slow
def test_fsdp_state_of_four_ranks_is_loaded_by_any_number(tmp_path: Path) -> None:
    ranks = run_job(tmp_path, 4, 2, 3)
    saved = ranks[4]
    assert len(saved) == 4
    assert len({one["digest"] for one in saved}) == 1
    with CheckpointManager(tmp_path, prefix="fsdp") as ours:
        whole: Any = ours.resume().state
    assert digest({name: whole[name] for name in ("model", "optimizer")}) == saved[0]["digest"]
    for world in (2, 3):
        loaded = ranks[world]
        assert [one["digest"] for one in loaded] == [saved[0]["digest"]] * world
        assert [(one["saved_by"], one["kept"]) for one in loaded] == [(r, 0) for r in range(world)]


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank of gloo, in this process."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cut(whole: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])


@pytest.mark.usefixtures("alone")
def test_dtensor_is_stored_as_what_this_rank_holds() -> None:
    flat = tree.flatten({"w": cut(torch.arange(6.0).reshape(3, 2))}, LayoutSlicer(0))
    assert flat.slices["w"].shape == (3, 2)
    assert "ckptmgr.pieces" in state_metadata(flat)
    state: Any = {"w": cut(torch.zeros(3, 2))}
    before = state["w"]
    read = {t.spec.name: np.frombuffer(t.content(), np.float32).reshape(3, 2) for t in flat.tensors}
    tree.restore(state, flat.skeleton, lambda name: read[name])
    assert state["w"] is before
    assert state["w"].full_tensor().tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.usefixtures("alone")
def test_module_and_optimizer_of_dtensors_are_filled_in_place() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model: Any = fully_shard(torch.nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=seed)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    one, two = made(1), made(2)
    flat = tree.flatten(one, LayoutSlicer(0))
    read = {
        t.spec.name: np.frombuffer(t.content(), t.spec.dtype.to_numpy()).reshape(t.spec.shape)
        for t in flat.tensors
    }
    tree.restore(two, flat.skeleton, lambda name: read[name])
    assert two["optimizer"].param_groups[0]["lr"] == 1
    for name, value in one["model"].state_dict().items():
        assert torch.equal(two["model"].state_dict()[name].full_tensor(), value.full_tensor())
    fresh = {"model": made(3)["model"], "optimizer": None}
    fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters())
    with pytest.raises(tree.StateMismatch, match=r"\['state'\] is empty, .* before, take a step"):
        tree.restore(fresh, flat.skeleton, lambda name: read[name])
    fresh["optimizer"].zero_grad()
    get_optimizer_state_dict(fresh["model"], fresh["optimizer"])
    tree.restore(fresh, flat.skeleton, lambda name: read[name])
    assert fresh["optimizer"].param_groups[0]["lr"] == 1


@pytest.mark.usefixtures("alone")
def test_optimizer_of_dtensors_takes_a_checkpoint_of_an_older_torch_and_none_of_another_class() -> (
    None
):
    from torch.distributed.fsdp import fully_shard

    def stepped(kind: Any) -> Any:
        model: Any = fully_shard(torch.nn.Linear(3, 2))
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return optimizer

    saved = stepped(torch.optim.AdamW)
    del saved.param_groups[0]["decoupled_weight_decay"]  # as before it was one of its options
    flat = tree.flatten(saved, LayoutSlicer(0))
    read = {
        t.spec.name: np.frombuffer(t.content(), t.spec.dtype.to_numpy()).reshape(t.spec.shape)
        for t in flat.tensors
    }
    resumed = stepped(torch.optim.AdamW)
    tree.restore(resumed, flat.skeleton, lambda name: read[name])
    assert resumed.param_groups[0]["decoupled_weight_decay"] is True
    with pytest.raises(tree.StateMismatch, match="optimizer is another than Adamax"):
        tree.restore(stepped(torch.optim.Adamax), flat.skeleton, lambda name: read[name])


@pytest.mark.usefixtures("alone")
def test_pending_sum_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    pending = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Partial()])
    with pytest.raises(UnsupportedState, match="is no complete value"):
        tree.flatten({"w": pending}, LayoutSlicer(0))


@pytest.mark.usefixtures("alone")
def test_integrated_save_of_a_dtensor_is_refused_at_the_first_save(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    part = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
    config = CheckpointConfig(integrated_save=True)
    manager = CheckpointManager(tmp_path, config, ranks=Ranks(Seat(Meeting(1), 0)))
    with pytest.raises(RankFailed, match="integrated_save has no effect on slices"):
        manager.save(1, {"w": part})


def test_sparse_slice_is_refused() -> None:
    layout = ParallelLayout(device_matrix=(1,), tensor_map=((0,),))
    with pytest.raises(UnsupportedState, match="sparse or quantized, and cut"):
        tree.flatten({"w": torch.ones(2).to_sparse()}, LayoutSlicer(0, {"w": layout}))
