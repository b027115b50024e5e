# SPDX-License-Identifier: Apache-2.0
"""PyTorch Distributed Checkpoint (DCP) over our files: encrypted, verified and retained.

```
import torch.distributed.checkpoint as dcp
from ckptmgr.integrations.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter

reader = StorageReader("runs/fsdp", config)                       # the newest one
dcp.load(state, storage_reader=reader, planner=LoadPlanner())
writer = StorageWriter("runs/fsdp", config, step=500, metrics={"loss": loss})
dcp.save(state, storage_writer=writer, planner=SavePlanner())     # or dcp.async_save
```

* States may be plain, DTensor or FSDP2. A checkpoint has a file for each rank, and one
  manifest, `ckpt-500.shards`, that is created when all ranks have written, or never. `ckptmgr ls`,
  `verify`, `pin` and `prune` work on it.
* It is loaded by any number of ranks, also by one without a process group (`no_dist`), each reading
  the bytes it needs.
* Nothing is pickled or unpickled in files. (DCP itself sends plans from rank to rank as pickles.)
* When the coordinator dies in the commit, the storage decides: the checkpoint is listed, or it is
  not.
"""

from __future__ import annotations

from ckptmgr.integrations.dcp.planners import LoadPlanner, SavePlanner
from ckptmgr.integrations.dcp.reader import StorageReader
from ckptmgr.integrations.dcp.writer import StorageWriter

__all__ = ["LoadPlanner", "SavePlanner", "StorageReader", "StorageWriter"]
