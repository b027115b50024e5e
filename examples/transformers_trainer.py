"""Train a tiny BERT with the Trainer. Kill it and start it again: it goes on, bit for bit."""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from ckptmgr import CheckpointConfig
from ckptmgr.integrations.transformers import TrainerCheckpoints


def main(directory, steps):
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (80, 8))
    data = [{"input_ids": row, "labels": row.sum() % 2} for row in tokens]
    sizes = {"vocab_size": 50, "num_hidden_layers": 1, "hidden_size": 16}
    model = BertForSequenceClassification(
        BertConfig(**sizes, num_attention_heads=2, intermediate_size=32)
    )
    args = TrainingArguments(
        f"{directory}/logs",
        max_steps=steps,
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    with TrainerCheckpoints(directory, CheckpointConfig(keep="last(2)")) as checkpoints:
        trainer = Trainer(model, args, train_dataset=data, callbacks=[checkpoints])
        trainer.train(resume_from_checkpoint=checkpoints.materialize())
    return {"model": model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/transformers", 25)
