# SPDX-License-Identifier: Apache-2.0
"""Going back into a live state: verified first, then read where it belongs; a damaged file changes nothing."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    CorruptCheckpoint,
    StateMismatch,
)
from ckptmgr.files.load.in_place import InPlaceState
from ckptmgr.files.load.state import StoredState
from ckptmgr.series.reader import SeriesReader
from tests.support import api
from tests.support.runs import manager_on
from tests.support.saved import flip
from tests.support.surface import KEY
from tests.support.trees import same

CONFIGS = {
    "ckpt": CheckpointConfig(),
    "safetensors": CheckpointConfig(format="safetensors"),
    "sealed": CheckpointConfig(enc_key=KEY),
}


def some_state(seed: int) -> dict[str, Any]:
    """Return a state with a bit of everything that is special about being filled in place."""
    rng = np.random.default_rng(seed)
    base, tied = rng.random(50), rng.random(20)
    return {
        "weight": rng.random((300, 40), np.float32),
        "half": rng.random(7).astype(ml_dtypes.bfloat16),
        "fp8": rng.random(7).astype(ml_dtypes.float8_e4m3fn),
        "big-endian": rng.random(3).astype(">f8"),
        "fortran": np.asfortranarray(rng.random((3, 4))),
        "strided": np.repeat(rng.random(5), 2)[::2],
        "flags": rng.random(9) > 0.5,
        "scalar": np.array(rng.random()),
        "empty": np.zeros((0, 4)),
        "tied": [tied, tied],
        "views": [base[:30], base[20:]],
        "bytes": rng.bytes(2000),
        "bytearray": bytearray(rng.bytes(2000)),
        "generators": [rng, np.random.RandomState(seed), random.Random(seed)],
        "anything": None if seed == 0 else rng.random(4),
        "steps": seed,
    }


def draws(state: dict[str, Any]) -> list[object]:
    """Take the generators out of a state and return their next draws."""
    numpy_rng, legacy, python = state.pop("generators")
    return [numpy_rng.random(), legacy.random_sample(), python.random()]


def read(directory: Path, state: object, config: CheckpointConfig) -> object:
    """Return the stored state before the manager restores it."""
    key = api.Key(config.enc_key) if isinstance(config.enc_key, bytes) else None
    reader = SeriesReader(
        api.place(directory, keys=key, allow_unencrypted=True),
        "ckpt",
        options=api.reading(keys=key),
    )
    return reader.read(reader.find(1), state)


@pytest.mark.parametrize("way", CONFIGS)
def test_state_is_filled_as_it_would_be_from_memory(tmp_path: Path, way: str) -> None:
    config = CONFIGS[way]
    state = some_state(1)
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(1, copy.deepcopy(state))
    target = some_state(0)
    arrays = {name: target[name] for name in ("weight", "half", "strided", "scalar")}
    found = read(tmp_path, target, config)
    assert isinstance(found, InPlaceState)
    assert found.put_back(target) is target
    assert all(target[name] is array for name, array in arrays.items())
    assert draws(target) == draws(state)
    # One array before the save is one array in the file; in the target it stays as it was there.
    assert same(target, state)


def test_torch_modules_and_optimizers_are_filled(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def built(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        frozen = torch.nn.Linear(40, 500).requires_grad_(False)
        model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.BatchNorm1d(50))
        optimizer = torch.optim.AdamW(model.parameters())
        if seed:
            model(torch.rand(8, 40)).sum().backward()
            optimizer.step()
        return {
            "frozen": frozen,
            "model": model,
            "optimizer": optimizer,
            "ema": torch.rand(50, 40).T,
        }

    state, target = built(1), built(0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        weight = target["model"][0].weight
        address = weight.data_ptr()
        assert isinstance(read(tmp_path, target, CheckpointConfig()), InPlaceState)
        manager.resume(target)
    assert target["model"][0].weight is weight
    assert weight.data_ptr() == address
    for part in ("frozen", "model"):
        for name, value in state[part].state_dict().items():
            assert torch.equal(target[part].state_dict()[name], value)
    assert torch.equal(target["ema"], state["ema"])
    for mine, theirs in zip(
        target["optimizer"].state_dict()["state"].values(),
        state["optimizer"].state_dict()["state"].values(),
        strict=True,
    ):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@given(data=st.data())
@settings(max_examples=15)
@pytest.mark.parametrize("way", CONFIGS)
def test_damaged_checkpoint_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, way: str, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("run")
    target: dict[str, Any] = {"w": np.zeros(1000), "n": 0}
    with CheckpointManager(directory, CONFIGS[way]) as manager:
        manager.save(1, {"w": np.ones(1000), "n": 1})
        (path,) = (c.path for c in manager.checkpoints())
        flip(path, data.draw(st.integers(0, path.stat().st_size - 1)))
        found = manager.resume(target)
        assert found.is_fresh
        assert len(found.skipped) == 1
        with pytest.raises(CorruptCheckpoint):
            manager.load(1, target)
        with pytest.raises(CheckpointNotFound):
            manager.rollback(target)
    assert not target["w"].any()
    assert target["n"] == 0


def test_older_checkpoint_is_read_in_place_when_the_newest_is_damaged(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.full(1000, step)})
        flip(tmp_path / "ckpt-2.ckpt", 5000)
        target = {"w": np.zeros(1000, int)}
        assert manager.resume(target).step == 1
    assert (target["w"] == 1).all()


def test_state_that_does_not_fit_is_not_changed(tmp_path: Path) -> None:
    target = {"a": np.zeros(100), "b": np.zeros(3)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": np.ones(100), "b": np.ones(4)})
        with pytest.raises(StateMismatch, match=r"'b'\] is float64\[3\], stored is float64\[4\]"):
            manager.resume(target)
    assert not target["a"].any()


def test_targets_that_overlap_take_what_is_equal_there_and_nothing_else(tmp_path: Path) -> None:
    memory = np.zeros(150, np.uint8)
    whole = np.repeat(np.arange(3, dtype=np.uint8), 50)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, [whole[:100].copy(), whole[50:].copy()])
        manager.resume([memory[:100], memory[50:]])
        assert np.array_equal(memory, whole)
        manager.save(2, [np.full(100, 1, np.uint8), np.full(100, 2, np.uint8)])
        with pytest.raises(StateMismatch, match=re.escape("state[1] overlaps state[0] in memory")):
            manager.resume([memory[:100], memory[50:]])
    assert np.array_equal(memory, whole)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"w": np.asfortranarray(np.zeros((30, 40)))},
        lambda: {"w": None},
        lambda: {"w": np.zeros((30, 80))[:, ::2]},
    ],
    ids=["fortran", "nothing-there", "strided"],
)
def test_state_without_room_is_read_into_memory_first(
    tmp_path: Path, make: Callable[[], dict[str, Any]]
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.ones((30, 40))})
        assert isinstance(read(tmp_path, make(), CheckpointConfig()), StoredState)
        target = make()
        manager.resume(target)
    assert np.array_equal(target["w"], np.ones((30, 40)))


def test_bare_file_that_nothing_vouches_for_is_read_into_memory_first(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.ones(100)})
    (tmp_path / "ckpt-1.ckpt.manifest.json").unlink()
    reader = SeriesReader(api.place(tmp_path), "ckpt", options=api.reading())
    (checkpoint,) = api.listed(tmp_path)
    assert isinstance(reader.read(checkpoint, {"w": np.zeros(100)}), StoredState)


class Changing(api.OsFileSystem):
    """A disk on which a file changes when so many of its bytes have been read.

    Attributes:
        stable_bytes: Until then it has the written bytes.
    """

    stable_bytes = 1 << 60

    def open(self, path: Path, *, is_uncached: bool = False) -> api.InputFile:
        """Open a file that may change."""
        return _ChangingFile(super().open(path, is_uncached=is_uncached), self)


class _ChangingFile:
    def __init__(self, file: api.InputFile, disk: Changing) -> None:
        self._file = file
        self._disk = disk
        self.size = file.size
        self.close = file.close

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._file.read_into(offset, buffer)
        self._disk.stable_bytes -= buffer.nbytes
        if self._disk.stable_bytes < 0:
            buffer[-1] ^= 1


def test_file_that_changes_after_it_was_verified_is_an_error_that_says_so(tmp_path: Path) -> None:
    disk = Changing()
    with manager_on(tmp_path, fs=disk) as manager:
        manager.save(1, {"w": np.ones(1 << 20)})
        disk.stable_bytes = 15 << 20  # 8 MiB to verify, and nearly as much to read
        with pytest.raises(CorruptCheckpoint) as caught:
            manager.resume({"w": np.zeros(1 << 20)})
        disk.stable_bytes = 1 << 60
    assert "partly overwritten" in caught.value.__notes__[0]


@pytest.mark.parametrize("is_sliced", [True, False], ids=["sliced", "expanded"])
def test_torch_tensor_of_one_element_may_have_any_stride(tmp_path: Path, is_sliced: bool) -> None:
    torch: Any = pytest.importorskip("torch")

    def state(value: float) -> dict[str, Any]:
        one = torch.full((1, 8), value)[:, 0] if is_sliced else torch.tensor(value).expand(1)
        half = torch.full((1, 8), value, dtype=torch.bfloat16)[:, 0]
        return {"one": one, "half": half, "turned": torch.full((1, 4), 1j * value)[:, 0].conj()}

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(3.0))
        given = state(0.0)
        found = manager.resume(given)
    assert found.step == 1
    assert {name: one.tolist() for name, one in given.items()} == {
        "one": [3.0],
        "half": [3.0],
        "turned": [-3j],
    }


def many_small(value: float) -> dict[str, np.ndarray]:
    """Return more small arrays than are read into places of their own."""
    return {f"w{number}": np.full(3, value + number) for number in range(1000)}


def test_many_small_arrays_are_read_once_and_filled_in_place(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, many_small(1))
    target = many_small(0)
    arrays = dict(target)

    found = read(tmp_path, target, CheckpointConfig())
    assert isinstance(found, StoredState)
    assert same(target, many_small(0))
    restored = found.put_back(target)

    assert restored is target
    assert all(target[name] is array for name, array in arrays.items())
    assert same(target, many_small(1))


def test_damage_in_many_small_arrays_changes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, many_small(1))
    [path] = tmp_path.glob("*.ckpt")
    flip(path, path.stat().st_size // 2)
    target = many_small(0)

    with CheckpointManager(tmp_path) as manager:
        resumption = manager.resume(target)

    assert resumption.is_fresh
    assert same(target, many_small(0))
