# SPDX-License-Identifier: Apache-2.0
"""The records of an encrypted MindSpore `.ckpt`: their heads and their positions in a file.

```
AES-GCM           magic(4) tag(16) block_len(4) iv_len(4) iv(16) cipher_len(4) cipher
AES-CBC, SM4-CBC  magic(4)         block_len(4) iv_len(4) iv(16) cipher_len(4) cipher
```
Little-endian; `block_len` = 24 + `cipher_len`, `iv_len` = 16. Nothing here needs a key, and nothing
here is authenticated: every value is checked against the size of the file before it is used.

Ciphertext: MindSpore 2.x, utils/crypto.cc. The layout of 1.x (the AES-GCM magic in both modes, no tag)
is recognised and refused.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

from ..ciphers import IV_BYTES, MODES, CipherMode
from ..errors import DecryptionError, TamperedError, TruncatedCiphertextError, UnsupportedSuiteError
from ..source import Ciphertext

MAX_CIPHER_BYTES = 67108890
"""MindSpore refuses a `block_len` above 64 MiB + 50."""

_MAGIC = 0x7F3A5ED8  # plus the code of the mode
_MAGIC_BYTES = 4
_LENGTHS_BYTES = 24  # iv_len, iv and cipher_len: what block_len counts besides the ciphertext
_MAX_HEAD_BYTES = 48
_LEGACY_HEAD_BYTES = 32
_FIELDS = struct.Struct(f"<II{IV_BYTES}sI")
_CRC_MARK = b"crc_num"
_CRC_BYTES = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHead:
    """The fields before the ciphertext of a record."""

    tag: bytes
    iv: bytes
    cipher_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The positions of the records of a file.

    `starts` are the file offsets of the records and the end of the last one; `ivs` are their IVs,
    16 bytes each. `has_crc_trailer` is set if the 17-byte CRC trailer of a broken MindSpore save
    follows.
    """

    starts: array[int]
    ivs: bytes
    has_crc_trailer: bool

    @property
    def count(self) -> int:
        """The number of records, a seal included."""
        return len(self.starts) - 1


def sniff_mode(first_bytes: bytes) -> str | None:
    """Return the cipher mode that the first bytes of a file claim, or None."""
    magic = int.from_bytes(first_bytes[:_MAGIC_BYTES], "little")
    return next((mode.name for mode in MODES if magic == _MAGIC + mode.code), None)


def head_size(mode: CipherMode) -> int:
    """Return the bytes of a record before its ciphertext: 48 for AES-GCM, 32 for CBC."""
    return _MAGIC_BYTES + mode.tag_bytes + _FIELDS.size


def record_size(mode: CipherMode, plaintext_size: int) -> int:
    """Return the size of the record of `plaintext_size` bytes."""
    return head_size(mode) + mode.ciphertext_size(plaintext_size)


def pack_head(mode: CipherMode, head: RecordHead) -> bytes:
    """Return the bytes before the ciphertext."""
    fields = _FIELDS.pack(_LENGTHS_BYTES + head.cipher_size, IV_BYTES, head.iv, head.cipher_size)
    return (_MAGIC + mode.code).to_bytes(_MAGIC_BYTES, "little") + head.tag + fields


def parse_head(mode: CipherMode, head: bytes, *, offset: int) -> RecordHead:
    """Parse a record head of `head_size` bytes, at `offset` of the file, or raise TamperedError."""
    if sniff_mode(head) != mode.name:
        raise TamperedError(f"no {mode.name} record starts here", offset=offset)
    end_of_tag = _MAGIC_BYTES + mode.tag_bytes
    block_size, iv_size, iv, cipher_size = _FIELDS.unpack_from(head, end_of_tag)
    if iv_size != IV_BYTES:
        raise TamperedError(f"the IV length of a record is {iv_size}, not 16", offset=offset)
    if not 0 < cipher_size <= MAX_CIPHER_BYTES:
        raise TamperedError(
            f"the ciphertext length {cipher_size} of a record is out of range", offset=offset
        )
    if block_size != _LENGTHS_BYTES + cipher_size:
        raise TamperedError(
            f"the two lengths of a record, {block_size} and {cipher_size}, disagree", offset=offset
        )
    if not mode.tag_bytes and cipher_size % IV_BYTES:
        raise TamperedError(
            f"the ciphertext length {cipher_size} is no multiple of 16", offset=offset
        )
    return RecordHead(tag=head[_MAGIC_BYTES:end_of_tag], iv=iv, cipher_size=cipher_size)


