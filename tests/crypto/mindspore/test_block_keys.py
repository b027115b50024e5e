# SPDX-License-Identifier: Apache-2.0
"""An encrypted `.ckpt` and several keys: the seal shows which is right."""

from __future__ import annotations

import pytest

from ckptmgr.crypto.errors import DecryptionError, KeySourceError, TamperedError, UnsealedError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.ring import KeyKind, KeyMaterial, KeyRing
from ckptmgr.crypto.mindspore.blocks import open_blocks_with
from ckptmgr.formats.source import BytesSource

from .sealing import KEY, read_range, seal, split

MODES = ("AES-GCM", "AES-CBC", "SM4-CBC")
PLAIN = bytes(range(200))
WRONG = Key(bytes(len(KEY.raw)))


def ring(*keys: Key) -> KeyRing:
    return KeyRing([KeyMaterial.of_key(key) for key in keys])


@pytest.mark.parametrize("mode", MODES)
def test_file_opens_with_whichever_key_is_right(mode: str) -> None:
    source = BytesSource(seal(PLAIN, mode))
    for keys in (ring(WRONG, KEY), ring(KEY, WRONG), ring(Key(bytes(24)), KEY), KEY):
        blocks = open_blocks_with(source, keys, mode)
        assert read_range(blocks, 0, blocks.size) == PLAIN


def test_file_that_opens_with_none_says_what_is_wrong_with_the_first() -> None:
    with pytest.raises(DecryptionError):
        open_blocks_with(
            BytesSource(seal(PLAIN, "AES-GCM")), ring(WRONG, Key(bytes(24))), "AES-GCM"
        )


def test_damage_is_not_taken_for_a_wrong_key() -> None:
    _, *records = split(seal(PLAIN, "AES-GCM"), "AES-GCM")
    with pytest.raises(TamperedError):
        open_blocks_with(BytesSource(b"".join(records)), ring(WRONG, KEY), "AES-GCM")


@pytest.mark.parametrize("mode", MODES)
def test_file_without_a_seal_takes_one_key(mode: str) -> None:
    source = BytesSource(b"".join(split(seal(PLAIN, mode), mode)[:-1]))
    assert open_blocks_with(source, ring(KEY), mode, allow_unsealed=True).size == len(PLAIN)
    with pytest.raises(UnsealedError):
        open_blocks_with(source, ring(KEY, WRONG), mode)
    with pytest.raises(KeySourceError, match="2 keys are given"):
        open_blocks_with(source, ring(KEY, WRONG), mode, allow_unsealed=True)


def test_passphrase_opens_no_such_file() -> None:
    phrase = KeyRing([KeyMaterial(KeyKind.PHRASE, b"horse")])
    with pytest.raises(KeySourceError, match="takes a key"):
        open_blocks_with(BytesSource(seal(PLAIN, "AES-GCM")), phrase, "AES-GCM")
