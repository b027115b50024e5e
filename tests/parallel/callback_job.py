# SPDX-License-Identifier: Apache-2.0
"""What each of two ranks does: save three steps through the callback, in worker processes, and resume.

`callback_job.py DIRECTORY`; every rank prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from ckptmgr import CheckpointConfig, ModelCheckpoint, Ranks
from ckptmgr.integrations.job import job_coordinator
from tests.support.surface import Loop
from tests.support.torch_ranks import run_ranks


def main(directory: Path) -> None:
    """Be one rank."""
    ranks = job_coordinator()
    config = CheckpointConfig(
        async_save="process", remove_redundancy=True, keep_checkpoint_max=2, format="safetensors"
    )

    def callback() -> ModelCheckpoint:
        return ModelCheckpoint("net", str(directory), config, ranks=Ranks(ranks, timeout_s=60.0))

    own = np.full(3, ranks.rank, np.float32)
    first = callback()
    Loop(callbacks=(first,), network={"w": np.zeros(1000, np.float32), "own": own}).run(3)
    found = callback().resume()
    assert found is not None
    told = {
        "rank": ranks.rank,
        "latest": Path(first.latest_ckpt_file_name).name,
        "resumed": found.checkpoint.name,
        "w": float(np.asarray(found.values["w"]).mean()),
        "own": np.asarray(found.values["own"]).tolist(),
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run_ranks(2, lambda: main(Path(sys.argv[1])))
