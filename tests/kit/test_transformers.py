# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Transformers goes on bit for bit: `make kit FRAMEWORK=transformers`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from ckptmgr.testing.child import find_program
from ckptmgr.testing.grid import Cell
from ckptmgr.testing.kit import differences
from tests.kit.cuts import every_cut, every_pair
from tests.kit.stops import TOLD, saved_and_killed
from tests.test_examples import MOST_LINES, lines_of

pytest.importorskip("torch")
pytest.importorskip("accelerate", reason="needs accelerate: make kit FRAMEWORK=transformers")
pytest.importorskip("transformers", reason="needs transformers: make kit FRAMEWORK=transformers")

pytestmark = pytest.mark.kit
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "transformers_trainer.py"
NAMES = (
    "evaluated",
    "evaluated_by_epoch",
    "accumulated",
    "shuffled_globally",
    "encrypted_in_background",
    "scaled",
)
PROGRAMS = {
    "examples/transformers_trainer.py:main": {"steps_per_epoch": 10, "keep": 2, "fork": True},
    **{
        f"tests/kit/transformers_programs.py:{name}": {"steps_per_epoch": 4, "fork": True}
        for name in NAMES
    },
}


@every_cut(PROGRAMS)
@pytest.mark.usefixtures("kit")
def test_training_goes_on_as_if_it_had_not_been_cut(cut: str, check: Callable[[str], None]) -> None:
    check(cut)


WAITS = """
import select, sys
import torch, transformers
from transformers import Trainer, TrainerCallback
from ckptmgr import CheckpointConfig
from ckptmgr.integrations.transformers import TrainerCheckpoints

how, waits_at = sys.argv[1], int(sys.argv[2])

class Wait(TrainerCallback):
    def on_prediction_step(self, args, state, control, **kwargs):
        if state.global_step == waits_at and self.is_cut:
            print("waits", flush=True)
            while True:
                select.select([], [], [], 60)

def train(directory, is_cut):
    torch.manual_seed(0)
    options = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    tokens = torch.randint(0, 50, (32, 8))
    data = [dict(input_ids=row, labels=row.sum() % 2) for row in tokens]
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**options))
    given = dict(eval_steps=2, lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0})
    args = transformers.TrainingArguments(f"{directory}/logs", num_train_epochs=3, per_device_train_batch_size=8,
        learning_rate=1e-2, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        eval_strategy=how, logging_strategy=how, logging_steps=2, metric_for_best_model="eval_loss", **given)
    wait = Wait()
    wait.is_cut = is_cut
    early = transformers.EarlyStoppingCallback(20)
    config = CheckpointConfig(save_checkpoint_steps=1000)
    with TrainerCheckpoints(directory, config, observe=told) as checkpoints:
        trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:8], callbacks=[wait, early, checkpoints])
        trainer.train(resume_from_checkpoint=checkpoints.materialize())
    state, losses = trainer.state, [(one["step"], one.get("eval_loss")) for one in trainer.state.log_history]
    return [*model.state_dict().values()], trainer.lr_scheduler.state_dict(), state.best_metric, losses

if waits_at:
    train("cut", True)
else:
    expected, found = train("uncut", False), train("cut", False)
    assert all(map(torch.equal, expected[0], found[0]))
    assert expected[1:3] == found[1:3], (expected[1:3], found[1:3])
    assert [one for one in expected[3] if one[1]] == [one for one in found[3] if one[1]]
"""


@pytest.mark.parametrize(
    ("how", "step"), [("steps", 2), ("steps", 8), ("steps", 12), ("epoch", 4), ("epoch", 12)]
)
def test_kill_in_an_evaluation_after_a_stop_loses_no_step(
    tmp_path: Path, how: str, step: int
) -> None:
    """The grace ends in the evaluation: the step is saved as it was before, and evaluated again."""
    command = [sys.executable, "-c", TOLD + WAITS, how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    cut = subprocess.Popen(
        [*command, str(step)], cwd=tmp_path, env=environment, stdout=PIPE, text=True
    )
    assert saved_and_killed(cut) == step
    done = subprocess.run([*command, "0"], cwd=tmp_path, env=environment, stderr=PIPE, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def without_checkpoints(text: str) -> str:
    """Return the same program without ckptmgr."""
    text = re.sub(r"from ckptmgr.*\n", "", text)
    head, _, body = re.split(r"( +with TrainerCheckpoints.*\n)", text)
    block, end, tail = body.partition("    return {")
    text = head + re.sub("^    ", "", block, flags=re.MULTILINE) + end + tail
    text = text.replace(", callbacks=[checkpoints]", "")
    text = text.replace("resume_from_checkpoint=checkpoints.materialize()", "")
    assert "checkpoints." not in text
    return text


def test_example_is_at_most_three_lines_longer_and_trains_alike(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    plain = without_checkpoints(text)
    assert 0 < lines_of(text) - lines_of(plain) <= MOST_LINES
    names: dict[str, Any] = {"__name__": "plain"}
    exec(plain, names)  # noqa: S102 - our own example
    expected = names["main"](str(tmp_path / "none"), 13)
    found = find_program(f"{EXAMPLE}:main")(str(tmp_path / "runs"), 13)
    assert differences(expected, found) == []


def test_example_runs_as_printed(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert list((tmp_path / "runs").rglob("*-25.ckpt"))


@every_pair("tests/kit/transformers_grid_programs.py:train", "docs/transformers.md")
def test_cell_of_the_grid_is_as_its_page_says(
    cell: Cell, check_pair: Callable[[Cell], None]
) -> None:
    check_pair(cell)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_run_with_adapters_of_peft_is_loaded_into_them_and_refused_elsewhere(
    tmp_path: Path,
) -> None:
    import torch
    import transformers
    from transformers import BertConfig, BertForSequenceClassification, Trainer

    from ckptmgr import CheckpointManager, StateMismatch
    from ckptmgr.integrations.transformers import TrainerCheckpoints, from_pretrained

    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(0)
        small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1}
        config = BertConfig(**small, num_attention_heads=2, intermediate_size=32)
        model = BertForSequenceClassification(config)
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"]))

    tokens = torch.randint(0, 50, (8, 8))
    data: Any = [{"input_ids": row, "labels": row.sum() % 2} for row in tokens]
    quiet: Any = {"save_strategy": "no", "report_to": "none", "use_cpu": True}
    args = transformers.TrainingArguments(f"{tmp_path}/logs", max_steps=2, **quiet)
    model = adapted()
    with TrainerCheckpoints(tmp_path / "runs") as checkpoints:
        trainer = Trainer(model, args, train_dataset=data, callbacks=[checkpoints])
        trainer.train(resume_from_checkpoint=checkpoints.materialize())
    with pytest.raises(StateMismatch, match=r"bert\.embeddings") as refused:
        from_pretrained(BertForSequenceClassification, tmp_path / "runs")
    assert "get_peft_model" in str(refused.value)
    found = adapted()
    CheckpointManager(tmp_path / "runs").load("latest", {"model": found}, only="model")
    assert differences(model.state_dict(), found.state_dict()) == []
