# SPDX-License-Identifier: Apache-2.0
"""Encrypting anew: what counts as done, and what stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.crypto.container_unlock import unlock
from ckptmgr.crypto.key import Key
from ckptmgr.crypto.key_files import generate_pair
from ckptmgr.crypto.keyring import KeyRing
from ckptmgr.errors import KeyProblem
from ckptmgr.formats.source import BytesSource
from ckptmgr.rekey import (
    Action,
    open_for_rekeying,
    plan_reencryption,
    reencrypt_checkpoint,
)
from ckptmgr.rekey_header import KeyChange
from ckptmgr.store import Store
from tests.manager.rekeying import NEW, OLD, OTHER, ROTATION, openers, rekey, ring, save_run
from tests.manager.saved import only

ANEW = KeyChange(keys=ring(OLD), add=(ring(NEW),), is_only=True)


def reencrypt(directory: Path, change: KeyChange = ANEW) -> Action:
    store = open_for_rekeying(directory, change)
    return reencrypt_checkpoint(store, only(store), change).action


def data_key(directory: Path, keys: KeyRing) -> Key:
    content = only(Store(directory)).path.read_bytes()
    return unlock(BytesSource(content), keys.identities).data_key


def test_file_that_was_only_rekeyed_is_not_taken_as_done(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    rekey(ROTATION, directory=tmp_path)
    before = data_key(tmp_path, ring(NEW))
    with pytest.raises(KeyProblem, match="another key") as caught:
        reencrypt(tmp_path)
    assert NEW.key_id in str(caught.value.hint)
    assert "--key" in str(caught.value.hint)
    again = KeyChange(keys=ring(NEW), add=(ring(NEW),), is_only=True)
    assert reencrypt(tmp_path, again) is Action.REENCRYPT
    assert data_key(tmp_path, ring(NEW)) != before
    assert reencrypt(tmp_path) is Action.NOTHING


def test_file_that_was_rekeyed_to_a_public_key_is_not_taken_as_done(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    public = ring(generate_pair("x25519")[1])
    rekey(KeyChange(keys=ring(OLD), add=(public,), remove=(ring(OLD),)), directory=tmp_path)
    with pytest.raises(KeyProblem, match="another key") as caught:
        reencrypt(tmp_path, KeyChange(keys=ring(OLD), add=(public,), is_only=True))
    assert "where only its keys were changed" in str(caught.value.hint)


def test_file_that_opens_for_others_as_well_is_not_taken_as_done(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    both = KeyChange(keys=ring(OLD), add=(ring(NEW), ring("horse")), is_only=True)
    assert reencrypt(tmp_path, both) is Action.REENCRYPT
    assert reencrypt(tmp_path, both) is Action.NOTHING
    with pytest.raises(KeyProblem, match="another key"):
        reencrypt(tmp_path)
    assert openers(only(Store(tmp_path)), [ring(NEW), ring("horse")]) == [0, 1]


def test_file_with_an_older_header_copy_for_the_old_key_is_encrypted_anew(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    path = only(Store(tmp_path)).path
    head = path.read_bytes()[:4096]
    rekey(ROTATION, directory=tmp_path)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.write(head)  # as if the second write of the header had never come
    assert reencrypt(tmp_path) is Action.REENCRYPT
    assert openers(only(Store(tmp_path)), [ring(OLD), ring(NEW)]) == [1]


def test_key_that_opens_nothing_hears_nothing_about_rekeying(tmp_path: Path) -> None:
    save_run(directory=tmp_path, steps=1)
    change = KeyChange(keys=ring(OTHER), add=(ring(NEW),), is_only=True)
    store = open_for_rekeying(tmp_path, change)
    with pytest.raises(KeyProblem) as caught:
        plan_reencryption(store, only(store), change)
    assert "keys were changed" not in str(caught.value.hint)
