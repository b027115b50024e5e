# SPDX-License-Identifier: Apache-2.0
"""Programs with the Trainer for the kit: evaluations, accumulation, a plateau, background saves."""

from __future__ import annotations

from typing import Any

import torch

from ckptmgr import CheckpointConfig

ROWS, SIZE = 32, 8  # 4 batches of an epoch


def evaluated(directory: str, steps: int) -> object:
    """Train with an evaluation after every second step, and a schedule that looks at it."""
    return _train(
        directory,
        steps,
        eval_strategy="steps",
        eval_steps=2,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0},
        metric_for_best_model="eval_loss",
    )


def evaluated_by_epoch(directory: str, steps: int) -> object:
    """Train with an evaluation and a log after every epoch."""
    return _train(directory, steps, eval_strategy="epoch", logging_strategy="epoch")


def accumulated(directory: str, steps: int) -> object:
    """Train with three batches for a step, of which the last of an epoch has fewer."""
    return _train(directory, steps, rows=11 * SIZE, gradient_accumulation_steps=3)


def shuffled_globally(directory: str, steps: int) -> object:
    """Train in an order that comes from the global generator."""
    return _train(directory, steps, accelerator_config={"use_seedable_sampler": False})


def encrypted_in_background(directory: str, steps: int) -> object:
    """Train with encrypted saves in a thread, and an average loss of every step."""
    config = {"enc_key": bytes(range(32)), "async_save": "thread", "format": "safetensors"}
    return _train(directory, steps, config=config, logging_steps=1)


def scaled(directory: str, steps: int) -> object:
    """Train with a loss scale that grows, as with fp16."""
    return _train(
        directory, steps, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    )


def _train(
    directory: str,
    steps: int,
    *,
    rows: int = ROWS,
    config: Any = None,
    scaler: Any = None,
    **options: Any,
) -> object:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from ckptmgr.integrations.transformers import TrainerCheckpoints

    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (rows, 8))
    data: Any = [{"input_ids": row, "labels": row.sum() % 2} for row in tokens]
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )
    args = TrainingArguments(
        f"{directory}/logs",
        max_steps=steps,
        per_device_train_batch_size=SIZE,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    kept = CheckpointConfig(keep="last(2) | best(1, eval_loss, min)", **(config or {}))
    with TrainerCheckpoints(directory, kept) as checkpoints:
        trainer = Trainer(
            model, args, train_dataset=data, eval_dataset=data[:SIZE], callbacks=[checkpoints]
        )
        trainer.accelerator.scaler = scaler
        trainer.train(resume_from_checkpoint=checkpoints.materialize())
    found = {"model": model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
    return found if scaler is None else found | {"scaler": scaler}
