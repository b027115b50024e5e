# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a manager with many small tensors."""

from __future__ import annotations

import json

import pytest

from tools.bench import small


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_bench_of_small_tensors_prints_the_time_of_each_action(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(small, "_ROUNDS", 1)

    small.main(["8", "--kind", kind])

    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"step_end", "resume", "resume into"}
    assert min(found.values()) > 0