def find_records(source: Ciphertext, mode: CipherMode) -> Records:
    """Walk the record heads of a file from the first byte to the last.

    Raises:
        DecryptionError: The file is not encrypted, or in another mode.
        UnsupportedSuiteError: A MindSpore 1.x file, which has no tags.
        TruncatedCiphertextError: The file ends inside a record, or is empty.
        TamperedError: A record head is inconsistent, or something else follows the last record.
    """
    _check_first(source, mode)
    starts, ivs = array("q", [0]), bytearray()
    has_crc_trailer = False
    while (offset := starts[-1]) < source.size:
        if has_crc_trailer := _is_crc_trailer(source, offset):
            break
        head = read_head(source, mode, offset=offset)
        end = offset + head_size(mode) + head.cipher_size
        if end > source.size:
            raise TruncatedCiphertextError(
                f"the file ends {end - source.size} bytes before the end of record {len(starts) - 1}",
                offset=offset,
            )
        starts.append(end)
        ivs += head.iv
    return Records(starts=starts, ivs=bytes(ivs), has_crc_trailer=has_crc_trailer)


def read_head(source: Ciphertext, mode: CipherMode, *, offset: int) -> RecordHead:
    """Return the record head at `offset`; raises as `find_records` does."""
    size = head_size(mode)
    head = read_bytes(source, offset, length=min(size, source.size - offset))
    if len(head) < size and (len(head) < _MAGIC_BYTES or sniff_mode(head) == mode.name):
        raise TruncatedCiphertextError("the file ends inside a record head", offset=offset)
    return parse_head(mode, head, offset=offset)


def read_bytes(source: Ciphertext, offset: int, *, length: int) -> bytes:
    """Return `length` bytes; the caller has checked that the source has them."""
    buffer = bytearray(length)
    source.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def _check_first(source: Ciphertext, mode: CipherMode) -> None:
    first = read_bytes(source, 0, length=min(_MAX_HEAD_BYTES, source.size))
    if len(first) < _MAGIC_BYTES:
        raise TruncatedCiphertextError(
            f"a file of {len(first)} bytes holds no encrypted record", offset=0
        )
    found = sniff_mode(first)
    if found is None:
        raise DecryptionError(
            "the file is not an encrypted MindSpore checkpoint",
            offset=0,
            hint="a plain file is read without a key; otherwise its first bytes are damaged",
        )
    if _is_legacy(first, source.size):
        raise UnsupportedSuiteError(
            "the file is laid out as MindSpore 1.x did, without authentication tags",
            offset=0,
            hint="load it with that MindSpore and save it again; "
            "if a newer one wrote it in a CBC mode, its first bytes are damaged",
        )
    if found != mode.name:
        raise DecryptionError(
            f"the file says {found}, not {mode.name}", offset=0, hint=f"open it with mode {found}"
        )


def _is_legacy(first: bytes, file_size: int) -> bool:
    if len(first) < _LEGACY_HEAD_BYTES:
        return False
    magic, block_size, iv_size, _, cipher_size = struct.unpack_from(f"<III{IV_BYTES}sI", first)
    is_whole = block_size == _LENGTHS_BYTES + cipher_size and block_size + 8 <= file_size
    return bool(magic == _MAGIC and iv_size == IV_BYTES and is_whole)


def _is_crc_trailer(source: Ciphertext, offset: int) -> bool:
    if offset == 0 or source.size - offset != _CRC_BYTES:
        return False
    return read_bytes(source, offset, length=len(_CRC_MARK)) == _CRC_MARK
