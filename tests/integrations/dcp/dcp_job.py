# SPDX-License-Identifier: Apache-2.0
"""What each of four ranks does: train with FSDP2 over gloo, and save and load through DCP.

`dcp_job.py DIRECTORY`; every rank prints one line of JSON. The last thing that rank 3 does is to die in the middle of a
save.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support import api
from tests.support.torch_ranks import run_ranks

KEY = bytes(range(32))
STATE_STEP = 7


def main(directory: Path) -> None:
    import torch.distributed as dist  # not at the top: the collection of doctests imports this file where torch is missing

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    told = _Job(directory, dist.get_rank()).run()
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without rank 3 no barrier


class _Job:
    def __init__(self, directory: Path, rank: int) -> None:
        from ckptmgr import CheckpointConfig

        self.directory = directory
        self.rank = rank
        self.plain = CheckpointConfig(keep="last(2)")
        self.encrypted = CheckpointConfig(enc_key=KEY)
        self.told: dict[str, Any] = {"rank": rank}

    def run(self) -> dict[str, Any]:
        from torch.distributed.device_mesh import DeviceMesh

        meshes = {ranks: DeviceMesh("cpu", list(range(ranks))) for ranks in (4, 3, 2)}
        state = trained(meshes[4], seed=1)
        whole = wholes(state)
        self.save(state, 1, self.plain, name="plain")
        self.save(state, 1, self.encrypted, name="encrypted")
        self.save_in_background(state, 2)
        copies = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("copies", "shards"))
        self.save_replicas_by_rows(copies)
        self.told["loaded by 4, 3 and 2"] = all(
            self.rank >= ranks or self.is_loaded(mesh, whole, name)
            for ranks, mesh in meshes.items()
            for name in ("plain", "encrypted", "replicas")
        )
        if self.rank < 2:
            self.save(trained(meshes[2], seed=1), 1, self.plain, name="two", group=meshes[2])
        self.told["full disk"] = self.failing(lambda: self.save_with_full_disk(state, 3))
        self.told["death"] = self.failing(lambda: self.save_with_death(state, 4))
        return self.told

    def save(
        self, state: Any, step: int, config: Any, *, name: str, group: Any = None, fs: Any = None
    ) -> None:
        import torch.distributed.checkpoint as dcp

        from ckptmgr.integrations.dcp import SavePlanner, StorageWriter

        writer = StorageWriter(self.directory / name, config, prefix="net", step=step, fs=fs)
        process_group = None if group is None else group.get_group()
        dcp.save(state, storage_writer=writer, planner=SavePlanner(), process_group=process_group)  # type: ignore[attr-defined]

    def save_in_background(self, state: Any, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        from ckptmgr.integrations.dcp import SavePlanner, StorageWriter

        writer = StorageWriter(self.directory / "plain", self.plain, prefix="net", step=step)
        saved: Any = dcp.async_save(state, storage_writer=writer, planner=SavePlanner())  # type: ignore[attr-defined]
        saved.result()

    def save_replicas_by_rows(self, mesh: Any) -> None:
        """Save a state that is sharded over two ranks and has two copies, with tensors small enough to look at cut up."""
        from ckptmgr.integrations.dcp import dedup as dcp_balance

        dcp_balance.LEAST_CHUNK_BYTES = 64
        self.save(trained(mesh, seed=1), 1, self.plain, name="replicas")

    def is_loaded(self, mesh: Any, whole: dict[str, Any], name: str) -> bool:
        """Load into a model of another seed, over the ranks of a mesh; return whether it is equal to the saved one."""
        import torch
        import torch.distributed.checkpoint as dcp

        from ckptmgr.integrations.dcp import LoadPlanner, StorageReader

        state = trained(mesh, seed=2)
        reader = StorageReader(
            self.directory / name, self.encrypted if name == "encrypted" else None, prefix="net"
        )
        dcp.load(  # type: ignore[attr-defined]
            state,
            storage_reader=reader,
            planner=LoadPlanner(),
            process_group=mesh.get_group(),
        )
        found = wholes(state)
        return all(torch.equal(found[key], value) for key, value in whole.items())

    def save_with_full_disk(self, state: Any, step: int) -> None:
        pass
        from tests.support.failingdisk import FailingDisk

        fs = FailingDisk(api.OsFileSystem(), space_bytes=100) if self.rank == 2 else None
        self.save(state, step, self.plain, name="plain", fs=fs)

    def save_with_death(self, state: Any, step: int) -> None:
        pass
        from tests.support.failingdisk import FailingDisk

        class Deadly(FailingDisk):
            def _meet(self, operation: str, path: Path) -> None:
                if operation == "write_at":
                    os._exit(0)
                super()._meet(operation, path)

        fs = Deadly(api.OsFileSystem()) if self.rank == 3 else None
        self.save(state, step, self.plain, name="plain", fs=fs)

    @staticmethod
    def failing(work: Callable[[], None]) -> list[object]:
        """Return the error: its type, and the types of the errors of the ranks that failed."""
        try:
            work()
        except BaseException as error:
            failures = getattr(error, "failures", {})
            causes = {rank: type(cause).__name__ for rank, (cause, _) in failures.items()}
            return [type(error).__name__, causes]
        return []


def trained(mesh: Any, *, seed: int) -> dict[str, Any]:
    """Return the state of a model and its AdamW after two steps, as DCP takes it."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 33), torch.nn.Linear(33, 5), torch.nn.Linear(5, 2)
    )
    if mesh.get_coordinate() is None:
        return {}
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for _ in range(2):
        torch.manual_seed(seed)
        model(torch.rand(4, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, slots = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": slots, "step": STATE_STEP * seed}


def wholes(state: Any, path: str = "") -> dict[str, Any]:
    """Return all tensors of a state, put together; a collective call."""
    import torch

    if isinstance(state, dict):
        return {k: v for key, one in state.items() for k, v in wholes(one, f"{path}.{key}").items()}
    if not isinstance(state, torch.Tensor):
        return {}
    gather = getattr(state, "full_tensor", state.clone)
    return {path: gather()}


if __name__ == "__main__":
    # What every rank uses, imported once.
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp  # noqa: F401

    import ckptmgr.integrations.dcp  # noqa: F401

    run_ranks(4, lambda: main(Path(sys.argv[1])))
