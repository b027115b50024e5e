# SPDX-License-Identifier: Apache-2.0
"""What `TrainerCheckpoints` does beside the Trainer of Transformers: `make hub`."""

from __future__ import annotations

import json
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate", reason="needs accelerate: make hub")
transformers = pytest.importorskip("transformers", reason="needs transformers: make hub")

from safetensors import safe_open  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ckptmgr import CheckpointConfig, CheckpointManager, Ranks, Resume  # noqa: E402
from ckptmgr.core.errors import (  # noqa: E402
    CheckpointNotFound,
    CorruptCheckpoint,
    KeyProblem,
    UnsupportedCheckpoint,
)
from ckptmgr.integrations import transformers as ours  # noqa: E402
from ckptmgr.integrations.base import FrameworkManager  # noqa: E402
from ckptmgr.integrations.safetensors.torch import save_file  # noqa: E402
from ckptmgr.integrations.transformers import TrainerCheckpoints, from_pretrained  # noqa: E402
from ckptmgr.state.paths import StateMismatch  # noqa: E402
from tests.parallel.ranks import Meeting, Seat  # noqa: E402

pytestmark = [pytest.mark.hub, pytest.mark.filterwarnings("default")]  # Transformers advises
KEY = bytes(range(32))
SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def new_model() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SMALL))


def new_trainer(place: Path, model: Any, callbacks: list[Any], **options: Any) -> Any:
    tokens = torch.randint(0, 50, (32, 8), generator=torch.Generator().manual_seed(1))
    data: Any = [{"input_ids": row, "labels": row.sum() % 2} for row in tokens]
    collator = options.pop("data_collator", None)
    optimizers = options.pop("optimizers", (None, None))
    options = {"max_steps": 6, "save_strategy": "no", **options}
    args = TrainingArguments(
        str(place / "logs"), report_to="none", disable_tqdm=True, use_cpu=True, **options
    )
    return Trainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=callbacks,
        data_collator=collator,
        optimizers=optimizers,
    )


def train(place: Path, config: CheckpointConfig | None = None, **options: Any) -> Any:
    """Train with checkpoints; return the Trainer."""
    more = options.pop("callbacks", [])
    with TrainerCheckpoints(place / "runs", config) as checkpoints:
        trainer = new_trainer(place, new_model(), [checkpoints, *more], **options)
        trainer.train(resume_from_checkpoint=checkpoints.materialize())
    return trainer


def bytes_of(model: Any) -> bytes:
    return b"".join(value.numpy().tobytes() for value in model.state_dict().values())


def test_page_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "transformers.md"
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(block, names)  # noqa: S102 - our own page
    assert bytes_of(names["model"]) == bytes_of(names["trainer"].model)


