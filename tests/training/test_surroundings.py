# SPDX-License-Identifier: Apache-2.0
"""A resume compares what a training depends on beside its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Resume, StateMismatch
from ckptmgr.state.paths import TreeError
from ckptmgr.state.surroundings import Surroundings

torch: Any = pytest.importorskip("torch")

EVERY_STEP = CheckpointConfig(save_checkpoint_steps=1)


def net() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.nn.Linear(2, 2))


def save(directory: Path, state: object, steps: tuple[int, ...] = (1,)) -> None:
    with CheckpointManager(directory, EVERY_STEP) as manager:
        for step in steps:
            manager.step_end(step, state)


def resume(directory: Path, state: Any, **how: Any) -> None:
    with CheckpointManager(directory, EVERY_STEP) as manager:
        manager.resume(state, Resume(**how))


def flags(module: Any) -> list[bool]:
    return [one.requires_grad for one in module.parameters()] + [
        one.training for one in module.modules()
    ]


def test_resume_sets_the_flags_of_parameters_and_modules(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, fresh = net(), net()
    saved[0].requires_grad_(requires_grad=False)
    saved[1].eval()
    save(tmp_path, {"net": saved})
    resume(tmp_path, {"net": fresh})
    assert flags(fresh) == flags(saved)
    assert "net/0.weight: requires_grad is True, stored is False" in caplog.text
    assert 'Resume(may_differ=["requires_grad", "training"])' in caplog.text


def test_resume_unfreezes_what_the_saved_run_had_unfrozen(tmp_path: Path) -> None:
    fresh = net()
    fresh.requires_grad_(requires_grad=False)
    save(tmp_path, {"net": net()})
    resume(tmp_path, {"net": fresh})
    assert all(flags(fresh))


def test_flags_that_may_differ_stay_those_of_the_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, fresh = net(), net()
    saved.requires_grad_(requires_grad=False)
    save(tmp_path, {"net": saved})
    resume(tmp_path, {"net": fresh}, may_differ=["requires_grad"])
    assert all(flags(fresh))
    assert not caplog.records


def test_load_leaves_the_flags_as_the_program_set_them(tmp_path: Path) -> None:
    serving = net().eval()
    save(tmp_path, {"net": net()})
    with CheckpointManager(tmp_path) as manager:
        manager.load("latest", {"net": serving})
    assert not serving.training


def test_optimizer_with_the_parameters_in_another_order_is_refused(tmp_path: Path) -> None:
    def state(order: int) -> dict[str, Any]:
        model: Any = net()
        parameters = [model[0].weight, model[2].weight][::order]
        return {"net": model, "optimizer": torch.optim.SGD(parameters, lr=0.1)}

    save(tmp_path, state(1))
    fresh = state(-1)
    before = fresh["net"][0].weight.clone()
    with pytest.raises(StateMismatch, match=r"optimizer 'optimizer' hold other parameters"):
        resume(tmp_path, fresh)
    assert torch.equal(fresh["net"][0].weight, before)


def test_state_whose_parts_come_in_another_order_has_the_same_groups(tmp_path: Path) -> None:
    def parts() -> dict[str, Any]:
        a, b = net(), net()
        parameters = [*a.parameters(), *b.parameters()]
        return {"a": a, "b": b, "optimizer": torch.optim.SGD(parameters, lr=0.1)}

    save(tmp_path, parts())
    resume(tmp_path, dict(reversed(parts().items())))


def test_option_of_the_process_that_differs_is_a_warning_with_both_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        save(tmp_path, {"net": net()})
    finally:
        torch.set_float32_matmul_precision("highest")
    resume(tmp_path, {"net": net()})
    assert "matmul_precision is highest, at the save it was high" in caplog.text


@pytest.mark.parametrize("step", [0, 3, 5])
def test_first_step_that_is_no_later_one_is_refused_before_it_is_saved(
    tmp_path: Path, step: int
) -> None:
    state = {"x": 1}
    save(tmp_path, state, (4, 5))
    with CheckpointManager(tmp_path, EVERY_STEP) as manager:
        manager.resume(state)
        with pytest.raises(
            StateMismatch, match=rf"step {step} is the first .* at step 5"
        ) as caught:
            manager.step_end(step, state)
        assert caught.match("start.next_step")
        assert [one.step for one in manager.checkpoints()] == [4, 5]


def test_first_step_after_a_new_start_may_be_an_earlier_one(tmp_path: Path) -> None:
    state = {"x": 1}
    save(tmp_path, state, (4, 5))
    with CheckpointManager(tmp_path, EVERY_STEP) as manager:
        manager.resume(state, Resume(start="new"))
        manager.step_end(1, state)


def test_first_step_after_a_rollback_is_a_later_one(tmp_path: Path) -> None:
    state = {"x": 1}
    with CheckpointManager(tmp_path, EVERY_STEP) as manager:
        for step in (1, 2, 3):
            manager.step_end(step, state)
        manager.rollback(state, steps_back=1)
        with pytest.raises(StateMismatch, match="step 2 is the first that ends after the rollback"):
            manager.step_end(2, state)


@pytest.mark.parametrize(("step", "warnings"), [(8, 0), (9, 1)])
def test_first_step_further_than_the_largest_stride_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int, warnings: int
) -> None:
    state = {"x": 1}
    save(tmp_path, state, (2, 5, 6))  # at most 3 apart; the exit has saved none
    with CheckpointManager(tmp_path, EVERY_STEP) as manager:
        at = manager.resume(state).step
        manager.step_end(at + step - 5, state)
    assert len([one for one in caplog.records if "at most 3 apart" in one.message]) == warnings


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"version": 1, "flags": []}',
        '{"version": 1, "flags": {"net": {"training": [1, 0, 1, 0, 1]}}}',
        '{"version": 1, "flags": {"net": {"training": [1, "0"]}}}',
        '{"version": 1, "empty": 5}',
        '{"version": 1, "stride": "1"}',
    ],
)
def test_damaged_surroundings_are_refused(text: str) -> None:
    with pytest.raises(TreeError, match="surroundings of the state are damaged"):
        Surroundings.from_text(text)


def test_surroundings_of_a_later_version_are_not_compared() -> None:
    assert Surroundings.from_text('{"version": 2, "flags": 1}') is None
