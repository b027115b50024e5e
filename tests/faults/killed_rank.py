# SPDX-License-Identifier: Apache-2.0
"""One rank of a job, which kills itself at a chosen call to the disk: `python -m tests.faults.killed_rank ...`.

It prints one line: `saved`, or its error.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support import api

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank is to do.

    Attributes:
        directory: Where it saves; the ranks meet beside it.
        rank: Its number.
        world: How many there are.
        operation: At the first call of which kind it kills itself, or None.
        timeout_s: How long it waits for the others.
    """

    directory: str
    rank: int
    world: int
    operation: str | None = None
    timeout_s: float = 2.0


def run_parts(parts: list[Part]) -> list[str]:
    """Run all ranks; return what each has printed, nothing for one that was killed."""
    command = [sys.executable, "-m", "tests.faults.killed_rank"]
    children = [
        subprocess.Popen(
            [*command, json.dumps(asdict(part))], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for part in parts
    ]
    printed = [child.communicate(timeout=120)[0].strip() for child in children]
    for child, part in zip(children, parts, strict=True):
        assert child.returncode == (0 if part.operation is None else -signal.SIGKILL)
    return printed


def main(part: Part) -> None:
    """Save step 1 with the others."""
    import time

    import numpy as np

    from ckptmgr import SaveFailed

    pass
    pass
    from ckptmgr.parallel import SharedDirectory
    from ckptmgr.parallel.rank_commit import together
    from ckptmgr.series.writer import SeriesWriter
    from ckptmgr.state import tree

    pass
    from tests.support.failingdisk import FailingDisk

    class Deadly(FailingDisk):
        def _meet(self, operation: str, path: Path) -> None:
            super()._meet(operation, path)
            if operation == part.operation:
                os.kill(os.getpid(), signal.SIGKILL)

    directory = Path(part.directory)
    coordinator = SharedDirectory(
        directory.with_name("meeting"), rank=part.rank, world=part.world, session="1"
    )
    writer = SeriesWriter(
        api.place(directory, clock=time.time, fs=Deadly(api.OsFileSystem())),
        "net",
        commit=together(coordinator, timeout_s=part.timeout_s),
        options=api.SaveOptions(),
        clock=time.time,
    )
    coordinator.all_gather("start", None, timeout_s=60)  # imports take longer than the save
    flat = tree.flatten({"weights": np.full(1000, part.rank)})
    try:
        writer.save("net-1.shards", [*flat.tensors], api.SaveFacts(step=1))
        result = "saved"
    except SaveFailed as error:
        result = error.message
    print(result)  # noqa: T201 - the parent reads it


if __name__ == "__main__":
    main(Part(**json.loads(sys.argv[1])))