class At(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Call a function after a step."""

    def __init__(self, step: int, what: Any) -> None:
        self.step, self.what = step, what

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.what(control)


class Failed(Exception):
    """The user's own."""


def fail(_: Any) -> None:
    raise Failed("mine")


def test_run_that_had_ended_started_again_stays_as_it_was(tmp_path: Path) -> None:
    first = train(tmp_path)
    again = train(tmp_path)
    assert bytes_of(again.model) == bytes_of(first.model)
    assert again.state.global_step == 6
    assert CheckpointManager(tmp_path / "runs").checkpoints()[-1].step == 6


def test_exception_in_training_is_the_one_that_the_user_sees(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="mine"):
        train(
            tmp_path,
            CheckpointConfig(save_checkpoint_steps=2, async_save="thread"),
            callbacks=[At(5, fail)],
        )
    assert CheckpointManager(tmp_path / "runs").checkpoints()[-1].step == 4


def test_exception_save_saves_the_last_step_that_ended(tmp_path: Path) -> None:
    config = CheckpointConfig(save_checkpoint_steps=2, exception_save=True)
    with pytest.raises(Failed, match="mine"):
        train(tmp_path, config, callbacks=[At(5, fail)])
    assert [one.step for one in CheckpointManager(tmp_path / "runs").checkpoints()] == [2, 4, 5]


class FailingEvaluation(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Fail in an evaluation."""

    def on_evaluate(self, *_: Any, **kwargs: Any) -> None:
        raise Failed("mine")


def test_exception_in_an_evaluation_saves_its_step_which_goes_on(tmp_path: Path) -> None:
    config = CheckpointConfig(save_checkpoint_steps=100, exception_save=True)
    expected = train(tmp_path / "uncut", config, eval_strategy="steps", eval_steps=3)
    with pytest.raises(Failed, match="mine"):
        train(
            tmp_path, config, eval_strategy="steps", eval_steps=3, callbacks=[FailingEvaluation()]
        )
    (saved,) = CheckpointManager(tmp_path / "runs").checkpoints()
    assert (saved.step, saved.why) == (3, "exception:Failed")
    found = train(tmp_path, config, eval_strategy="steps", eval_steps=3)
    assert bytes_of(found.model) == bytes_of(expected.model)


def test_checkpoint_of_an_evaluated_step_has_its_metrics_and_the_best_is_kept(
    tmp_path: Path,
) -> None:
    config = CheckpointConfig(save_checkpoint_steps=2, keep="best(1, eval_loss, min)")
    trainer = train(tmp_path, config, eval_strategy="steps", eval_steps=2, learning_rate=1e-2)
    losses = {
        entry["step"]: entry["eval_loss"]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    }
    found = CheckpointManager(tmp_path / "runs").best("eval_loss")
    assert found is not None
    assert found.step == min(losses, key=lambda step: losses[step])
    assert found.metrics["eval_loss"] == losses[found.step]


def test_only_the_best_evaluated_steps_are_written(tmp_path: Path) -> None:
    config = CheckpointConfig(keep="best(1, eval_loss, min)", save_only_kept=True)
    rising = {"learning_rate": 0.5, "lr_scheduler_type": "constant"}
    trainer = train(tmp_path, config, eval_strategy="steps", eval_steps=2, **rising)
    losses = {
        one["step"]: one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one
    }
    best = min(losses, key=lambda step: losses[step])
    found = CheckpointManager(tmp_path / "runs").checkpoints()
    assert {one.step for one in found} == {best, 6}
    assert all("eval_loss" in one.metrics for one in found)


def test_interval_of_an_epoch_saves_its_last_step_with_its_evaluation(tmp_path: Path) -> None:
    steps = 4  # 32 rows, 8 in a batch
    config = CheckpointConfig(save_checkpoint_steps=steps, keep="all")
    train(tmp_path, config, eval_strategy="epoch", num_train_epochs=3, max_steps=-1)
    found = CheckpointManager(tmp_path / "runs").checkpoints()
    assert [one.step for one in found] == [4, 8, 12]
    assert all("eval_loss" in one.metrics for one in found)


def test_evaluated_steps_are_saved_where_the_metric_makes_them_due(tmp_path: Path) -> None:
    config = CheckpointConfig(None, save_when_measured="eval_loss", keep="all")
    train(tmp_path, config, eval_strategy="steps", eval_steps=3, logging_steps=1, max_steps=7)
    found = CheckpointManager(tmp_path / "runs").checkpoints()
    assert [one.step for one in found] == [3, 6, 7]


def test_saves_after_a_stop_stay_at_the_steps_that_evaluate(tmp_path: Path) -> None:
    config = CheckpointConfig(save_checkpoint_steps=4, keep="all")
    evaluated: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4, "max_steps": 14}
    stop = At(6, lambda control: signal.raise_signal(signal.SIGTERM))
    train(tmp_path, config, callbacks=[stop], **evaluated)
    train(tmp_path, config, **evaluated)
    found = CheckpointManager(tmp_path / "runs").checkpoints()
    assert {one.step: "eval_loss" in one.metrics for one in found} == {
        4: True,
        7: False,
        8: True,
        12: True,
        14: True,
    }


def test_evaluation_of_a_part_of_an_epoch_is_not_in_the_last_checkpoint(tmp_path: Path) -> None:
    stop = At(6, lambda control: setattr(control, "should_training_stop", True))
    train(
        tmp_path,
        CheckpointConfig(save_checkpoint_steps=100),
        callbacks=[stop],
        max_steps=12,
        eval_strategy="epoch",
        lr_scheduler_type="reduce_lr_on_plateau",
        metric_for_best_model="eval_loss",
    )
    saved: Any = CheckpointManager(tmp_path / "runs").load("latest")
    assert saved["scheduler"]["last_epoch"] == 1  # of the first epoch, 4 steps


def test_encrypted_run_materialized_links_into_memory_and_leaves_nothing(tmp_path: Path) -> None:
    config = CheckpointConfig(enc_key=KEY, format="safetensors")
    train(tmp_path, config)
    seen = []

    def look(_: Any) -> None:
        seen.append(folder.exists())

    with TrainerCheckpoints(tmp_path / "runs", config) as checkpoints:
        folder = Path(str(checkpoints.materialize()))
        assert {Path(one.readlink()).parts[1] for one in folder.iterdir()} == {"proc"}
        trainer = new_trainer(tmp_path, new_model(), [checkpoints, At(7, look)], max_steps=8)
        trainer.train(resume_from_checkpoint=str(folder))
    assert seen == [False]


def test_plain_run_materialized_is_a_directory_that_goes_with_the_block(tmp_path: Path) -> None:
    train(tmp_path)
    with TrainerCheckpoints(tmp_path / "runs") as checkpoints:
        folder = Path(str(checkpoints.materialize()))
        assert {one.name for one in folder.iterdir()} == {
            "model.safetensors",
            "optimizer.pt",
            "scheduler.pt",
            "rng_state.pth",
            "trainer_state.json",
        }
        assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 6
    assert not folder.exists()


def resume_with(place: Path, model: Any, **options: Any) -> Any:
    """Train six more steps with another model, or with other arguments."""
    with TrainerCheckpoints(place / "runs") as checkpoints:
        trainer = new_trainer(place, model, [checkpoints], **{"max_steps": 12, **options})
        trainer.train(resume_from_checkpoint=checkpoints.materialize())
    return trainer


OTHER_OPTIMIZERS = {
    "adagrad": "is a torch.optim.Adagrad, stored is the state of a torch.optim.AdamW",
    "sgd": "is a torch.optim.SGD, stored is the state of a torch.optim.AdamW",
    "adafactor": "is a Adafactor, stored is the state of a torch.optim.AdamW",  # of Transformers
}


@pytest.mark.parametrize("name", OTHER_OPTIMIZERS)
def test_training_with_another_optimizer_is_refused_by_name(name: str, tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(StateMismatch, match=f"{OTHER_OPTIMIZERS[name]}\nhint: train with"):
        resume_with(tmp_path, new_model(), optim=name)
    assert CheckpointManager(tmp_path / "runs").checkpoints()[-1].step == 6


def with_optimizer(place: Path, make: Any) -> Any:
    """Train, or go on, with the optimizer that a function makes for the model."""
    model = new_model()
    with TrainerCheckpoints(place / "runs") as checkpoints:
        trainer = new_trainer(
            place, model, [checkpoints], max_steps=4, optimizers=(make(model), None)
        )
        trainer.train(resume_from_checkpoint=checkpoints.materialize())
    return trainer


def test_training_with_another_order_of_the_parameters_is_refused(tmp_path: Path) -> None:
    with_optimizer(tmp_path, lambda model: torch.optim.Adam(model.parameters()))
    with pytest.raises(StateMismatch, match=r"\['exp_avg'\] is stored with shape \[50, 16\]"):
        with_optimizer(tmp_path, lambda model: torch.optim.Adam([*model.parameters()][::-1]))


def test_training_with_another_kind_of_schedule_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "eval_loss"}
    message = r"\['scheduler'\]\['factor'\] is not in .* another than this ReduceLROnPlateau"
    with pytest.raises(StateMismatch, match=message):
        resume_with(tmp_path, new_model(), eval_strategy="epoch", **plateau)


def test_other_groups_of_parameters_are_an_error_that_names_checkpoint_and_way_out(
    tmp_path: Path,
) -> None:
    def grouped(model: Any) -> Any:
        return torch.optim.Adam([{"params": [one]} for one in model.parameters()])

    with_optimizer(tmp_path, lambda model: torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match="parameter group") as caught:  # torch's own
        with_optimizer(tmp_path, grouped)
    (note,) = caught.value.__notes__
    assert re.search(r"ckpt-4.ckpt was being resumed; if it does not fit, train with", note)


def test_checkpoint_without_a_class_of_its_optimizer_resumes(tmp_path: Path) -> None:
    class Older(FrameworkManager):
        def step_end(self, step: int, state: Any, **facts: Any) -> Any:
            def without_class() -> Any:
                return {name: one for name, one in state().items() if name != "optimizer_class"}

            return super().step_end(step, without_class, **facts)

    with TrainerCheckpoints(tmp_path / "runs") as checkpoints:
        checkpoints.manager = Older("Older", tmp_path / "runs")
        new_trainer(tmp_path, new_model(), [checkpoints]).train()
    assert resume_with(tmp_path, new_model()).state.global_step == 12


OTHER_MODELS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "a layer more": ({"num_hidden_layers": 2}, None, r"bert.encoder.layer.1.* not in the checkp"),
    "a layer less": ({"num_hidden_layers": 0}, None, r"bert.encoder.layer.0.* only in the checkp"),
    "another size": ({"vocab_size": 60}, None, r"float32\[60, 16\], stored is .*\[50, 16\]"),
    "another type": ({}, torch.bfloat16, r"is torch.bfloat16\[.*stored is torch.float32\["),
}


@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_training_of_another_model_is_refused_by_the_names_of_its_weights(
    kind: str, tmp_path: Path
) -> None:
    train(tmp_path, max_steps=1)
    sizes, dtype, message = OTHER_MODELS[kind]
    model = BertForSequenceClassification(BertConfig(**SMALL | sizes)).to(dtype)
    with pytest.raises(StateMismatch, match=f"{message}(?s:.*)\nhint: train with the model"):
        resume_with(tmp_path, model)


def test_another_model_is_refused_also_where_materialize_comes_before_the_trainer(
    tmp_path: Path,
) -> None:
    train(tmp_path, max_steps=1)
    with TrainerCheckpoints(tmp_path / "runs") as checkpoints:
        checkpoints.materialize()
        with pytest.raises(StateMismatch, match="another model"):
            new_trainer(tmp_path, new_model().half(), [checkpoints])


def test_another_model_is_refused_also_where_the_callback_is_added_later(tmp_path: Path) -> None:
    train(tmp_path, max_steps=1)
    with TrainerCheckpoints(tmp_path / "runs") as checkpoints:
        trainer = new_trainer(tmp_path, new_model().bfloat16(), [])
        trainer.add_callback(checkpoints)
        with pytest.raises(StateMismatch, match="another model"):
            trainer.train(resume_from_checkpoint=checkpoints.materialize())


def test_training_that_does_not_resume_beside_checkpoints_is_refused_before_a_step(
    tmp_path: Path,
) -> None:
    train(tmp_path)
    with TrainerCheckpoints(tmp_path / "runs") as checkpoints:
        trainer = new_trainer(tmp_path, new_model(), [checkpoints], max_steps=2)
        with pytest.raises(ValueError, match="without it") as caught:
            trainer.train()
    assert re.fullmatch(
        r".*ckpt-6.ckpt is of step 6, and this training begins at step 0, without it: write"
        r" trainer.train\(resume_from_checkpoint=checkpoints.materialize\(\)\) .*start='new'.*",
        str(caught.value),
    )
    assert trainer.state.global_step == 0
    assert train(tmp_path, max_steps=7).state.global_step == 7  # the run goes on


def test_training_that_is_to_begin_anew_begins_beside_the_checkpoints(tmp_path: Path) -> None:
    train(tmp_path)
    with TrainerCheckpoints(tmp_path / "runs", resume=Resume(start="new")) as checkpoints:
        trainer = new_trainer(tmp_path, new_model(), [checkpoints], max_steps=2)
        trainer.train()
        trainer.train()
    assert CheckpointManager(tmp_path / "runs").resume().step == 2
    assert {one.step for one in CheckpointManager(tmp_path / "runs").checkpoints()} >= {2, 6}
    with pytest.raises(ValueError, match="start must be 'newest' or 'new', but got 'old'"):
        Resume(start="old")  # type: ignore[arg-type]


def test_training_in_an_empty_directory_begins_without_materialize(tmp_path: Path) -> None:
    with TrainerCheckpoints(tmp_path / "runs") as checkpoints:
        new_trainer(tmp_path, new_model(), [checkpoints], max_steps=2).train()
    assert CheckpointManager(tmp_path / "runs").resume().step == 2


def test_directory_that_is_made_and_not_given_to_the_trainer_is_an_error(tmp_path: Path) -> None:
    train(tmp_path)
    with TrainerCheckpoints(tmp_path / "runs") as checkpoints:
        checkpoints.materialize()
        with pytest.raises(ValueError, match=r"of step 6, and the training begins at step 0: wri"):
            new_trainer(tmp_path, new_model(), [checkpoints]).train()


def test_tied_weights_resumed_are_tied_and_equal(tmp_path: Path) -> None:
    def run(place: Path, *callbacks: Any) -> Any:
        torch.manual_seed(0)
        model = BertForMaskedLM(BertConfig(**SMALL))
        with TrainerCheckpoints(place) as checkpoints:
            trainer = new_trainer(
                tmp_path, model, [checkpoints, *callbacks], data_collator=same_labels
            )
            trainer.train(resume_from_checkpoint=checkpoints.materialize())
        return model

    def same_labels(rows: list[Any]) -> Any:
        tokens = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": tokens, "labels": tokens}

    uncut = run(tmp_path / "uncut")
    run(tmp_path / "cut", At(3, lambda control: setattr(control, "should_training_stop", True)))
    model = run(tmp_path / "cut")
    assert bytes_of(model) == bytes_of(uncut)
    outputs, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    assert outputs.weight.data_ptr() == inputs.weight.data_ptr()


def test_checkpoint_that_is_not_of_a_trainer_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "runs") as manager:
        manager.save(1, {"weights": [1.0]})
    with (
        TrainerCheckpoints(tmp_path / "runs") as checkpoints,
        pytest.raises(UnsupportedCheckpoint, match="no state of a Trainer"),
    ):
        checkpoints.materialize()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"restore_callback_states_from_checkpoint": True}, "restore_callback_states"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
    ],
)
def test_arguments_that_need_other_saves_are_refused_by_name(
    options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=name):
        train(tmp_path, **options)


@pytest.mark.parametrize(("name", "value"), [("fsdp", "full_shard"), ("deepspeed", {"zero": 1})])
def test_sharded_training_is_refused_by_name(name: str, value: object, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    setattr(args, name, value)  # the real ones need a launcher
    with pytest.raises(ValueError, match=name):
        TrainerCheckpoints(tmp_path / "runs").on_init_end(args, None, None)


def test_training_in_several_processes_is_refused_by_name(tmp_path: Path) -> None:
    class Many(TrainingArguments):  # type: ignore[misc, unused-ignore]
        world_size = 2  # the real one needs a launcher

    args = Many(str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(ValueError, match="world_size=2"):
        TrainerCheckpoints(tmp_path / "runs").on_init_end(args, None, None)


def test_coordinator_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="coordinator"):
        TrainerCheckpoints(tmp_path, ranks=Ranks(Seat(Meeting(1), 0)))


def test_training_outside_of_the_block_is_refused(tmp_path: Path) -> None:
    checkpoints = TrainerCheckpoints(tmp_path / "runs")
    with pytest.raises(RuntimeError, match="with TrainerCheckpoints"):
        checkpoints.materialize()
    with pytest.raises(RuntimeError, match="with TrainerCheckpoints"):
        new_trainer(tmp_path, new_model(), [checkpoints]).train()


def test_trainer_that_saves_too_is_warned_of_by_name(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"save_strategy"):
        train(tmp_path, save_strategy="steps", max_steps=1)


def test_data_that_are_not_skipped_are_warned_of_by_name(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.warns(UserWarning, match="ignore_data_skip"):
        train(tmp_path, ignore_data_skip=True, max_steps=7)


def test_collator_that_draws_is_warned_of_once(tmp_path: Path) -> None:
    def masking(rows: list[Any]) -> Any:
        batch = transformers.default_data_collator(rows)
        return batch | {"input_ids": batch["input_ids"] * (torch.rand(8) > 0.1)}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(tmp_path, data_collator=masking, num_train_epochs=3, max_steps=-1)
    assert len([one for one in caught if "random numbers" in str(one.message)]) == 1


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize(
    "kind", [AutoModelForSequenceClassification, BertForSequenceClassification]
)
def test_from_pretrained_gives_the_newest_model(
    kind: Any, key: bytes | None, tmp_path: Path
) -> None:
    config = CheckpointConfig() if key is None else CheckpointConfig(enc_key=key)
    trained = train(tmp_path, config, max_steps=1)
    model = from_pretrained(kind, tmp_path / "runs", key=key)
    assert type(model) is BertForSequenceClassification
    assert bytes_of(model) == bytes_of(trained.model)
    assert not model.training


def test_from_pretrained_without_the_key_is_an_error(tmp_path: Path) -> None:
    train(tmp_path, CheckpointConfig(enc_key=KEY), max_steps=1)
    with pytest.raises(KeyProblem):
        from_pretrained(AutoModelForSequenceClassification, tmp_path / "runs")


def test_training_goes_back_to_the_chosen_checkpoint(tmp_path: Path) -> None:
    config = CheckpointConfig(keep="all")
    expected = train(tmp_path, config)
    with TrainerCheckpoints(tmp_path / "runs", config, resume=Resume(at=3)) as checkpoints:
        again = new_trainer(tmp_path, new_model(), [checkpoints])
        again.train(resume_from_checkpoint=checkpoints.materialize())
    found = CheckpointManager(tmp_path / "runs").checkpoints()
    assert [one.step for one in found] == [1, 2, 3, 4, 5, 6, 4, 5, 6]
    assert bytes_of(again.model) == bytes_of(expected.model)


def test_from_pretrained_takes_the_chosen_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, CheckpointConfig(keep="all"), max_steps=2)
    found = from_pretrained(BertForSequenceClassification, tmp_path / "runs", checkpoint=1)
    stored: Any = CheckpointManager(tmp_path / "runs").load(1)
    assert bytes_of(found) == b"".join(v.numpy().tobytes() for v in stored["model"].values())
    folder = hub_folder(tmp_path / "model", small_gpt(), shards=False, seal=None)
    with pytest.raises(ValueError, match=r"^checkpoint has no effect in .*/model"):
        from_pretrained(AutoModelForCausalLM, folder, checkpoint=1)


def small_gpt() -> Any:
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 8, "vocab_size": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def hub_folder(directory: Path, model: Any, *, shards: bool, seal: str | None) -> Path:
    """Save a model as Transformers does, and encrypt its weights under their names, or with `.ckpe`."""
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    model.save_pretrained(directory, max_shard_size="2KB" if shards else "5GB")
    for path in list(directory.glob("*.safetensors")):
        if seal is None:
            break
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        path.unlink()
        save_file(tensors, directory / (path.name + seal), metadata=metadata, key=KEY)
    assert (directory / "model.safetensors.index.json").exists() == shards
    return directory


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("seal", [None, "", ".ckpe"], ids=["plain", "same name", "ckpe"])
@pytest.mark.parametrize("kind", [AutoModelForCausalLM, transformers.GPT2LMHeadModel])
def test_from_pretrained_reads_a_folder_of_the_hub_layout(
    kind: Any, seal: str | None, shards: bool, tmp_path: Path
) -> None:
    model = small_gpt()
    folder = hub_folder(tmp_path / "model", model, shards=shards, seal=seal)
    found = from_pretrained(kind, folder, key=None if seal is None else KEY)
    assert type(found) is transformers.GPT2LMHeadModel
    assert bytes_of(found) == bytes_of(model)
    assert found.generation_config.temperature == 0.5


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("key", [None, bytes(32)])
def test_folder_of_the_hub_layout_needs_its_key(
    key: bytes | None, shards: bool, tmp_path: Path
) -> None:
    folder = hub_folder(tmp_path / "model", small_gpt(), shards=shards, seal="")
    with pytest.raises(KeyProblem, match="model"):
        from_pretrained(AutoModelForCausalLM, folder, key=key)


def test_container_beside_its_plain_file_is_what_a_key_opens(tmp_path: Path) -> None:
    model = small_gpt()
    folder = hub_folder(tmp_path / "model", model, shards=False, seal=".ckpe")
    (folder / "model.safetensors").write_bytes(b"of another model")
    assert bytes_of(from_pretrained(AutoModelForCausalLM, folder, key=KEY)) == bytes_of(model)


def test_plain_folder_is_refused_with_a_key(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "model", small_gpt(), shards=False, seal=None)
    with pytest.raises(KeyProblem, match="not encrypted"):
        from_pretrained(AutoModelForCausalLM, folder, key=KEY)


def test_missing_shard_and_damaged_index_are_named(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "model", small_gpt(), shards=True, seal=".ckpe")
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    first = min(folder.glob("*.ckpe"))
    kept = first.read_bytes()
    first.unlink()
    with pytest.raises(CheckpointNotFound, match=first.name):
        from_pretrained(AutoModelForCausalLM, folder, key=KEY)
    first.write_bytes(kept)
    tensor = "transformer.wpe.weight"
    for damaged, said in (
        ("[", "index"),
        ("{}", "no weight_map"),
        (text.replace('"model-', '"../model-', 1), "none of this directory"),
        (text.replace(tensor, "other.weight"), "lacks 'other.weight'"),
    ):
        index.write_text(damaged)
        with pytest.raises(CorruptCheckpoint, match=said):
            from_pretrained(AutoModelForCausalLM, folder, key=KEY)


def test_from_pretrained_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no checkpoint of a Trainer"):
        from_pretrained(AutoModelForSequenceClassification, tmp_path)


def test_model_without_configuration_trains_and_is_refused_by_from_pretrained(
    tmp_path: Path,
) -> None:
    class Plain(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 1)

        def forward(self, input_ids: Any, labels: Any) -> Any:
            return {"loss": (self.inner(input_ids.float()).sum(1) - labels).square().mean()}

    with TrainerCheckpoints(tmp_path / "runs") as checkpoints:
        new_trainer(tmp_path, Plain(), [checkpoints], max_steps=1).train()
    with pytest.raises(UnsupportedCheckpoint, match="no configuration"):
        from_pretrained(BertForSequenceClassification, tmp_path / "runs")


def test_earlier_name_is_the_same_class() -> None:
    assert ours.CheckpointCallback is TrainerCheckpoints


class Rows(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
    """Forty rows, five batches, without a length."""

    def __iter__(self) -> Any:
        tokens = torch.randint(0, 50, (40, 8), generator=torch.Generator().manual_seed(1))
        yield from ({"input_ids": row, "labels": row.sum() % 2} for row in tokens)


@pytest.mark.parametrize(("saved", "is_refused"), [(3, False), (5, False), (8, True)])
def test_step_of_a_later_pass_over_data_without_a_length_is_refused(
    tmp_path: Path, saved: int, is_refused: bool
) -> None:
    def go_on(steps: int) -> None:
        with TrainerCheckpoints(tmp_path / "runs") as checkpoints:
            trainer = new_trainer(tmp_path, new_model(), [checkpoints, At(saved, stop)])
            trainer.args.max_steps = steps
            trainer.train_dataset = Rows()
            trainer.train(resume_from_checkpoint=checkpoints.materialize())

    def stop(control: Any) -> None:
        control.should_training_stop = True

    go_on(17)
    if not is_refused:
        go_on(17)
        return
    with pytest.raises(UnsupportedCheckpoint, match="pass 2 over data without a length") as caught:
        go_on(17)
    assert caught.match("__len__")


def test_moments_of_a_trainer_come_back_in_their_stored_type(tmp_path: Path) -> None:
    class Momentum(torch.optim.SGD):  # type: ignore[misc, name-defined]
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for one in group["params"]:
                    held = self.state[one].setdefault("moment", torch.zeros(one.shape).double())
                    held += 1 / 3
            return super().step(closure)

    def go_on(steps: int) -> Any:
        model = new_model()
        with TrainerCheckpoints(tmp_path / "runs") as checkpoints:
            optimizer = Momentum(model.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
            trainer = new_trainer(
                tmp_path, model, [checkpoints], max_steps=steps, optimizers=(optimizer, schedule)
            )
            trainer.train(resume_from_checkpoint=checkpoints.materialize())
        return next(iter(optimizer.state.values()))["moment"]

    go_on(2)
    found = go_on(4)
    assert found.dtype is torch.float64
    wanted = sum([torch.tensor(1 / 3, dtype=torch.float64)] * 4)
    assert torch.equal(found.flatten()[0], wanted)


def test_model_with_an_adapter_is_refused_by_from_pretrained(tmp_path: Path) -> None:
    class Adapted(BertForSequenceClassification):  # type: ignore[misc, unused-ignore]
        """A model as an adapter makes it: with weights that its class does not have."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.adapter = torch.nn.Linear(2, 2)

    with TrainerCheckpoints(tmp_path / "runs") as checkpoints:
        model = Adapted(BertConfig(**SMALL))
        new_trainer(tmp_path, model, [checkpoints], max_steps=1).train()
    with pytest.raises(StateMismatch, match=r"adapter.weight is only in the checkpoint"):
        from_pretrained(BertForSequenceClassification, tmp_path / "runs")
