# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the Trainer of Transformers: durable, verified, encrypted, and resumed bit for bit.

```
with TrainerCheckpoints("runs/bert", CheckpointConfig(save_checkpoint_steps=100)) as checkpoints:
    args = TrainingArguments(..., save_strategy="no")
    trainer = Trainer(model, args, train_dataset=data, callbacks=[checkpoints])
    trainer.train(resume_from_checkpoint=checkpoints.materialize())
```
"""

from __future__ import annotations

from ckptmgr.integrations.transformers.callback import TrainerCheckpoints
from ckptmgr.integrations.transformers.pretrained import from_pretrained

__all__ = ["CheckpointCallback", "TrainerCheckpoints", "from_pretrained"]

CheckpointCallback = TrainerCheckpoints
"""The earlier name."""
