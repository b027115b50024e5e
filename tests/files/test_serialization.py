# SPDX-License-Identifier: Apache-2.0
"""`save_checkpoint` and `load_checkpoint`: names, links, manifests, networks, and how much memory they take."""

from __future__ import annotations

import io
import logging
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptmgr import (
    CheckpointNotFound,
    CorruptCheckpoint,
    KeyProblem,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
    UnsupportedState,
    load_checkpoint,
    load_param_into_net,
    save_checkpoint,
)
from ckptmgr.files.load.network import load_into
from tests.support import api
from tests.support.surface import KEY, bare

MIB = 1 << 20
_W = {"w": np.array([1, 2], np.float32)}


def _w(path: Path, **options: Any) -> list[float]:
    value = load_checkpoint(path, **options)["w"]
    assert isinstance(value, np.ndarray)
    return list(value.tolist())


def test_save_returns_the_checkpoint_as_it_is_listed(tmp_path: Path) -> None:
    saved = save_checkpoint(_W, tmp_path / "net-2_3.ckpt", append_dict={"step_num": 13})
    assert (saved.path, saved.series, saved.step) == (tmp_path / "net-2_3.ckpt", "net", 13)
    assert [saved] == api.listed(tmp_path)


@pytest.mark.parametrize(
    ("append", "epoch"), [({}, 2), ({"epoch_num": 7}, 7), ({"epoch_num": True}, 2)]
)
def test_save_notes_the_epoch_of_the_counter_or_of_the_name(
    tmp_path: Path, append: dict[str, int], epoch: int
) -> None:
    saved = save_checkpoint(_W, tmp_path / "net-2_3.ckpt", append_dict=append)
    assert saved.epoch == epoch


def test_save_under_another_kind_of_name_is_a_series_of_its_own(tmp_path: Path) -> None:
    saved = save_checkpoint(_W, tmp_path / "final.ckpt")
    assert (saved.series, saved.step, saved.epoch) == ("final", 0, None)


def test_save_through_a_link_replaces_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    save_checkpoint(_W, tmp_path / "real" / "x.ckpt")
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "real" / "x.ckpt")
    save_checkpoint({"w": np.zeros(2, np.float32)}, tmp_path / "link.ckpt")
    assert (tmp_path / "link.ckpt").is_symlink()
    assert _w(tmp_path / "real" / "x.ckpt") == [0, 0]


def test_choice_function_chooses_what_is_saved_appended_values_included(tmp_path: Path) -> None:
    state = {"net.w": np.zeros(1), "opt.m": np.zeros(1)}
    save_checkpoint(
        state,
        tmp_path / "x.ckpt",
        choice_func=lambda name: name.startswith("net"),
        append_dict={"net.n": 1, "n": 2},
    )
    assert set(load_checkpoint(tmp_path / "x.ckpt")) == {"net.w", "net.n"}


def test_choice_function_without_a_match_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="nothing to save"):
        save_checkpoint(_W, tmp_path / "x.ckpt", choice_func=lambda _: False)


def test_string_in_safetensors_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="tensor 'note'"):
        save_checkpoint(
            _W, tmp_path / "x.safetensors", format="safetensors", append_dict={"note": "hi"}
        )


def test_integer_of_more_than_64_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedState, match="64 is the most"):
        save_checkpoint(_W, tmp_path / "x.ckpt", append_dict={"n": 2**70})


@pytest.mark.parametrize("flag", [True, False])
def test_remove_redundancy_is_noted_in_safetensors(tmp_path: Path, flag: bool) -> None:
    path = tmp_path / "x.safetensors"
    save_checkpoint(_W, path, format="safetensors", remove_redundancy=flag)
    assert f'"remove_redundancy":"{flag}"'.encode() in path.read_bytes().replace(b" ", b"")


def test_remove_redundancy_that_is_no_bool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'remove_redundancy' must be isinstance of"):
        save_checkpoint(_W, tmp_path / "x.ckpt", remove_redundancy=1)


def test_cipher_mode_of_safetensors_without_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'enc_mode' must be set to default value"):
        save_checkpoint(_W, tmp_path / "x", format="safetensors", enc_mode="AES-CBC")


