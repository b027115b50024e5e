# SPDX-License-Identifier: Apache-2.0
"""The features of the grid with the Trainer of Transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from ckptmgr import CheckpointConfig
from ckptmgr.integrations.transformers import TrainerCheckpoints
from ckptmgr.testing.cell import BATCHES, EPOCHS, Moments, NoSuchFeature
from tests.kit.torch_grid_programs import INPUTS, SIZE, averages, network, optimizers_of

ABSENT = {
    "two optimizers": "the Trainer has one optimizer",
    "finder": "auto_find_batch_size searches only where memory runs out",
    "loaders of unequal length": "the Trainer has one loader",
}


class Net(nn.Module):
    """A network that gives its loss, and has an average of itself."""

    def __init__(self, *, is_averaged: bool) -> None:
        super().__init__()
        self.net = network()
        self.average = averages()(self.net) if is_averaged else None

    def forward(self, x: Any, labels: Any) -> Any:
        """Return the loss."""
        found = self.net(x)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class Changes(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Changes what a feature changes when a step or an epoch ends."""

    def __init__(self, feature: str, model: Net) -> None:
        self.feature, self.model = feature, model

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Average."""
        if self.model.average is not None:
            self.model.average.update_parameters(self.model.net)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Change weights, or unfreeze."""
        if self.feature == "frozen and unfrozen layers":
            self.model.net[0].requires_grad_(True)
        if self.feature == "state changed at the end of an epoch":
            with torch.no_grad():
                self.model.net[4].weight.mul_(0.9).add_(torch.rand(()))


class Rows(torch.utils.data.Dataset[Any]):
    """Rows."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> Any:
        return {"x": INPUTS[index], "labels": INPUTS[index].sum(0, keepdim=True)}


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same rows without a length."""

    def __iter__(self) -> Any:
        rows = Rows()
        return (rows[index] for index in range(len(rows)))


class Ending(Trainer):  # type: ignore[misc, unused-ignore]
    """Ends a training at the place of a cell."""

    moments: Moments

    def training_step(self, *given: Any, **options: Any) -> Any:
        """Train on a batch."""
        self.moments.batch()
        return super().training_step(*given, **options)

    def prediction_step(self, *given: Any, **options: Any) -> Any:
        """Validate on a batch."""
        self.moments.validation()
        torch.rand(1)
        return super().prediction_step(*given, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "data without a length": {"max_steps": BATCHES * EPOCHS},
    "persistent workers": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    "accumulation that does not divide": {"gradient_accumulation_steps": 2},
    "torch.compile": {"torch_compile": True, "torch_compile_backend": "eager"},
}


def train(directory: str, feature: str, moments: Moments) -> object:
    """Train with a feature."""
    if feature in ABSENT:
        raise NoSuchFeature(ABSENT[feature])
    torch.manual_seed(0)
    model = Net(is_averaged=feature == "EMA")
    (optimizer,) = optimizers_of(feature, model.net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    if feature == "frozen and unfrozen layers":
        model.net[0].requires_grad_(False)
    args = TrainingArguments(
        f"{directory}/logs",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=SIZE,
        per_device_eval_batch_size=SIZE,
        eval_strategy="epoch",
        logging_strategy="epoch" if feature == "averages of the epoch" else "no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **OPTIONS.get(feature, {}),
    )
    data: Any = Stream() if feature == "data without a length" else Rows()
    with TrainerCheckpoints(directory, CheckpointConfig(**moments.options)) as checkpoints:
        trainer = Ending(
            model,
            args,
            train_dataset=data,
            eval_dataset=torch.utils.data.Subset(Rows(), range(2 * SIZE)),
            callbacks=[Changes(feature, model), checkpoints],
            optimizers=(optimizer, schedule),
        )
        trainer.moments = moments
        trainer.train(resume_from_checkpoint=checkpoints.materialize())
    found = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if feature == "averages of the epoch":
        found["losses"] = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    return found
