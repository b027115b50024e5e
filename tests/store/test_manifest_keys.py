# SPDX-License-Identifier: Apache-2.0
"""Manifests that several can check: who does, and refusals after a change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import (
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    TamperedCheckpoint,
    UnsupportedCheckpoint,
)
from ckptmgr.crypto.keys.pem import generate_pair
from ckptmgr.crypto.keys.ring import KeyRing, Keys
from ckptmgr.crypto.keys.run_passphrase import RunPassphrase
from ckptmgr.crypto.slots import MAX_SLOTS
from ckptmgr.crypto.slots.secret import Argon2id, Passphrase
from ckptmgr.crypto.slots.stretching import StretchedKeys, StretchingBudget
from ckptmgr.store.manifest.codec import reauthenticated
from ckptmgr.store.manifest.keys import BOUND, ManifestKey, manifest_key_of, opened_manifest_key
from tests.support import api
from tests.support.manifests import manifest
from tests.support.rekeying import NEW, OLD, ring

PRIVATE, PUBLIC = generate_pair("x25519")
WRITER = KeyRing(ring(OLD).own, also_for=ring(PUBLIC).own)
PATH = Path("/runs") / api.manifest_name(manifest().name)


def read(data: bytes, keys: Keys) -> api.Manifest:
    return api.decode_manifest(data, path=PATH, trust=api.Trust(keys=keys))


def changed(data: bytes, **auth: object) -> bytes:
    """Return a manifest with other members of `auth`."""
    document: dict[str, Any] = json.loads(data)
    document["auth"].update(auth)
    return json.dumps(document).encode()


@pytest.mark.parametrize("keys", [OLD, ring(OLD), ring(PRIVATE), ring(NEW, PRIVATE)])
def test_manifest_for_several_is_checked_by_each(keys: Keys) -> None:
    found = read(api.encode_manifest(manifest(), trust=api.Trust(keys=WRITER)), keys)
    assert found == manifest()
    assert found.opened_by == (f"key {OLD.key_id}", f"X25519 {ring(PUBLIC).key_id}")


@pytest.mark.parametrize("keys", [OLD, ring(OLD)])
def test_manifest_for_a_single_key_has_no_slots(keys: Keys) -> None:
    auth = json.loads(api.encode_manifest(manifest(), trust=api.Trust(keys=keys)))["auth"]
    assert auth.keys() == {"algorithm", "key_id", "mac"}
    assert auth["key_id"] == OLD.key_id


def test_manifest_of_a_writer_has_always_the_same_key() -> None:
    assert manifest_key_of(WRITER) is manifest_key_of(WRITER)
    other = KeyRing(WRITER.own, WRITER.also_for)
    assert manifest_key_of(other).key != manifest_key_of(WRITER).key


def test_manifest_gets_no_more_passphrases_stretched_than_the_budget_pays_for() -> None:
    cost = Argon2id(memory_kib=1024, passes=8)

    def phrase(number: int, *, most_kib: int) -> RunPassphrase:
        keys = StretchedKeys(StretchingBudget(most_kib=most_kib))
        return RunPassphrase(Passphrase(str(number), stretched_keys=keys), cost=cost)

    def opened_by(number: int, *, most_kib: int) -> api.Key:
        keys = ring(str(number))
        keys.identities = (phrase(number, most_kib=most_kib),)
        return opened_manifest_key(auth, keys, path="net.ckpt.manifest.json").key

    key = api.Key(bytes(32))
    slots = tuple(phrase(one, most_kib=1 << 20).wrap(key, bound=BOUND) for one in range(12))
    auth = ManifestKey(key, slots).to_document()
    assert opened_by(11, most_kib=1 << 20) == key
    assert opened_by(0, most_kib=64 << 10) == key
    with pytest.raises(
        UnsupportedCheckpoint, match=r"^net\.ckpt\.manifest\.json: .*more stretching"
    ):
        opened_by(11, most_kib=64 << 10)


@pytest.mark.parametrize("keys", [NEW, ring(NEW), ring("horse")])
def test_manifest_for_others_names_them(keys: Keys) -> None:
    with pytest.raises(KeyProblem, match="for another key than") as caught:
        read(api.encode_manifest(manifest(), trust=api.Trust(keys=WRITER)), keys)
    assert f"key {OLD.key_id}" in str(caught.value.hint)


def test_manifest_that_was_read_is_written_for_the_same_again() -> None:
    found = read(api.encode_manifest(manifest(), trust=api.Trust(keys=WRITER)), ring(PRIVATE))
    again = api.encode_manifest(found, trust=api.Trust(keys=ring(PRIVATE)))
    assert read(again, OLD) == manifest()


def test_changed_manifest_for_several_is_tampered() -> None:
    data = api.encode_manifest(manifest(), trust=api.Trust(keys=WRITER))
    with pytest.raises(TamperedCheckpoint):
        read(data.replace(b'"epoch": 3', b'"epoch": 4'), OLD)


def test_slots_of_another_manifest_are_tampered() -> None:
    data = api.encode_manifest(manifest(), trust=api.Trust(keys=WRITER))
    other = json.loads(
        api.encode_manifest(manifest(), trust=api.Trust(keys=KeyRing(WRITER.own, WRITER.also_for)))
    )["auth"]
    with pytest.raises(TamperedCheckpoint, match="key is that of another one"):
        read(changed(data, slots=other["slots"]), OLD)
    with pytest.raises(TamperedCheckpoint, match="does not match"):
        read(changed(data, slots=other["slots"], key_id=other["key_id"]), OLD)


@pytest.mark.parametrize(
    "slots",
    [
        "00",
        {"0": "00"},
        [0],
        [None],
        ["zz"],
        [""],
        ["00"],
        ["01000000" + "00" * 8 + "00"],
        ["0100ffff" + "00" * 8],
        ["01000000" + "00" * 8] * (MAX_SLOTS + 1),
        [["01"]],
    ],
)
@pytest.mark.parametrize("keys", [None, OLD])
def test_slots_that_are_none_are_damage(slots: object, keys: Keys | None) -> None:
    data = changed(api.encode_manifest(manifest(), trust=api.Trust(keys=WRITER)), slots=slots)
    with pytest.raises(CkptmgrError) as caught:
        api.decode_manifest(data, path=PATH, trust=api.Trust(keys=keys, allow_unencrypted=True))
    assert isinstance(caught.value, CorruptCheckpoint)


@pytest.mark.parametrize("key_id", [None, 7, "x" * 1000, "\x1b[31m" + "0" * 11, ["0"]])
def test_key_id_that_is_none_is_not_shown_as_one(key_id: object) -> None:
    data = changed(api.encode_manifest(manifest(), trust=api.Trust(keys=OLD)), key_id=key_id)
    assert api.decode_manifest(data, path=PATH).opened_by == ()
    with pytest.raises(KeyProblem):
        read(data, OLD)


@pytest.mark.parametrize("auth", [[], "x", 7, None])
def test_authentication_that_is_none_names_nobody(auth: object) -> None:
    document = json.loads(api.encode_manifest(manifest(), trust=api.Trust(keys=OLD)))
    document["auth"] = auth
    assert api.decode_manifest(json.dumps(document).encode(), path=PATH).opened_by == ()


def test_public_keys_check_nothing_and_rewrite_nothing() -> None:
    data = api.encode_manifest(manifest(), trust=api.Trust(keys=OLD))
    assert read(data, ring(PUBLIC)).auth is None
    with pytest.raises(KeyProblem, match="public keys alone"):
        reauthenticated(data, path=PATH, key=ring(PUBLIC), change=lambda auth: auth)


def test_too_many_or_no_keys_for_a_manifest_are_refused() -> None:
    auth = ManifestKey(OLD)
    with pytest.raises(ValueError, match="0 keys"):
        auth.rewrapped(add=(), remove=lambda _: True, own=())
    many = [ring(api.Key(bytes([7, number]) * 16)).recipients[0] for number in range(MAX_SLOTS)]
    with pytest.raises(ValueError, match="17 keys"):
        auth.rewrapped(add=many, remove=lambda _: False, own=())


def test_key_that_is_left_alone_authenticates_by_itself_when_it_is_at_hand() -> None:
    auth = manifest_key_of(WRITER)
    public = ring(PUBLIC)

    def is_public(slot: object) -> bool:
        return slot is auth.slots[1]

    assert auth.rewrapped(add=(), remove=is_public, own=(OLD,)) == ManifestKey(OLD)
    assert auth.rewrapped(add=(), remove=is_public, own=(NEW,)).slots == auth.slots[:1]
    assert public.key_id is not None


def test_keys_are_not_shown() -> None:
    found = read(api.encode_manifest(manifest(), trust=api.Trust(keys=WRITER)), OLD)
    key = manifest_key_of(WRITER).key
    assert key.raw.hex() not in f"{found!r} {found.auth!r} {manifest_key_of(WRITER)!r}"