def test_object_with_a_state_dict_is_saved_with_joined_names(tmp_path: Path) -> None:
    class Model:
        def state_dict(self) -> dict[str, object]:
            return {"layer": {"w": np.ones(1)}, "n": 3}

    save_checkpoint(Model(), tmp_path / "x.ckpt")
    assert set(load_checkpoint(tmp_path / "x.ckpt")) == {"layer.w", "n"}


def test_load_of_a_missing_file_is_both_not_found_and_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound) as caught:
        load_checkpoint(tmp_path / "x.ckpt")
    assert isinstance(caught.value, ValueError)


def test_load_with_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the format must be 'safetensors' or 'ckpt', but got pt"):
        load_checkpoint(tmp_path / "x.pt", format="pt")


def test_load_with_both_prefixes_takes_what_passes_both(tmp_path: Path) -> None:
    save_checkpoint({n: np.zeros(1) for n in ("net.w", "net.b", "opt")}, tmp_path / "x.ckpt")
    values = load_checkpoint(tmp_path / "x.ckpt", specify_prefix="net", filter_prefix=("net.b",))
    assert set(values) == {"net.w"}


def test_load_with_a_prefix_ignores_the_choice_function_as_mindspore_does(tmp_path: Path) -> None:
    save_checkpoint({n: np.zeros(1) for n in ("net.w", "opt")}, tmp_path / "x.ckpt")
    values = load_checkpoint(
        tmp_path / "x.ckpt", specify_prefix="net", choice_func=lambda name: name == "opt"
    )
    assert set(values) == {"net.w"}


def test_load_of_one_name_does_not_read_the_damage_in_another(tmp_path: Path) -> None:
    state = {"a": np.zeros(2, np.float32), "on": np.array([True])}
    path = tmp_path / "x.ckpt"
    save_checkpoint(state, path)
    content = path.read_bytes()
    bare(path, content[:-1] + b"\x07")
    assert set(load_checkpoint(path, choice_func=lambda name: name == "a")) == {"a"}
    with pytest.raises(CorruptCheckpoint, match="tensor 'on'"):
        load_checkpoint(path)


def test_load_of_a_zip_with_pickles_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(UnsupportedCheckpoint, match="weights_only=True"):
        load_checkpoint(tmp_path / "x.ckpt")


def test_load_of_a_container_of_a_newer_version_is_unsupported(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(b"\x8fCKPE\r\n\x1a\x09" + bytes(60))
    with pytest.raises(UnsupportedCheckpoint, match="version 9"):
        load_checkpoint(tmp_path / "x.ckpt")


def test_load_goes_by_the_content_of_a_misnamed_file(tmp_path: Path) -> None:
    save_checkpoint(_W, tmp_path / "x.safetensors", format="safetensors")
    (tmp_path / "y.ckpt").write_bytes((tmp_path / "x.safetensors").read_bytes())
    assert _w(tmp_path / "y.ckpt") == [1, 2]


def test_load_from_bytes_checks_a_crc(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_checkpoint(_W, path, format="safetensors", crc_check=True)
    stream = io.BytesIO(path.read_bytes())
    assert load_checkpoint(stream, format="safetensors", crc_check=True)["w"].shape == (2,)


def test_plain_file_with_a_key_loads_only_when_unencrypted_ones_are_allowed(tmp_path: Path) -> None:
    save_checkpoint(_W, tmp_path / "x.ckpt")
    with pytest.raises(UnsealedCheckpoint):
        load_checkpoint(tmp_path / "x.ckpt", dec_key=KEY)
    with pytest.raises(UnsealedCheckpoint, match="allow-unencrypted"):
        load_checkpoint(tmp_path / "x.ckpt", dec_key=KEY, allow_unsealed=True)
    assert _w(tmp_path / "x.ckpt", dec_key=KEY, allow_unencrypted=True) == [1, 2]


def test_wrong_mode_names_the_right_one(tmp_path: Path) -> None:
    save_checkpoint(_W, tmp_path / "x.ckpt", enc_key=KEY, enc_mode="AES-CBC")
    with pytest.raises(KeyProblem, match="open it with mode AES-CBC"):
        load_checkpoint(tmp_path / "x.ckpt", dec_key=KEY, dec_mode="AES-GCM")


def test_network_of_arrays_is_filled_in_place(tmp_path: Path) -> None:
    save_checkpoint(_W, tmp_path / "x.ckpt", append_dict={"epoch_num": 3})
    mine = np.zeros(2, np.float32)
    load_checkpoint(tmp_path / "x.ckpt", net={"w": mine})
    assert mine.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("runs", None, "this is a directory"),
        ("model.pt", b"PK\x03\x04" + bytes(60), "this is a torch.save file"),
        ("net.ckpt.bak", b"", None),
        ("notes.txt", b"hello", None),
        ("nothing.bin", None, None),
    ],
)
def test_path_that_is_no_checkpoint_name_is_told_what_it_is(
    tmp_path: Path, name: str, content: bytes | None, note: str | None
) -> None:
    (tmp_path / "runs").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="must same with 'format'") as caught:
        load_checkpoint(tmp_path / name)
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert notes.startswith(note) if note is not None else notes == ""


