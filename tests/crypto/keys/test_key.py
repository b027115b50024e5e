# SPDX-License-Identifier: Apache-2.0
"""A key is never shown, and values derived from it are as documented."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest

from ckptmgr.crypto.errors import CryptoError, KeyLengthError
from ckptmgr.crypto.keys.key import Key, derive, is_manifest_mac, manifest_mac

SECRET = bytes.fromhex("c0ffee0102030405060708090a0b0c0d0e0f1011121314151617181920212223")


def hkdf_sha256(secret: bytes, info: bytes, *, length: int) -> bytes:
    """RFC 5869 for one output block and no salt, written out."""
    extracted = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")[:length]


def test_key_shown_in_any_way_hides_the_secret() -> None:
    key = Key(SECRET)
    shown = f"{key!r} {key} {[key]} {key:}"
    for form in (SECRET.hex(), base64.b64encode(SECRET).decode(), repr(SECRET), "c0ffee"):
        assert form.lower() not in shown.lower()
    assert repr(key) == f"Key(32 bytes, id {key.key_id})"


@pytest.mark.parametrize("size", [0, 1, 8, 15, 17, 31, 33, 64])
def test_key_of_other_length_raises_without_showing_it(size: int) -> None:
    with pytest.raises(KeyLengthError, match=f"not {size}") as caught:
        Key(SECRET * 2 if size == 64 else (SECRET + SECRET)[:size])
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, CryptoError)
    assert "c0ffee" not in str(caught.value)


def test_key_id_is_hkdf_of_the_key() -> None:
    assert Key(SECRET).key_id == hkdf_sha256(SECRET, b"ckptmgr/v1/key-id", length=8).hex()


def test_key_id_differs_between_keys() -> None:
    assert Key(SECRET).key_id != Key(SECRET[:16]).key_id


def test_keys_with_equal_bytes_are_equal() -> None:
    assert Key(SECRET) == Key(bytes(SECRET))
    assert Key(SECRET) != Key(SECRET[::-1])


def test_derive_for_another_purpose_gives_unrelated_bytes() -> None:
    assert derive(Key(SECRET), "one") != derive(Key(SECRET), "two")


def test_manifest_mac_is_hmac_under_a_derived_key() -> None:
    secret = hkdf_sha256(SECRET, b"ckptmgr/v1/manifest", length=32)
    expected = hmac.digest(secret, b"{}", hashlib.sha256)
    assert manifest_mac(Key(SECRET), b"{}") == expected


def test_manifest_mac_of_same_bytes_and_key_is_accepted() -> None:
    assert is_manifest_mac(Key(SECRET), b"{}", mac=manifest_mac(Key(SECRET), b"{}"))


@pytest.mark.parametrize("mac", [b"", b"short", bytes(32)])
def test_manifest_mac_of_wrong_bytes_is_refused(mac: bytes) -> None:
    assert not is_manifest_mac(Key(SECRET), b"{}", mac=mac)


def test_manifest_mac_of_other_content_is_refused() -> None:
    assert not is_manifest_mac(Key(SECRET), b"[]", mac=manifest_mac(Key(SECRET), b"{}"))
