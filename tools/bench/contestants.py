# SPDX-License-Identifier: Apache-2.0
"""Who takes part: ours in every mode, MindSpore in the same one, safetensors, torch, and the bare disk."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ckptmgr
from tools.bench.disk import RawDisk, sync
from tools.bench.workload import State, size_of

PAGE_BYTES = 4096
_KEY = bytes(range(32))
_SM4_KEY = bytes(range(16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way of writing a file that both ckptmgr and MindSpore have.

    Attributes:
        name: For the table and `--modes`.
        save_options: Arguments of both `save_checkpoint`.
        load_options: Arguments of both `load_checkpoint`.
        suffix: Of the file name.
        is_in_mindspore: Whether MindSpore can do it with this model.
    """

    name: str
    save_options: Mapping[str, Any]
    load_options: Mapping[str, Any]
    suffix: str = ".ckpt"
    is_in_mindspore: bool = True

    @property
    def is_encrypted(self) -> bool:
        """Whether it takes a key."""
        return "enc_key" in self.save_options


def _cipher(name: str, mode: str, key: bytes) -> Mode:
    return Mode(
        name=name,
        save_options={"enc_key": key, "enc_mode": mode},
        load_options={"dec_key": key, "dec_mode": mode},
    )


_SAFETENSORS = {"format": "safetensors"}
_CHECKED = {"crc_check": True}
MODES = (
    Mode(name="ckpt", save_options={}, load_options={}),
    Mode(name="ckpt-crc", save_options=_CHECKED, load_options=_CHECKED),
    _cipher("ckpt-gcm", "AES-GCM", _KEY),
    _cipher("ckpt-cbc", "AES-CBC", _KEY),
    _cipher("ckpt-sm4", "SM4-CBC", _SM4_KEY),
    Mode(
        name="safetensors",
        save_options=_SAFETENSORS,
        load_options=_SAFETENSORS,
        suffix=".safetensors",
    ),
    Mode(
        name="safetensors-crc",
        save_options=_SAFETENSORS | _CHECKED,
        load_options=_SAFETENSORS | _CHECKED,
        suffix=".safetensors",
        is_in_mindspore=False,  # its CRC stops at bfloat16
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """Something that saves the model to a path durably, and loads it.

    Attributes:
        name: Who.
        mode: In which mode; those of one mode are compared with each other.
        suffix: Of the file name.
        save: Saves to a path that does not exist; what it writes survives a power cut when it returns.
        load: Loads from the path and touches every page of the result.
    """

    name: str
    mode: str
    suffix: str
    save: Callable[[Path], object]
    load: Callable[[Path], object]


def contestants(state: State, names: frozenset[str]) -> list[Contestant]:
    """Return everybody who is installed, for the modes called `names`, those of one mode side by side."""
    modes = [mode for mode in MODES if mode.name in names]
    theirs = _mindspore(state, modes) if importlib.util.find_spec("mindspore") else {}
    everybody = []
    for mode in modes:
        everybody.append(ours(state, mode))
        everybody += theirs.get(mode.name, [])
        if mode.name == "safetensors":
            everybody += _others(state)
    disk, size_bytes = RawDisk(), size_of(state)
    limit = Contestant(
        name="raw O_DIRECT",
        mode="limit",
        suffix=".raw",
        save=lambda path: disk.write(path, size_bytes),
        load=disk.read,
    )
    return [*everybody, limit]


def ours(state: State, mode: Mode) -> Contestant:
    """Return ckptmgr in one mode."""
    return Contestant(
        name="ckptmgr",
        mode=mode.name,
        suffix=mode.suffix,
        save=lambda path: ckptmgr.save_checkpoint(state, path, **mode.save_options),
        load=lambda path: touch(ckptmgr.load_checkpoint(path, **mode.load_options)),
    )


def _mindspore(state: State, modes: list[Mode]) -> dict[str, list[Contestant]]:
    import mindspore
    from mindspore.common import np_dtype

    def parameter(name: str, array: np.ndarray) -> Any:
        is_half = array.dtype.name == "bfloat16"
        tensor = mindspore.Tensor(array.view(np_dtype.bfloat16) if is_half else array)
        return mindspore.Parameter(tensor, name=name)

    parameters = {name: parameter(name, array) for name, array in state.items()}

    def contestant(mode: Mode) -> Contestant:
        def save(path: Path) -> None:
            mindspore.save_checkpoint(parameters, str(path), **mode.save_options)
            sync(path)

        def load(path: Path) -> None:
            loaded = mindspore.load_checkpoint(str(path), **mode.load_options)
            touch({name: value.asnumpy() for name, value in loaded.items()})

        return Contestant(
            name="mindspore", mode=mode.name, suffix=mode.suffix, save=save, load=load
        )

    return {mode.name: [contestant(mode)] for mode in modes if mode.is_in_mindspore}


def _others(state: State) -> list[Contestant]:
    from safetensors import numpy as safetensors_numpy

    # Its NumPy half does not load bfloat16; the same bytes as uint16 cost it the same.
    bits = {
        name: array.view(np.uint16) if array.dtype.name == "bfloat16" else array
        for name, array in state.items()
    }

    def save(path: Path) -> None:
        safetensors_numpy.save_file(bits, path)
        sync(path)

    stock = Contestant(
        name="safetensors.numpy",
        mode="safetensors",
        suffix=".safetensors",
        save=save,
        load=lambda path: touch(safetensors_numpy.load_file(path)),
    )
    return [stock, *(_torch(bits) if importlib.util.find_spec("torch") else ())]


def _torch(bits: State) -> list[Contestant]:
    import torch

    tensors = {
        name: torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)
        for name, array in bits.items()
    }

    def save(path: Path) -> None:
        torch.save(tensors, path)
        sync(path)

    def load(path: Path) -> None:
        loaded = torch.load(path, weights_only=True)
        touch({name: tensor.numpy() for name, tensor in loaded.items()})

    return [Contestant(name="torch.save", mode="safetensors", suffix=".pt", save=save, load=load)]


def touch(loaded: Mapping[str, Any]) -> int:
    """Read one byte of every page, so that a lazily mapped file is really loaded."""
    flat = (np.asarray(array).reshape(-1).view(np.uint8) for array in loaded.values())
    return sum(int(array[::PAGE_BYTES].sum(dtype=np.int64)) for array in flat)
