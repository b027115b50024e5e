# SPDX-License-Identifier: Apache-2.0
"""The ways in which MindSpore 2.10 was seen to lose or change data without a word, and that ours does not: content of files.

The numbers F14 to F26 are those of the experiments with the real MindSpore; "MindSpore" says what came of them there. The
faults of disks are in test_mindspore_faults.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    ChecksumMismatch,
    CorruptCheckpoint,
    KeyProblem,
    ModelCheckpoint,
    TamperedCheckpoint,
    TruncatedCheckpoint,
    UnsupportedCheckpoint,
    UnsupportedState,
    load_checkpoint,
    save_checkpoint,
)
from tests.support.surface import KEY, Loop, bare

_BLOCK_BYTES = 4 << 20
_MODES = ["AES-GCM", "AES-CBC", "SM4-CBC"]
_NETWORK = {"w": np.array([1, 2], np.float32), "b": np.array([3, 4], np.float32)}


def _replaced(path: Path, content: bytes) -> Path:
    """Put other bytes in place of a file, beside the manifest of the old ones."""
    path.unlink()
    path.write_bytes(content)
    return path


def test_f14_crc_check_with_a_key_loads_again(tmp_path: Path) -> None:
    """MindSpore: accepted silently, and the file can never be loaded."""
    config = CheckpointConfig(crc_check=True, enc_key=KEY)
    Loop(callbacks=(ModelCheckpoint("CKP", str(tmp_path), config),)).run(1)
    values = load_checkpoint(tmp_path / "CKP-1_1.ckpt", dec_key=KEY, crc_check=True)
    assert np.array_equal(values["w"], np.ones(4, np.float32))


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_f15_empty_tensor_comes_back_with_its_shape(
    tmp_path: Path, shape: tuple[int, ...], format: str
) -> None:
    """MindSpore: missing from the file; with async_save, (0,) comes back as a scalar of value 0."""
    path = tmp_path / f"x.{format}"
    save_checkpoint({"e": np.zeros(shape, np.float32)}, path, format=format)
    values = load_checkpoint(path)
    assert isinstance(values["e"], np.ndarray)
    assert values["e"].shape == shape


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_f16_complex_ckpt_is_refused_before_it_replaces_anything(
    tmp_path: Path, dtype: type[np.generic]
) -> None:
    """MindSpore: it saves files without a word that it cannot load."""
    path = tmp_path / "x.ckpt"
    save_checkpoint(_NETWORK, path)
    with pytest.raises(UnsupportedCheckpoint, match="tensor 'c'"):
        save_checkpoint({"c": np.zeros(2, dtype)}, path)
    assert set(load_checkpoint(path)) == {"w", "b"}


def test_f16_complex64_safetensors_loads_again(tmp_path: Path) -> None:
    """MindSpore: saves, and fails with KeyError 'C64' when it loads."""
    value = np.array([1 + 2j, -0.5j], np.complex64)
    save_checkpoint({"c": value}, tmp_path / "x.safetensors", format="safetensors")
    assert np.array_equal(load_checkpoint(tmp_path / "x.safetensors")["c"], value)


def test_f17_dictionary_of_several_values_is_saved_whole(tmp_path: Path) -> None:
    """MindSpore: of `{'x': Parameter, 'y': Tensor}` y is dropped."""
    save_checkpoint({"x": np.zeros(1), "y": np.ones(2), "z": 5}, tmp_path / "x.ckpt")
    assert set(load_checkpoint(tmp_path / "x.ckpt")) == {"x", "y", "z"}


def test_f18_appended_value_with_the_name_of_a_parameter_is_refused(tmp_path: Path) -> None:
    """MindSpore: the parameter is replaced by the number."""
    with pytest.raises(UnsupportedState, match="'w' is the name of a parameter"):
        save_checkpoint(_NETWORK, tmp_path / "x.ckpt", append_dict={"w": 1})
    assert list(tmp_path.iterdir()) == []


def test_f18_append_info_with_the_name_of_a_parameter_is_refused(tmp_path: Path) -> None:
    """MindSpore: the parameter is replaced by the number in every checkpoint."""
    config = CheckpointConfig(append_info=[{"w": 1}])
    with pytest.raises(UnsupportedState, match="'w' is the name of a parameter"):
        Loop(callbacks=(ModelCheckpoint("CKP", str(tmp_path), config),)).run(1)


def test_f19_list_with_one_name_twice_is_refused(tmp_path: Path) -> None:
    """MindSpore: the last one wins."""
    twice = [{"name": "w", "data": np.zeros(1)}, {"name": "w", "data": np.ones(1)}]
    with pytest.raises(UnsupportedState, match="two values are called 'w'"):
        save_checkpoint(twice, tmp_path / "x.ckpt")


def test_f20_large_step_counter_with_a_safetensors_crc_is_saved(tmp_path: Path) -> None:
    """MindSpore: MemoryError for 10**12, after the old file is gone."""
    path = tmp_path / "x.safetensors"
    save_checkpoint(_NETWORK, path, append_dict={"n": 10**12}, format="safetensors", crc_check=True)
    assert int(np.asarray(load_checkpoint(path, crc_check=True)["n"])) == 10**12


def test_f20_bfloat16_with_a_safetensors_crc_is_saved(tmp_path: Path) -> None:
    """MindSpore: ValueError, after the old file is gone."""
    import ml_dtypes

    path = tmp_path / "x.safetensors"
    value = np.array([1, 2], ml_dtypes.bfloat16)
    save_checkpoint({"h": value}, path, format="safetensors", crc_check=True)
    assert np.array_equal(load_checkpoint(path, crc_check=True)["h"], value)


def test_f20_negative_counter_with_a_safetensors_crc_keeps_the_old_file(tmp_path: Path) -> None:
    """MindSpore: ValueError "negative count", after the old file is gone. Its reader could not check such a CRC."""
    path = tmp_path / "x.safetensors"
    save_checkpoint(_NETWORK, path, format="safetensors")
    with pytest.raises(UnsupportedCheckpoint, match="negative scalar"):
        save_checkpoint({"n": -1}, path, format="safetensors", crc_check=True)
    assert set(load_checkpoint(path)) == {"w", "b"}


def _cut_between_entries(path: Path, *, crc: bool) -> bytes:
    save_checkpoint({"w": _NETWORK["w"]}, path)
    first_bytes = path.stat().st_size
    save_checkpoint(_NETWORK, path, crc_check=crc)
    return path.read_bytes()[:first_bytes]


def test_f21_file_cut_between_two_entries_does_not_match_its_manifest(tmp_path: Path) -> None:
    """MindSpore: loads with parameters missing."""
    path = tmp_path / "x.ckpt"
    _replaced(path, _cut_between_entries(path, crc=False))
    with pytest.raises(TruncatedCheckpoint, match="but the manifest says"):
        load_checkpoint(path)


def test_f21_file_that_lost_its_crc_with_its_end_is_refused_by_crc_check(tmp_path: Path) -> None:
    """MindSpore: only logs that there is no CRC, and loads with parameters missing."""
    path = tmp_path / "x.ckpt"
    bare(path, _cut_between_entries(path, crc=True))
    with pytest.raises(ChecksumMismatch, match="its end was cut off"):
        load_checkpoint(path, crc_check=True)


def test_f21_plain_file_without_crc_that_a_manifest_vouches_for_passes_crc_check(
    tmp_path: Path,
) -> None:
    """Digests say more than a CRC."""
    save_checkpoint(_NETWORK, tmp_path / "x.ckpt")
    assert set(load_checkpoint(tmp_path / "x.ckpt", crc_check=True)) == {"w", "b"}


def test_f22_flipped_bit_of_the_content_does_not_match_the_manifest(tmp_path: Path) -> None:
    """MindSpore: a wrong value."""
    path = tmp_path / "x.ckpt"
    save_checkpoint(_NETWORK, path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    with pytest.raises(ChecksumMismatch, match="do not match the digest"):
        load_checkpoint(_replaced(path, bytes(content)))


def test_f22_flipped_dimension_is_never_filled_with_zeros(tmp_path: Path) -> None:
    """MindSpore: the missing tail is zeros."""
    path = tmp_path / "x.ckpt"
    save_checkpoint(_NETWORK, path)
    content = bytearray(path.read_bytes())
    at = content.index(b"\x08\x02") + 1
    content[at] = 3
    with pytest.raises(CorruptCheckpoint, match=r"float32\[3\] needs 12") as caught:
        load_checkpoint(bare(path, bytes(content)))
    assert caught.value.tensor == "w"
    assert caught.value.offset is not None


def _sealed(tmp_path: Path, mode: str, *, name: str = "x.ckpt", value: float = 1.0) -> bytes:
    """Save three records of weights that differ, without a manifest; return the file."""
    weights = np.arange(_BLOCK_BYTES * 5 // 8, dtype=np.float32) + np.float32(value)
    save_checkpoint({"w": weights}, tmp_path / name, enc_key=KEY, enc_mode=mode)
    return bare(tmp_path / name).read_bytes()


def _blocks(data: bytes) -> list[bytes]:
    """Cut a sealed file into its records; the last one is the seal."""
    return [data[at : at + _BLOCK_BYTES] for at in (0, _BLOCK_BYTES)] + [data[2 * _BLOCK_BYTES :]]


def _swapped(ours: bytes, _: bytes) -> bytes:
    first, second, rest = _blocks(ours)
    return second + first + rest


def _duplicated(ours: bytes, _: bytes) -> bytes:
    first, _, rest = _blocks(ours)
    return first + first + rest


def _spliced(ours: bytes, theirs: bytes) -> bytes:
    first, _, rest = _blocks(ours)
    return first + _blocks(theirs)[1] + rest


def _foreign_end(ours: bytes, theirs: bytes) -> bytes:
    return b"".join(_blocks(ours)[:2]) + _blocks(theirs)[2]


def _concatenated(ours: bytes, theirs: bytes) -> bytes:
    return ours + theirs


def _without_first(ours: bytes, _: bytes) -> bytes:
    return ours[_BLOCK_BYTES:]


def _without_seal(ours: bytes, _: bytes) -> bytes:
    return b"".join(_blocks(ours)[:2])


def _one_byte_short(ours: bytes, _: bytes) -> bytes:
    return ours[:-1]


def _one_byte_long(ours: bytes, _: bytes) -> bytes:
    return ours + b"\0"


_ATTACKS = [
    _swapped,
    _duplicated,
    _spliced,
    _foreign_end,
    _concatenated,
    _without_first,
    _without_seal,
    _one_byte_short,
    _one_byte_long,
]


@pytest.mark.parametrize("mode", _MODES)
def test_f23_moved_repeated_and_foreign_blocks_are_refused(tmp_path: Path, mode: str) -> None:
    """MindSpore: each block opens by itself; order, number and origin of the blocks are not authenticated."""
    ours = _sealed(tmp_path, mode)
    theirs = _sealed(tmp_path, mode, name="y.ckpt", value=2.0)
    attacks: list[Callable[[bytes, bytes], bytes]] = list(_ATTACKS)
    accepted = []
    for attack in attacks:
        path = bare(tmp_path / "attacked.ckpt", attack(ours, theirs))
        try:
            load_checkpoint(path, dec_key=KEY, dec_mode=mode)
        except (TamperedCheckpoint, KeyProblem, TruncatedCheckpoint):
            continue
        accepted.append(attack.__name__)
    assert accepted == []


# Where the IV of a record stands, and its ciphertext.
_IV_AT = {"AES-GCM": 28, "AES-CBC": 12, "SM4-CBC": 12}


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("at", ["first of iv", "last of iv", "ciphertext"])
def test_f24_changed_bit_of_iv_or_ciphertext_is_refused(tmp_path: Path, mode: str, at: str) -> None:
    """MindSpore: in CBC modes a bit of the IV or ciphertext changes chosen bits of weights; of a GCM IV 4 bytes are free."""
    path = tmp_path / "x.ckpt"
    save_checkpoint(_NETWORK, path, enc_key=KEY, enc_mode=mode)
    content = bytearray(path.read_bytes())
    content[_IV_AT[mode] + {"first of iv": 0, "last of iv": 15, "ciphertext": 30}[at]] ^= 1
    with pytest.raises((TamperedCheckpoint, KeyProblem)):
        load_checkpoint(bare(path, bytes(content)), dec_key=KEY, dec_mode=mode)


def test_f26_encrypted_file_without_a_key_says_that_it_is_encrypted(tmp_path: Path) -> None:
    """MindSpore: it says that the file may be corrupted and cannot be parsed."""
    save_checkpoint(_NETWORK, tmp_path / "x.ckpt", enc_key=KEY)
    with pytest.raises(KeyProblem, match=r"is encrypted \(AES-GCM\); a key is needed"):
        load_checkpoint(tmp_path / "x.ckpt")
