# SPDX-License-Identifier: Apache-2.0
"""Links, pipes, folders and huge files under the names of checkpoints and their manifests."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, CorruptCheckpoint, UnsupportedCheckpoint
from ckptmgr.io.digest import FileDigest
from ckptmgr.store.manifest.codec import MAX_MANIFEST_BYTES
from tests.support import api
from tests.support.cut_overwrites import NAME, save
from tests.support.manifests import manifest

GIB = 1 << 30


def entries(directory: Path) -> dict[str, tuple[int, int]]:
    """Return the names in a directory, each with its kind and time."""
    return {one.name: (one.lstat().st_mode, one.lstat().st_mtime_ns) for one in directory.iterdir()}


def test_checkpoint_with_a_link_as_its_manifest_is_damaged_and_not_changed(
    tmp_path: Path,
) -> None:
    save(tmp_path, "plain", 1)
    path = tmp_path / api.manifest_name(NAME)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to("elsewhere")
    store = api.place(tmp_path)
    (found,) = [one for one in store.scan() if one.name == NAME]
    assert (found.state, found.problem) == (
        api.State.CORRUPT,
        "the manifest is a link or no regular file",
    )
    with pytest.raises(CorruptCheckpoint, match="the manifest is a link"):
        store.change_pins(found, lambda pins: (*pins, api.Pin(name="best", reason="")))
    with pytest.raises(CorruptCheckpoint, match="the manifest is a link"):
        save(tmp_path, "plain", 2)
    assert path.is_symlink()


def test_huge_manifest_is_refused_by_its_size_alone(tmp_path: Path) -> None:
    save(tmp_path, "plain", 1)
    path = tmp_path / api.manifest_name(NAME)
    path.unlink()
    path.touch()
    os.truncate(path, GIB)
    store = api.place(tmp_path)
    (found,) = [one for one in store.scan() if one.name == NAME]
    assert (found.state, found.problem) == (
        api.State.CORRUPT,
        f"has {GIB} bytes, a manifest at most {MAX_MANIFEST_BYTES}",
    )
    assert store.recover("net") == []
    before = path.stat().st_mtime_ns
    with pytest.raises(CorruptCheckpoint, match="move it away"):
        save(tmp_path, "plain", 2)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (GIB, before)
    assert len(list(tmp_path.glob("*.tmp"))) == 0


@pytest.mark.slow
def test_manifest_that_nobody_would_read_is_not_written() -> None:
    ranges = (bytes(32),) * (MAX_MANIFEST_BYTES // 64)
    digest = FileDigest(size_bytes=len(ranges), ranges=ranges, range_bytes=1)
    huge = replace(manifest(), file=replace(manifest().file, digest=digest))
    with pytest.raises(UnsupportedCheckpoint, match=f"of {MAX_MANIFEST_BYTES}"):
        api.encode_manifest(huge)


@pytest.mark.parametrize("is_manifest", [False, True])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_file_harms_nobody_and_stays(
    tmp_path: Path, make: Callable[[Path], None], is_manifest: bool
) -> None:
    save(tmp_path, "plain", 1)
    odd = tmp_path / "net-2_2.ckpt"
    make(tmp_path / api.manifest_name(odd.name) if is_manifest else odd)
    before = entries(tmp_path)
    store = api.place(tmp_path)
    assert [one.name for one in store.scan() if one.state is api.State.OK] == [NAME]
    assert store.recover("net") == []
    assert entries(tmp_path) == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")])
def test_save_takes_another_name_than_that_of_what_is_no_file(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "net-1.safetensors")
    before = entries(tmp_path)
    with CheckpointManager(
        tmp_path, CheckpointConfig(format="safetensors"), prefix="net"
    ) as manager:
        manager.save(1, {"w": np.ones(3)})
        saved = manager.latest()
    assert saved is not None
    assert saved.name == "net-1-r1.safetensors"
    assert before.items() <= entries(tmp_path).items()
