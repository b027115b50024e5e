# SPDX-License-Identifier: Apache-2.0
"""Whole files in memory: sealed, taken apart, put together again, read back."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from itertools import pairwise

from ckptmgr.crypto.ciphers import mode_of
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.mindspore.blocks import BlockSealer, open_blocks
from ckptmgr.crypto.mindspore.records import find_records
from ckptmgr.crypto.source import Ciphertext
from ckptmgr.formats.source import BytesSource

MODES = ("AES-GCM", "AES-CBC", "SM4-CBC")
KEY = Key(bytes(range(16)))
OTHER_KEY = Key(bytes(range(1, 17)))
BLOCK = 64


def seal(
    plaintext: bytes,
    mode: str,
    *,
    key: Key = KEY,
    block_bytes: int = BLOCK,
    has_crc: bool = False,
    random: Callable[[int], bytes] = os.urandom,
) -> bytes:
    """Return the sealed file of `plaintext`."""
    sealer = BlockSealer(
        key,
        mode,
        plaintext_size=len(plaintext),
        block_bytes=block_bytes,
        has_crc_trailer=has_crc,
        random=random,
    )
    sealed = memoryview(bytearray(sealer.sealed_size))
    for index in range(sealer.block_count):
        start, size = sealer.plaintext_range(index)
        at, length = sealer.record_range(index)
        sealer.seal_into(
            index, memoryview(plaintext)[start : start + size], sealed[at : at + length]
        )
    end = sealer.finish(crc=zlib.crc32(plaintext) if has_crc else None)
    sealed[len(sealed) - len(end) :] = end
    return bytes(sealed)


def split(file: bytes, mode: str) -> list[bytes]:
    """Return the records of a file, the seal last."""
    starts = find_records(BytesSource(file), mode_of(mode)).starts
    return [file[a:b] for a, b in pairwise(starts)]


def read_range(source: Ciphertext, offset: int, length: int) -> bytes:
    """Return `length` bytes of `source` from `offset` on."""
    buffer = bytearray(length)
    source.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def unseal(file: bytes, mode: str, *, key: Key = KEY, allow_unsealed: bool = False) -> bytes:
    """Return the whole plaintext of `file`."""
    source = open_blocks(BytesSource(file), key, mode, allow_unsealed=allow_unsealed)
    return read_range(source, 0, source.size)
