# SPDX-License-Identifier: Apache-2.0
"""Statements of the page about Lightning beside the cuts: `make kit FRAMEWORK=lightning`."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

lightning = pytest.importorskip("lightning", reason="needs lightning: make kit FRAMEWORK=lightning")
torch = pytest.importorskip("torch")

from lightning.pytorch.callbacks import EarlyStopping  # noqa: E402
from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: E402
from lightning.pytorch.plugins.environments import SLURMEnvironment  # noqa: E402

from ckptmgr import CheckpointConfig, CheckpointManager  # noqa: E402
from ckptmgr.integrations.lightning import LightningCheckpoints  # noqa: E402

pytestmark = [pytest.mark.kit, pytest.mark.usefixtures("quiet")]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def quiet() -> Iterator[None]:
    """Let Lightning advise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fit(directory: Path, model: Any, *callbacks: Any, **options: Any) -> Any:
    """Train from the newest checkpoint, two batches an epoch; return the trainer."""
    lightning.seed_everything(0, verbose=False)
    config = CheckpointConfig(save_checkpoint_steps=options.pop("every", 1))
    checkpoints = LightningCheckpoints(directory / "runs", config)
    trainer = lightning.Trainer(
        callbacks=[*callbacks, checkpoints],
        limit_train_batches=2,
        limit_val_batches=0,
        accelerator="cpu",
        logger=False,
        default_root_dir=directory,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, ckpt_path=checkpoints.latest())
    return trainer


class Plateau(BoringModel):  # type: ignore[misc]
    """Its loss stops to fall after the second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log the falling loss."""
        self.log("falling", max(1.0 - 0.1 * self.current_epoch, 0.9), on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("cut_after", [1, 3, 4])
def test_early_stopping_goes_on_after_a_resume(cut_after: int, tmp_path: Path) -> None:
    def end_of(name: str, most: int) -> tuple[int, int, int]:
        stopping = EarlyStopping("falling", patience=3)
        trainer = fit(tmp_path / name, Plateau(), stopping, max_epochs=most)
        return trainer.global_step, stopping.stopped_epoch, stopping.wait_count

    uncut = end_of("uncut", 20)
    end_of("cut", cut_after)
    assert end_of("cut", 20) == uncut == (10, 4, 3)


class Signalled(BoringModel):  # type: ignore[misc]
    """Gets a signal in its third step."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self.number = number

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        if self.global_step == 2:
            signal.raise_signal(self.number)
        return super().training_step(batch, batch_idx)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of Slurm, whose `scontrol` notes its requests."""
    script = tmp_path / "bin" / "scontrol"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    for name, value in (("JOB_ID", "77"), ("NTASKS", "1"), ("PROCID", "0"), ("LOCALID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    return tmp_path


def test_requeue_of_lightning_writes_a_file_of_its_own(slurm: Path) -> None:
    fit(slurm, Signalled(signal.SIGUSR1), max_steps=4, plugins=[SLURMEnvironment()])
    assert list(slurm.glob("hpc_ckpt_*.ckpt"))
    assert (slurm / "asked").read_text() == "requeue 77\n"


def test_without_that_requeue_sigterm_saves_the_step_that_runs(slurm: Path) -> None:
    plugins = [SLURMEnvironment(auto_requeue=False)]
    with pytest.raises(SystemExit):
        fit(slurm, Signalled(signal.SIGTERM), max_steps=8, every=100, plugins=plugins)
    assert not list(slurm.glob("hpc_ckpt_*"))
    assert not (slurm / "asked").exists()
    assert [one.step for one in CheckpointManager(slurm / "runs").checkpoints()] == [3]
    assert fit(slurm, BoringModel(), max_steps=5, plugins=plugins).global_step == 5


_PACKAGE = """
import sys, warnings
warnings.simplefilter("ignore")
import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel
from ckptmgr import CheckpointConfig
from ckptmgr.integrations.lightning import LightningCheckpoints

assert issubclass(LightningCheckpoints, pl.callbacks.Checkpoint)
assert "lightning.pytorch" not in sys.modules
found = []
for name, ends in (("uncut", [7]), ("cut", [3, 7])):
    for end in ends:
        pl.seed_everything(0, verbose=False)
        checkpoints = LightningCheckpoints(name, CheckpointConfig(keep="last(2)"))
        trainer = pl.Trainer(max_steps=end, callbacks=[checkpoints], logger=False, accelerator="cpu",
                             limit_val_batches=0, enable_progress_bar=False, limit_train_batches=4)
        model = BoringModel()
        trainer.fit(model, ckpt_path=checkpoints.latest())
        assert trainer.global_step == end
    found.append(model.state_dict())
assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
print("equal")
"""


# A process of its own: this one has imported the other package.
def test_package_pytorch_lightning_resumes_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    command = [sys.executable, "-c", _PACKAGE]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "equal"


def test_example_runs_as_printed(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "lightning_fit.py")]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert [one.step for one in CheckpointManager(tmp_path / "runs/lightning").checkpoints()] == [
        24,
        25,
    ]
