# SPDX-License-Identifier: Apache-2.0
"""Several padded CBC messages at once: their long equal parts in lock-step, the ends one by one.

The last cipher blocks, which hold the padding, go through `CbcMode`: one place handles padding and
its errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .ciphers import CipherMode
from .errors import DecryptionError
from .keys.key import Key
from .sm4_ipp import LANES, Chain, Sm4Lanes, sm4_lanes

FindLanes = Callable[[CipherMode], Sm4Lanes | None]

MIN_LANES = 4
"""Sixteen lanes take as long as two or three messages do without them."""

_BLOCK_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message.

    For encryption the plaintext may be in the place of the ciphertext. `ciphertext` includes the
    padding.
    """

    iv: bytes
    plaintext: memoryview
    ciphertext: memoryview


def lanes_for(mode: CipherMode) -> Sm4Lanes | None:
    """Return the accelerator of a mode, or None."""
    return sm4_lanes() if mode.name == "SM4-CBC" else None


def batch_of(lanes: Sm4Lanes | None) -> int:
    """Return how many messages the accelerator takes at once; 1 without one."""
    return 1 if lanes is None else LANES


def encrypt_together(
    lanes: Sm4Lanes, mode: CipherMode, key: Key, messages: Sequence[Message]
) -> None:
    """Fill the ciphertexts of up to sixteen messages of one length of 16 bytes or more."""
    whole = messages[0].plaintext.nbytes // _BLOCK_BYTES * _BLOCK_BYTES
    chains = [
        Chain(iv=one.iv, source=one.plaintext[:whole], target=one.ciphertext[:whole])
        for one in messages
    ]
    lanes.encrypt(key.raw, chains)
    for one in messages:
        mode.encrypt_into(
            key,
            iv=bytes(one.ciphertext[whole - _BLOCK_BYTES : whole]),
            plaintext=memoryview(bytes(one.plaintext[whole:])),
            ciphertext=one.ciphertext[whole:],
        )


def decrypt_together(lanes: Sm4Lanes, key: Key, messages: Sequence[Message]) -> None:
    """Fill all but the ends of up to sixteen plaintexts of one length of 32 bytes or more."""
    chains = []
    for one in messages:
        body = _body_bytes(one)
        chains.append(Chain(iv=one.iv, source=one.ciphertext[:body], target=one.plaintext[:body]))
    lanes.decrypt(key.raw, chains)


def decrypt_end(mode: CipherMode, key: Key, message: Message) -> None:
    """Fill the rest of a plaintext, or zero all of it and raise DecryptionError."""
    body = _body_bytes(message)
    try:
        mode.decrypt_into(
            key,
            iv=bytes(message.ciphertext[body - _BLOCK_BYTES : body]),
            tag=b"",
            ciphertext=message.ciphertext[body:],
            plaintext=message.plaintext[body:],
        )
    except DecryptionError:
        message.plaintext[:] = bytes(message.plaintext.nbytes)
        raise


def _body_bytes(message: Message) -> int:
    return message.ciphertext.nbytes - 2 * _BLOCK_BYTES
