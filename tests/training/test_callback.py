# SPDX-License-Identifier: Apache-2.0
"""`ModelCheckpoint`: its files and their names, breakpoints, counters, callables, metrics."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from ckptmgr import CheckpointConfig, ModelCheckpoint, StoreLocked, load_checkpoint
from tests.support import api
from tests.support.failingdisk import FailingDisk
from tests.support.runs import callback_on
from tests.support.surface import KEY, Loop, data_files


def _callback(directory: Path, prefix: Any = "CKP", **config: Any) -> ModelCheckpoint:
    return ModelCheckpoint(prefix, str(directory), CheckpointConfig(**config))


def _loaded(path: Path, name: str, **options: Any) -> object:
    value = load_checkpoint(path, **options)[name]
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_default_configuration_saves_each_step_and_keeps_five(tmp_path: Path) -> None:
    Loop(callbacks=(ModelCheckpoint(directory=str(tmp_path)),), batch_num=10).run(7)
    assert data_files(tmp_path) == [f"CKP-1_{n}.ckpt" for n in (3, 4, 5, 6, 7)]


def test_directory_without_a_name_is_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Loop(callbacks=(ModelCheckpoint("net"),)).run(1)
    assert data_files(tmp_path) == ["net-1_1.ckpt"]


def test_missing_directory_is_made_for_its_owner_only(tmp_path: Path) -> None:
    _callback(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    Loop(callbacks=(_callback(tmp_path),)).run(1)
    assert (tmp_path / "CKP-1_1.ckpt").stat().st_mode & 0o777 == 0o400


def test_first_step_is_saved_with_the_weights_after_it(tmp_path: Path) -> None:
    Loop(callbacks=(_callback(tmp_path),)).run(1)
    assert _loaded(tmp_path / "CKP-1_1.ckpt", "w") == [1, 1, 1, 1]


def test_latest_file_name_is_empty_before_the_first_save(tmp_path: Path) -> None:
    assert _callback(tmp_path).latest_ckpt_file_name == ""


def test_neither_steps_nor_seconds_saves_nothing_even_at_the_end(tmp_path: Path) -> None:
    callback = _callback(tmp_path, save_checkpoint_steps=0, save_checkpoint_seconds=0)
    Loop(callbacks=(callback,)).run(3)
    assert data_files(tmp_path) == []


@pytest.mark.parametrize("how", [True, "thread", "process"])
def test_async_save_is_durable_when_training_ends(tmp_path: Path, how: bool | str) -> None:
    callback = _callback(tmp_path, async_save=how)
    loop = Loop(callbacks=(callback,))
    loop.run(2)
    assert _loaded(Path(callback.latest_ckpt_file_name), "w") == [2, 2, 2, 2]


def test_safetensors_format_is_saved_and_kept_like_ckpt(tmp_path: Path) -> None:
    Loop(callbacks=(_callback(tmp_path, format="safetensors", keep_checkpoint_max=2),)).run(4)
    assert data_files(tmp_path) == ["CKP-1_3.safetensors", "CKP-2_1.safetensors"]
    assert _loaded(tmp_path / "CKP-2_1.safetensors", "w") == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("mode", "size"), [("AES-GCM", 16), ("AES-GCM", 32), ("AES-CBC", 24), ("SM4-CBC", 16)]
)
def test_key_with_crc_saves_sealed_files_that_load(tmp_path: Path, mode: str, size: int) -> None:
    key = bytes(range(100, 100 + size))
    Loop(callbacks=(_callback(tmp_path, enc_key=key, enc_mode=mode, crc_check=True),)).run(1)
    path = tmp_path / "CKP-1_1.ckpt"
    assert b"Float32" not in path.read_bytes()
    options = {"dec_key": key, "dec_mode": mode, "crc_check": True}
    assert _loaded(path, "w", **options) == [1, 1, 1, 1]


def test_key_is_not_in_any_file(tmp_path: Path) -> None:
    Loop(callbacks=(_callback(tmp_path, enc_key=KEY),)).run(2)
    for path in tmp_path.iterdir():
        assert KEY not in path.read_bytes()
        assert KEY.hex().encode() not in path.read_bytes()


def test_remove_redundancy_is_refused_before_anything_is_saved(tmp_path: Path) -> None:
    callback = _callback(tmp_path, remove_redundancy=True)
    with pytest.raises(TypeError, match="can only be used in parallel scenarios"):
        Loop(callbacks=(callback,)).run(1)
    assert data_files(tmp_path) == []


def test_saved_network_is_saved_instead_of_the_training_network(tmp_path: Path) -> None:
    network = {"ema": np.array([7.0], np.float32)}
    Loop(callbacks=(_callback(tmp_path, saved_network=network),)).run(1)
    assert set(load_checkpoint(tmp_path / "CKP-1_1.ckpt")) == {"ema"}


def test_counters_run_on_from_their_start_values(tmp_path: Path) -> None:
    callback = _callback(tmp_path, append_info=[{"epoch_num": 10, "step_num": 50, "lr": 0.5}])
    Loop(callbacks=(callback,), batch_num=2).run(4)
    path = tmp_path / "CKP-2_2.ckpt"
    assert (_loaded(path, "epoch_num"), _loaded(path, "step_num")) == (12, 54)
    assert _loaded(path, "lr") == 0.5


def test_one_configuration_counts_for_each_of_two_callbacks_from_the_start(tmp_path: Path) -> None:
    config = CheckpointConfig(append_info=["epoch_num", "step_num"])
    for name in ("first", "second"):
        callback = ModelCheckpoint(name, str(tmp_path), config)
        Loop(callbacks=(callback,)).run(3)
        assert _loaded(Path(callback.latest_ckpt_file_name), "step_num") == 3
    assert config.append_dict == {"epoch_num": 0, "step_num": 0}


def test_two_callbacks_save_side_by_side_and_each_keeps_its_own(tmp_path: Path) -> None:
    often = _callback(tmp_path, "net", keep_checkpoint_max=1)
    seldom = _callback(tmp_path, "net-2", save_checkpoint_steps=2, keep_checkpoint_max=2)
    Loop(callbacks=(often, seldom), batch_num=10).run(6)
    assert data_files(tmp_path) == ["net-1_6.ckpt", "net-2-1_4.ckpt", "net-2-1_6.ckpt"]


def test_two_callbacks_of_one_series_at_once_are_refused(tmp_path: Path) -> None:
    callbacks = (_callback(tmp_path), _callback(tmp_path))
    with pytest.raises(StoreLocked, match="being written by process"):
        Loop(callbacks=callbacks).run(1)


def test_names_of_mindspore_two_have_the_same_effect(tmp_path: Path) -> None:
    callback = _callback(tmp_path, save_checkpoint_steps=2)
    loop = Loop(callbacks=())
    callback.on_train_begin(loop)
    for _ in range(3):
        callback.on_train_epoch_begin(loop)
        callback.on_train_step_begin(loop)
        loop.run_step()
        callback.on_train_step_end(loop)
        callback.on_train_epoch_end(loop)
    callback.on_train_end(loop)
    assert data_files(tmp_path) == ["CKP-1_2.ckpt", "CKP-1_3.ckpt"]


def test_callable_prefix_is_the_whole_name_and_nothing_is_pruned(tmp_path: Path) -> None:
    callback = _callback(tmp_path, lambda p: f"step{p.cur_step_num}", keep_checkpoint_max=1)
    Loop(callbacks=(callback,)).run(3)
    assert data_files(tmp_path) == ["step1.ckpt", "step2.ckpt", "step3.ckpt"]


def test_callable_prefix_with_one_result_overwrites_that_file(tmp_path: Path) -> None:
    Loop(callbacks=(_callback(tmp_path, lambda _: "last"),)).run(3)
    assert data_files(tmp_path) == ["last.ckpt"]
    assert _loaded(tmp_path / "last.ckpt", "w") == [3, 3, 3, 3]


@pytest.mark.parametrize("result", ["a/b", 3])
def test_callable_prefix_with_a_bad_result_is_refused(tmp_path: Path, result: object) -> None:
    with pytest.raises(ValueError, match="it must return a string that does not contain '/'"):
        Loop(callbacks=(_callback(tmp_path, lambda _: result),)).run(1)


def test_callable_directory_is_asked_at_each_step_and_each_keeps_its_own(tmp_path: Path) -> None:
    callback = ModelCheckpoint(
        "CKP",
        lambda p: str(tmp_path / f"epoch{p.cur_epoch_num}"),
        CheckpointConfig(keep_checkpoint_max=1),
    )
    Loop(callbacks=(callback,)).run(6)
    assert data_files(tmp_path / "epoch1") == ["CKP-1_3.ckpt"]
    assert data_files(tmp_path / "epoch2") == ["CKP-2_3.ckpt"]


def test_breakpoint_is_saved_where_training_stopped_and_the_error_passes(tmp_path: Path) -> None:
    callback = _callback(tmp_path, save_checkpoint_steps=2, exception_save=True)
    with pytest.raises(KeyboardInterrupt):
        Loop(callbacks=(callback,)).run_and_fail(5, KeyboardInterrupt())
    assert data_files(tmp_path) == ["CKP-1_2.ckpt", "CKP-2_1.ckpt", "CKP-2_2_breakpoint.ckpt"]
    assert _loaded(tmp_path / "CKP-2_2_breakpoint.ckpt", "w") == [5, 5, 5, 5]


def test_breakpoint_notes_why_and_the_global_step(tmp_path: Path) -> None:
    callback = _callback(tmp_path, save_checkpoint_steps=100, exception_save=True)
    with pytest.raises(MemoryError):
        Loop(callbacks=(callback,)).run_and_fail(5, MemoryError())
    (found,) = api.listed(tmp_path)
    assert (found.step, found.why, found.is_emergency) == (5, "exception:MemoryError", True)


def test_breakpoint_is_encrypted_like_the_others(tmp_path: Path) -> None:
    callback = _callback(tmp_path, enc_key=KEY, exception_save=True, crc_check=True)
    with pytest.raises(ZeroDivisionError):
        Loop(callbacks=(callback,)).run_and_fail(1, ZeroDivisionError())
    path = tmp_path / "CKP-1_1_breakpoint.ckpt"
    assert _loaded(path, "w", dec_key=KEY, crc_check=True) == [1, 1, 1, 1]


def test_safetensors_breakpoint_is_encrypted_and_compressed_like_the_others(tmp_path: Path) -> None:
    options = {"format": "safetensors", "enc_key": "passphrase:env:PHRASE", "compression": "zstd"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHRASE", "seven words that nobody would ever guess")
        callback = _callback(tmp_path, exception_save=True, crc_check=True, **options)
        with pytest.raises(ZeroDivisionError):
            Loop(callbacks=(callback,)).run_and_fail(1, ZeroDivisionError())
        path = tmp_path / "CKP-1_1_breakpoint.safetensors.ckpe"
        assert _loaded(path, "w", dec_key=options["enc_key"], crc_check=True) == [1, 1, 1, 1]


def test_crc_of_safetensors_files_is_stored_and_checked(tmp_path: Path) -> None:
    Loop(callbacks=(_callback(tmp_path, format="safetensors", crc_check=True),)).run(1)
    path = tmp_path / "CKP-1_1.safetensors"
    with safe_open(path, framework="np") as file:
        assert file.metadata()["crc_num"]
    assert _loaded(path, "w", crc_check=True) == [1, 1, 1, 1]


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_breakpoints_of_later_runs_in_either_format_are_numbered(
    tmp_path: Path, format: str
) -> None:
    for _ in range(2):
        callback = _callback(
            tmp_path, save_checkpoint_steps=100, exception_save=True, format=format
        )
        with pytest.raises(ZeroDivisionError):
            Loop(callbacks=(callback,)).run_and_fail(2, ZeroDivisionError())
    names = [f"{prefix}-1_2_breakpoint.{format}" for prefix in ("CKP", "CKP_1")]
    assert data_files(tmp_path) == names


def test_breakpoints_of_later_runs_are_numbered(tmp_path: Path) -> None:
    for _ in range(3):
        callback = _callback(tmp_path, save_checkpoint_steps=100, exception_save=True)
        with pytest.raises(ZeroDivisionError):
            Loop(callbacks=(callback,)).run_and_fail(2, ZeroDivisionError())
    names = [f"{prefix}-1_2_breakpoint.ckpt" for prefix in ("CKP", "CKP_1", "CKP_2")]
    assert data_files(tmp_path) == names


@dataclass(frozen=True)
class FrozenError(Exception):
    """An exception that refuses attributes, and so notes."""


def test_failed_breakpoint_never_replaces_an_exception_that_refuses_notes(tmp_path: Path) -> None:
    callback = _callback(tmp_path, save_checkpoint_steps=100, exception_save=True)
    loop = Loop(callbacks=(callback,), network={"w": np.zeros(4), "socket": np.array(object())})
    error = FrozenError()
    with pytest.raises(FrozenError) as caught:
        loop.run_and_fail(1, error)
    assert caught.value is error


def test_breakpoint_before_the_first_step_has_step_0(tmp_path: Path) -> None:
    callback = _callback(tmp_path, exception_save=True)
    with pytest.raises(ZeroDivisionError):
        Loop(callbacks=(callback,)).run_and_fail(0, ZeroDivisionError())
    assert data_files(tmp_path) == ["CKP-0_0_breakpoint.ckpt"]


def test_breakpoint_with_a_callable_prefix_has_a_name_of_its_own(tmp_path: Path) -> None:
    callback = _callback(tmp_path, lambda p: f"s{p.cur_step_num}", exception_save=True)
    with pytest.raises(ZeroDivisionError):
        Loop(callbacks=(callback,)).run_and_fail(1, ZeroDivisionError())
    assert data_files(tmp_path) == ["breakpoint-1_1_breakpoint.ckpt", "s1.ckpt"]


def test_breakpoint_is_never_pruned(tmp_path: Path) -> None:
    callback = _callback(tmp_path, keep_checkpoint_max=1, exception_save=True)
    loop = Loop(callbacks=(callback,))
    with pytest.raises(ZeroDivisionError):
        loop.run_and_fail(1, ZeroDivisionError())
    loop.run(3)
    assert data_files(tmp_path) == ["CKP-1_1_breakpoint.ckpt", "CKP-2_1.ckpt"]


def test_breakpoint_that_cannot_be_saved_is_a_note_on_the_error(tmp_path: Path) -> None:
    callback = _callback(tmp_path, save_checkpoint_steps=100, exception_save=True)
    loop = Loop(callbacks=(callback,), network={"w": np.zeros(1), "c": np.zeros(1, complex)})
    with pytest.raises(ZeroDivisionError) as caught:
        loop.run_and_fail(1, ZeroDivisionError())
    assert "the breakpoint checkpoint could not be saved" in caught.value.__notes__[0]
    assert "'c'" in caught.value.__notes__[0]


def test_exception_without_exception_save_saves_nothing_and_frees_the_series(
    tmp_path: Path,
) -> None:
    with pytest.raises(ZeroDivisionError):
        Loop(callbacks=(_callback(tmp_path, save_checkpoint_steps=9),)).run_and_fail(
            1, ZeroDivisionError()
        )
    assert data_files(tmp_path) == []


def test_exception_before_training_began_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), _callback(tmp_path, exception_save=True):
        raise ZeroDivisionError
    assert data_files(tmp_path) == []


def test_metrics_of_the_loop_decide_what_keep_keeps(tmp_path: Path) -> None:
    callback = _callback(tmp_path, keep="last(1) | best(1, loss, min)")
    loop = Loop(callbacks=(callback,), batch_num=10)
    for loss in (3.0, 1.0, 2.0, 4.0):
        loop.metrics = {"loss": loss}
        loop.run_step()
    loop.end()
    assert data_files(tmp_path) == ["CKP-1_2.ckpt", "CKP-1_4.ckpt"]


def test_metrics_that_are_absent_keep_the_newest(tmp_path: Path) -> None:
    callback = _callback(tmp_path, keep="best(1, loss, min)")
    Loop(callbacks=(callback,), batch_num=10).run(3)
    assert data_files(tmp_path)[-1] == "CKP-1_3.ckpt"


def test_metric_that_is_no_number_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics: Any = {"loss": np.float32(0.5), "matrix": np.eye(2), "none": None}
    with caplog.at_level(logging.WARNING):
        Loop(callbacks=(_callback(tmp_path),), metrics=metrics).run(1)
    (found,) = api.listed(tmp_path)
    assert found.metrics == {"loss": 0.5}
    assert "'matrix' is no number" in caplog.text


def test_parameters_that_are_a_dictionary_are_understood(tmp_path: Path) -> None:
    class Params(dict[str, Any]):
        """As MindSpore's: attributes are entries, and a missing one is a KeyError."""

        def __getattr__(self, name: str) -> Any:
            return self[name]

    class Context:
        def original_args(self) -> Params:
            network = {"w": np.ones(1, np.float32)}
            facts = {"cur_step_num": 1, "cur_epoch_num": 1, "batch_num": 1}
            return Params(**facts, train_network=network)

    _callback(tmp_path).step_end(Context())
    assert data_files(tmp_path) == ["CKP-1_1.ckpt"]


