# SPDX-License-Identifier: Apache-2.0
"""Every element type and header that the safetensors library holds, read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import ckptmgr
from ckptmgr import CheckpointConfig, PackedArray, UnsupportedCheckpoint, UnsupportedState
from tests.cli.running import key_file, run, run_json
from tests.support.surface import Loop

KEY = bytes(range(32))

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
PACKED = ("F4", "F6_E2M3", "F6_E3M2")
SHAPE = (2, 4)


def stored_bytes(dtype: str) -> bytes:
    size = BITS[dtype] * 8 // 8
    return bytes(size) if dtype == "BOOL" else bytes(range(size))


def write_every_type(path: Path, *, before: bytes = b"", after: bytes = b"") -> Path:
    """Write a file with a tensor of each type, and white space around its header."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    content = b""
    for dtype in BITS:
        stop = len(content) + len(stored_bytes(dtype))
        header[dtype] = {"dtype": dtype, "shape": SHAPE, "data_offsets": [len(content), stop]}
        content += stored_bytes(dtype)
    text = before + json.dumps(header).encode() + after
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def library_bytes(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return type, shape and bytes of each tensor as the library reads them."""
    tensors = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    return {name: (one["dtype"], tuple(one["shape"]), bytes(one["data"])) for name, one in tensors}


@pytest.fixture
def every_type(tmp_path: Path) -> Path:
    return write_every_type(tmp_path / "all.safetensors")


def bytes_of(value: object) -> bytes:
    return np.asarray(value).tobytes()


@pytest.mark.parametrize(
    "options", [{}, {"enc_key": KEY}, {"compression": "zstd"}, {"crc_check": True}]
)
def test_every_type_saved_again_is_the_same_to_the_library(
    every_type: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    values = ckptmgr.load_checkpoint(every_type)
    assert {name: bytes_of(one) for name, one in values.items()} == {
        dtype: stored_bytes(dtype) for dtype in BITS
    }
    saved = ckptmgr.save_checkpoint(values, tmp_path / "again", format="safetensors", **options)  # type: ignore[arg-type]
    again = ckptmgr.load_checkpoint(saved.path, dec_key=options.get("enc_key"))  # type: ignore[arg-type]
    ckptmgr.save_checkpoint(again, tmp_path / "plain", format="safetensors")
    assert library_bytes(tmp_path / "plain.safetensors") == library_bytes(every_type)


@pytest.mark.parametrize("dtype", PACKED)
def test_packed_elements_come_as_bytes_with_their_type(every_type: Path, dtype: str) -> None:
    value = ckptmgr.load_checkpoint(every_type)[dtype]
    assert value[:2] == (dtype, SHAPE)
    assert value.data.tobytes() == stored_bytes(dtype)
    with ckptmgr.open_checkpoint(every_type) as reader:
        assert reader.spec(dtype).stated_shape == SHAPE
        read = reader.read(dtype)
        with pytest.raises(UnsupportedCheckpoint, match="may end within a byte"):
            reader.read(dtype, rows=slice(0, 1))
    assert isinstance(read, PackedArray)
    assert read[:2] == value[:2]
    assert np.array_equal(read, value)
    assert np.array(read, np.int64).sum() == value.data.sum()


def test_packed_elements_that_do_not_fill_a_row_keep_their_shape(tmp_path: Path) -> None:
    odd = PackedArray("F4", (3, 2, 1), np.arange(3, dtype=np.uint8))
    ckptmgr.save_checkpoint({"odd": odd}, tmp_path / "x", format="safetensors")
    stored = library_bytes(tmp_path / "x.safetensors")
    assert stored == {"odd": ("F4", (3, 2, 1), b"\x00\x01\x02")}


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (PackedArray("F5", (2,), np.zeros(1, np.uint8)), "'F5' is no packed type; there are F4"),
        (PackedArray("F4", (3,), np.zeros(2, np.uint8)), "12 bits, which are no whole bytes"),
        (PackedArray("F4", (2,), np.zeros(2, np.uint8)), "needs 1 bytes as uint8"),
        (PackedArray("F4", (2,), np.zeros(1, np.int8)), r"the data is int8\[1\]"),
    ],
)
def test_packed_elements_that_contradict_themselves_are_refused(
    tmp_path: Path, packed: PackedArray, message: str
) -> None:
    with pytest.raises(UnsupportedState, match=f"{message}.*'w'"):
        ckptmgr.save_checkpoint({"w": packed}, tmp_path / "x", format="safetensors")


def test_packed_elements_in_a_ckpt_are_refused_by_name(tmp_path: Path) -> None:
    packed = PackedArray("F4", (2,), np.zeros(1, np.uint8))
    with pytest.raises(UnsupportedCheckpoint, match=r"F4.*'w'"):
        ckptmgr.save_checkpoint({"w": packed}, tmp_path / "x.ckpt")


def test_torch_elements_of_four_bits_have_the_shape_that_the_library_writes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import safetensors.torch

    value = torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2)
    ckptmgr.save_checkpoint({"m": value}, tmp_path / "x", format="safetensors")
    safetensors.torch.save_file({"m": value}, tmp_path / "lib.safetensors")
    ours = library_bytes(tmp_path / "x.safetensors")
    assert ours == library_bytes(tmp_path / "lib.safetensors")


def test_packed_elements_pass_through_the_worker_process(tmp_path: Path) -> None:
    packed: Any = PackedArray("F6_E3M2", (4,), np.arange(3, dtype=np.uint8))
    config = CheckpointConfig(format="safetensors", async_save="process")
    callback = ckptmgr.ModelCheckpoint("net", str(tmp_path), config)
    Loop(callbacks=(callback,), network={"w": np.zeros(1), "packed": packed}).run(1)
    stored = library_bytes(Path(callback.latest_ckpt_file_name))
    assert stored["packed"] == ("F6_E3M2", (4,), b"\x00\x01\x02")


def test_commands_take_every_type(every_type: Path, tmp_path: Path) -> None:
    shown = run_json("inspect", every_type, "--stats")
    (f4,) = [one for one in shown["items"] if one["name"] == "F4"]
    assert (f4["dtype"], f4["shape"], f4["size_bytes"]) == ("F4", list(SHAPE), 4)
    assert f4["stats"]["min"] is None
    assert run("verify", every_type).exit_code == 0
    sealed, back = tmp_path / "s.safetensors.ckpe", tmp_path / "back.safetensors"
    key = key_file(tmp_path)
    assert run("encrypt", every_type, "-o", sealed, "--key", key).exit_code == 0
    assert run("verify", sealed, "--key", key).exit_code == 0
    assert run("decrypt", sealed, "-o", back, "--key", key).exit_code == 0
    assert back.read_bytes() == every_type.read_bytes()


def test_convert_compresses_and_expands_every_type(every_type: Path) -> None:
    before = every_type.read_bytes()
    folder = every_type.parent
    result = run("convert", folder, "--compression", "zstd")
    assert result.exit_code == 0, result.output
    assert not every_type.exists()
    loaded = ckptmgr.load_checkpoint(folder / "all.safetensors.ckpz")
    assert {name: bytes_of(one) for name, one in loaded.items()} == {
        dtype: stored_bytes(dtype) for dtype in BITS
    }
    assert run("convert", folder, "--compression", "none").exit_code == 0
    assert every_type.read_bytes() == before


@pytest.mark.parametrize("space", [b" ", b" \t\r\n" * 9])
def test_header_padded_in_front_is_read(tmp_path: Path, space: bytes) -> None:
    path = write_every_type(tmp_path / "x.safetensors", before=space, after=space)
    assert set(library_bytes(path)) == set(BITS)
    assert set(ckptmgr.load_checkpoint(path)) == set(BITS)
    with ckptmgr.open_checkpoint(path) as reader:
        assert set(reader.names()) == set(BITS)
    assert run("verify", path).exit_code == 0
    assert run("inspect", path).exit_code == 0
    sealed = tmp_path / "s.safetensors.ckpe"
    assert run("encrypt", path, "-o", sealed, "--key", key_file(tmp_path)).exit_code == 0


def test_prune_keeps_what_has_packed_elements(tmp_path: Path) -> None:
    packed: Any = PackedArray("F4", (2,), np.zeros(1, np.uint8))
    callback = ckptmgr.ModelCheckpoint("net", str(tmp_path), CheckpointConfig(format="safetensors"))
    Loop(callbacks=(callback,), network={"w": np.zeros(1), "packed": packed}).run(3)
    result = run("prune", tmp_path, "--keep", "last(1)", "--yes")
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["net-1_3.safetensors"]
