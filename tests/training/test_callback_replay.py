# SPDX-License-Identifier: Apache-2.0
"""The real `ModelCheckpoint` on a real directory, driven by the loop and clock that recorded the real MindSpore 2.10.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, ModelCheckpoint
from ckptmgr.core.names import parse_name
from tests.support.runs import callback_on
from tests.support.surface import GOLDEN, Loop, data_files


class _Case(TypedDict):
    name: str
    config: dict[str, int | str | None]
    steps: int
    batch_num: int
    dt: float | None
    end: bool
    prefix: str
    files: list[str]
    latest: str
    events: list[list[object]]


_CASES: list[_Case] = json.loads((GOLDEN / "policy.json").read_text(encoding="utf-8"))
_NAMING = json.loads((GOLDEN / "naming.json").read_text(encoding="utf-8"))


class _Recorder:
    """Notes which data files each call of a callback adds and removes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._before: set[str] = set()
        self.events: list[list[object]] = []

    def note(self, event: int | str, now: float) -> None:
        after = set(data_files(self._directory))
        added, removed = sorted(after - self._before), sorted(self._before - after)
        if added or removed:
            self.events.append([event, now, added, removed])
        self._before = after


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case["name"])
def test_callback_adds_and_removes_the_recorded_files(case: _Case, tmp_path: Path) -> None:
    loop = Loop(callbacks=(), batch_num=case["batch_num"], step_s=case["dt"] or 0.0)
    config = CheckpointConfig(**case["config"])  # type: ignore[arg-type]
    callback = callback_on(case["prefix"], str(tmp_path), config, clock=lambda: loop.now)
    loop.callbacks = (callback,)
    recorder = _Recorder(tmp_path)
    loop.begin()
    for step in range(1, case["steps"] + 1):
        loop.run_step()
        recorder.note(step, loop.now)
    if case["end"]:
        loop.end()
        recorder.note("end", loop.now)
    assert recorder.events == case["events"]
    assert data_files(tmp_path) == case["files"]
    assert Path(callback.latest_ckpt_file_name).name == case["latest"]


@pytest.mark.parametrize(
    ("names", "prefix", "expected"),
    [
        (names, prefix, expected)
        for names, prefix, is_breakpoint, expected in _NAMING["rename"]
        if not is_breakpoint
    ],
)
def test_callback_in_a_used_directory_takes_the_recorded_prefix(
    names: list[str], prefix: str, expected: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"old")
    callback = ModelCheckpoint(prefix, str(tmp_path))
    Loop(callbacks=(callback,)).run(1)
    assert Path(callback.latest_ckpt_file_name).name == f"{expected}-1_1.ckpt"
    assert all((tmp_path / name).read_bytes() == b"old" for name in names)


@pytest.mark.parametrize(
    ("names", "prefix", "expected"),
    [
        (names, prefix, expected)
        for names, prefix, is_breakpoint, expected in _NAMING["rename"]
        if is_breakpoint
    ],
)
def test_breakpoint_in_a_used_directory_takes_the_recorded_prefix(
    names: list[str], prefix: str, expected: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"old")
    config = CheckpointConfig(save_checkpoint_steps=100, exception_save=True)
    callback = ModelCheckpoint(prefix, str(tmp_path), config)
    with pytest.raises(ZeroDivisionError):
        Loop(callbacks=(callback,)).run_and_fail(2, ZeroDivisionError())
    assert f"{expected}-1_2_breakpoint.ckpt" in data_files(tmp_path)
    assert all((tmp_path / name).read_bytes() == b"old" for name in names)


# Names that MindSpore counts as its own and deletes in turn, and no run ever writes.
NOT_MANAGED_HERE = ["CKP-(1).ckpt", "CKP--9.ckpt", "CKP-.ckpt", "CKP-1.ckpt", "CKP-1_2.5.ckpt"]


def test_names_that_mindspore_manages_are_ours_but_for_the_listed_ones() -> None:
    managed = _NAMING["managed"]
    for format in ("ckpt", "safetensors"):
        ours = []
        for name in managed["files"]:
            parsed = parse_name(name)
            if parsed is None or parsed.is_breakpoint or parsed.prefix != managed["prefix"]:
                continue
            ours += [name] * (parsed.format == format)
        assert sorted([*ours, *(set(NOT_MANAGED_HERE) & set(managed[format]))]) == managed[format]
    assert set(NOT_MANAGED_HERE) <= set(managed["ckpt"])


def test_retention_touches_no_file_that_mindspore_would_have_counted(tmp_path: Path) -> None:
    for name in _NAMING["managed"]["files"]:
        (tmp_path / name).write_bytes(b"of the user")
    config = CheckpointConfig(keep_checkpoint_max=1)
    callback = ModelCheckpoint("CKP", str(tmp_path), config)
    Loop(callbacks=(callback,), network={"w": np.zeros(1)}).run(6)
    assert all(
        (tmp_path / name).read_bytes() == b"of the user" for name in _NAMING["managed"]["files"]
    )
