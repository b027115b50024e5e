# SPDX-License-Identifier: Apache-2.0
"""`ModelCheckpoint` across runs: restart, resume, the files that the keep policy counts, and those that it never touches."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    KeyProblem,
    ModelCheckpoint,
    Resume,
    Resumed,
    StoreLocked,
    UnprovenCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from tests.support.surface import GOLDEN, KEY, Loop, data_files

OTHER_KEY = b"another 16 bytes"


def _callback(directory: Path, prefix: str = "net", **config: Any) -> ModelCheckpoint:
    return ModelCheckpoint(prefix, str(directory), CheckpointConfig(**config))


def _train(directory: Path, steps: int = 3, **config: Any) -> None:
    """Run a whole training of its own."""
    Loop(callbacks=(_callback(directory, **config),), batch_num=10).run(steps)


def _go_on(callback: ModelCheckpoint, *, steps: int) -> Resumed:
    """Resume and run on from the step that was found."""
    resumed = callback.resume()
    assert resumed is not None
    weights = resumed.values["w"]
    assert isinstance(weights, np.ndarray)
    loop = Loop(callbacks=(callback,), batch_num=10, network={"w": weights.copy()})
    loop.step = resumed.checkpoint.step
    loop.run(steps)
    return resumed


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)


def test_restart_without_resume_renames_and_never_prunes_old_runs(tmp_path: Path) -> None:
    for _ in range(3):
        _train(tmp_path, keep_checkpoint_max=2)
    names = [f"{prefix}-1_{n}.ckpt" for prefix in ("net", "net_1", "net_2") for n in (2, 3)]
    assert data_files(tmp_path) == names


def test_wrong_prefix_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _train(tmp_path)
    assert _callback(tmp_path, prefix="nett").resume() is None
    assert "nothing to resume as 'nett': there are other series: 'net' (to step 3)" in caplog.text


def test_resume_in_an_empty_directory_is_none(tmp_path: Path) -> None:
    assert _callback(tmp_path).resume() is None


def test_resume_returns_the_newest_step_and_its_values(tmp_path: Path) -> None:
    _train(tmp_path)
    resumed = _callback(tmp_path).resume()
    assert resumed is not None
    assert (resumed.checkpoint.name, resumed.checkpoint.step) == ("net-1_3.ckpt", 3)
    assert np.array_equal(resumed.values["w"], np.full(4, 3, np.float32))
    assert resumed.skipped == ()


def test_resumed_run_continues_under_the_next_prefix_and_prunes_its_parents(tmp_path: Path) -> None:
    _train(tmp_path, keep_checkpoint_max=3)
    resumed = _go_on(_callback(tmp_path, keep_checkpoint_max=3), steps=5)
    assert resumed.checkpoint.name == "net-1_3.ckpt"
    # The one it was resumed from stays besides the three.
    names = ["net-1_3.ckpt", "net_1-1_6.ckpt", "net_1-1_7.ckpt", "net_1-1_8.ckpt"]
    assert data_files(tmp_path) == names


def test_third_run_prunes_what_both_before_it_left(tmp_path: Path) -> None:
    _train(tmp_path, keep_checkpoint_max=2)
    _go_on(_callback(tmp_path, keep_checkpoint_max=2), steps=2)
    _go_on(_callback(tmp_path, keep_checkpoint_max=2), steps=3)
    assert data_files(tmp_path) == ["net_1-1_5.ckpt", "net_2-1_7.ckpt", "net_2-1_8.ckpt"]


def test_keep_that_was_lowered_catches_up_at_the_first_save(tmp_path: Path) -> None:
    _train(tmp_path, 8, keep_checkpoint_max=8)
    _go_on(_callback(tmp_path, keep_checkpoint_max=2), steps=1)
    assert data_files(tmp_path) == ["net-1_8.ckpt", "net_1-1_9.ckpt"]


def test_unrelated_run_in_the_directory_is_not_pruned_by_a_resumed_one(tmp_path: Path) -> None:
    _train(tmp_path, keep_checkpoint_max=3)
    _train(tmp_path, keep_checkpoint_max=3)
    resumed = _go_on(_callback(tmp_path, keep_checkpoint_max=1), steps=2)
    assert resumed.checkpoint.series == "net_1"
    kept = [f"net-1_{n}.ckpt" for n in (1, 2, 3)]
    assert data_files(tmp_path) == [*kept, "net_1-1_3.ckpt", "net_2-1_5.ckpt"]


def test_shuffled_modification_times_change_nothing(tmp_path: Path) -> None:
    callback = _callback(tmp_path, keep_checkpoint_max=3)
    loop = Loop(callbacks=(callback,), batch_num=20)
    loop.begin()
    for step in range(1, 9):
        loop.run_step()
        for rank, name in enumerate(sorted(data_files(tmp_path), reverse=step % 2 == 0)):
            os.utime(tmp_path / name, (rank * 1000, rank * 1000))
    assert data_files(tmp_path) == ["net-1_6.ckpt", "net-1_7.ckpt", "net-1_8.ckpt"]


def test_copied_directory_is_as_good_as_the_original(tmp_path: Path) -> None:
    _train(tmp_path / "original")
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    resumed = _callback(tmp_path / "copy").resume()
    assert resumed is not None
    assert resumed.checkpoint.path == tmp_path / "copy" / "net-1_3.ckpt"


@pytest.mark.parametrize(
    "name",
    [
        "net-2023.12.ckpt",
        "net-(1).ckpt",
        "net--9.ckpt",
        "net-2-1_1.ckpt",
        "net-2-9_10.ckpt",
        "network-1_1.ckpt",
        "net-9_9.ckpt",
        "net_1-9_9.ckpt",
        "notes.txt",
    ],
)
def test_file_of_the_user_is_never_touched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"mine")
    _train(tmp_path, 6, keep_checkpoint_max=1)
    assert (tmp_path / name).read_bytes() == b"mine"


@pytest.mark.parametrize("other", ["net-2", "network", "net_x", "xnet"])
def test_resume_leaves_other_prefixes_alone(tmp_path: Path, other: str) -> None:
    Loop(callbacks=(_callback(tmp_path, other),)).run(2)
    assert _callback(tmp_path).resume() is None


def test_prefix_with_regular_expression_characters_is_taken_as_it_is(tmp_path: Path) -> None:
    Loop(callbacks=(_callback(tmp_path, "a.b+"),)).run(1)
    assert _callback(tmp_path, "axb").resume() is None
    resumed = _callback(tmp_path, "a.b+").resume()
    assert resumed is not None


def test_damaged_newest_is_skipped_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _train(tmp_path)
    _damage(tmp_path / "net-1_3.ckpt")
    with caplog.at_level(logging.WARNING):
        resumed = _callback(tmp_path).resume()
    assert resumed is not None
    assert resumed.checkpoint.step == 2
    assert [one.checkpoint.name for one in resumed.skipped] == ["net-1_3.ckpt"]
    assert "do not match the digest" in caplog.text


def test_all_damaged_is_none_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _train(tmp_path, 2)
    for name in data_files(tmp_path):
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(b"short")
    with caplog.at_level(logging.WARNING):
        assert _callback(tmp_path).resume() is None
    assert caplog.text.count("but the manifest says") == 2


def test_resume_prefers_any_step_that_was_saved_between_two_steps_to_a_breakpoint(
    tmp_path: Path,
) -> None:
    callback = _callback(tmp_path, save_checkpoint_steps=2, exception_save=True)
    with pytest.raises(ZeroDivisionError):
        Loop(callbacks=(callback,)).run_and_fail(3, ZeroDivisionError())
    resumed = _callback(tmp_path).resume()
    assert resumed is not None
    assert resumed.checkpoint.name == "net-1_2.ckpt"


def test_breakpoint_is_resumed_from_when_there_is_nothing_else(tmp_path: Path) -> None:
    callback = _callback(tmp_path, save_checkpoint_steps=9, exception_save=True)
    with pytest.raises(ZeroDivisionError):
        Loop(callbacks=(callback,)).run_and_fail(3, ZeroDivisionError())
    resumed = _callback(tmp_path).resume()
    assert resumed is not None
    assert resumed.checkpoint.name == "net-1_3_breakpoint.ckpt"


def test_runs_that_fail_again_and_again_leave_one_breakpoint(tmp_path: Path) -> None:
    for resumes in (False, True, True):
        callback = _callback(tmp_path, save_checkpoint_steps=2, exception_save=True)
        assert (callback.resume() is not None) is resumes
        with pytest.raises(ZeroDivisionError):
            Loop(callbacks=(callback,)).run_and_fail(3, ZeroDivisionError())
    names = sorted(path.name for path in tmp_path.glob("*_breakpoint.ckpt"))
    assert names == ["net_2-1_3_breakpoint.ckpt"]


def test_breakpoint_of_a_run_that_was_not_resumed_stays(tmp_path: Path) -> None:
    for _ in range(2):
        callback = _callback(tmp_path, save_checkpoint_steps=2, exception_save=True)
        with pytest.raises(ZeroDivisionError):
            Loop(callbacks=(callback,)).run_and_fail(3, ZeroDivisionError())
    assert len(list(tmp_path.glob("*_breakpoint.ckpt"))) == 2


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC", "SM4-CBC"])
def test_encrypted_run_is_resumed_and_goes_on_encrypted(tmp_path: Path, mode: str) -> None:
    config: dict[str, Any] = {
        "enc_key": KEY,
        "enc_mode": mode,
        "keep_checkpoint_max": 2,
        "crc_check": True,
    }
    _train(tmp_path, **config)
    _go_on(_callback(tmp_path, **config), steps=2)
    values = load_checkpoint(tmp_path / "net_1-1_5.ckpt", dec_key=KEY, dec_mode=mode)
    assert np.array_equal(values["w"], np.full(4, 5, np.float32))


def test_resume_goes_by_the_mode_of_the_file_not_of_the_configuration(tmp_path: Path) -> None:
    _train(tmp_path, enc_key=KEY, enc_mode="AES-CBC")
    resumed = _callback(tmp_path, enc_key=KEY, enc_mode="AES-GCM").resume()
    assert resumed is not None
    assert resumed.checkpoint.cipher == "AES-CBC"


@pytest.mark.parametrize("key", [None, OTHER_KEY])
def test_resume_without_the_right_key_is_an_error_not_a_fresh_start(
    tmp_path: Path, key: bytes | None
) -> None:
    _train(tmp_path, enc_key=KEY)
    with pytest.raises(KeyProblem):
        _callback(tmp_path, enc_key=key).resume()


def test_resume_with_a_key_does_not_take_a_plain_file_for_its_own(tmp_path: Path) -> None:
    _train(tmp_path)
    with pytest.raises(KeyProblem):
        _callback(tmp_path, enc_key=KEY).resume()


def test_file_of_no_run_is_resumed_from_and_nothing_of_no_run_is_pruned(tmp_path: Path) -> None:
    network = {"w": np.zeros(4, np.float32)}
    for name in ("best.ckpt", "net-1_10.ckpt", "other-7_3.ckpt"):
        save_checkpoint(network, tmp_path / name)
    resumed = _go_on(_callback(tmp_path, keep_checkpoint_max=2), steps=4)
    assert resumed.checkpoint.name == "net-1_10.ckpt"
    kept = {"best.ckpt", "net-1_10.ckpt", "other-7_3.ckpt"}
    assert kept < set(data_files(tmp_path))
    assert len(data_files(tmp_path)) == len(kept) + 2


def test_files_of_mindspore_itself_are_resumed_from_on_request_and_never_pruned(
    tmp_path: Path,
) -> None:
    source = GOLDEN / "files" / "slices_sync.ckpt"
    for name in ("net-1_9.ckpt", "net-1_10.ckpt"):
        shutil.copyfile(source, tmp_path / name)
    callback = _callback(tmp_path, keep_checkpoint_max=1)
    with pytest.raises(UnprovenCheckpoint, match="no manifest proves which step it is") as caught:
        callback.resume()
    assert "Resume(allow_bare=True)" in str(caught.value.hint)
    resumed = callback.resume(Resume(allow_bare=True))
    assert resumed is not None
    assert (resumed.checkpoint.name, resumed.checkpoint.step) == ("net-1_10.ckpt", 10)
    Loop(callbacks=(callback,)).run(3)
    assert data_files(tmp_path) == ["net-1_10.ckpt", "net-1_9.ckpt", "net_1-1_3.ckpt"]


def test_step_that_went_back_is_saved_again_and_counts_as_the_newest(tmp_path: Path) -> None:
    callback = _callback(tmp_path, keep_checkpoint_max=2)
    loop = Loop(callbacks=(callback,), batch_num=20)
    loop.run(5, end=False)
    loop.step = 1
    loop.run(2)
    assert data_files(tmp_path) == ["net-1_2.ckpt", "net-1_3.ckpt"]


def test_run_that_ended_lets_the_series_go_and_takes_it_back(tmp_path: Path) -> None:
    first, second = _callback(tmp_path), _callback(tmp_path)
    loop = Loop(callbacks=(first,))
    loop.run(1)
    other = Loop(callbacks=(second,), step=7)
    other.run_step()
    with pytest.raises(StoreLocked):
        loop.run_step()
    second.close()
    loop.run_step()
    assert Path(first.latest_ckpt_file_name).name == "net-1_3.ckpt"
