# SPDX-License-Identifier: Apache-2.0
"""Bytes that are read of an open checkpoint are proven, and so is the description of their places."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CorruptCheckpoint, save_checkpoint
from ckptmgr.files.load.open import OpenCheckpoint, open_source
from ckptmgr.formats.index import TensorEntry
from ckptmgr.io.scatter import Placement
from tests.support import api
from tests.support.saved import flip

# Two of them reach into the second range of 16 MiB, whose digest says nothing of the description.
SIZE = 3 << 20
STATE = {"aa": np.full(SIZE, 1.0, np.float32), "bb": np.full(SIZE, 2.0, np.float32)}


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "net.safetensors"
    save_checkpoint(STATE, str(path), format="safetensors")
    return path


def read(path: Path, *, is_confirmed: bool) -> np.ndarray:
    """Return the last elements of the tensor under the name "aa"."""
    store = api.place(path.parent)
    with closing(store.fs.open(path)) as raw:
        opened: OpenCheckpoint = open_source(
            raw,
            path=str(path),
            options=api.reading(),
            manifest=store.read_manifest(path.name),
            is_for_loading=True,
        )
        (entry,) = (one for one in opened.index.entries if one.name == "aa")
        assert isinstance(entry, TensorEntry)
        found = np.zeros(1000, np.float32)
        offset = entry.pieces[0].offset + entry.spec.size_bytes - found.nbytes
        placement = Placement(offset, found.data.cast("B"))
        opened.read([placement], confirmed=() if is_confirmed else None)
    return found


def exchange_names(path: Path) -> None:
    """Make the description say of each tensor that it lies where the other one does."""
    content = path.read_bytes()
    head = (
        content[:200].replace(b'"aa"', b'"zz"').replace(b'"bb"', b'"aa"').replace(b'"zz"', b'"bb"')
    )
    path.chmod(0o600)
    path.write_bytes(head + content[200:])


def test_part_is_read(tmp_path: Path) -> None:
    assert np.array_equal(read(saved(tmp_path), is_confirmed=False), STATE["aa"][:1000])


def test_part_is_refused_where_the_description_was_changed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    exchange_names(path)
    with pytest.raises(CorruptCheckpoint):
        read(path, is_confirmed=False)


def test_control_the_digest_of_the_part_alone_does_not_tell(tmp_path: Path) -> None:
    path = saved(tmp_path)
    exchange_names(path)
    assert np.array_equal(read(path, is_confirmed=True), STATE["bb"][:1000])


def test_part_is_refused_where_its_bytes_were_changed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    flip(path, 10 << 20)
    with pytest.raises(CorruptCheckpoint):
        read(path, is_confirmed=True)
