# SPDX-License-Identifier: Apache-2.0
"""Machines for the tests of this folder: each has a temporary folder of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def on_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that goes to another machine, and returns its temporary folder."""

    def go(name: str) -> Path:
        folder = tmp_path / "machines" / name
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        return folder

    return go


@pytest.fixture
def machine(on_machine: Callable[[str], Path]) -> Path:
    """Return the temporary folder of one machine."""
    return on_machine("first")
