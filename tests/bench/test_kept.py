# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.core.model import State
from ckptmgr.store.store import Store
from tools.bench import kept


def test_directory_has_so_many_whole_checkpoints_of_one_run(fast_path: Path) -> None:
    kept.fill(fast_path, 40)
    found = Store(fast_path).scan()
    assert [one.state for one in found] == [State.OK] * 40
    assert len({one.run_id for one in found}) == 1


def test_each_policy_and_count_has_a_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fast_path: Path,
) -> None:
    monkeypatch.setattr(kept, "_SAVES", 1)
    monkeypatch.setattr("tempfile.tempdir", str(fast_path))
    kept.main(["3"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(kept.POLICIES)
    assert all(float(line.split()[-2]) > 0 for line in lines[1:])
