# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of `fit` of Keras 3: durable, verified, encrypted, and resumed bit for bit.

```
with KerasCheckpoints("runs/digits", CheckpointConfig(save_checkpoint_steps=100)) as checkpoints:
    model.fit(x, y, epochs=9, initial_epoch=checkpoints.initial_epoch, callbacks=[checkpoints])
```
"""

from __future__ import annotations

from ckptmgr.integrations.keras.callback import KerasCheckpoints

__all__ = ["CheckpointCallback", "KerasCheckpoints"]

CheckpointCallback = KerasCheckpoints
"""The earlier name."""
