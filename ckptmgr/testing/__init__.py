# SPDX-License-Identifier: Apache-2.0
"""Conformance kit: does a program that trains with ckptmgr go on bit for bit after it was cut?

A program is a function `main(directory, steps)`. It trains to step `steps`, saves its checkpoints
below `directory`, resumes from those that it finds there, and returns its final state: any value
that `save_state` takes, such as the state of model and optimizer. The kit runs it in processes of
their own: uncut, and cut at the edges of an epoch by SIGKILL, SIGTERM and Ctrl-C, then again until
the end. Each cut run must return the state that the uncut one returned.

With pytest:

```
kit = Kit("examples/torch_loop.py:main", steps_per_epoch=10)

@pytest.mark.parametrize("cut", kit.cuts, ids=str)
def test_torch_loop(cut: Cut, tmp_path: Path) -> None:
    kit.check(cut, tmp_path)
```

Without it: `python -m ckptmgr.testing examples/torch_loop.py:main --steps-per-epoch 10`.

`ckptmgr.testing.places` is a suite for places that hold checkpoints.
"""

from __future__ import annotations

from ckptmgr.testing.fork_server import ForkServer, NotConforming
from ckptmgr.testing.kit import Cut, Kit

__all__ = ["Cut", "ForkServer", "Kit", "NotConforming"]
