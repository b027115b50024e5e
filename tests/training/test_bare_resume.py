# SPDX-License-Identifier: Apache-2.0
"""Data files without their manifests: a run resumes from one only where it is asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, ModelCheckpoint, Resume, UnprovenCheckpoint
from tests.support import api
from tests.support.runs import manager_on
from tests.support.saved import overwrite
from tests.support.surface import Loop

KEY = bytes(range(16))


def manager_in(directory: Path, key: bytes | None = None, **options: Any) -> CheckpointManager:
    config = CheckpointConfig(enc_key=key, crc_check=True)
    return manager_on(directory, config, prefix="net", **options)


def saved_steps(directory: Path, *steps: int, key: bytes | None = None) -> None:
    """Save some steps of a run whose state is its step, and remove the manifests."""
    with manager_in(directory, key) as manager:
        for step in steps:
            manager.save(step, {"w": np.full(3, float(step))})
    for path in directory.glob(f"*{api.MANIFEST_SUFFIX}"):
        path.unlink()


def test_manager_takes_the_newest_file_without_manifest_only_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved_steps(tmp_path, 9, 10)
    state = {"w": np.zeros(3)}
    with manager_in(tmp_path) as manager:
        refused = manager.resume(state)
        assert refused.is_fresh
        assert not state["w"].any()
        assert {one.checkpoint.name for one in refused.skipped} == {"net-9.ckpt", "net-10.ckpt"}
        assert "Resume(allow_bare=True)" in caplog.text
        found = manager.resume(state, Resume(allow_bare=True))
    assert (found.step, found.next_step, found.skipped) == (10, 11, ())
    assert state["w"].tolist() == [10, 10, 10]


def test_file_without_manifest_never_comes_before_a_checkpoint_with_one(tmp_path: Path) -> None:
    saved_steps(tmp_path, 10)
    with manager_in(tmp_path) as manager:
        manager.save(3, {"w": np.full(3, 3)})
        found = manager.resume(None, Resume(allow_bare=True))
    assert found.step == 3
    assert [one.checkpoint.name for one in found.skipped] == ["net-10.ckpt"]


def test_damaged_file_without_manifest_is_skipped_for_an_older_one(tmp_path: Path) -> None:
    saved_steps(tmp_path, 1, 2)
    content = (tmp_path / "net-2.ckpt").read_bytes()
    overwrite(tmp_path / "net-2.ckpt", content[:-1] + bytes([content[-1] ^ 1]))
    with manager_in(tmp_path) as manager:
        found = manager.resume(None, Resume(allow_bare=True))
    assert found.step == 1
    assert [one.checkpoint.name for one in found.skipped] == ["net-2.ckpt"]


def test_saves_after_a_file_without_manifest_are_resumed_from_instead(tmp_path: Path) -> None:
    saved_steps(tmp_path, 9, 10)
    config = CheckpointConfig(keep="last(1)")
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        assert manager.resume(None, Resume(allow_bare=True)).step == 10
        for step in (11, 12):
            manager.save(step, {"w": np.full(3, float(step))})
    kept = sorted(path.name for path in tmp_path.glob("*.ckpt"))
    assert kept == ["net-10.ckpt", "net-12.ckpt", "net-9.ckpt"]
    with manager_in(tmp_path) as manager:
        assert manager.resume(None, Resume(allow_bare=True)).step == 12


def test_with_a_key_the_manager_must_also_accept_what_no_manifest_proves(tmp_path: Path) -> None:
    saved_steps(tmp_path, 4, key=KEY)
    with (
        manager_in(tmp_path, KEY) as manager,
        pytest.raises(UnprovenCheckpoint, match="no manifest proves") as caught,
    ):
        manager.resume(None, Resume(allow_bare=True))
    assert "allow_unsealed=True" in str(caught.value.hint)
    with manager_in(tmp_path, KEY, allow_unsealed=True) as manager:
        assert manager.resume().step == 4


def test_request_is_refused_where_it_has_no_effect(tmp_path: Path) -> None:
    with manager_in(tmp_path) as manager:
        with pytest.raises(ValueError, match=r"allow_bare has no effect with start='new'"):
            manager.resume(None, Resume(start="new", allow_bare=True))
        with pytest.raises(ValueError, match="'allow_bare' must be"):
            manager.resume(None, Resume(allow_bare=1))  # type: ignore[arg-type]


def test_callback_refuses_its_files_without_manifests_until_it_is_asked(tmp_path: Path) -> None:
    config = CheckpointConfig(keep="all")
    Loop(callbacks=(ModelCheckpoint("net", str(tmp_path), config),), batch_num=10).run(3)
    whole = tmp_path / api.manifest_name("net-1_1.ckpt")
    for path in tmp_path.glob(f"*{api.MANIFEST_SUFFIX}"):
        if path != whole:
            path.unlink()
    again = ModelCheckpoint("net", str(tmp_path), config)
    first = again.resume()
    assert first is not None
    assert first.checkpoint.name == "net-1_1.ckpt"
    assert {one.checkpoint.name for one in first.skipped} == {"net-1_2.ckpt", "net-1_3.ckpt"}
    whole.unlink()
    with pytest.raises(UnprovenCheckpoint, match=r"\(and 2 more\)"):
        again.resume()
    found = again.resume(Resume(allow_bare=True))
    assert found is not None
    assert found.checkpoint.name == "net-1_3.ckpt"
