# SPDX-License-Identifier: Apache-2.0
"""The examples of the README and of the guides work as described."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointManager, ModelCheckpoint
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.policy.save import EverySeconds
from ckptmgr.policy.time_rules import PerMinutes
from tests.support.surface import Loop, data_files

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
GUIDES = ("encryption", "files", "mindspore", "ranks", "training")


def blocks() -> list[str]:
    if not README.exists():
        pytest.skip("needs the sources: the README is not installed")
    pages = [README, *(ROOT / "docs" / f"{name}.md" for name in GUIDES)]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def without_mindspore(example: str) -> str:
    """Return an example with the import for other loops; tests/interop runs it as it is."""
    return re.sub(r"ckptmgr\.integrations\.mindspore(\.train)?\b", "ckptmgr", example)


def test_training_loop_of_the_readme_runs_and_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for _ in range(2):
        names.clear()
        exec(blocks()[0], names)  # noqa: S102 - our own page
    manager = names["manager"]
    assert isinstance(manager, CheckpointManager)
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 1000


def test_callback_example_saves_by_seconds_and_keeps_by_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    loops: list[Loop] = []

    class Model:
        def train(self, epochs: int, dataset: int, *, callbacks: ModelCheckpoint) -> None:
            loops.append(Loop(callbacks=(callbacks,), batch_num=dataset))
            loops[0].run(epochs * dataset)

    names: dict[str, Any] = {"net": {"w": np.ones(2)}, "model": Model(), "dataset": 3}
    (example,) = [block for block in blocks() if "saved_network" in block]
    exec(without_mindspore(example), names)  # noqa: S102 - our own page
    assert data_files(tmp_path / "checkpoint") == ["LeNet5-10_3.ckpt"]
    assert names["config"].save_policy() == EverySeconds(100)
    assert names["config"].retention_policy() == RetentionPolicy((PerMinutes(5),))
    assert caplog.messages == []
    names["net"]["w"][...] = 0.0
    (resuming,) = [block for block in blocks() if "callback.resume()" in block]
    exec(without_mindspore(resuming), names)  # noqa: S102 - our own page
    assert (names["net"]["w"].tolist(), names["first_epoch"]) == ([1.0, 1.0], 10)


def test_encryption_example_makes_an_encrypted_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTMGR_KEY", "ab" * 16)
    names: dict[str, object] = {}
    (example,) = [block for block in blocks() if "enc_key=key" in block]
    exec(example, names)  # noqa: S102 - our own page
    manager = names["manager"]
    assert isinstance(manager, CheckpointManager)
    with manager:
        manager.save(1, {"n": 1})
    (saved,) = manager.checkpoints()
    assert saved.cipher == "AES-GCM"


def test_example_of_one_state_saves_and_restores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    (example,) = [block for block in blocks() if "save_state" in block]
    saving, loading = example.split("load_state(", 1)
    exec(saving, names)  # noqa: S102 - our own page
    drawn = names["state"]["rng"].random()
    names["state"]["weights"][:] = 0
    exec(f"load_state({loading}", names)  # noqa: S102 - our own page
    assert names["state"]["weights"].all()
    assert names["state"]["rng"].random() == drawn


def test_example_of_parts_reads_rows_and_fills_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    (example,) = [block for block in blocks() if "open_checkpoint" in block]
    exec(example, names)  # noqa: S102 - our own page
    head = names["head"]
    assert head.shape == (10, 8)
    assert (head.flags.owndata, head.flags.writeable) == (False, False)
    assert not names["bias"].any()


def test_example_of_safe_open_reads_rows_of_an_encrypted_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPTMGR_KEY", "ab" * 32)
    names: dict[str, Any] = {}
    (example,) = [block for block in blocks() if "safe_open" in block]
    exec(example, names)  # noqa: S102 - our own page
    assert names["rows"].tolist() == [[1.0, 1.0]] * 10
    assert (tmp_path / "secret.safetensors").read_bytes().startswith(b"\x8fCKPE")


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_example_of_dcp_saves_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 2)
    names: dict[str, Any] = {"model": model, "loss": 0.5}
    (example,) = [block for block in blocks() if "StorageWriter" in block]
    saving, resuming = example.split("# to resume")
    exec(saving, names)  # noqa: S102 - our own page
    saved = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    names["state"]["step"] = 0
    exec(f"# {resuming}", names)  # noqa: S102 - our own page
    assert torch.equal(model.weight, saved)
    assert names["state"]["step"] == 500


def test_example_of_observers_hears_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    (example,) = [block for block in blocks() if "LogObserver" in block]
    exec(example, names)  # noqa: S102 - our own page
    with names["manager"] as manager:
        manager.save(1, {"n": 1})
    assert capsys.readouterr().out.split() == ["save.started", "save.durable"]
