# SPDX-License-Identifier: Apache-2.0
"""The training job of the demo: a small network that reads noisy digits, in NumPy.

It is deterministic: the batches of an epoch follow from the epoch's number, so a resumed run can be compared bit for bit with
one that was never killed. The key comes from the environment variable DEMO_KEY.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from ckptmgr import CheckpointConfig, ModelCheckpoint
from ckptmgr.crypto.keys.sources import load_key
from ckptmgr.io.filesystem import OsFileSystem, OutputFile
from ckptmgr.training.options import System

BATCH = 64
EPOCHS = 12
HIDDEN = 256
RATE = 0.05
MOMENTUM = 0.9
IMAGES = 1797
DIGITS = (  # five rows of three pixels each
    "111 101 101 101 111",
    "010 110 010 010 111",
    "111 001 111 100 111",
    "111 001 111 001 111",
    "101 101 111 001 001",
    "111 100 111 001 111",
    "111 100 111 101 111",
    "111 001 001 001 001",
    "111 101 111 101 111",
    "111 101 111 001 111",
)


class Network:
    """One hidden layer, trained by momentum; its state is a mapping of names to arrays."""

    def __init__(self, inputs: int, classes: int) -> None:
        rng = np.random.default_rng(7)
        self.state = {
            "hidden.weight": rng.normal(0, 0.1, (inputs, HIDDEN)),
            "hidden.bias": np.zeros(HIDDEN),
            "output.weight": rng.normal(0, 0.1, (HIDDEN, classes)),
            "output.bias": np.zeros(classes),
        }
        self.state |= {f"moment.{name}": np.zeros_like(value) for name, value in self.state.items()}

    def forward(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return hidden activations and class probabilities."""
        hidden = np.maximum(images @ self.state["hidden.weight"] + self.state["hidden.bias"], 0)
        scores = hidden @ self.state["output.weight"] + self.state["output.bias"]
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        return hidden, scores / scores.sum(axis=1, keepdims=True)

    def step(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Do one step of gradient descent and return the loss."""
        hidden, scores = self.forward(images)
        rows = np.arange(len(labels))
        loss = -float(np.log(scores[rows, labels] + 1e-12).mean())
        scores[rows, labels] -= 1
        scores /= len(labels)
        back = (scores @ self.state["output.weight"].T) * (hidden > 0)
        self._descend("output.weight", hidden.T @ scores)
        self._descend("output.bias", scores.sum(axis=0))
        self._descend("hidden.weight", images.T @ back)
        self._descend("hidden.bias", back.sum(axis=0))
        return loss

    def _descend(self, name: str, gradient: np.ndarray) -> None:
        moment = self.state[f"moment.{name}"]
        moment *= MOMENTUM
        moment += gradient
        self.state[name] -= RATE * moment

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Return the share of images that are recognised."""
        return float((self.forward(images)[1].argmax(axis=1) == labels).mean())

    def fingerprint(self) -> str:
        """Return a digest of every bit of the state."""
        digest = hashlib.sha256()
        for name in sorted(self.state):
            digest.update(self.state[name].tobytes())
        return digest.hexdigest()


def drawn_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images, float64[n, 64], of digits at random places under noise, and which they are."""
    rng = np.random.default_rng(3)
    shapes = [np.array([[*map(float, row)] for row in text.split()]) for text in DIGITS]
    images = rng.normal(0, 0.15, (IMAGES, 8, 8))
    labels = np.arange(IMAGES) % len(DIGITS)
    for image, label in zip(images, labels, strict=True):
        row, column = rng.integers(0, 3), rng.integers(1, 4)
        image[row : row + 5, column : column + 3] += shapes[label]
    return images.reshape(IMAGES, 64), labels


class StoppingFileSystem(OsFileSystem):
    """The real disk, but the save number `stop_at` stops half-way through its data and waits to be killed."""

    def __init__(self, stop_at: int) -> None:
        super().__init__()
        self._saves_left = stop_at

    def create(self, path: Path, *, mode: int, owner_of: Path | None = None) -> OutputFile:
        """Create a file; of the doomed save, one that stops."""
        file = super().create(path, mode=mode, owner_of=owner_of)
        if ".manifest." not in path.name:
            self._saves_left -= 1
            if self._saves_left == 0:
                return StoppingFile(file)
        return file


class StoppingFile:
    """A file whose first write writes half and never returns."""

    def __init__(self, file: OutputFile) -> None:
        self._file = file

    def reserve(self, size_bytes: int) -> None:
        """Reserve space."""
        self._file.reserve(size_bytes)

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write the first half, say so, and wait for the end."""
        view = memoryview(data)
        self._file.write_at(offset, view[: view.nbytes // 2])
        print(json.dumps({"event": "half-written", "pid": os.getpid()}), flush=True)
        sys.stdin.read()

    def sync(self) -> None:
        """Sync."""
        self._file.sync()

    def close(self) -> None:
        """Close."""
        self._file.close()


class RunContext:
    """The argument of the callback."""

    def __init__(self, **values: object) -> None:
        self._values = SimpleNamespace(**values)

    def original_args(self) -> SimpleNamespace:
        """Return the values."""
        return self._values


def train(directory: Path, *, is_resumed: bool, stop_at: int | None) -> dict[str, object]:
    """Train, or go on training, and return an account of it."""
    images, labels = drawn_digits()
    split = len(images) - 297
    network = Network(images.shape[1], 10)
    batches = split // BATCH
    config = CheckpointConfig(
        save_checkpoint_steps=20,
        keep_checkpoint_max=4,
        enc_key=load_key("env:DEMO_KEY").raw,
        append_info=["epoch_num", "step_num"],
    )
    fs = OsFileSystem() if stop_at is None else StoppingFileSystem(stop_at)
    callback = ModelCheckpoint._on(
        System(fs=fs), prefix="digits", directory=str(directory), config=config
    )
    found = callback.resume() if is_resumed else None
    done = 0
    if found is not None:
        done = found.checkpoint.step
        for name, value in network.state.items():
            value[...] = found.values[name]
    loss = 0.0
    context = RunContext()
    for step in range(done + 1, EPOCHS * batches + 1):
        epoch, position = divmod(step - 1, batches)
        order = np.random.default_rng([7, epoch]).permutation(split)
        chosen = order[position * BATCH : (position + 1) * BATCH]
        loss = network.step(images[chosen], labels[chosen])
        context = RunContext(
            cur_step_num=step,
            cur_epoch_num=epoch + 1,
            batch_num=batches,
            train_network=network.state,
            metrics={"loss": loss},
        )
        callback.step_end(context)
    callback.end(context)
    return {
        "event": "finished",
        "resumed_from": None if found is None else found.checkpoint.name,
        "skipped": [] if found is None else [one.checkpoint.name for one in found.skipped],
        "first_step": done + 1,
        "steps": EPOCHS * batches,
        "loss": loss,
        "accuracy": network.accuracy(images[split:], labels[split:]),
        "fingerprint": network.fingerprint(),
    }


def main() -> None:
    """Run the job; the last line on stdout is its account as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stop-at-save", type=int, default=None)
    options = parser.parse_args()
    account = train(options.directory, is_resumed=options.resume, stop_at=options.stop_at_save)
    print(json.dumps(account), flush=True)


if __name__ == "__main__":
    main()
