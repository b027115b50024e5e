# SPDX-License-Identifier: Apache-2.0
"""A process of JAX: hold arrays on many devices, save them; or resume into arrays that are cut another way.

`jax_job.py DIRECTORY save|load RANK WORLD PORT`, with two devices a process; prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ckptmgr import CheckpointConfig, CheckpointManager, Ranks

WHOLE = np.arange(48, dtype=np.float32).reshape(8, 6)


def arrays(action: str) -> dict[str, Any]:
    """Return arrays over all devices: by rows to save, by columns to load."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("x",))
    content = WHOLE if action == "save" else np.zeros_like(WHOLE)
    cut = PartitionSpec("x") if action == "save" else PartitionSpec(None, "x")

    def made(spec: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(WHOLE.shape, sharding, lambda index: content[index])

    return {"cut": made(cut), "copied": made(PartitionSpec())}


def main(directory: Path, action: str, rank: int, world: int, port: str) -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax

    from ckptmgr.integrations.jax_distributed import jax_coordinator

    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"127.0.0.1:{port}", world, rank, initialization_timeout=60)
    state: Any = {**arrays(action), "own": rank}
    config = CheckpointConfig(remove_redundancy=True, format="safetensors")
    with CheckpointManager(
        directory, config, ranks=Ranks(jax_coordinator(), timeout_s=60), prefix="jax"
    ) as manager:
        if action == "save":
            manager.save(1, state)
        else:
            state = manager.resume(state).state
    held = {
        name: all(
            np.array_equal(np.asarray(shard.data), WHOLE[shard.index])
            for shard in state[name].addressable_shards
        )
        for name in ("cut", "copied")
    }
    spec = str(state["cut"].sharding.spec)
    sys.stdout.write(json.dumps({"rank": rank, "held": held, "own": state["own"], "spec": spec}))
    sys.stdout.write("\n")
    sys.stdout.flush()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
