# SPDX-License-Identifier: Apache-2.0
"""Ed25519 keys and signatures."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, x25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ckptmgr.crypto.errors import KeyLengthError, KeySourceError
from ckptmgr.crypto.keys.signing import (
    PublicKey,
    SigningKey,
    dsse_bytes,
    generate_signing_pair,
    load_public_key,
    load_signing_key,
)

SECRET = bytes(range(32))
KEY = SigningKey(SECRET)

# RFC 8032, 7.1: secret key, public key, message, signature.
PUBLISHED = {
    "test 1": (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    "test 3": (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_signatures_are_the_published_ones(name: str) -> None:
    secret, public, message, signature = map(bytes.fromhex, PUBLISHED[name])
    key = SigningKey(secret)
    assert key.public_key == PublicKey(public)
    assert key.sign(message) == signature
    assert key.public_key.has_signed(message, signature)


def test_signed_bytes_are_those_of_the_dsse_example() -> None:
    # DSSE v1.0.2, protocol.md, test vectors.
    assert dsse_bytes("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


@pytest.mark.parametrize("size", [0, 63, 65])
def test_signature_of_another_length_is_none(size: int) -> None:
    assert not KEY.public_key.has_signed(b"", bytes(size))


def test_every_flipped_bit_of_a_signature_is_noticed() -> None:
    signature = bytearray(KEY.sign(b"text"))
    for bit in range(8 * len(signature)):
        signature[bit // 8] ^= 1 << bit % 8
        assert not KEY.public_key.has_signed(b"text", bytes(signature))
        signature[bit // 8] ^= 1 << bit % 8


def test_key_of_another_length_is_refused_without_showing_it() -> None:
    for kind in (SigningKey, PublicKey):
        with pytest.raises(KeyLengthError, match="32 bytes, not 31") as caught:
            kind(SECRET[:31])
        assert SECRET[:31].hex() not in str(caught.value)


def test_keys_show_their_id_only() -> None:
    assert repr(KEY) == f"SigningKey(id {KEY.public_key.key_id})"
    assert repr(KEY.public_key) == f"PublicKey(id {KEY.public_key.key_id})"


def test_generated_keys_differ() -> None:
    assert SigningKey.generate() != SigningKey.generate()


def saved(directory: Path, content: bytes = KEY.to_pem()) -> str:
    path = directory / "sign.pem"
    path.touch(mode=0o600)
    path.write_bytes(content)
    return f"file:{path}"


def test_keys_read_back_from_their_files(tmp_path: Path) -> None:
    (tmp_path / "pub").write_bytes(KEY.public_key.to_pem())
    assert load_signing_key(saved(tmp_path)) == KEY
    assert load_public_key(tmp_path / "pub") == KEY.public_key


def test_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path)
    Path(source.removeprefix("file:")).chmod(0o644)
    with pytest.raises(KeySourceError, match="used by others"):
        load_signing_key(source)


def test_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGN", KEY.to_pem().decode())
    assert load_signing_key("env:SIGN") == KEY


def private_pem(
    key: Ed25519PrivateKey | x25519.X25519PrivateKey | ec.EllipticCurvePrivateKey,
) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


LOCKED = Ed25519PrivateKey.from_private_bytes(SECRET).private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.BestAvailableEncryption(b"phrase"),
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"text", "no private key for signing"),
        (LOCKED, "one with a passphrase"),
        (KEY.public_key.to_pem(), "no private key for signing"),
        (b"x" * 5000, "more than 4096"),
        (b"\xff\xfe", "no text"),
        (private_pem(x25519.X25519PrivateKey.generate()), "not an Ed25519 key"),
        (private_pem(ec.generate_private_key(ec.SECP256R1())), "not an Ed25519 key"),
    ],
    ids=["nothing", "text", "passphrase", "public", "long", "bytes", "X25519", "P-256"],
)
def test_source_without_signing_key_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(KeySourceError, match=message) as caught:
        load_signing_key(saved(tmp_path, content))
    assert SECRET.hex() not in str(caught.value)


def public_pem() -> bytes:
    return (
        x25519.X25519PrivateKey.generate()
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no public key in PEM"),
        (KEY.to_pem(), "a private key"),
        (b"x" * 5000, "no public key in PEM"),
        (public_pem(), "not an Ed25519 key"),
    ],
    ids=["nothing", "private", "long", "X25519"],
)
def test_file_without_public_key_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "pub").write_bytes(content)
    with pytest.raises(KeySourceError, match=message):
        load_public_key(tmp_path / "pub")


@pytest.mark.parametrize("name", ["absent", "a\0b"])
def test_public_key_file_that_cannot_be_opened_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeySourceError, match="cannot be opened"):
        load_public_key(tmp_path / name)


def openssl(*arguments: str) -> Callable[[], bool]:
    return lambda: (
        subprocess.run(["openssl", *arguments], capture_output=True, check=False).returncode == 0
    )


def test_openssl_makes_keys_for_us_and_checks_our_signatures(tmp_path: Path) -> None:
    secret, public, message, signature = (str(tmp_path / name) for name in "kpms")
    if not openssl("genpkey", "-algorithm", "ed25519", "-out", secret)():
        pytest.skip("needs openssl")
    assert openssl("pkey", "-in", secret, "-pubout", "-out", public)()
    os.chmod(secret, 0o600)
    key = load_signing_key(f"file:{secret}")
    assert load_public_key(public) == key.public_key
    Path(message).write_bytes(b"text")
    Path(signature).write_bytes(key.sign(b"text"))
    check = ("pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", "-in", message)
    assert openssl(*check, "-sigfile", signature)()
    Path(signature).write_bytes(bytes(64))
    assert not openssl(*check, "-sigfile", signature)()


def test_generated_pair_of_each_kind_signs(tmp_path: Path) -> None:
    pair = generate_signing_pair("ed25519")
    key = load_signing_key(saved(tmp_path, pair.private_pem))
    assert (key.public_key.to_pem(), key.public_key.key_id) == (pair.public_pem, pair.key_id)
    other = generate_signing_pair("p256")
    private = serialization.load_pem_private_key(other.private_pem, password=None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    public = serialization.load_pem_public_key(other.public_pem)
    assert private.public_key() == public
    assert "PRIVATE" not in repr(pair) + repr(other)
