# SPDX-License-Identifier: Apache-2.0
"""The benchmark runs with everybody who is installed beside MindSpore, and its memory figures are within the limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.interop, pytest.mark.slow]
_ROOT = Path(__file__).parents[2]


def _bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    figures = tmp_path / "figures.json"
    options = ["--size", "2MiB", "--dir", str(tmp_path), "--json", str(figures)]
    subprocess.run(
        [sys.executable, "tools/bench", *options, *arguments],
        cwd=_ROOT,
        check=True,
        capture_output=True,
        timeout=300,
    )
    loaded: dict[str, Any] = json.loads(figures.read_text())
    return loaded


def test_bench_measures_ours_and_mindspore_in_every_mode(tmp_path: Path) -> None:
    figures = _bench(tmp_path, "--rounds", "1")["figures"]
    measured = {(figure["mode"], figure["who"]) for figure in figures}
    modes = {"ckpt", "ckpt-crc", "ckpt-gcm", "ckpt-cbc", "ckpt-sm4", "safetensors"}
    assert {(mode, who) for mode in modes for who in ("ckptmgr", "mindspore")} <= measured
    assert ("limit", "raw O_DIRECT") in measured
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_memory_beyond_the_tensors_is_within_the_limits(tmp_path: Path) -> None:
    peaks = _bench(tmp_path, "--memory", "--modes", "ckpt", "ckpt-gcm", "--size", "100MiB")[
        "memory"
    ]
    assert [peak["mode"] for peak in peaks] == ["ckpt", "ckpt-gcm"]
    for peak in peaks:
        assert max(peak["save_bytes"], peak["load_bytes"]) <= peak["limit_bytes"]
