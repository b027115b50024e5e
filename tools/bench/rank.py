# SPDX-License-Identifier: Apache-2.0
"""One rank of a job that saves its share of a model with the others and loads it again: `python -m tools.bench.rank PART`."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

from ckptmgr import CheckpointConfig, CheckpointManager, Ranks
from ckptmgr.parallel.shared_directory import SharedDirectory
from tools.bench.disk import drop_cache
from tools.bench.quiet import rest
from tools.bench.ranks import Part
from tools.bench.workload import new_state


def main(part: Part) -> None:
    """Save and load in rounds; rank 0 prints what that took until all ranks were done."""
    directory = Path(part.directory)
    ranks = SharedDirectory(directory / "meeting", rank=part.rank, world=part.world)
    state = new_state(part.size_bytes)
    found = []

    def together(tag: str) -> float:
        ranks.all_gather(tag, None, timeout_s=600)
        return time.perf_counter()

    config = CheckpointConfig(
        format="safetensors", keep="last(1)", remove_redundancy=part.is_replicated
    )
    with CheckpointManager(directory / "run", config, ranks=Ranks(ranks), prefix="net") as manager:
        for turn in range(part.rounds + 1):
            rest(part.rest_s)
            started = together(f"save {turn}")
            manager.save(turn + 1, state)
            saved_s = together(f"saved {turn}") - started
            if part.rank == 0:
                drop_cache(directory / "run")
            rest(part.rest_s)
            started = together(f"load {turn}")
            loaded = manager.load(turn + 1)
            loaded_s = together(f"loaded {turn}") - started
            del loaded
            found.append({"save": saved_s, "load": loaded_s})
        together("end")
    if part.rank == 0:
        shutil.rmtree(directory / "run")
        json.dump(found[1:], sys.stdout)


if __name__ == "__main__":
    main(Part(**json.loads(sys.argv[1])))
