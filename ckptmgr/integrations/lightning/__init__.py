# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of PyTorch Lightning: `LightningCheckpoints`, a callback, and `CkptmgrIO`, a plugin.

```
checkpoints = LightningCheckpoints("runs/digits", CheckpointConfig(save_checkpoint_steps=100, keep="last(2)"))
trainer = Trainer(callbacks=[checkpoints])
trainer.fit(model, loader, ckpt_path=checkpoints.latest())
```

The callback saves and deletes by the policies of a `CheckpointConfig`, and a run that it resumes
goes on bit for bit. The plugin writes the files of Lightning's own `ModelCheckpoint`. Both work
with `lightning` and `pytorch_lightning`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptmgr.integrations.lightning.checkpoint_io import CkptmgrIO

if TYPE_CHECKING:
    from ckptmgr.integrations.lightning.callback import LightningCheckpoints

    ManagerCheckpoint = LightningCheckpoints

__all__ = ["CkptmgrIO", "LightningCheckpoints", "ManagerCheckpoint"]


def __getattr__(name: str) -> Any:
    """Import the callback when it is used: its base class is Lightning's."""
    if name in ("LightningCheckpoints", "ManagerCheckpoint"):  # the second is the earlier name
        from ckptmgr.integrations.lightning.callback import LightningCheckpoints

        return LightningCheckpoints
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
