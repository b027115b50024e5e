# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the MindSpore surface: a training loop without a framework, and values that compare."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ckptmgr import ModelCheckpoint, PackedArray
from ckptmgr.files.load.values import MapArrays, Value
from ckptmgr.formats.dtypes import BY_MINDSPORE, BY_NAME
from tests.support.stored import Stored, StoredItem

GOLDEN = Path(__file__).parents[1] / "golden"
KEY = b"sixteen byte key"


def comparable(values: Mapping[str, Value]) -> dict[str, StoredItem]:
    """Return loaded values as plain values that compare with `==`, byte for byte."""
    return {name: _comparable(value) for name, value in values.items()}


def _comparable(value: Value) -> StoredItem:
    if isinstance(value, str):
        return value
    if isinstance(value, MapArrays):
        return tuple(_stored(part) for part in value)
    assert not isinstance(value, PackedArray)
    return _stored(value)


def _stored(array: np.ndarray) -> Stored:
    return Stored(array.dtype.name, array.shape, array.tobytes())


def recorded(items: list[dict[str, Any]]) -> dict[str, StoredItem]:
    """Return the values that a golden manifest records, in the same form."""
    values: dict[str, StoredItem] = {}
    for item in items:
        if "string" in item:
            values[item["name"]] = item["string"]
        elif "map" in item:
            values[item["name"]] = tuple(_recorded_array(*part) for part in item["map"])
        else:
            dtype = BY_MINDSPORE.get(item["dtype"]) or BY_NAME[item["dtype"].lower()]
            content = bytes.fromhex(item["raw_hex"])
            values[item["name"]] = Stored(dtype.to_numpy().name, tuple(item["shape"]), content)
    return values


def _recorded_array(dtype: str, shape: list[int], values: list[Any]) -> Stored:
    return _stored(np.array(values, BY_NAME[dtype].to_numpy()).reshape(shape))


def spellings(secret: bytes) -> tuple[str, ...]:
    """Return every way in which a key could show up in a text."""
    return (
        secret.decode("latin-1"),
        repr(bytes(secret))[2:-1],
        secret.hex(),
        secret.hex().upper(),
        base64.b64encode(secret).decode(),
        base64.urlsafe_b64encode(secret).decode(),
        str(list(secret)),
    )


def shows(text: str, secret: bytes) -> bool:
    """Tell whether a text gives a key away."""
    return any(spelling in text for spelling in spellings(secret))


def everything_said(error: BaseException | None) -> str:
    """Return all texts of an error, of its notes and of the errors behind it."""
    said = []
    while error is not None:
        said += [str(error), repr(error), *getattr(error, "__notes__", [])]
        error = error.__cause__ or error.__context__
    return "\n".join(said)


@dataclass
class Loop:
    """A training loop: it drives callbacks as MindSpore's `Model` does and gives each step its own weights.

    Attributes:
        callbacks: Those that are called.
        batch_num: Steps in an epoch.
        step_s: Seconds on the clock before every step.
        now: The clock.
        step: The global step that ran last.
    """

    callbacks: tuple[ModelCheckpoint, ...]
    batch_num: int = 3
    step_s: float = 1.0
    now: float = 0.0
    step: int = 0
    metrics: Mapping[str, float] | None = None
    network: dict[str, np.ndarray] = field(default_factory=lambda: {"w": np.zeros(4, np.float32)})

    def original_args(self) -> Any:
        """Return what MindSpore's run context gives to a callback."""
        params = SimpleNamespace(
            cur_step_num=self.step,
            cur_epoch_num=(self.step - 1) // self.batch_num + 1 if self.step else 0,
            batch_num=self.batch_num,
            train_network=self.network,
        )
        if self.metrics is not None:
            params.metrics = self.metrics
        return params

    def begin(self) -> None:
        """Start training."""
        for callback in self.callbacks:
            callback.begin(self)

    def run_step(self) -> None:
        """Run one step: the weights become the number of the step."""
        self.now += self.step_s
        self.step += 1
        for callback in self.callbacks:
            callback.step_begin(self)
        self.network["w"][...] = self.step
        for callback in self.callbacks:
            callback.step_end(self)

    def run(self, steps: int, *, end: bool = True) -> None:
        """Run so many steps, and say that it is over."""
        self.begin()
        for _ in range(steps):
            self.run_step()
        if end:
            self.end()

    def run_and_fail(self, steps: int, error: BaseException) -> None:
        """Run so many steps as a `with` block of the callbacks, and raise `error` in it."""
        with contextlib.ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback)
            self.run(steps, end=False)
            raise error

    def end(self) -> None:
        """Say that training is over."""
        for callback in self.callbacks:
            callback.end(self)


def data_files(directory: Path) -> list[str]:
    """Return the names of the data files in a directory: the checkpoints that the user sees."""
    return sorted(
        path.name for path in directory.iterdir() if path.suffix in (".ckpt", ".safetensors")
    )


def bare(path: Path, content: bytes | None = None) -> Path:
    """Take the manifest away, so that only the file speaks for itself; with `content`, replace the file, too."""
    path.with_name(path.name + ".manifest.json").unlink(missing_ok=True)
    if content is not None:
        path.unlink(missing_ok=True)
        path.write_bytes(content)
    return path