def test_string_as_configuration_is_refused_with_mindspores_message(tmp_path: Path) -> None:
    config: Any = "keep everything"
    with pytest.raises(TypeError, match="the type of argument 'config' should be"):
        ModelCheckpoint("CKP", str(tmp_path), config)


def _with_full_disk(directory: Path, **config: Any) -> ModelCheckpoint:
    """Return a callback whose first save fails in the background."""
    disk = FailingDisk(api.OsFileSystem(), operation="reserve", call=1)
    checked = CheckpointConfig(async_save=True, save_checkpoint_steps=2, **config)
    return callback_on("net", str(directory), checked, fs=disk)


def test_failure_in_the_background_leaves_a_with_block_as_its_error(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="Input/output"),
        _with_full_disk(tmp_path) as callback,
    ):
        Loop(callbacks=(callback,)).run(2, end=False)


def test_failure_in_the_background_is_a_note_on_the_error_of_the_training(tmp_path: Path) -> None:
    error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError) as caught:
        Loop(callbacks=(_with_full_disk(tmp_path),)).run_and_fail(2, error)
    assert caught.value is error
    assert "a save in the background failed" in error.__notes__[0]


def test_breakpoint_is_saved_after_a_failure_in_the_background(tmp_path: Path) -> None:
    error = ZeroDivisionError()
    callback = _with_full_disk(tmp_path, exception_save=True)
    with pytest.raises(ZeroDivisionError):
        Loop(callbacks=(callback,)).run_and_fail(2, error)
    assert "a save in the background failed" in error.__notes__[0]
    assert data_files(tmp_path) == ["net-1_2_breakpoint.ckpt"]
