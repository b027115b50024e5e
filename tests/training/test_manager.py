# SPDX-License-Identifier: Apache-2.0
"""A training loop with a `CheckpointManager` without faults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    CkptmgrError,
    UnsupportedCheckpoint,
)
from tests.faults.training import (
    KEY,
    KEYS,
    RUNS,
    SERIES,
    Trainer,
    check_no_leftovers,
    disk_with,
    name_of,
    saved,
    state_of,
    value_of,
)
from tests.support import api
from tests.support.crashmodel import ModelDisk
from tests.support.runs import manager_on

with_and_without_key = pytest.mark.parametrize("key", KEYS, ids=["plain", "encrypted"])


def steps(manager: CheckpointManager) -> list[int]:
    return [checkpoint.step for checkpoint in manager.checkpoints()]


@with_and_without_key
def test_resume_in_an_empty_directory_is_a_fresh_start(key: bytes | None) -> None:
    state = state_of(1.0)
    with Trainer(ModelDisk(), key=key).manager() as manager:
        resumption = manager.resume(state)
    assert resumption.is_fresh
    assert (resumption.step, resumption.starts, resumption.skipped) == (0, 1, ())
    assert resumption.state is state
    assert manager.latest() is None


@with_and_without_key
def test_resume_restores_the_newest_into_the_state(key: bytes | None) -> None:
    disk = disk_with(10.0, 20.0, key=key)
    state = state_of(0.0)
    weights = state["weights"]
    with Trainer(disk, key=key).manager() as manager:
        resumption = manager.resume(state)
    assert (resumption.step, resumption.is_fresh) == (2, False)
    assert resumption.checkpoint is not None
    assert resumption.checkpoint.name == name_of(2)
    assert value_of(resumption.state) == 20.0
    assert isinstance(weights, np.ndarray)
    assert weights.tolist() == [20.0] * 3


def test_resume_without_a_state_gives_new_objects() -> None:
    with Trainer(disk_with(10.0)).manager() as manager:
        assert value_of(manager.resume().state) == 10.0


def test_resume_gives_epoch_and_metrics() -> None:
    disk = ModelDisk()
    with Trainer(disk).manager() as manager:
        manager.save(5, state_of(1.0), epoch=2, metrics={"loss": 0.25})
    with Trainer(disk).manager() as manager:
        resumption = manager.resume()
    assert (resumption.step, resumption.epoch, resumption.metrics) == (5, 2, {"loss": 0.25})


def test_resumed_run_is_a_child_of_the_run_before() -> None:
    disk = disk_with(10.0)
    for step in (2, 3):
        with Trainer(disk).manager() as manager:
            manager.resume()
            manager.save(step, state_of(1.0))
    store = Trainer(disk).store()
    manifests = [store.read_manifest(name_of(step)) for step in (1, 2, 3)]
    first, second, third = (found for found in manifests if found is not None)
    assert second.parent_run_ids == (first.run_id,)
    assert third.parent_run_ids == (second.run_id, first.run_id)
    assert [m.sequence for m in (first, second, third)] == [1, 2, 3]


def test_state_that_does_not_fit_is_an_error_and_stays_as_it_was() -> None:
    disk = disk_with(10.0)
    weights = np.zeros(3, np.float32)
    with Trainer(disk).manager() as manager, pytest.raises(CkptmgrError, match="other"):
        manager.resume({"weights": weights, "other": np.zeros(2)})
    assert weights.tolist() == [0.0] * 3


def test_second_save_of_a_step_is_another_checkpoint() -> None:
    disk = disk_with(10.0, 20.0)
    with Trainer(disk).manager() as manager:
        manager.resume()
        again = saved(manager, 2, 21.0)
        assert (again.name, again.attempt) == (f"{SERIES}-2-r1.ckpt", 1)
        assert saved(manager, 2, 22.0).name == f"{SERIES}-2-r2.ckpt"
        assert value_of(manager.load(name_of(2))) == 20.0
        assert value_of(manager.load(2)) == 22.0


def test_save_of_an_older_step_is_the_newest_checkpoint() -> None:
    disk = disk_with(10.0, 20.0, 30.0)
    with Trainer(disk).manager() as manager:
        manager.resume()
        value_of(manager.load(1))
        manager.save(2, state_of(21.0))
        assert steps(manager) == [1, 2, 3, 2]
    with Trainer(disk).manager() as manager:
        assert value_of(manager.resume().state) == 21.0


def test_name_of_a_file_that_lost_its_manifest_is_not_taken() -> None:
    disk = disk_with(10.0, 20.0)
    disk.unlink(RUNS / f"{name_of(2)}.manifest.json")
    before = disk.read_bytes(RUNS / name_of(2))
    with Trainer(disk).manager() as manager:
        again = saved(manager, 2, 21.0)
    assert (again.name, again.attempt) == (f"{SERIES}-2-r1.ckpt", 1)
    assert disk.read_bytes(RUNS / name_of(2)) == before


def test_step_end_saves_when_the_policy_says_so() -> None:
    disk = ModelDisk()
    config = CheckpointConfig(save_checkpoint_steps=2)
    with manager_on(RUNS, config, fs=disk, prefix=SERIES) as manager:
        due = [manager.step_end(step, state_of(step)) is not None for step in range(1, 5)]
        assert due == [False, True, False, True]
    assert steps(manager) == [2, 4]


def test_state_that_is_a_callable_object_with_a_state_dict_is_saved_not_called() -> None:
    class Model:
        def state_dict(self) -> dict[str, object]:
            return state_of(7.0)

        def __call__(self, batch: object) -> object:
            raise AssertionError("called")

    with Trainer(ModelDisk()).manager() as manager:
        manager.save(1, Model())
        assert value_of(manager.load(1)) == 7.0


@pytest.mark.parametrize("epoch", [-1, 1.5, True, "1"])
def test_epoch_that_is_no_count_is_refused_and_nothing_saved(epoch: int) -> None:
    with Trainer(ModelDisk()).manager() as manager:
        with pytest.raises(ValueError, match="the epoch is an integer from 0 on"):
            manager.save(1, state_of(1.0), epoch=epoch)
        assert manager.checkpoints() == []


def test_numpy_epoch_is_a_count() -> None:
    with Trainer(ModelDisk()).manager() as manager:
        manager.save(1, state_of(1.0), epoch=np.int64(3))  # type: ignore[arg-type]
        assert manager.checkpoints()[0].epoch == 3


@pytest.mark.parametrize("step", [2**63, 10**5000], ids=["64 bits", "5001 digits"])
def test_step_that_no_manifest_can_note_is_refused(step: int) -> None:
    manager = Trainer(ModelDisk()).manager()
    with manager, pytest.raises(ValueError, match="the step has more than 63 bits"):
        manager.save(step, state_of(1.0))


def test_repr_of_a_resumption_does_not_print_the_state() -> None:
    with Trainer(disk_with(10.0)).manager() as manager:
        assert "weights" not in repr(manager.resume(state_of(0.0)))


def test_state_function_is_called_only_for_a_save() -> None:
    calls: list[None] = []

    def state() -> dict[str, object]:
        calls.append(None)
        return state_of(1.0)

    config = CheckpointConfig(save_checkpoint_steps=3)
    with manager_on(RUNS, config, fs=ModelDisk(), prefix=SERIES) as manager:
        for step in range(1, 4):
            manager.step_end(step, state)
        assert value_of(manager.load(3)) == 1.0
    assert len(calls) == 1


def every_third(disk: ModelDisk) -> CheckpointManager:
    config = CheckpointConfig(save_checkpoint_steps=3)
    return manager_on(RUNS, config, fs=disk, prefix=SERIES)


def test_leaving_saves_the_last_step() -> None:
    disk = ModelDisk()
    with every_third(disk) as manager:
        for step in range(1, 5):
            manager.step_end(step, state_of(step), metrics={"loss": 1 / step})
    assert steps(manager) == [3, 4]
    latest = manager.latest()
    assert latest is not None
    assert (latest.why, latest.metrics) == ("end", {"loss": 0.25})


@pytest.mark.parametrize("last", [0, 3])
def test_leaving_saves_nothing_when_there_is_nothing_new(last: int) -> None:
    disk = ModelDisk()
    with every_third(disk) as manager:
        for step in range(1, last + 1):
            manager.step_end(step, state_of(step))
    assert steps(manager) == [3][: last // 3]


def test_leaving_after_a_failure_saves_nothing() -> None:
    disk = ModelDisk()

    def train() -> None:
        with every_third(disk) as manager:
            manager.step_end(1, state_of(1.0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert every_third(disk).latest() is None


def test_leaving_gives_the_lease_back() -> None:
    disk = ModelDisk()
    with every_third(disk) as manager:
        manager.resume()
    manager.close()
    with every_third(disk) as other:
        assert other.resume().is_fresh


def with_losses(*losses: float) -> CheckpointManager:
    manager = Trainer(ModelDisk()).manager()
    for step, loss in enumerate(losses, 1):
        manager.save(step, state_of(step), metrics={"loss": loss})
    return manager


@pytest.mark.parametrize(
    ("losses", "mode", "best"),
    [
        ((0.5, 0.25, 0.75), "min", 2),
        ((0.5, 0.25, 0.75), "max", 3),
        ((0.5, 0.5), "min", 2),
        ((math.nan, 0.5, math.inf), "min", 2),
        ((math.nan, math.nan), "min", None),
    ],
)
def test_best_is_the_newest_with_the_best_number(
    losses: tuple[float, ...], mode: str, best: int | None
) -> None:
    with with_losses(*losses) as manager:
        found = manager.best("loss", mode)
        assert (None if found is None else found.step) == best
        assert manager.best("accuracy") is None


def test_best_of_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'min' or 'max', but got 'low'"):
        with_losses(1.0).best("loss", "low")


def test_nan_metric_is_kept_with_its_checkpoint() -> None:
    with with_losses(math.nan) as manager:
        latest = manager.latest()
    assert latest is not None
    assert math.isnan(latest.metrics["loss"])


@pytest.mark.parametrize("value", ["low", None, [1], 10**400], ids=["text", "none", "list", "huge"])
def test_metric_that_is_no_number_is_refused_and_nothing_saved(value: object) -> None:
    with Trainer(ModelDisk()).manager() as manager:
        with pytest.raises((TypeError, ValueError), match="metric 'loss' must be a number"):
            manager.save(1, state_of(1.0), metrics={"loss": value})  # type: ignore[dict-item]
        assert manager.checkpoints() == []


@pytest.mark.parametrize(
    ("step", "given"),
    [
        (3, {"metrics": {"loss": np.zeros(2)}}),
        (3, {"metrics": {"loss": "low"}}),
        (3, {"metrics": [0.5]}),
        (3, {"epoch": 0.5}),
        (-1, {}),
    ],
    ids=["array", "text", "no mapping", "epoch", "step"],
)
def test_unusable_argument_is_refused_at_its_step_and_the_step_before_is_saved_on_exit(
    tmp_path: Path, step: int, given: dict[str, Any]
) -> None:
    config = CheckpointConfig(save_checkpoint_steps=100)
    with CheckpointManager(tmp_path, config) as manager:
        manager.step_end(2, state_of(2.0), metrics={"loss": 0.5})
        with pytest.raises((TypeError, ValueError)):
            manager.step_end(step, state_of(3.0), **given)
    assert steps(manager) == [2]


class _DeviceNumber:
    """A number on a device, whose conversion waits for the device."""

    shape = ()
    conversions = 0

    def __float__(self) -> float:
        self.conversions += 1
        return 0.5


def test_metric_on_a_device_is_read_for_a_save_only(tmp_path: Path) -> None:
    loss: Any = _DeviceNumber()
    with CheckpointManager(tmp_path, CheckpointConfig(save_checkpoint_steps=100)) as manager:
        for step in range(1, 10):
            manager.step_end(step, state_of(1.0), metrics={"loss": loss})
        assert loss.conversions == 0
    assert manager.checkpoints()[0].metrics == {"loss": 0.5}


def test_numpy_metric_is_a_number() -> None:
    with Trainer(ModelDisk()).manager() as manager:
        manager.save(1, state_of(1.0), metrics={"loss": np.float32(0.5)})  # type: ignore[dict-item]
        assert manager.checkpoints()[0].metrics == {"loss": 0.5}


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None])
def test_step_that_is_no_count_is_refused(step: object) -> None:
    manager = Trainer(ModelDisk()).manager()
    with pytest.raises(ValueError, match="the step is an integer from 0 on"):
        manager.save(step, state_of(1.0))  # type: ignore[arg-type]


def test_numpy_step_is_a_step() -> None:
    with Trainer(ModelDisk()).manager() as manager:
        assert saved(manager, np.int64(3), 1.0).step == 3  # type: ignore[arg-type]


def test_retention_keeps_what_the_policy_says() -> None:
    disk = ModelDisk()
    with Trainer(disk, keep="last(2) | best(1, loss, min)").manager() as manager:
        for step, loss in enumerate((0.5, 0.1, 0.4, 0.3, 0.2), 1):
            manager.save(step, state_of(step), metrics={"loss": loss})
        assert steps(manager) == [2, 4, 5]
    check_no_leftovers(disk)


def test_plan_says_why_without_doing_anything() -> None:
    disk = disk_with(1.0, 2.0, 3.0)
    with Trainer(disk, keep="last(1)").manager() as manager:
        manager.resume()
        plan = manager.plan()
        assert [c.step for c in plan.kept] == [3]
        assert [c.step for c in plan.dropped] == [2, 1]
        assert "resumed from" in {reason.detail for reason in plan.verdicts[0].reasons}
        assert steps(manager) == [1, 2, 3]


def test_pinned_checkpoint_stays_until_it_is_unpinned() -> None:
    disk = ModelDisk()
    with Trainer(disk, keep="last(1)").manager() as manager:
        manager.save(1, state_of(1.0))
        manager.pin(1, "paper", reason="figure 2")
        for step in (2, 3):
            manager.save(step, state_of(step))
        assert steps(manager) == [1, 3]
        (pin,) = manager.checkpoints()[0].pins
        assert (pin.name, pin.reason) == ("paper", "figure 2")
        manager.unpin(1)
        manager.save(4, state_of(4.0))
        assert steps(manager) == [4]


def test_metric_that_arrives_after_the_save_ranks_at_the_next_one() -> None:
    disk = ModelDisk()
    with Trainer(disk, keep="last(1) | best(1, loss, min)").manager() as manager:
        manager.save(1, state_of(1.0), metrics={"lr": 0.5})
        before = manager.checkpoints()[0].id
        manager.record(1, {"loss": 0.1})
        (first,) = manager.checkpoints()
        assert (first.metrics, first.id) == ({"lr": 0.5, "loss": 0.1}, before)
        for step in (2, 3):
            manager.save(step, state_of(step))
            manager.record(manager.latest() or step, {"loss": 0.5})
        assert steps(manager) == [1, 3]
        manager.record(3, {"loss": 0.05})
        manager.save(4, state_of(4.0))
        assert steps(manager) == [3, 4]


def test_metric_of_a_checkpoint_that_is_gone_is_refused() -> None:
    with Trainer(ModelDisk(), keep="last(1)").manager() as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        with pytest.raises(CheckpointNotFound):
            manager.record(1, {"loss": 0.1})


def test_metric_is_recorded_for_a_save_in_flight(tmp_path: Path) -> None:
    config = CheckpointConfig(async_save=True, keep="all", enc_key=bytes(32), format="safetensors")
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(7, {"w": np.ones(4)})
        manager.record(7, {"loss": 0.25})
        (found,) = manager.checkpoints()
    assert (found.metrics, found.state) == ({"loss": 0.25}, api.State.OK)


def test_checkpoint_that_was_resumed_from_stays() -> None:
    disk = disk_with(1.0, 2.0)
    with Trainer(disk, keep="last(1)").manager() as manager:
        manager.resume()
        for step in (3, 4):
            manager.save(step, state_of(step))
        assert steps(manager) == [2, 4]


def test_files_of_other_runs_are_never_removed() -> None:
    disk = disk_with(1.0, 2.0)
    with Trainer(disk, keep="last(1)").manager() as manager:
        for step in (3, 4):  # not resumed: these are another run's
            manager.save(step, state_of(step))
        assert steps(manager) == [1, 2, 4]


def test_other_series_in_the_directory_are_left_alone() -> None:
    disk = disk_with(1.0, 2.0)
    config = CheckpointConfig(keep="last(1)")
    with manager_on(RUNS, config, fs=disk, prefix="other") as other:
        assert other.resume().is_fresh
        for step in (1, 2):
            other.save(step, state_of(step))
        assert [c.name for c in other.checkpoints()] == ["other-2.ckpt"]
    with Trainer(disk).manager() as manager:
        assert steps(manager) == [1, 2]


def test_load_by_step_by_name_by_path_and_by_value() -> None:
    with Trainer(disk_with(10.0, 20.0)).manager() as manager:
        first = manager.checkpoints()[0]
        for selector in (1, name_of(1), str(RUNS / name_of(1)), first):
            assert value_of(manager.load(selector)) == 10.0


def test_load_of_what_is_not_there_says_so() -> None:
    with Trainer(disk_with(10.0)).manager() as manager:
        with pytest.raises(CheckpointNotFound, match="no checkpoint 7 in series 'net'"):
            manager.load(7)
        with pytest.raises(CheckpointNotFound):
            manager.pin("net-7.ckpt")


def test_load_restores_into_a_state() -> None:
    state = state_of(0.0)
    with Trainer(disk_with(10.0)).manager() as manager:
        assert value_of(manager.load(1, state)) == 10.0


def test_file_of_named_tensors_loads_as_such_and_not_into_a_state() -> None:
    disk = ModelDisk()
    from ckptmgr.files.save.job import SaveOrder
    from ckptmgr.files.save.saver import save_items
    from tests.support.manifests import manifest
    from tests.support.strategies import named_tensor

    save_items(
        Trainer(disk).store(),
        SaveOrder(
            name=name_of(1),
            items=[named_tensor("w")],
            options=api.SaveOptions(),
            series=SERIES,
            draft=manifest(),
        ),
    )
    with Trainer(disk).manager() as manager:
        state = manager.load(1)
        assert isinstance(state, dict)
        assert list(state) == ["w"]
        with pytest.raises(UnsupportedCheckpoint, match="without a state tree"):
            manager.load(1, state_of(0.0))


def test_prefix_must_be_a_string() -> None:
    with pytest.raises(TypeError, match="prefix of a CheckpointManager is a string"):
        CheckpointManager(RUNS, prefix=len)  # type: ignore[arg-type]


def test_manager_saves_on_a_real_disk(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "new" / "run", CheckpointConfig(keep_checkpoint_max=2)) as m:
        for step in range(1, 4):
            m.step_end(step, state_of(step))
    with CheckpointManager(tmp_path / "new" / "run") as manager:
        assert manager.prefix == "ckpt"
        assert value_of(manager.resume().state) == 3.0
        assert steps(manager) == [2, 3]
    modes = {p.name: p.stat().st_mode & 0o777 for p in manager.directory.iterdir()}
    assert modes["ckpt-3.ckpt"] == modes["ckpt-3.ckpt.manifest.json"] == 0o400
    assert api.OsFileSystem().status(manager.directory / ".ckpt.lease") is None


def test_safetensors_manager_resumes(tmp_path: Path) -> None:
    config = CheckpointConfig(format="safetensors")
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(1, state_of(1.0))
    with CheckpointManager(tmp_path, config) as manager:
        assert value_of(manager.resume().state) == 1.0
        assert [c.name for c in manager.checkpoints()] == ["ckpt-1.safetensors"]


def test_torch_state_is_restored_in_place(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def training() -> dict[str, object]:
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "epoch": 0}

    def train(state: dict[str, object]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        for _ in range(3):
            optimizer.zero_grad()  # type: ignore[attr-defined]
            model(torch.ones(1, 3)).sum().backward()  # type: ignore[operator]
            optimizer.step()  # type: ignore[attr-defined]

    state, config = training(), CheckpointConfig(enc_key=KEY)
    train(state)
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(3, state)
    resumed = training()
    with CheckpointManager(tmp_path, config) as manager:
        manager.resume(resumed)
    train(state)
    train(resumed)
    assert torch.equal(state["model"].weight, resumed["model"].weight)  # type: ignore[attr-defined]


def test_saved_checkpoint_is_described_by_its_handle() -> None:
    disk = ModelDisk()
    with Trainer(disk, key=KEY).manager() as manager:
        handle = manager.save(1, state_of(1.0))
    assert handle is not None
    assert handle.staged.done()
    checkpoint = handle.durable.result()
    assert checkpoint == handle.wait() == manager.latest()
    assert (checkpoint.state, checkpoint.cipher, checkpoint.sequence) == (
        api.State.OK,
        "AES-GCM",
        1,
    )
