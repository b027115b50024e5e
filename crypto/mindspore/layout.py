# SPDX-License-Identifier: Apache-2.0
"""The plaintext range of each record of an encrypted file, from the seal or from the records."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise

from blake3 import blake3

from ..ciphers import IV_BYTES, CipherMode
from ..errors import DecryptionError, TamperedError, UnsealedError
from ..keys.key import Key
from ..source import Ciphertext
from .records import Records, find_records, head_size, pack_head, read_bytes, read_head, record_size
from .seal import Seal, claimed_size, decode_seal, seal_failure, seal_plaintext_size

_NONCE_BYTES = 12
_PEEK_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The positions of records and plaintext.

    `record_starts` and `plaintext_starts` are the offsets of all blocks and the end of the last
    one. `ivs`, 16 bytes each, are not authenticated. `seal_digest` is the BLAKE3 of the record of
    the seal; empty without a seal.
    """

    record_starts: array[int]
    plaintext_starts: array[int]
    ivs: bytes
    seal: Seal | None
    seal_digest: bytes


def read_layout(
    source: Ciphertext, key: Key, *, mode: CipherMode, allow_unsealed: bool
) -> BlockLayout:
    """Return the layout of the file in `source`; raises as `open_blocks` does."""
    records = find_records(source, mode)
    seal, seal_digest = _find_seal(
        source, key, mode=mode, records=records, allow_unsealed=allow_unsealed
    )
    if seal is not None:
        starts = _sealed_starts(mode, records, seal=seal)
    elif allow_unsealed:
        starts = _unsealed_starts(source, key, mode=mode, records=records)
    else:
        raise UnsealedError(
            "the file has no seal, so order, number and end of its blocks are not authenticated",
            hint="it is a plain MindSpore file, or its end was cut off; "
            "allow unsealed files only for one you trust",
        )
    return BlockLayout(
        record_starts=records.starts[: len(starts)],
        plaintext_starts=starts,
        ivs=records.ivs,
        seal=seal,
        seal_digest=seal_digest,
    )


def _find_seal(
    source: Ciphertext, key: Key, *, mode: CipherMode, records: Records, allow_unsealed: bool
) -> tuple[Seal | None, bytes]:
    """Return the seal and the digest of its record if the last record is one, else None.

    Its length, which everyone can see, and its first bytes, which cannot be forged without the key,
    decide that. All later failures give one error, so that padding and MAC are not distinguished.
    """
    offset = records.starts[-2]
    head = read_head(source, mode, offset=offset)
    start = offset + head_size(mode)
    first = memoryview(read_bytes(source, start, length=min(_PEEK_BYTES, head.cipher_size)))
    size = claimed_size(mode.peek(key, iv=head.iv, ciphertext=first))
    if size is None or mode.ciphertext_size(size) != head.cipher_size:
        if not allow_unsealed and _looks_like_seal(mode, records):
            raise seal_failure()
        return None, b""
    ciphertext = read_bytes(source, start, length=head.cipher_size)
    plaintext = bytearray(size)
    try:
        mode.decrypt_into(
            key,
            iv=head.iv,
            tag=head.tag,
            ciphertext=memoryview(ciphertext),
            plaintext=memoryview(plaintext),
        )
    except DecryptionError:
        raise seal_failure() from None
    seal = decode_seal(mode, key, plaintext=bytes(plaintext))
    if mode.tag_bytes and any(head.iv[_NONCE_BYTES:]):
        raise TamperedError("the unused bytes of the seal's IV were changed", offset=offset)
    return seal, blake3(pack_head(mode, head) + ciphertext).digest()


def _looks_like_seal(mode: CipherMode, records: Records) -> bool:
    """Return whether the last record is as long as a seal over all the others."""
    length = records.starts[-1] - records.starts[-2]
    return any(
        length == record_size(mode, seal_plaintext_size(records.count - 1, has_crc=has_crc))
        for has_crc in (False, True)
    )


def _sealed_starts(mode: CipherMode, records: Records, *, seal: Seal) -> array[int]:
    """Return the plaintext offset of every block, after comparing the file with its seal."""
    if records.has_crc_trailer:
        raise TamperedError("bytes were added behind the seal", offset=records.starts[-1])
    if records.count - 1 != seal.block_count:
        raise TamperedError(
            f"the file has {records.count - 1} blocks, its seal lists {seal.block_count}"
        )
    full = record_size(mode, seal.block_size)
    starts = array("q", [0])
    for index in range(seal.block_count):
        size = min(seal.block_size, seal.plaintext_size - starts[-1])
        end = index * full + record_size(mode, size)
        if records.starts[index + 1] != end:
            raise TamperedError(
                f"block {index} is not as long as the seal says", offset=records.starts[index]
            )
        starts.append(starts[-1] + size)
    return starts


def _unsealed_starts(
    source: Ciphertext, key: Key, *, mode: CipherMode, records: Records
) -> array[int]:
    """Return the plaintext offset of every block; the end of each block gives its padding."""
    starts = array("q", [0])
    for index, (start, stop) in enumerate(pairwise(records.starts)):
        cipher_size = stop - start - head_size(mode)
        try:
            size = mode.plaintext_size(
                key,
                ciphertext_size=cipher_size,
                end=_last_two_blocks(source, mode, start=start, stop=stop),
            )
        except DecryptionError as error:
            raise DecryptionError(
                f"block {index} does not open: {error.message}", offset=start
            ) from None
        starts.append(starts[-1] + size)
    return starts


def _last_two_blocks(source: Ciphertext, mode: CipherMode, *, start: int, stop: int) -> bytes:
    last = read_bytes(source, stop - IV_BYTES, length=IV_BYTES)
    if stop - start - head_size(mode) > IV_BYTES:
        return read_bytes(source, stop - 2 * IV_BYTES, length=IV_BYTES) + last
    return read_head(source, mode, offset=start).iv + last
