# SPDX-License-Identifier: Apache-2.0
"""GCM in pieces: the same bytes as at once, and zeros after whatever goes wrong on the way."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

import pytest
from cryptography.hazmat.primitives.ciphers import algorithms
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.crypto.aead import AES_256_GCM
from ckptmgr.crypto.ciphers import CIPHER_PIECE_BYTES, GcmDecryption, read_in_pieces
from ckptmgr.crypto.container.source import open_container
from ckptmgr.crypto.errors import DecryptionError, TamperedError
from ckptmgr.crypto.mindspore.blocks import open_blocks
from ckptmgr.crypto.source import Ciphertext
from ckptmgr.formats.source import BytesSource

from .container import containers
from .mindspore import sealing

Make = Callable[[bytes], bytes]
Reopen = Callable[[BytesSource], Ciphertext]

KEY, NONCE, AAD = bytes(32), bytes(range(12)), b"where"
LARGE = bytes(range(256)) * (5 << 12)  # 5 MiB


def encrypted(plaintext: bytes) -> tuple[bytes, bytes]:
    ciphertext = bytearray(len(plaintext))
    tag = AES_256_GCM.encrypt_into(
        KEY,
        iv=NONCE,
        aad=AAD,
        plaintext=memoryview(plaintext),
        ciphertext=memoryview(ciphertext),
    )
    return bytes(ciphertext), tag


def decryption(plaintext: bytearray) -> GcmDecryption:
    return GcmDecryption(algorithms.AES(KEY), NONCE, aad=AAD, plaintext=memoryview(plaintext))


@given(parts=st.lists(st.binary(max_size=40), max_size=5))
def test_ciphertext_in_pieces_gives_the_plaintext(parts: Sequence[bytes]) -> None:
    whole = b"".join(parts)
    ciphertext, tag = encrypted(whole)
    plaintext = bytearray(len(whole))
    start = 0
    with decryption(plaintext) as opening:
        for part in parts:
            opening.update(memoryview(ciphertext)[start : start + len(part)])
            start += len(part)
        opening.finish(tag)
    assert plaintext == whole


def test_wrong_tag_is_refused_and_leaves_zeros() -> None:
    ciphertext, tag = encrypted(b"weights")
    plaintext = bytearray(7)
    with decryption(plaintext) as opening:
        opening.update(memoryview(ciphertext))
        with pytest.raises(DecryptionError):
            opening.finish(bytes([tag[0] ^ 1]) + tag[1:])
    assert plaintext == bytes(7)


def test_what_ends_without_its_tag_leaves_zeros() -> None:
    ciphertext, _ = encrypted(b"weights")
    plaintext = bytearray(7)
    with decryption(plaintext) as opening:
        opening.update(memoryview(ciphertext))
        assert plaintext == b"weights"
    assert plaintext == bytes(7)


@pytest.mark.parametrize(
    ("size", "lengths"),
    [
        (0, []),
        (1, [1]),
        (CIPHER_PIECE_BYTES, [CIPHER_PIECE_BYTES]),
        (CIPHER_PIECE_BYTES + 4095, [CIPHER_PIECE_BYTES + 4095]),
        (CIPHER_PIECE_BYTES + 4096, [CIPHER_PIECE_BYTES, 4096]),
        (2 * CIPHER_PIECE_BYTES + 1, [CIPHER_PIECE_BYTES, CIPHER_PIECE_BYTES + 1]),
    ],
)
def test_pieces_follow_on_each_other_and_the_last_one_is_not_short(
    size: int, lengths: list[int]
) -> None:
    reads: list[tuple[int, int]] = []
    buffer = memoryview(bytearray(size))
    pieces = read_in_pieces(lambda at, view: reads.append((at, view.nbytes)), buffer)
    assert [piece.nbytes for piece in pieces] == lengths
    assert reads == [(sum(lengths[:index]), length) for index, length in enumerate(lengths)]


class FailingSource(BytesSource):
    """Fails to read from an offset on, once it is broken."""

    fails_from: int | None = None

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`, or fail."""
        if self.fails_from is not None and offset >= self.fails_from:
            raise OSError(errno.EIO, "the disk is gone")
        super().read_into(offset, buffer)


def container_of(plaintext: bytes) -> bytes:
    return containers.seal(plaintext, segment_bytes=len(plaintext) + 32)


def blocks_of(plaintext: bytes) -> bytes:
    return sealing.seal(plaintext, "AES-GCM", block_bytes=len(plaintext))


def opened_container(source: BytesSource) -> Ciphertext:
    return open_container(source, [containers.ME])


def opened_blocks(source: BytesSource) -> Ciphertext:
    return open_blocks(source, sealing.KEY, "AES-GCM")


FILES = pytest.mark.parametrize(
    ("make", "reopen"), [(container_of, opened_container), (blocks_of, opened_blocks)]
)


@FILES
def test_block_of_several_pieces_is_read(make: Make, reopen: Reopen) -> None:
    source = reopen(BytesSource(make(LARGE)))
    buffer = bytearray(len(LARGE))
    source.read_into(0, memoryview(buffer))
    assert buffer == LARGE


@FILES
@pytest.mark.parametrize("place", [0, 100, CIPHER_PIECE_BYTES - 1, CIPHER_PIECE_BYTES, len(LARGE)])
def test_block_that_was_changed_anywhere_leaves_zeros(
    make: Make, reopen: Reopen, place: int
) -> None:
    content = bytearray(make(LARGE))
    source = reopen(BytesSource(content))
    content[-len(LARGE) - 32 + place if make is container_of else place] ^= 1
    buffer = bytearray(b"\xee") * len(LARGE)
    with pytest.raises(TamperedError):
        source.read_into(0, memoryview(buffer))
    assert set(buffer) in ({0}, {0xEE})


@FILES
def test_disk_that_fails_in_the_middle_of_a_block_leaves_zeros(make: Make, reopen: Reopen) -> None:
    content = make(LARGE)
    file = FailingSource(content)
    source = reopen(file)
    file.fails_from = len(content) // 2
    buffer = bytearray(b"\xee") * len(LARGE)
    with pytest.raises(OSError, match="the disk is gone"):
        source.read_into(0, memoryview(buffer))
    assert set(buffer) == {0}
