# SPDX-License-Identifier: Apache-2.0
"""The batches of a resumed pass are compared with those of the saved run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Resume, StateMismatch
from ckptmgr.training.loaders import fingerprint_of

torch: Any = pytest.importorskip("torch")


def saving(directory: Path) -> CheckpointManager:
    return CheckpointManager(directory, CheckpointConfig(save_checkpoint_steps=1))


def train_on_a_new_order(directory: Path, last: int, **how: Any) -> None:
    order = [{"x": (part,)} for part in np.split(np.random.permutation(12), 4)]
    with saving(directory) as manager:
        step = manager.resume({"epochs": np.zeros(1)}, Resume(**how)).step
        for _ in manager.batches(order):
            step += 1
            manager.step_end(step, {"epochs": np.zeros(1)})
            if step == last:
                break


def test_order_that_was_drawn_outside_the_pass_is_refused(tmp_path: Path) -> None:
    train_on_a_new_order(tmp_path, 2)
    with pytest.raises(StateMismatch, match="batch 2 of loader 'batches' is another") as caught:
        train_on_a_new_order(tmp_path, 3)
    assert caught.match(r'Resume\(may_differ=\["data"\]\)')


def test_order_that_may_differ_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_on_a_new_order(tmp_path, 2)
    train_on_a_new_order(tmp_path, 3, may_differ=["data"])
    assert "batch 2 of loader 'batches' is another than in the saved run" in caplog.text


class Numbers(torch.utils.data.Dataset[Any]):  # type: ignore[misc]
    """Elements with noise that the worker process draws; `is_seeded` by the loader's numbers."""

    def __init__(self, *, is_seeded: bool) -> None:
        self._own = None if is_seeded else np.random.default_rng

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(1) if self._own is None else torch.tensor([self._own().random()])
        return noise + index


def train_with_workers(directory: Path, last: int, *, is_seeded: bool, **options: Any) -> None:
    loader = torch.utils.data.DataLoader(
        Numbers(is_seeded=is_seeded), 2, num_workers=1, multiprocessing_context="fork", **options
    )
    with saving(directory) as manager:
        start = manager.resume({"epochs": np.zeros(1)})
        step = start.step
        while step < last:
            for _ in manager.batches(loader):
                step += 1
                manager.step_end(step, {"epochs": np.zeros(1)})
                if step == last:
                    break


def test_noise_that_a_worker_draws_unseeded_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for last in (2, 3):
        train_with_workers(tmp_path, last, is_seeded=False)
    assert "batch 2 of loader 'batches' is another than in the saved run" in caplog.text


def test_noise_that_a_worker_draws_seeded_is_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for last in (2, 3):
        train_with_workers(tmp_path, last, is_seeded=True)
    assert "is another than in the saved run" not in caplog.text


def test_noise_of_workers_that_outlive_a_pass_is_refused(tmp_path: Path) -> None:
    options = {"is_seeded": True, "persistent_workers": True}
    train_with_workers(tmp_path, 6, **options)  # inside the second pass
    with pytest.raises(StateMismatch, match="its persistent workers go on"):
        train_with_workers(tmp_path, 7, **options)


@pytest.mark.parametrize("batch", [5, "text", [], np.array(["a"]), [[[[np.ones(1)]]]]], ids=repr)
def test_batch_without_numbers_has_no_fingerprint(batch: object) -> None:
    assert fingerprint_of(batch) is None


@pytest.mark.parametrize("change", [0, 5_000, 39_999])
@pytest.mark.parametrize("made", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_fingerprint_tells_batches_apart_that_differ_in_an_element(made: Any, change: int) -> None:
    one, other = np.zeros((2, 10_000), np.float16), np.zeros((2, 10_000), np.float16)
    other.reshape(-1).view(np.uint8)[change] = 1
    assert fingerprint_of({"x": [made(one)]}) != fingerprint_of({"x": [made(other)]})
    assert fingerprint_of([made(one)]) == fingerprint_of((made(one.copy()),))


def test_fingerprint_tells_batches_of_another_shape_or_type_apart() -> None:
    batches = [np.zeros(4, np.int32), np.zeros((2, 2), np.int32), np.zeros(4, np.float32)]
    assert len({fingerprint_of(one) for one in batches}) == 3


def test_fingerprint_of_a_view_with_gaps_covers_its_first_and_last_row() -> None:
    whole = torch.arange(20.0).reshape(4, 5)
    one = fingerprint_of(whole.T)
    whole[0, 0] = 7
    assert fingerprint_of(whole.T) != one


def test_batches_that_are_skipped_are_not_given_and_not_counted_as_steps(tmp_path: Path) -> None:
    def train(last: int, **how: Any) -> list[int]:
        seen = []
        with saving(tmp_path) as manager:
            step = manager.resume({"x": 1}, Resume(**how)).step
            while step < last:
                for batch in manager.batches(range(5)):
                    seen.append(batch)
                    step += 1
                    manager.step_end(step, {"x": 1})
                    if step == last:
                        break
        return seen

    assert train(2) == [0, 1]
    assert train(4, skip_batches=2) == [4, 0]
    assert train(6) == [1, 2]


def test_batches_of_another_loader_are_not_skipped(tmp_path: Path) -> None:
    with saving(tmp_path) as manager:
        manager.step_end(1, {"x": 1})
    with saving(tmp_path) as manager:
        manager.resume({"x": 1}, Resume(skip_batches=3))
        assert list(manager.batches(range(2))) == []
        assert list(manager.batches(range(2), name="validation")) == [0, 1]
        assert list(manager.batches(range(2))) == [1]


@pytest.mark.parametrize("number", [-1, True, 1.5])
def test_number_of_batches_to_skip_is_a_count(number: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="skip"):
        Resume(skip_batches=number)
