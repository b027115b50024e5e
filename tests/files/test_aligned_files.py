# SPDX-License-Identifier: Apache-2.0
"""Large files: aligned, and read straight into new arrays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    ChecksumMismatch,
    CkptmgrError,
    load_checkpoint,
    load_state,
    open_checkpoint,
    save_checkpoint,
    save_state,
)
from ckptmgr.formats.safetensors_file import read_safetensors_index
from ckptmgr.io.files import CachedFile

MIB = 1 << 20
KEY = bytes(range(32))


def state(seed: int = 0) -> dict[str, np.ndarray]:
    """Return 9 MiB: tensors of odd sizes, tiny ones in between, a bool, one in several units."""
    rng = np.random.default_rng(seed)
    sizes = {"a": 5 * MIB, "b": 12, "c": 300_000, "d": 2 * MIB, "e": 70_001, "f": 256, "g": MIB}
    arrays = {
        name: np.frombuffer(rng.bytes(size), np.float32 if size % 4 == 0 else np.uint8)
        for name, size in sizes.items()
    }
    return {**arrays, "h": rng.random(200_000) < 0.5, "i": np.array(3)}


def drop_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def equal(found: dict[str, Any], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == array.dtype
        and found[name].shape == array.shape
        and found[name].tobytes() == array.tobytes()
        for name, array in wanted.items()
    )


def offsets(path: Path) -> dict[str, int]:
    file = CachedFile(path)
    try:
        index = read_safetensors_index(file)
    finally:
        file.close()
    return {entry.name: entry.pieces[0].offset for entry in index.entries}


def saved_by_manager(path: Path) -> Path:
    config = CheckpointConfig(format="safetensors")
    with CheckpointManager(path.parent, config) as manager:
        manager.save(1, state())
        latest = manager.latest()
    assert latest is not None
    return latest.path


SURFACES: dict[str, Callable[[Path], Path]] = {
    "save_checkpoint": lambda path: save_checkpoint(state(), path, format="safetensors").path,
    "save_state": lambda path: save_state(state(), path, format="safetensors").path,
    "manager": saved_by_manager,
}


@pytest.mark.parametrize("surface", SURFACES)
def test_files_of_a_mib_are_aligned(tmp_path: Path, surface: str) -> None:
    path = SURFACES[surface](tmp_path / "x.safetensors")
    found = offsets(path)
    assert min(found.values()) % 4096 == 0
    large = [name for name in found if name.endswith(("a", "d", "g"))]
    assert len(large) == 3
    assert all(found[name] % 64 == 0 for name in large)
    assert len(safetensors.numpy.load_file(path)) == len(found)


def test_names_of_an_aligned_file_load_in_the_order_of_a_compact_one(tmp_path: Path) -> None:
    path = save_checkpoint(state(), tmp_path / "x", format="safetensors").path
    small = {name: array.reshape(-1)[:3] for name, array in state().items()}
    compact = save_checkpoint(small, tmp_path / "y", format="safetensors").path
    assert list(load_checkpoint(path)) == list(load_checkpoint(compact))
    some = list(load_checkpoint(path, filter_prefix="b"))
    assert some == [name for name in load_checkpoint(compact) if not name.startswith("b")]


def test_state_keeps_the_order_of_its_keys(tmp_path: Path) -> None:
    given = dict(reversed(state().items()))
    loaded = load_state(save_state(given, tmp_path / "x", format="safetensors").path)
    assert isinstance(loaded, dict)
    assert list(loaded) == list(given)


MODES: dict[str, dict[str, Any]] = {
    "plain": {"format": "safetensors"},
    "crc": {"format": "safetensors", "crc_check": True},
    "container": {"format": "safetensors", "enc_key": KEY},
    "compressed": {"format": "safetensors", "compression": "zstd"},
    "ckpt": {"format": "ckpt"},
    "ckpt-gcm": {"format": "ckpt", "enc_key": KEY},
}


@pytest.mark.parametrize("is_cold", [False, True], ids=["cached", "cold"])
@pytest.mark.parametrize("mode", MODES)
def test_large_files_load_into_new_and_into_existing_arrays(
    tmp_path: Path, mode: str, is_cold: bool
) -> None:
    options = MODES[mode]
    key = options.get("enc_key")
    path = save_checkpoint(state(), tmp_path / "x", **options).path
    if is_cold:
        drop_cache(path)
    loaded = load_checkpoint(path, dec_key=key, crc_check="crc_check" in options)
    assert equal(loaded, state())
    for array in loaded.values():
        array[...] = 0
    load_checkpoint(path, into=loaded, dec_key=key)
    assert equal(loaded, state())


def test_files_without_digests_load_into_arenas(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(state(), path)
    assert equal(load_checkpoint(path), state())
    assert equal(
        load_checkpoint(path, filter_prefix=("a", "e")),
        {name: array for name, array in state().items() if name not in "ae"},
    )


def test_new_arrays_are_as_aligned_as_their_file(tmp_path: Path) -> None:
    path = save_checkpoint(state(), tmp_path / "x", format="safetensors").path
    loaded = load_checkpoint(path)
    for name, offset in offsets(path).items():
        if name in "adg":
            assert loaded[name].ctypes.data % 4096 == offset % 4096
            assert loaded[name].ctypes.data % 64 == 0


@pytest.mark.parametrize("place", ["a", "c", "h", "end"])
def test_damage_in_an_arena_is_found(tmp_path: Path, place: str) -> None:
    path = save_checkpoint(state(), tmp_path / "x", format="safetensors").path
    at = path.stat().st_size - 1 if place == "end" else offsets(path)[place] + 7
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ChecksumMismatch):
        load_checkpoint(path)


def test_a_bool_in_an_arena_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"w": np.zeros(4 * MIB, np.bool_)}, path)
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\2")
    with pytest.raises(CkptmgrError, match="bool"):
        load_checkpoint(path)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_one_array_that_is_kept_does_not_keep_the_memory_of_the_others(tmp_path: Path) -> None:
    given = {f"w{i}": np.ones(MIB, np.uint8) for i in range(40)}
    loaded = load_checkpoint(save_checkpoint(given, tmp_path / "x", format="safetensors").path)
    before = resident_bytes()
    kept = loaded.pop("w7")
    loaded.clear()
    assert before - resident_bytes() > 30 * MIB
    assert kept.all()


def test_loaded_arrays_are_saved_again_as_separate_tensors(tmp_path: Path) -> None:
    path = save_checkpoint(state(), tmp_path / "x", format="safetensors").path
    again = save_state(load_checkpoint(path), tmp_path / "y", format="safetensors").path
    with open_checkpoint(again) as reader:
        assert sum(reader.spec(name).size_bytes for name in reader.tensor_names()) == sum(
            array.nbytes for array in state().values()
        )
