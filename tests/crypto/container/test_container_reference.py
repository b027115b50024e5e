# SPDX-License-Identifier: Apache-2.0
"""What ours writes is read by who knows nothing but docs/container-format.md, and the other way round."""

from __future__ import annotations

import os
import struct

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from ckptmgr.crypto.container.header import Content, HeaderCopy
from ckptmgr.crypto.container.rekey import rewrite_header
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.run_passphrase import RunPassphrase
from ckptmgr.crypto.slots import Recipient
from ckptmgr.crypto.slots.public import (
    hybrid_recipient,
    rsa_recipient,
    x25519_identity,
    x25519_recipient,
)
from ckptmgr.crypto.slots.secret import Argon2id, Passphrase, RawKey, Scrypt
from tests.crypto.slots import slots_reference as slots
from tests.files.test_golden_compressed import PLAIN
from tests.files.test_golden_compressed import reference as expanded

from . import container_reference as reference
from .containers import HEAD, ME, MODES, OTHER, SEGMENT, opened, seal, unseal
from .test_golden_containers import GOLDEN, INSIDE, PASSPHRASE, PLAINTEXT, X25519, mlkem_key

pytest.importorskip("cryptography.hazmat.primitives.asymmetric.mlkem")

SIZES = (0, 1, 15, 16, 47, 48, 49, 95, 96, 97, 1000)
COPY = 4096
RSA = rsa.generate_private_key(65537, 3072)
SMALL = Argon2id(memory_kib=64, passes=2, lanes=2)
PHRASE = "correct horse"

# How slots are made: who they are for, and what opens them.
SLOTS: dict[str, tuple[Recipient, slots.Secret]] = {
    "key of 16 bytes": (ME, ME.key.raw),
    "key of 24 bytes": (RawKey(Key(bytes(24))), bytes(24)),
    "key of 32 bytes": (OTHER, OTHER.key.raw),
    "scrypt": (Passphrase(PHRASE, Scrypt(log2_n=14)), PHRASE),
    "argon2id": (Passphrase(PHRASE, SMALL), PHRASE),
    "argon2id of a run": (RunPassphrase(Passphrase(PHRASE), cost=SMALL), PHRASE),
    "an accent": (Passphrase("cafe\u0301", SMALL), "caf\u00e9"),
    "X25519": (x25519_recipient(X25519.public_key()), X25519),
    "ML-KEM-768 and X25519": (
        hybrid_recipient(mlkem_key().public_key(), X25519.public_key()),
        slots.Pair(mlkem_key(), X25519),
    ),
    "RSA": (rsa_recipient(RSA.public_key()), RSA),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
def test_container_is_read_by_the_reference(size: int, mode: str) -> None:
    plaintext = os.urandom(size)
    assert reference.unseal(seal(plaintext, mode), ME.key.raw) == plaintext


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
def test_container_of_the_reference_is_read(size: int, mode: str) -> None:
    plaintext = os.urandom(size)
    for key in (ME, OTHER):
        file = reference.seal(
            plaintext, key.key.raw, segment_bytes=SEGMENT, seed=b"seed", mode=mode
        )
        assert unseal(file, key) == plaintext
        assert (opened(file, key).mode, opened(file, key).content) == (mode, Content.OPAQUE)


@pytest.mark.parametrize("name", SLOTS)
def test_slot_of_each_kind_opens_for_the_reference(name: str) -> None:
    recipient, secret = SLOTS[name]
    everybody = [one for one, _ in SLOTS.values() if one is not recipient]
    for recipients in ([recipient], [*everybody, recipient]):
        file = seal(PLAINTEXT, recipients=recipients)
        assert reference.unseal(file, secret) == PLAINTEXT
    with pytest.raises(ValueError, match="nothing opens it"):
        reference.unseal(seal(PLAINTEXT, recipients=everybody[:1]), RSA)


@pytest.mark.parametrize("mode", MODES)
def test_golden_container_is_read_by_the_reference(mode: str) -> None:
    file = (GOLDEN / f"{mode}.ckpe").read_bytes()
    for secret in (bytes(range(32)), PASSPHRASE):
        assert reference.unseal(file, secret) == PLAINTEXT


def test_golden_container_for_many_is_read_by_the_reference() -> None:
    for name, secret in (
        ("public", X25519),
        ("public", slots.Pair(mlkem_key(), X25519)),
        ("run-passphrase", PASSPHRASE),
    ):
        assert reference.unseal((GOLDEN / f"{name}.ckpe").read_bytes(), secret) == PLAINTEXT


@pytest.mark.parametrize("format", INSIDE)
def test_golden_checkpoint_is_read_by_the_reference(format: str) -> None:
    file = (GOLDEN / f"all_dtypes.{format}.ckpe").read_bytes()
    plaintext = (GOLDEN.parent / "files" / INSIDE[format]).read_bytes()
    assert reference.unseal(file, bytes(range(32))) == plaintext


@pytest.mark.parametrize("mode", ["AES-GCM", "SM4-CBC"])
def test_golden_compressed_container_is_read_by_the_reference(mode: str) -> None:
    file = (GOLDEN.parent / "compressed" / f"{mode}.safetensors.ckpe").read_bytes()
    frames = reference.unseal(file, bytes(range(32)))
    assert expanded(frames) == PLAIN
    assert len(PLAIN) == struct.unpack_from("<Q", file, 32)[0]


def test_newest_copy_that_holds_is_read_by_the_reference() -> None:
    file = bytearray(seal(PLAINTEXT))
    first, second = rewrite_header(opened(bytes(file)).unlocked, add=[OTHER])
    file[first.offset : first.offset + COPY] = first.data
    assert first.offset == COPY
    assert reference.unseal(bytes(file), OTHER.key.raw) == PLAINTEXT  # only the newer copy
    damaged = bytearray(file)
    damaged[COPY + 200] ^= 1
    assert reference.unseal(bytes(damaged), ME.key.raw) == PLAINTEXT  # only the older one
    file[second.offset : second.offset + COPY] = second.data
    file[:COPY] = bytes(COPY)
    assert reference.unseal(bytes(file), OTHER.key.raw) == PLAINTEXT


def test_copy_whose_data_key_is_another_one_is_passed_over_by_the_reference() -> None:
    # Owners of the public key can make such a copy, of any generation.
    alice = x25519_recipient(X25519.public_key())
    file = seal(PLAINTEXT, recipients=[alice])
    forged = Key(bytes(32))
    header = HeaderCopy(
        fixed=opened(file, x25519_identity(X25519)).unlocked.header.fixed,
        generation=9,
        slots=(alice.wrap(forged, bound=file[:64]),),
    )
    assert reference.unseal(header.pack(forged) + file[COPY:], X25519) == PLAINTEXT


@pytest.mark.parametrize("copy_bytes", [4096, 8192, 16384, 32768, 65536])
def test_copies_of_any_size_are_found_by_the_reference(copy_bytes: int) -> None:
    file = seal(PLAINTEXT, copy_bytes=copy_bytes)
    assert len(file) > HEAD
    for damaged in (file, bytes(copy_bytes) + file[copy_bytes:]):
        assert reference.unseal(damaged, ME.key.raw) == PLAINTEXT
