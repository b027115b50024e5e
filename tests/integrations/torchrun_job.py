# SPDX-License-Identifier: Apache-2.0
"""What each rank of `torchrun` does: train with gloo, save, and at a step let one rank find its disk full.

`torchrun --nproc-per-node 4 torchrun_job.py DIRECTORY`; every rank prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from ckptmgr import SaveFailed
from ckptmgr.parallel.rank_commit import together
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.state import tree
from tests.support import api
from tests.support.crashmodel import FailingDisk


def main(directory: Path) -> None:
    import torch  # not at the top: the collection of doctests imports this file where torch is missing
    import torch.distributed as dist

    from ckptmgr.integrations.torch_store import group_coordinator, torchrun_coordinator

    dist.init_process_group("gloo")
    coordinator = torchrun_coordinator()
    weights = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(weights)
    told: dict[str, object] = {"rank": coordinator.rank, "sum": weights[0].item()}
    for step, space_bytes in ((1, None), (2, 100 if coordinator.rank == 3 else None)):
        disk = FailingDisk(api.OsFileSystem(), space_bytes=space_bytes)
        store = api.place(directory, clock=time.time, fs=disk)
        writer = SeriesWriter(
            store,
            f"run{step}",
            commit=together(coordinator if step == 1 else group_coordinator(), timeout_s=60),
            options=api.SaveOptions(),
            clock=time.time,
        )
        flat = tree.flatten({"weights": weights, "rank": coordinator.rank})
        try:
            saved = writer.save(
                f"run{step}-{step}.shards", [*flat.tensors], api.SaveFacts(step=step)
            )
            told[f"step {step}"] = list(saved.shards)
        except SaveFailed as error:
            told[f"step {step}"] = str(error)
        writer.close()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
