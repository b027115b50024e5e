# SPDX-License-Identifier: Apache-2.0
"""The manifest that an overwrite by others keeps opens the old file for those who could open it, and for no one else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmgr import CkptmgrError, KeyProblem, TamperedCheckpoint
from tests.support import api
from tests.support.cut_overwrites import (
    NAME,
    OVERWRITES,
    WRITERS,
    fail,
    save,
    store_of,
    strict_store_of,
)
from tests.support.rekeying import NEW, OLD, OTHER
from tests.support.saved import overwrite

PROVEN = [(old, new) for old, new in OVERWRITES if old != "plain" and new != old]
_MANIFEST = api.manifest_name(NAME)


def cut(directory: Path, old: str = "old key", new: str = "new key") -> bytes:
    """Save a file, lose power while another writer replaces it; return the manifest that it had."""
    save(directory, old, 1)
    before = (directory / _MANIFEST).read_bytes()
    fail(directory, new, is_power_cut=True)
    return before


def keep(directory: Path, kept: bytes, *, key: api.Key | None = NEW, times: int = 1) -> None:
    """Put a manifest file into that of an overwrite under a key, and that into another one."""
    path = directory / _MANIFEST
    for _ in range(times):
        mine = api.decode_manifest((directory / _MANIFEST).read_bytes(), path=path)
        old = mine.replaces or mine
        text = kept.decode()
        kept = api.encode_manifest(
            replace(mine, auth=None, replaces=replace(old, preserved=text)),
            trust=api.Trust(keys=key),
        )
    overwrite(path, kept)


@pytest.mark.parametrize(("old", "new"), PROVEN)
def test_old_file_opens_with_its_own_keys_when_others_lost_power_over_it(
    tmp_path: Path, old: str, new: str
) -> None:
    before = cut(tmp_path, old, new)
    store = strict_store_of(tmp_path, old)
    (checkpoint,) = [one for one in store.scan() if one.state is api.State.OK]
    answer = api.verify(
        store,
        checkpoint,
        keys=WRITERS[old][0],
        trusted_keys=store.trust.trusted_keys,
    )
    key, signing_key = WRITERS[old]
    trusted = () if signing_key is None else (signing_key.public_key,)
    expected = api.decode_manifest(
        before,
        path=tmp_path / _MANIFEST,
        trust=api.Trust(keys=key, trusted_keys=trusted, allow_unencrypted=True),
    )
    found = store.read_manifest(NAME)
    assert answer.status is api.Status.OK
    assert found == expected
    assert found is not None
    assert (found.auth, found.signed_by) == (expected.auth, expected.signed_by)


@pytest.mark.parametrize(("old", "new"), PROVEN)
def test_recovery_with_the_old_keys_undoes_what_others_lost_power_over(
    tmp_path: Path, old: str, new: str
) -> None:
    before = cut(tmp_path, old, new)
    assert any("finished" in one for one in store_of(tmp_path, old).recover("net"))
    assert (tmp_path / _MANIFEST).read_bytes() == before


@pytest.mark.parametrize(("old", "new"), PROVEN)
def test_recovery_with_the_old_keys_leaves_what_others_have_replaced(
    tmp_path: Path, old: str, new: str
) -> None:
    save(tmp_path, old, 1)
    fail(tmp_path, new, is_power_cut=True, is_late=True)
    interim = (tmp_path / _MANIFEST).read_bytes()
    done = store_of(tmp_path, old).recover("net")
    if (tmp_path / _MANIFEST).read_bytes() == interim:
        assert not any("finished" in one for one in done)
    else:  # these keys prove the new one, too
        found = strict_store_of(tmp_path, new).read_manifest(NAME)
        assert found is not None
        assert found.replaces is None
    assert strict_store_of(tmp_path, new).read_manifest(NAME) is not None


def test_two_others_in_a_row_lose_power_and_the_old_file_opens_with_its_own_keys(
    tmp_path: Path,
) -> None:
    before = cut(tmp_path, "old key", "new key")
    fail(tmp_path, "signed", is_power_cut=True)
    store = strict_store_of(tmp_path, "old key")
    assert store.read_manifest(NAME) is not None
    store.recover("net")
    assert (tmp_path / _MANIFEST).read_bytes() == before


def test_owner_who_loses_power_over_the_overwrite_of_others_keeps_the_old_proofs(
    tmp_path: Path,
) -> None:
    before = cut(tmp_path, "old key", "new key")
    fail(tmp_path, "old key", is_power_cut=True)
    store = strict_store_of(tmp_path, "old key")
    found = store.read_manifest(NAME)
    assert found is not None
    assert not found.is_placeholder
    store.recover("net")
    assert (tmp_path / _MANIFEST).read_bytes() == before


def test_file_under_other_keys_is_listed_with_the_size_it_has(tmp_path: Path) -> None:
    cut(tmp_path, "old key", "new key")
    (found,) = [
        one for one in api.listed(tmp_path, keys=OTHER, allow_unencrypted=True) if one.name == NAME
    ]
    assert found.state is api.State.UNVERIFIED


def other_name(found: api.Manifest) -> api.Manifest:
    return replace(found, file=replace(found.file, name="net-2_2.ckpt"))


@pytest.mark.parametrize(
    "forge",
    [
        lambda found: api.encode_manifest(found, trust=api.Trust(keys=OTHER)),
        lambda found: api.encode_manifest(replace(found, auth=None)),
        lambda found: api.encode_manifest(found, trust=api.Trust(keys=OLD)).replace(
            b'"step": 1,', b'"step": 9,'
        ),
        lambda found: api.encode_manifest(other_name(found), trust=api.Trust(keys=OLD)),
        lambda found: b"no manifest",
        lambda found: b"[" * 100_000,
        lambda found: api.encode_manifest(found, trust=api.Trust(keys=OLD)) + b" " * (8 << 20),
    ],
    ids=["other key", "no proof", "changed", "other name", "no JSON", "nested", "large"],
)
def test_kept_manifest_that_the_keys_do_not_prove_is_not_accepted(
    tmp_path: Path, forge: Callable[[api.Manifest], bytes]
) -> None:
    path = tmp_path / _MANIFEST
    forged = forge(
        replace(
            api.decode_manifest(
                cut(tmp_path), path=path, trust=api.Trust(keys=OLD, allow_unencrypted=True)
            ),
            auth=None,
        )
    )
    keep(tmp_path, forged)
    before = path.read_bytes()
    store = strict_store_of(tmp_path, "old key")
    with pytest.raises(KeyProblem):
        store.read_manifest(NAME)
    store.recover("net")
    assert path.read_bytes() == before


def test_kept_manifest_of_other_data_is_not_accepted(tmp_path: Path) -> None:
    cut(tmp_path)
    data = bytearray((tmp_path / NAME).read_bytes())
    data[-1] ^= 1
    overwrite(tmp_path / NAME, bytes(data))
    with pytest.raises(KeyProblem):
        strict_store_of(tmp_path, "old key").read_manifest(NAME)


def test_manifest_preserved_in_a_preserved_one_is_not_used(tmp_path: Path) -> None:
    before = cut(tmp_path)
    keep(tmp_path, before)
    assert strict_store_of(tmp_path, "old key").read_manifest(NAME) is not None
    keep(tmp_path, before, times=2)
    with pytest.raises(KeyProblem):
        strict_store_of(tmp_path, "old key").read_manifest(NAME)


def test_changed_manifest_is_not_excused_by_what_it_keeps(tmp_path: Path) -> None:
    before = cut(tmp_path)
    keep(tmp_path, before, key=OLD)
    path = tmp_path / _MANIFEST
    overwrite(path, path.read_bytes().replace(b'"why": "manual"', b'"why": "other!"'))
    with pytest.raises(TamperedCheckpoint):
        strict_store_of(tmp_path, "old key").read_manifest(NAME)


READERS = {
    "plain": (None, False),
    "old": (OLD, True),
    "old, not strict": (OLD, False),
    "other": (OTHER, False),
}


@pytest.mark.parametrize(
    ("reader", "keeper", "proof"),
    [*itertools.product(READERS, (NEW, None), (OLD, NEW, None))],
)
def test_kept_manifest_counts_at_most_as_if_it_had_been_put_there(
    tmp_path: Path, reader: str, keeper: api.Key | None, proof: api.Key | None
) -> None:
    path = tmp_path / _MANIFEST
    found = replace(
        api.decode_manifest(
            cut(tmp_path), path=path, trust=api.Trust(keys=OLD, allow_unencrypted=True)
        ),
        auth=None,
        step=5,
    )
    kept = api.encode_manifest(found, trust=api.Trust(keys=proof))
    keep(tmp_path, kept, key=keeper)
    key, is_strict = READERS[reader]
    store = api.place(tmp_path, keys=key, allow_unencrypted=not (is_strict))
    from_keeper = outcome(store)
    overwrite(path, kept)
    made_up = 1  # of a file without proof, for a reader who is not strict
    assert from_keeper in (outcome(store), KeyProblem, *([] if is_strict else [made_up]))


def outcome(store: api.Place) -> int | type[Exception]:
    """Return the step that a manifest says; or that it is not accepted."""
    try:
        found = store.read_manifest(NAME)
    except CkptmgrError as error:
        return KeyProblem if isinstance(error, KeyProblem) else type(error)
    return -1 if found is None else found.step
