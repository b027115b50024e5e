# SPDX-License-Identifier: Apache-2.0
"""The measurement of the rate of `ckptmgr verify`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench import verify_rate


def test_verify_is_measured_beside_cat_and_leaves_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_rate, "MODES", {"AES-GCM": verify_rate.MODES["AES-GCM"]})
    options = ["--files", "1", "--mib", "1", "--rounds", "1", "--directory", str(tmp_path)]
    verify_rate.main(options)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[:2] for line in lines] == [["AES-GCM", "cat"], ["AES-GCM", "verify"]]
    assert float(lines[1][3]) > 0
    assert not list(tmp_path.iterdir())
