# SPDX-License-Identifier: Apache-2.0
"""MindSpore's own example (LeNet5 with `ModelCheckpoint`), run with its imports and with ours: nothing else changes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmgr import load_checkpoint
from tests.interop.states import facts_of

mindspore = pytest.importorskip("mindspore", reason="needs MindSpore: make interop")
pytestmark = [pytest.mark.interop, pytest.mark.slow]

_EXAMPLE = """
import numpy as np
import mindspore
import mindspore.dataset as ds
from mindspore import nn
from mindspore.common.initializer import Normal
from mindspore.train import Model
from {library} import CheckpointConfig, ModelCheckpoint


class LeNet5(nn.Cell):
    def __init__(self, num_class=10, num_channel=1):
        super().__init__()
        self.conv1 = nn.Conv2d(num_channel, 6, 5, pad_mode="valid")
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid")
        self.relu = nn.ReLU()
        self.max_pool2d = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Dense(16 * 5 * 5, 120, weight_init=Normal(0.02))
        self.fc2 = nn.Dense(120, 84, weight_init=Normal(0.02))
        self.fc3 = nn.Dense(84, num_class, weight_init=Normal(0.02))

    def construct(self, x):
        x = self.max_pool2d(self.relu(self.conv1(x)))
        x = self.max_pool2d(self.relu(self.conv2(x)))
        x = self.flatten(x)
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        return self.fc3(x)


def create_dataset():
    rng = np.random.default_rng(0)
    images = rng.random((96, 1, 32, 32), dtype=np.float32)
    labels = rng.integers(0, 10, 96).astype(np.int32)
    return ds.NumpySlicesDataset((images, labels), ["image", "label"], shuffle=False).batch(32)


mindspore.set_seed(1)
net = LeNet5()
loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optim = nn.Momentum(net.trainable_params(), 0.01, 0.9)
model = Model(net, loss_fn=loss, optimizer=optim)
dataset = create_dataset()
config = CheckpointConfig(save_checkpoint_seconds=100, keep_checkpoint_per_n_minutes=5, saved_network=net)
ckpoint_cb = ModelCheckpoint(prefix='LeNet5', directory='./checkpoint', config=config)
model.train(10, dataset, callbacks=ckpoint_cb)
"""


def _run(library: str, directory: Path) -> Path:
    directory.mkdir()
    (directory / "example.py").write_text(_EXAMPLE.format(library=library))
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "example.py"],
        cwd=directory,
        env={"PYTHONPATH": str(root), "PATH": ""},
        check=True,
        timeout=300,
        capture_output=True,
    )
    return directory / "checkpoint"


def test_example_leaves_the_same_files_with_our_import_and_each_loads_in_the_other(
    tmp_path: Path,
) -> None:
    theirs = _run("mindspore.train", tmp_path / "theirs")
    ours = _run("ckptmgr.integrations.mindspore.train", tmp_path / "ours")
    names = sorted(path.name for path in theirs.glob("*.ckpt"))
    assert names == sorted(path.name for path in ours.glob("*.ckpt"))
    assert names
    for path in (directory / name for directory in (ours, theirs) for name in names):
        in_mindspore = mindspore.load_checkpoint(str(path))
        assert facts_of(load_checkpoint(path)) == facts_of(in_mindspore)
        assert len(in_mindspore) == 8


def test_examples_of_the_page_train_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = pytest.importorskip("tests.interop.training")
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "mindspore.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    net = training.new_network()
    names = {"net": net, "model": training.new_model(net), "dataset": training.dataset()}
    for part in ("saved_network", "callback.resume()"):
        (example,) = [block for block in blocks if part in block]
        assert "ckptmgr.integrations.mindspore" in example
        exec(example, names)  # noqa: S102 - our own page
    assert names["first_epoch"] == 10
    assert [path.name for path in (tmp_path / "checkpoint").glob("*.ckpt")] == ["LeNet5-10_5.ckpt"]
