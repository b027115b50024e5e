# SPDX-License-Identifier: Apache-2.0
"""What each of the real ranks of an engine does: resume, train, save every step, and at the last one lose rank 1.

`python -m tests.integrations.engine_job PLAN`, where the plan is JSON; every rank writes its observations to a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ckptmgr import Ranks

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of the ranks.

    Attributes:
        engine: `jax`, `mpi` or `mindspore`.
        directory: Gets the checkpoints, and the observations of the ranks.
        until: The last step.
        ending: What rank 1 does instead of saving the last step: `killed`, `leaves`; empty to save it.
        address: Where JAX meets.
        rank: Number of this process, where nothing else tells.
    """

    engine: str
    directory: str
    until: int
    ending: str = ""
    address: str = ""
    rank: int = 0

    def command(self) -> list[str]:
        """Return the command of a rank."""
        return [sys.executable, "-m", "tests.integrations.engine_job", json.dumps(asdict(self))]

    def told(self, rank: int) -> dict[str, object]:
        """Return the observations of a rank."""
        found: dict[str, object] = json.loads(self._report(rank).read_text())
        return found

    def tell(self, rank: int, seen: dict[str, object]) -> None:
        """Leave the observations of a rank."""
        self._report(rank).write_text(json.dumps(seen))

    def _report(self, rank: int) -> Path:
        return Path(self.directory) / f"told-{self.until}-{rank}.json"


def trained(weights: np.ndarray, step: int, rank: int) -> np.ndarray:
    """Return the weights after one more step."""
    noise = np.random.default_rng([rank, step]).standard_normal(weights.shape)
    return weights * 0.9 + noise


def main(plan: Plan) -> None:
    """Be one rank."""
    if plan.engine == "jax":
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax

        jax.distributed.initialize(plan.address, 2, plan.rank, initialization_timeout=60)
    elif plan.engine == "mpi":
        from mpi4py import MPI  # noqa: F401 - this is how a program says that it uses MPI

    elif plan.engine == "mindspore":
        import mindspore
        from mindspore.communication import init

        mindspore.set_device("CPU")
        init()

    from ckptmgr import CheckpointConfig, CheckpointManager, SaveFailed
    from ckptmgr.integrations.job import job_coordinator

    coordinator = job_coordinator(directory=Path(plan.directory) / "meeting")
    rank = coordinator.rank
    directory = Path(plan.directory) / "run"
    config = CheckpointConfig(async_save=True, keep="all")
    with CheckpointManager(
        directory, config, ranks=Ranks(coordinator, timeout_s=60), prefix="net"
    ) as manager:
        found = manager.resume({"weights": np.zeros(1000)})
        assert isinstance(found.state, dict)
        weights = found.state["weights"]
        seen: dict[str, object] = {"world": coordinator.world, "start": found.step}
        for step in range(found.step + 1, plan.until + 1):
            weights = trained(weights, step, rank)
            if plan.ending and step == plan.until:
                manager.wait()
                break
            manager.save(step, {"weights": weights})
    seen["weights"] = weights.tobytes().hex()
    if plan.ending and rank == 1:
        plan.tell(rank, seen)
        if plan.ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return
    if plan.ending:
        last = CheckpointManager(
            directory, config, ranks=Ranks(coordinator, timeout_s=1), prefix="net"
        )
        try:
            last.save(plan.until, {"weights": weights})
            last.wait()
        except SaveFailed as error:
            seen["failed"] = error.message
        last.close()
    plan.tell(rank, seen)
    if plan.ending == "killed":
        # Without its last rank the engine would wait for it, or end this one with an error.
        os._exit(0)


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