def test_checkpoint_under_another_name_is_told_so(tmp_path: Path) -> None:
    save_checkpoint(_W, tmp_path / "net.ckpt")
    (tmp_path / "net.ckpt").rename(tmp_path / "net.best")
    with pytest.raises(ValueError, match="must same with 'format'") as caught:
        load_checkpoint(tmp_path / "net.best")
    assert caught.value.__notes__ == ["this is a mindspore-ckpt file under another name: rename it"]


def test_network_is_filled_in_a_second_step_that_names_what_is_left_over(tmp_path: Path) -> None:
    save_checkpoint(_W, tmp_path / "net.ckpt", append_dict={"epoch": 3, "note": "hi"})
    loaded = load_checkpoint(tmp_path / "net.ckpt")
    network: dict[str, np.ndarray] = {"w": np.zeros(2, np.float32), "b": np.ones(1)}
    assert load_param_into_net(network, loaded) == (["b"], ["epoch", "note"])
    assert network["w"].tolist() == _W["w"].tolist()
    with pytest.raises(RuntimeError, match="should have the same type"):
        load_param_into_net({"w": np.zeros(2)}, loaded, strict_load=True)


def test_modules_of_torch_and_objects_are_filled_in_a_second_step() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(1, 1)
    values = {"weight": np.full((1, 1), 7, np.float32), "bias": np.zeros(1, np.float32)}
    assert load_param_into_net(model, {**values, "epoch": 3}) == ([], ["epoch"])
    assert model.weight.item() == 7
    schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()))
    assert load_param_into_net(schedule, {"last_epoch": 5}) == ([], [])
    assert schedule.last_epoch == 5


