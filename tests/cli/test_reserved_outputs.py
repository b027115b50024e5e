# SPDX-License-Identifier: Apache-2.0
"""Outputs with the names of files that ckptmgr keeps beside checkpoints are refused by every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import run
from tests.support.saved import KEY, save_run

NAMES = [
    ".net.lease",
    ".net.starts",
    ".net.save_now",
    ".ckptmgr-trash",
    "net-1_1.ckpt.manifest.json",
    "net-1_1.shards",
    ".net-1_1.ckpt.0a-0b-1-2.0a1b2c3d.7f-0.tmp",
]
COMMANDS = {
    "encrypt": ["encrypt", "net-1_1.ckpt", "--key", "env:KEY", "-o"],
    "decrypt": ["decrypt", "net-1_1.ckpt", "--key", "env:KEY", "-o"],
    "export": ["export", "net-1_1.ckpt", "--hf", "-o"],
    "export --to": ["export", "net-1_1.ckpt", "--to", "ckpt", "-o"],
    "keygen": ["keygen", "-o"],
    "report": ["report", ".", "-o"],
    "watch": ["watch", ".", "--once", "--state"],
    "transform": ["transform", "ranks", "-o"],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_output_of_a_reserved_name_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_run(tmp_path, [1])
    before = sorted(path.name for path in tmp_path.iterdir())
    answer = run(*command, name, env={"KEY": KEY.raw.hex()})
    assert answer.exit_code not in (0, 1)
    assert "a manifest, a lease or another file of ckptmgr" in answer.stderr
    assert name in answer.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_selectors_pass_over_the_small_files_of_a_run(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [1])
    others = [tmp_path / name for name in (".net.lease", NAMES[-1])]
    for other in others:
        other.write_bytes(b"")
    answer = run("verify", path, *others)
    assert answer.exit_code == 0, answer.output
