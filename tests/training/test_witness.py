# SPDX-License-Identifier: Apache-2.0
"""Steps that come again after a resumption are compared with those that the run had trained before it died."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Ranks, Resume, StateMismatch, Trust
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.observe.events import Event
from ckptmgr.training.witness_record import (
    HEAD_BYTES,
    MOST_BYTES,
    MOST_RECORDS,
    NOT_GIVEN,
    RECORD_BYTES,
    Record,
    difference_of,
    head_of,
    packed,
    packed_metrics,
    parsed,
    place_of,
)
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support.failingdisk import FailingDisk
from tests.support.options import SIGNER
from tests.support.runs import manager_on
from tests.training.witness_programs import train

PROGRAM = Path(__file__).with_name("witness_programs.py")
DIED_AT, SAVED = 17, 10
KEY = bytes(range(16))
NEVER = CheckpointConfig(save_checkpoint_steps=1000)


class Died(Exception):
    """Ends a run as if it had died."""


def program(directory: Path, last: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), str(directory), str(last), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def _killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saved step 10 and was killed after step 17."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    assert program(directory, DIED_AT, "killed").returncode == -9
    return directory


@pytest.fixture
def killed(_killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_killed, tmp_path / "run"))


def note(directory: Path) -> Path:
    return directory / ".net.witness"


def test_run_that_goes_on_is_proven_equal_over_the_steps_that_come_again(killed: Path) -> None:
    done = program(killed, DIED_AT + 2)
    assert done.stdout == "continued; proven equal over 7 steps\n"
    assert "INFO continued; proven equal over 7 steps" in done.stderr


def test_resumption_says_how_many_steps_are_recorded(killed: Path) -> None:
    with CheckpointManager(killed, prefix="net") as manager:
        start = manager.resume({"w": np.zeros(4)})
        assert (start.step, start.recorded) == (SAVED, DIED_AT - SAVED)
        assert str(manager.witness) == "continued; equal over 0 of 7 recorded steps so far"


@pytest.mark.parametrize(
    ("other", "how", "said"),
    [
        ("batch", Resume(may_differ=["data"]), "step 11: another batch; and the program is another: the data may differ"),
        ("random", Resume(), "step 13: same batch, other random numbers"),
        ("loss", Resume(), "step 12: same batch, same random numbers, other loss: "),
        ("loss", Resume(tolerance={"noise": 1.0}), "1e-06 apart: kernels that are not deterministic?"),
    ],
)  # fmt: skip
def test_difference_is_one_warning_with_the_first_step_and_in_what(
    other: str, how: Resume, said: str, killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = train(killed, DIED_AT + 2, how, other=[other])
    (warning,) = [one.message for one in caplog.records if "continued" in one.message]
    assert said in warning
    assert str(manager.witness) == warning
    assert manager.witness.equal == {"batch": 0, "random": 2, "loss": 1}[other]


def test_metric_with_a_tolerance_is_equal_within_it(killed: Path) -> None:
    manager = train(killed, DIED_AT + 2, Resume(tolerance={"loss": 1e-3}), other=["loss"])
    assert str(manager.witness) == "continued; proven equal over 7 steps, loss within 0.001"


@pytest.mark.parametrize("config", [{}, {"exception_save": True}])
def test_difference_is_raised_on_request_before_its_step_is_saved(
    config: dict[str, Any], killed: Path
) -> None:
    with pytest.raises(StateMismatch, match="step 12: same batch, same random numbers, other loss"):
        train(killed, 19, Resume(on_difference="raise"), other=["loss"], config=config)
    with CheckpointManager(killed, prefix="net") as manager:
        assert [one.step for one in manager.checkpoints()] == [SAVED]
        assert manager.resume({"w": np.zeros(4)}).recorded == DIED_AT - SAVED


def test_result_is_an_event(killed: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    other = Path(shutil.copytree(killed, tmp_path / "other"))
    train(killed, 19, observe=events.append)
    train(other, 19, other=["loss"], observe=events.append)
    found = [(one.name, one.step, one.figures) for one in events if one.operation == "witness"]
    recorded = DIED_AT - SAVED
    assert found == [
        ("witness.equal", DIED_AT, {"equal_steps": 7, "recorded_steps": recorded}),
        ("witness.differs", 12, {"equal_steps": 1, "recorded_steps": recorded}),
    ]


def test_run_that_was_changed_is_compared_with_itself_from_then_on(killed: Path) -> None:
    for _ in range(2):
        program(killed, DIED_AT, "loss", "killed")
    assert train(killed, 19, other=["loss"]).witness.difference is None


def test_run_that_begins_anew_is_compared_with_nothing(
    killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(killed, NEVER, prefix="net") as manager:
        manager.resume({"w": np.zeros(4)}, Resume(start="new"))
        for step in range(1, DIED_AT + 1):
            manager.step_end(step, {"w": np.ones(4)}, metrics={"loss": 0.5})
    assert str(manager.witness) == "no recorded step comes again"
    assert caplog.text == ""


def test_chosen_step_is_compared_and_said(killed: Path) -> None:
    manager = train(killed, 19, Resume(at=SAVED))
    assert str(manager.witness) == (
        "continued; proven equal over 7 steps; and the program is another: it begins at a chosen step"
    )


def loop(
    directory: Path,
    losses: Sequence[Any],
    how: Resume | None = None,
    *,
    dies: bool = True,
    **options: Any,
) -> CheckpointManager:
    """Save step 1, train a step for each loss, and die."""
    state = {"w": np.zeros(4)}
    manager = manager_on(directory, NEVER, prefix="net", **options)
    try:
        with manager:
            start = manager.resume(state, how)
            if start.is_fresh:
                manager.save(1, state)
            for step, loss in enumerate(losses, 2):
                metrics = loss if isinstance(loss, dict) else {"loss": loss}
                manager.step_end(step, state, metrics=metrics)
            if dies:
                raise Died
    except Died:
        pass
    return manager


def test_steps_of_a_future_that_was_given_up_do_not_count(tmp_path: Path) -> None:
    loop(tmp_path, [1.0, 2.0, 3.0, 4.0])
    loop(tmp_path, [1.0, 2.5])
    assert str(loop(tmp_path, [1.0, 2.5, 3.5]).witness).startswith("continued; proven equal")


def test_steps_after_a_rollback_are_compared_with_none_before_it(tmp_path: Path) -> None:
    state = {"w": np.zeros(4)}
    with CheckpointManager(tmp_path, NEVER, prefix="net") as manager:
        manager.save(1, state)
        manager.step_end(2, state, metrics={"loss": 1.0})
        manager.rollback(state)
        manager.step_end(2, state, metrics={"loss": 2.0})
        manager.step_end(3, state, metrics={"loss": 3.0})
    with CheckpointManager(tmp_path, NEVER, prefix="net") as manager:
        assert manager.resume(state).recorded == 0


def test_run_that_dies_after_a_rollback_is_compared_with_what_came_after_it(tmp_path: Path) -> None:
    state = {"w": np.zeros(4)}

    def rolled_back() -> None:
        with CheckpointManager(tmp_path, NEVER, prefix="net") as manager:
            manager.save(1, state)
            for step in (2, 3):
                manager.step_end(step, state, metrics={"loss": 1.0})
            manager.rollback(state, steps_back=2)
            manager.step_end(2, state, metrics={"loss": 2.0})
            raise Died

    with pytest.raises(Died):
        rolled_back()
    with CheckpointManager(tmp_path, NEVER, prefix="net") as manager:
        assert manager.resume(state).recorded == 1
        manager.step_end(2, state, metrics={"loss": 2.0})
        assert str(manager.witness) == "continued; proven equal over 1 step"


def test_pass_that_gives_no_batch_of_a_step_is_not_compared_in_it(tmp_path: Path) -> None:
    batches = [np.full(2, float(index)) for index in range(9)]

    def measured_at(last: int) -> CheckpointManager:
        state = {"w": np.zeros(2)}
        with CheckpointManager(tmp_path, NEVER, prefix="net") as manager:
            step = manager.resume(state).step
            others = iter(manager.batches(batches, name="others"))
            for batch in manager.batches(batches):
                step, state["w"] = step + 1, state["w"] + batch
                if step in (2, 5):
                    next(others)
                manager.step_end(step, state)
                if step == 3:
                    manager.save(step, state)
                if step == last:
                    raise Died
        return manager

    with pytest.raises(Died):
        measured_at(last=6)
    assert str(measured_at(last=10).witness) == "continued; proven equal over 3 steps"


def test_resumption_inside_a_run_is_compared_with_it(tmp_path: Path) -> None:
    state = {"w": np.zeros(4)}
    with CheckpointManager(tmp_path, NEVER, prefix="net") as manager:
        manager.save(1, state)
        manager.step_end(2, state, metrics={"loss": 1.0})
        manager.resume(state)
        manager.step_end(2, state, metrics={"loss": 1.5})
    assert (
        str(manager.witness)
        == "continued, but not equal: step 2: other loss: 1.5 in place of 1.0, 0.5 apart"
    )


def test_nan_is_equal_to_itself_and_missing_metrics_are_not_compared(tmp_path: Path) -> None:
    loop(tmp_path, [float("nan"), {"loss": 1.0, "val": 2.0}, {"val": 3.0}])
    found = loop(tmp_path, [float("nan"), 1.0, {"loss": 5.0, "val": 3.0}]).witness
    assert str(found) == "continued; proven equal over 3 steps"


def test_only_five_metrics_are_compared_which_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    loop(tmp_path, [{f"m{index}": 1.0 for index in range(7)}] * 2)
    said = "of the metrics, where steps come again, m0, m1, m2, m3, m4 are compared, not m5"
    assert [one.message for one in caplog.records if "metrics" in one.message] == [said]
    changed = {f"m{index}": float(index < 5) for index in range(7)}
    assert loop(tmp_path, [changed] * 2).witness.equal == 2


def test_numbers_of_numpy_and_torch_are_compared(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    ones: list[Any] = [np.float32(0.1), np.array([0.5]), torch.tensor(0.25), True, 3]
    loop(tmp_path, ones)
    again = [float(np.float32(0.1)), 0.5, 0.25, 1, 3.0]
    assert loop(tmp_path, again).witness.equal == len(ones)


@pytest.mark.parametrize("metric", [np.array("x"), np.array(1j), np.array(object())])
def test_metric_that_is_no_number_is_refused_by_the_save_and_not_compared(
    metric: Any, tmp_path: Path
) -> None:
    assert loop(tmp_path, [{"loss": metric}, 1.0]).witness.difference is None
    assert str(loop(tmp_path, [{"loss": metric}, 1.0]).witness).endswith("equal over 1 step")


def test_metric_that_a_device_computes_is_recorded_with_its_own_step(tmp_path: Path) -> None:
    jax: Any = pytest.importorskip("jax")
    square = jax.jit(lambda x: (x @ x).sum())
    large = jax.numpy.full((300, 300), 0.01)
    losses = [square(large * step) for step in range(5)]
    loop(tmp_path, losses)
    jax.block_until_ready(losses)
    found = loop(tmp_path, [float(one) for one in losses], dies=False).witness
    assert found.difference is None
    assert 1 <= found.equal <= len(losses)  # those that were ready before the run died


def test_program_without_metrics_and_batches_has_no_file(tmp_path: Path) -> None:
    state = {"w": np.zeros(4)}
    with CheckpointManager(tmp_path, NEVER, prefix="net") as manager:
        manager.save(1, state)
        manager.step_end(2, state)
    assert not note(tmp_path).exists()


@pytest.mark.parametrize(
    ("operation", "error"), [("change", errno.EROFS), ("write_at", errno.ENOSPC)]
)
def test_disk_that_takes_no_records_ends_them_with_one_warning(
    operation: str, error: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, disk = {"w": np.zeros(4)}, FailingDisk(OsFileSystem(), error=error, operation=operation)
    try:
        with manager_on(tmp_path, NEVER, prefix="net", fs=disk) as manager:
            manager.save(1, state)
            disk._call, disk._is_lasting = disk._counted() + 1, True
            for step in range(2, 6):
                manager.step_end(step, state, metrics={"loss": 1.0})
            raise Died
    except Died:
        pass
    (said,) = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert "steps are recorded no longer" in said
    assert os.strerror(error) in said


def flipped(data: bytes) -> bytes:
    return data[:HEAD_BYTES] + bytes(one ^ 1 for one in data[HEAD_BYTES:])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: HEAD_BYTES - 1],
        lambda data: bytes(len(data)),
        lambda data: data[:HEAD_BYTES],
        lambda data: b"[" * len(data),
        lambda data: json.dumps({"version": 1}).encode().ljust(HEAD_BYTES),
        lambda data: head_of(["loss"], ["0" * 32]) + data[HEAD_BYTES:],
        lambda data: head_of(["a"] * 6, json.loads(data[:HEAD_BYTES])["runs"]) + data[HEAD_BYTES:],
        lambda data: data.ljust(MOST_BYTES + RECORD_BYTES, b"\0"),
        flipped,
    ],
)
def test_damaged_file_counts_as_absent_and_is_made_anew(
    damage: Callable[[bytes], bytes], killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note(killed).write_bytes(damage(note(killed).read_bytes()))
    assert str(train(killed, 19).witness) == "no recorded step comes again"
    assert caplog.text == ""
    found = parsed(note(killed).read_bytes(), after=SAVED)
    assert found is not None
    assert sorted(found.records) == list(range(SAVED + 1, 20))


def test_damaged_record_leaves_the_others(killed: Path) -> None:
    data = bytearray(note(killed).read_bytes())
    data[HEAD_BYTES + 3 * RECORD_BYTES] ^= 1
    note(killed).write_bytes(data)
    assert str(train(killed, 19).witness) == "continued; proven equal over 6 steps"


def link(path: Path, aside: Path) -> None:
    path.rename(aside)
    path.symlink_to(aside)


def pipe(path: Path, aside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("put", [link, pipe])
def test_entry_that_is_no_file_of_its_own_is_replaced(
    put: Callable[[Path, Path], None], killed: Path, tmp_path: Path
) -> None:
    aside = tmp_path / "aside"
    put(note(killed), aside)
    before = aside.read_bytes() if aside.exists() else b""
    assert str(train(killed, 19).witness) == "no recorded step comes again"
    assert note(killed).is_file()
    assert not note(killed).is_symlink()
    assert (aside.read_bytes() if aside.exists() else b"") == before


def test_file_with_a_second_name_is_not_written(
    killed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "aside").hardlink_to(note(killed))
    before = note(killed).read_bytes()
    train(killed, 19)
    assert "steps are recorded no longer" in caplog.text
    assert note(killed).read_bytes() == before


def test_forged_record_only_warns(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = bytearray(note(killed).read_bytes())
    metrics = packed_metrics([1e9, *[NOT_GIVEN] * 4])
    data[place_of(0) : place_of(1)] = packed(Record(SAVED + 1, metrics), 0)
    note(killed).write_bytes(data)
    manager = train(killed, 20)
    assert "step 11: other loss" in caplog.text
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 20


def test_forged_number_at_the_end_of_its_range_ends_no_run(killed: Path) -> None:
    step = packed(Record(DIED_AT, packed_metrics([NOT_GIVEN] * 5)), (1 << 32) - 1)
    note(killed).write_bytes(note(killed).read_bytes()[:HEAD_BYTES] + step)
    assert program(killed, DIED_AT + 2).returncode == 0


def test_manager_that_nothing_closes_leaves_no_file_open(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/dev/fd"))
    manager = CheckpointManager(tmp_path, NEVER, prefix="net")
    manager.save(1, {"n": 1})
    manager.step_end(2, {"n": 2}, metrics={"loss": 1.0})
    del manager
    gc.collect()
    assert len(os.listdir("/dev/fd")) == before


def test_file_is_a_ring_of_a_bounded_number_of_steps() -> None:
    assert place_of(MOST_RECORDS) == place_of(0) == HEAD_BYTES
    assert place_of(MOST_RECORDS - 1) + RECORD_BYTES == MOST_BYTES
    data, count = bytearray(MOST_BYTES), MOST_RECORDS + 3
    data[:HEAD_BYTES] = head_of(["loss"], ["run"])
    nothing = packed_metrics([NOT_GIVEN] * 5)
    for number in range(count):
        place = place_of(number)
        data[place : place + RECORD_BYTES] = packed(Record(number, nothing), number)
    found = parsed(bytes(data), after=0)
    assert found is not None
    assert found.next_number == count
    assert sorted(found.records) == list(range(3, count))


def test_later_record_of_a_step_counts() -> None:
    one, two = (Record(7, packed_metrics([value] * 5)) for value in (1.0, 2.0))
    found = parsed(head_of([], []) + packed(two, 1) + packed(one, 0), after=0)
    assert found is not None
    assert found.records == {7: two}


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        ((0, 0), (5, 5), ""),
        ((5, 0), (5, 7), None),
        ((5, 6), (5, 7), "same batch, other random numbers"),
        ((0, 6), (5, 7), "other random numbers"),
        ((5, 6), (5, 9 << 16 | 6), None),  # torch was imported only in one of them
        ((5, 6), (5, 9 << 16 | 7), "same batch, other random numbers"),
        ((5, 8 << 16 | 6), (5, 9 << 16 | 6), "same batch, other random numbers"),
        ((5, 8 << 16 | 6), (5, 1 << 31 | 9 << 16 | 6), None),  # CUDA, the same
    ],
)
def test_only_what_both_know_is_compared(
    before: tuple[int, int], now: tuple[int, int], difference: str | None
) -> None:
    nothing = packed_metrics([NOT_GIVEN] * 5)
    assert (
        difference_of(Record(1, nothing, *before), Record(1, nothing, *now), [], {}) == difference
    )


def test_key_leaves_out_the_marks_of_the_data(tmp_path: Path) -> None:
    keyed = {"enc_key": KEY}
    with pytest.raises(Died):
        train(tmp_path, DIED_AT, config=keyed, dies=Died)
    found = parsed(note(tmp_path).read_bytes(), after=SAVED)
    assert found is not None
    assert {one[2:] for one in found.records.values()} == {(0, 0)}
    assert train(tmp_path, 19, config=keyed).witness.equal == len(found.records)


@pytest.mark.parametrize(
    "options",
    [
        {"config": CheckpointConfig(enc_key=KEY, format="safetensors")},
        {"trust": Trust(trusted_keys=[SIGNER.public_key])},
    ],
)
def test_record_that_nothing_proves_raises_nothing_in_a_run_with_keys(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with (
        CheckpointManager(tmp_path, prefix="net", **options) as manager,
        pytest.raises(ValueError, match="the record of the steps is not authenticated"),
    ):
        manager.resume(None, Resume(on_difference="raise"))


def test_ranks_have_the_record_of_the_first_and_another_number_is_said(tmp_path: Path) -> None:
    meeting = Meeting(2)

    def rank(number: int) -> None:
        state = {"w": np.zeros(4)}
        with CheckpointManager(
            tmp_path, NEVER, prefix="net", ranks=Ranks(Seat(meeting, number))
        ) as manager:
            manager.resume(state)
            manager.save(1, state)
            manager.step_end(2, state, metrics={"loss": float(number)})
            manager._past.unsaved = None

    assert all(one.raised is None for one in run_ranks(meeting, rank))
    found = loop(tmp_path, [0.0]).witness
    assert str(found) == (
        "continued; proven equal over 1 step; and the program is another: it has another number of ranks"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_difference": "stop"}, "on_difference must be 'warn' or 'raise', but got 'stop'"),
        ({"on_difference": "raise", "skip_batches": 1}, "on_difference has no effect with skip_batches"),
        ({"on_difference": "raise", "may_differ": ["data"]}, 'no effect with may_differ=\\["data"\\]'),
        ({"tolerance": {"loss": -1.0}}, "the tolerance of 'loss' must be a number from 0 on"),
        ({"tolerance": {"loss": float("nan")}}, "the tolerance of 'loss' must be a number from 0 on"),
        ({"start": "new", "tolerance": {"loss": 1.0}}, "tolerance has no effect with start='new'"),
    ],
)  # fmt: skip
def test_unusable_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Resume(**options)


@pytest.mark.parametrize("tolerance", [1.0, {"loss": "1"}, {"loss": True}, {1: 1.0}])
def test_tolerance_that_is_no_mapping_of_names_to_numbers_is_refused(tolerance: Any) -> None:
    with pytest.raises(TypeError, match="tolerance"):
        Resume(tolerance=tolerance)


@pytest.mark.slow
def test_thousand_resumptions_give_no_false_alarm(killed: Path) -> None:
    events: list[Event] = []
    for number in range(1000):
        with pytest.raises(Died):
            train(killed, SAVED + 1 + number % 9, dies=Died, observe=events.append)
    names = [one.name for one in events if one.operation == "witness"]
    assert set(names) == {"witness.equal"}
    assert len(names) > 100
