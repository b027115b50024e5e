# SPDX-License-Identifier: Apache-2.0
"""Whole containers in memory: sealed, cut up, read back."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ckptmgr.crypto.container.header import Content
from ckptmgr.crypto.container.source import ContainerSource, open_container
from ckptmgr.crypto.container.writer import ContainerSealer
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.slots import Identity, Recipient
from ckptmgr.crypto.slots.secret import RawKey
from ckptmgr.formats.source import BytesSource
from tests.crypto.mindspore.sealing import read_range

MODES = ("AES-GCM", "SM4-GCM", "AES-CBC", "SM4-CBC")
ME = RawKey(Key(bytes(range(16))))
OTHER = RawKey(Key(bytes(range(1, 33))))
SEGMENT = 128
HEAD = 3 * 4096


def seal(
    plaintext: bytes,
    mode: str = "AES-GCM",
    *,
    recipients: Sequence[Recipient] = (ME,),
    segment_bytes: int = SEGMENT,
    copy_bytes: int | None = None,
    content: Content = Content.OPAQUE,
    raw_size: int | None = None,
    random: Callable[[int], bytes] = os.urandom,
) -> bytes:
    """Return the container of `plaintext`; frames expand to as many bytes unless said."""
    if content is Content.FRAMES and raw_size is None:
        raw_size = len(plaintext)
    sealer = ContainerSealer(
        recipients,
        mode,
        plaintext_size=len(plaintext),
        segment_bytes=segment_bytes,
        copy_bytes=copy_bytes,
        content=content,
        raw_size=raw_size,
        random=random,
    )
    file = memoryview(bytearray(sealer.sealed_size))
    file[: len(sealer.head)] = sealer.head
    for index in range(sealer.block_count):
        start, size = sealer.plaintext_range(index)
        at, length = sealer.record_range(index)
        sealer.seal_into(index, memoryview(plaintext)[start : start + size], file[at : at + length])
    sealer.finish()
    return bytes(file)


def opened(file: bytes, *identities: Identity) -> ContainerSource:
    """Return the opened container."""
    return open_container(BytesSource(file), identities or (ME,))


def unseal(file: bytes, *identities: Identity) -> bytes:
    """Return the whole plaintext of `file`."""
    source = opened(file, *identities)
    return read_range(source, 0, source.size)


def segments(file: bytes, *, head: int = HEAD, segment_bytes: int = SEGMENT) -> list[bytes]:
    """Return everything before the first segment, then the segments."""
    starts = range(head, len(file), segment_bytes)
    return [file[:head], *(file[start : start + segment_bytes] for start in starts)]