def test_network_of_torch_is_filled_bit_for_bit(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        saved = torch.nn.Linear(3, 2).to(dtype)
        save_checkpoint(saved, tmp_path / "x.ckpt", append_dict={"epoch_num": 3})
        other = torch.nn.Linear(3, 2).to(dtype)
        load_checkpoint(tmp_path / "x.ckpt", net=other)
        assert torch.equal(other.weight, saved.weight)
        assert torch.equal(other.bias, saved.bias)


def test_network_of_torch_that_misses_a_value_is_refused_with_its_name(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_checkpoint({"weight": np.zeros((2, 3), np.float32)}, tmp_path / "x.ckpt")
    with pytest.raises(RuntimeError, match="'bias' is not in the checkpoint"):
        load_checkpoint(tmp_path / "x.ckpt", net=torch.nn.Linear(3, 2))


def test_mapping_of_torch_tensors_is_filled_in_place() -> None:
    torch = pytest.importorskip("torch")
    mine = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    load_into({"w": mine}, {"w": np.array([1, 2], np.float32)})
    assert mine.tolist() == [1, 2]


def test_object_with_load_state_dict_gets_all_values() -> None:
    class Model:
        def load_state_dict(self, state: dict[str, object]) -> None:
            self.state = state

    model = Model()
    load_into(model, {"w": _W["w"], "note": "hi"})
    assert set(model.state) == {"w", "note"}


def test_network_keeps_what_the_file_lacks_and_a_warning_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network: dict[str, np.ndarray] = {"w": np.zeros(2, np.float32), "b": np.ones(1)}
    with caplog.at_level(logging.WARNING):
        load_into(network, _W)
    assert network["b"].tolist() == [1]
    assert "left as they are: b" in caplog.text


def test_network_is_not_half_filled_when_one_value_does_not_fit() -> None:
    network: dict[str, np.ndarray] = {"w": np.zeros(2, np.float32), "b": np.zeros(3)}
    with pytest.raises(RuntimeError, match="b in the argument 'net' should have the same shape"):
        load_into(network, {"w": _W["w"], "b": np.ones(4)})
    assert network["w"].tolist() == [0, 0]


@pytest.mark.parametrize("mine", ["text", 3, None])
def test_network_value_that_cannot_be_filled_is_refused(mine: object) -> None:
    with pytest.raises(TypeError, match="'w' cannot be filled in place"):
        load_into({"w": mine}, _W)


def test_text_for_an_array_is_refused() -> None:
    with pytest.raises(TypeError, match="the checkpoint a str"):
        load_into({"w": np.zeros(2)}, {"w": "text"})


@pytest.mark.parametrize(
    ("mine", "theirs"), [(np.float32, ml_dtypes.bfloat16), (np.int8, np.int64), (np.int64, np.int8)]
)
def test_value_of_a_kindred_type_is_converted(mine: Any, theirs: Any) -> None:
    network = {"w": np.zeros(2, mine)}
    load_into(network, {"w": np.array([1, 2], theirs)})
    assert network["w"].tolist() == [1, 2]


def test_integer_that_would_become_another_number_is_refused() -> None:
    network = {"w": np.zeros(1, np.int8)}
    with pytest.raises(RuntimeError, match="should have the same type"):
        load_into(network, {"w": np.array([300])})


def test_type_without_a_mindspore_name_is_named_as_numpy_does() -> None:
    with pytest.raises(RuntimeError, match=r"its type complex64 .* and type Float32"):
        load_into({"w": np.zeros(2, np.complex64)}, _W)


def _peak_bytes(work: Callable[[], object]) -> int:
    work()  # the pool of buffers is made once
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"crc_check": True},
        {"enc_key": KEY},
        {"enc_key": KEY, "enc_mode": "AES-CBC", "crc_check": True},
        {"format": "safetensors"},
        {"format": "safetensors", "crc_check": True},
    ],
    ids=str,
)
def test_save_of_64_mib_takes_a_few_mib_besides_the_pool(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    state = {f"w{n}": np.zeros(16 * MIB // 4, np.float32) for n in range(4)}
    path = tmp_path / f"x.{options.get('format', 'ckpt')}"
    assert _peak_bytes(lambda: save_checkpoint(state, path, **options)) < 4 * MIB


@pytest.mark.parametrize("options", [{}, {"crc_check": True}], ids=str)
def test_load_of_64_mib_takes_the_tensors_and_one_digest_range(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    state = {f"w{n}": np.zeros(16 * MIB // 4, np.float32) for n in range(4)}
    save_checkpoint(state, tmp_path / "x.ckpt", **options)
    peak = _peak_bytes(lambda: load_checkpoint(tmp_path / "x.ckpt", **options))
    assert peak < (64 + 16 + 6) * MIB


@pytest.mark.parametrize("options", [{"enc_key": bytes(32)}, {"compression": "zstd"}])
def test_missing_file_names_the_one_that_was_saved_encrypted_or_compressed(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    saved = tmp_path / "net.safetensors"
    save_checkpoint({"w": np.ones(3)}, saved, format="safetensors", **options)
    with pytest.raises(FileNotFoundError) as refused:
        load_checkpoint(saved)
    (file,) = [path for path in tmp_path.iterdir() if not path.name.endswith(".json")]
    assert str(file) in str(refused.value)
