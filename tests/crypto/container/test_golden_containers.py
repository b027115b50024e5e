# SPDX-License-Identifier: Apache-2.0
"""Containers of version 1 that were written once and must be readable for ever.

Those of the modes are also made again, byte for byte, from the same random bytes.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ckptmgr.crypto.ciphers import Random
from ckptmgr.crypto.container.header import Content
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.run_passphrase import RunPassphrase
from ckptmgr.crypto.slots import Recipient
from ckptmgr.crypto.slots.public import (
    hybrid_identity,
    hybrid_recipient,
    x25519_identity,
    x25519_recipient,
)
from ckptmgr.crypto.slots.secret import Argon2id, Passphrase, RawKey, Scrypt

from .containers import MODES, opened, seal, unseal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey

GOLDEN = Path(__file__).parents[2] / "golden" / "containers"
PLAINTEXT = bytes(range(256)) + b"the last segment is short"
PASSPHRASE = "caf\u00e9 9\u20ac"
X25519 = X25519PrivateKey.from_private_bytes(bytes([1]) * 32)


def counted(seed: str) -> Random:
    """Return a source of bytes that are always the same."""
    state = [0]

    def random(count: int) -> bytes:
        state[0] += 1
        return hashlib.shake_256(f"{seed} {state[0]}".encode()).digest(count)

    return random


def made(mode: str) -> bytes:
    """Return the golden file of a mode: slots for a key, for scrypt and for argon2id."""
    random = counted(mode)
    recipients: list[Recipient] = [
        RawKey(Key(bytes(range(32))), random),
        Passphrase(PASSPHRASE, Scrypt(log2_n=14), random),
        Passphrase(PASSPHRASE, Argon2id(memory_kib=64, passes=2, lanes=2), random),
    ]
    return seal(PLAINTEXT, mode, recipients=recipients, content=Content.OPAQUE, random=random)


@pytest.mark.parametrize("mode", MODES)
def test_golden_container_of_each_mode_is_made_again(mode: str) -> None:
    assert made(mode) == (GOLDEN / f"{mode}.ckpe").read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_golden_container_of_each_mode_opens_for_key_and_passphrase(mode: str) -> None:
    file = (GOLDEN / f"{mode}.ckpe").read_bytes()
    assert unseal(file, RawKey(Key(bytes(range(32))))) == PLAINTEXT
    assert unseal(file, Passphrase(PASSPHRASE)) == PLAINTEXT
    assert opened(file, Passphrase(PASSPHRASE)).mode == mode


CONTENTS = {"ckpt": Content.MINDSPORE_CKPT, "safetensors": Content.SAFETENSORS}
INSIDE = {"ckpt": "ckpt_all_dtypes.ckpt", "safetensors": "st_all_dtypes.safetensors"}


@pytest.mark.parametrize("format", CONTENTS)
def test_golden_container_of_a_checkpoint_is_made_again(format: str) -> None:
    plaintext = (GOLDEN.parent / "files" / INSIDE[format]).read_bytes()
    random, content = counted(format), CONTENTS[format]
    key = RawKey(Key(bytes(range(32))), random)
    file = seal(plaintext, recipients=[key], content=content, segment_bytes=4096, random=random)
    golden = (GOLDEN / f"all_dtypes.{format}.ckpe").read_bytes()
    assert file == golden
    assert (opened(golden, key).content, unseal(golden, key)) == (content, plaintext)


def test_golden_container_for_the_passphrase_of_a_run_is_made_again_and_opens() -> None:
    random = counted("run passphrase")
    cost = Argon2id(memory_kib=64, passes=2, lanes=2)
    phrase = RunPassphrase(Passphrase(PASSPHRASE), cost=cost, random=random)
    file = seal(PLAINTEXT, recipients=[phrase], content=Content.OPAQUE, random=random)
    assert file == (GOLDEN / "run-passphrase.ckpe").read_bytes()
    assert unseal(file, RunPassphrase(Passphrase(PASSPHRASE))) == PLAINTEXT


def mlkem_key() -> MLKEM768PrivateKey:
    """Return the private key of `public.ckpe`."""
    mlkem = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.mlkem")
    key: MLKEM768PrivateKey = mlkem.MLKEM768PrivateKey.from_seed_bytes(bytes([2]) * 64)
    return key


def public_recipients() -> tuple[Recipient, Recipient]:
    """Return the recipients of `public.ckpe`, which cannot be made again: HPKE takes no random bytes from us."""
    hybrid = hybrid_recipient(mlkem_key().public_key(), X25519.public_key())
    return x25519_recipient(X25519.public_key()), hybrid


def test_golden_container_for_public_keys_opens_for_their_owners() -> None:
    pytest.importorskip("cryptography.hazmat.primitives.asymmetric.mlkem")
    file = (GOLDEN / "public.ckpe").read_bytes()
    assert unseal(file, x25519_identity(X25519)) == PLAINTEXT
    assert unseal(file, hybrid_identity(mlkem_key(), X25519)) == PLAINTEXT
