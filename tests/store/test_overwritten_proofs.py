# SPDX-License-Identifier: Apache-2.0
"""Overwriting a file: the old manifest neither gets the proofs of the writer nor loses its own, whenever the save ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptmgr import KeyProblem, UnsealedCheckpoint, load_checkpoint, save_checkpoint
from ckptmgr.store.manifest.codec import MAX_MANIFEST_BYTES
from ckptmgr.store.manifest.reader import ManifestContent
from tests.support import api
from tests.support.cut_overwrites import (
    NAME,
    OVERWRITES,
    SIGNER,
    FailingRename,
    fail,
    save,
    store_of,
    strict_store_of,
)
from tests.support.saved import overwrite


@pytest.mark.parametrize(("old", "new"), OVERWRITES)
def test_failed_overwrite_leaves_the_manifest_as_it_was(tmp_path: Path, old: str, new: str) -> None:
    save(tmp_path, old, 1)
    path = tmp_path / api.manifest_name(NAME)
    path.chmod(0o440)
    before = (path.read_bytes(), path.stat().st_mode)
    fail(tmp_path, new, is_power_cut=False)
    assert (path.read_bytes(), path.stat().st_mode) == before


@pytest.mark.parametrize("mode", [0o400, 0o444])
def test_overwrite_that_is_finished_later_leaves_the_modes_of_any_save(
    tmp_path: Path, mode: int
) -> None:
    save(tmp_path, "plain", 1)
    path = tmp_path / api.manifest_name(NAME)
    path.chmod(mode)
    fail(tmp_path, "plain", is_power_cut=True, is_late=True)
    assert path.stat().st_mode & 0o777 == mode
    store_of(tmp_path, "plain").recover("net")
    assert path.stat().st_mode & 0o777 == (tmp_path / NAME).stat().st_mode & 0o777 == 0o400


def test_failed_overwrite_of_a_bare_file_leaves_no_manifest(tmp_path: Path) -> None:
    save(tmp_path, "old key", 1)
    (tmp_path / api.manifest_name(NAME)).unlink()
    fail(tmp_path, "new key", is_power_cut=False)
    assert [one.name for one in tmp_path.glob("net*")] == [NAME]


@pytest.mark.parametrize(("old", "new"), OVERWRITES)
def test_overwrite_that_the_power_cut_ended_is_undone_with_the_old_proofs(
    tmp_path: Path, old: str, new: str
) -> None:
    save(tmp_path, old, 1)
    path = tmp_path / api.manifest_name(NAME)
    path.chmod(0o440)
    before = path.read_bytes()
    fail(tmp_path, new, is_power_cut=True)
    fail(tmp_path, new, is_power_cut=True)
    assert path.read_bytes() != before
    assert any("finished" in one for one in store_of(tmp_path, new).recover("net"))
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (before, 0o440)


@pytest.mark.parametrize(
    ("old", "new"), [("plain", "signed"), ("plain", "old key"), ("signed", "old key, signed")]
)
def test_what_was_not_proven_is_not_while_it_is_replaced(
    tmp_path: Path, old: str, new: str
) -> None:
    save(tmp_path, old, 1)
    fail(tmp_path, new, is_power_cut=True)
    with pytest.raises(UnsealedCheckpoint):
        strict_store_of(tmp_path, new).read_manifest(NAME)


def test_what_was_proven_stays_so_while_it_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, "signed", 1)
    fail(tmp_path, "signed", is_power_cut=True)
    strict = api.place(tmp_path, trusted_keys=(SIGNER.public_key,))
    found = strict.read_manifest(NAME)
    assert found is not None
    assert (found.step, found.signed_by) == (1, SIGNER.public_key.key_id)


def test_recovery_does_not_sign_what_nobody_signed(tmp_path: Path) -> None:
    save(tmp_path, "plain", 1)
    fail(tmp_path, "plain", is_power_cut=True)
    before = (tmp_path / api.manifest_name(NAME)).read_bytes()
    store_of(tmp_path, "signed").recover("net")
    assert (tmp_path / api.manifest_name(NAME)).read_bytes() == before


class PowerCut(FailingRename):
    """Loses power at the rename of the data."""

    def __init__(self) -> None:
        super().__init__(is_power_cut=True)


def test_single_file_that_a_signed_save_was_to_replace_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / NAME
    save_checkpoint({"w": np.full(3, 666.0)}, path)
    with monkeypatch.context() as patch:
        patch.setattr("ckptmgr.store.store.OsFileSystem", PowerCut)
        with pytest.raises(OSError, match="the disk is gone"):
            save_checkpoint({"w": np.ones(3)}, path, signing_key=SIGNER)
    store = api.place(tmp_path, trusted_keys=(SIGNER.public_key,))
    with pytest.raises(KeyProblem):
        store.read_manifest(NAME)
    save_checkpoint({"w": np.ones(3)}, path, signing_key=SIGNER)
    assert load_checkpoint(path, trusted_keys=(SIGNER.public_key,))["w"].sum() == 3


@pytest.mark.parametrize("data", [b"\xff", b"x" * (MAX_MANIFEST_BYTES // 8 + 1)])
def test_manifest_that_is_no_text_or_too_large_is_not_kept_in_another(data: bytes) -> None:
    assert ManifestContent(data=data, mode=0o400).text is None


def test_damaged_manifest_is_put_back_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, "plain", 1)
    path = tmp_path / api.manifest_name(NAME)
    overwrite(path, b"\xff damaged")
    fail(tmp_path, "signed", is_power_cut=False)
    assert path.read_bytes() == b"\xff damaged"
