# SPDX-License-Identifier: Apache-2.0
"""The programs that are started get none of the keys that stand in the environment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.crypto.providers.exec import ExecProvider
from ckptmgr.crypto.providers.provider import ProviderError
from tests.cli.running import run_process
from tests.support import api
from tests.support.saved import KEY, OTHER_KEY, save_run

SECRET = OTHER_KEY.raw.hex()[:-1] + "7"


def printing_environment(tmp_path: Path, *, then: str) -> tuple[Path, Path]:
    """Return a program that notes its environment and prints a key, and where it notes that."""
    program, seen = tmp_path / "program", tmp_path / "seen"
    program.write_text(f"#!/bin/sh\ncat /proc/$$/environ > '{seen}'\n{then}\n")
    program.chmod(0o700)
    return program, seen


def test_key_program_gets_no_other_key(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", [1], options=api.SaveOptions(key=KEY))
    program, seen = printing_environment(tmp_path, then=f"echo {KEY.raw.hex()}")
    result = run_process(
        "ls",
        tmp_path / "runs",
        "--key",
        f"cmd:{program}",
        "--key",
        "env:RUN_KEY",
        "--key",
        "passphrase:env:RUN_PHRASE",
        CKPTMGR_KEY=SECRET,
        CKPTMGR_KEY_FILE="/run/secrets/key",
        RUN_KEY=SECRET,
        RUN_PHRASE=SECRET,
        VAULT_ADDR="http://localhost",
    )
    assert result.returncode == 0, result.stderr
    content = seen.read_bytes()
    assert b"VAULT_ADDR=http://localhost" in content
    assert SECRET.encode() not in content
    assert b"CKPTMGR_KEY" not in content
    assert b"RUN_KEY" not in content


def test_key_service_program_gets_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_KEY", SECRET)
    monkeypatch.setenv("CKPTMGR_KEY_FILE", "/run/secrets/key")
    CheckpointConfig(enc_key="env:RUN_KEY")
    program, seen = printing_environment(tmp_path, then="exit 1")
    with pytest.raises(ProviderError):
        ExecProvider(command=(str(program),)).wrap(KEY.raw, {})
    assert b"PATH" in seen.read_bytes()
    assert b"RUN_KEY" not in seen.read_bytes()
    assert b"CKPTMGR_KEY" not in seen.read_bytes()


def test_saving_process_gets_no_key_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTMGR_KEY", SECRET)
    monkeypatch.setenv("RUN_KEY", KEY.raw.hex())
    config = CheckpointConfig(enc_key="env:RUN_KEY", async_save="process")
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(1, {"w": np.zeros(3)})
        worker = manager._engine._worker
        assert worker is not None
        environment = Path(f"/proc/{worker.pid}/environ").read_bytes()
    assert environment
    assert b"CKPTMGR_KEY" not in environment
    assert b"RUN_KEY" not in environment
