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
_COMMON = (
    "--libraries",
    "raw",
    "ckptmgr",
    "mindspore",
    "safetensors",
    "--rounds",
    "1",
    "--rest",
    "0",
)


def _bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    output = tmp_path / "output"
    options = [*_COMMON, "--size", "2MiB", "--dir", str(tmp_path), "--output", str(output)]
    subprocess.run(
        [sys.executable, "tools/bench", *options, *arguments],
        cwd=_ROOT,
        check=True,
        capture_output=True,
        timeout=300,
    )
    loaded: dict[str, Any] = json.loads((output / "figures.json").read_text())
    return loaded


def test_bench_measures_ours_and_mindspore_in_every_mode(tmp_path: Path) -> None:
    result = _bench(tmp_path, "--sections", "files", "slow")
    measured = {(one["mode"], one["who"], one["what"]) for one in result["figures"]}
    modes = {"ckpt", "ckpt-crc", "ckpt-gcm", "ckpt-cbc", "ckpt-sm4", "safetensors"}
    assert {
        (mode, who, what)
        for mode in modes
        for who in ("ckptmgr", "mindspore")
        for what in ("save", "load")
    } <= measured
    assert ("limit", "raw O_DIRECT", "save") in measured
    assert result["missing"] == {}
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_bench_measures_the_background_saves_of_ours_and_mindspore(tmp_path: Path) -> None:
    result = _bench(tmp_path, "--sections", "background")
    measured = {(one["mode"], one["who"]) for one in result["figures"]}
    assert {
        (mode, who) for mode in ("thread", "process") for who in ("ckptmgr", "mindspore")
    } <= measured
    assert {one["what"] for one in result["figures"]} == {"blocked", "durable"}


def test_memory_beyond_the_tensors_is_within_the_limits(tmp_path: Path) -> None:
    options = ("--sections", "memory", "--modes", "ckpt", "ckpt-gcm", "--size", "100MiB")
    peaks = _bench(tmp_path, *options)["memory"]
    assert [peak["mode"] for peak in peaks] == ["ckpt", "ckpt-gcm"]
    for peak in peaks:
        assert max(peak["save_bytes"], peak["load_bytes"]) <= peak["limit_bytes"]
