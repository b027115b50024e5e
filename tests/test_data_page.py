# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/data.md work as described."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "data.md"


def example(word: str) -> str:
    if not PAGE.exists():
        pytest.skip("needs the sources: the page is not installed")
    (found,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if word in block
    ]
    return str(found)


def test_loop_over_batches_ends_alike_when_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch: Any = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    weights = []
    for lasts in ([12], [5, 8, 12]):
        names: dict[str, Any] = {}
        for last in lasts:
            names = {}
            text = example("DataLoader").replace("12", str(last))
            exec(text.replace("runs/loop", f"runs/{len(lasts)}"), names)  # noqa: S102 - our own page
        weights.append(names["model"].state_dict())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_report_after_an_empty_pass_has_the_stored_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    loop = example("start.metrics.get")
    stopped = loop.replace('metrics={"loss": last})', 'metrics={"loss": last}); assert step < 5')
    assert stopped != loop
    texts = {"uncut": [loop], "cut": [stopped, loop]}
    for name, programs in texts.items():
        for text in programs:
            names: dict[str, Any] = {}
            exec(example("DataLoader").split("with CheckpointManager")[0], names)  # noqa: S102 - our own page
            with contextlib.suppress(AssertionError):
                exec(text.replace("runs/report", f"runs/{name}"), names)  # noqa: S102
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == lines[3:]
    assert len(lines) == 6


def test_loop_with_global_generators_draws_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for _ in range(2):
        names = {}
        exec(example("GlobalRandom"), names)  # noqa: S102 - our own page
    assert len(set(names["state"]["losses"])) == 5
