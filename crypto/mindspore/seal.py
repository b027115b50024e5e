# SPDX-License-Identifier: Apache-2.0
"""The seal: a last record that authenticates order, count and end of all others.

MindSpore's records authenticate at best themselves (AES-GCM), never each other: swapped, repeated,
dropped or foreign records load silently. The seal is an ordinary encrypted record whose plaintext
is one unknown protobuf field, which MindSpore skips:

```
DA B4 08              field 17227, length-delimited
length                varint
  version(1) = 1 | mode(1) | flags(2) | file_id(16) | block_bytes(8) | block_count(8) |
  plaintext_bytes(8)
  block_count x digest(32)
  crc32(4)            only with flag 1: CRC32 of the plaintext of all blocks
  mac(32)             HMAC over everything before it in the body
crc_num + 10 bytes    only with flag 1: MindSpore's CRC trailer over blocks and field, which follows
from crc32
```
Integers are little-endian. The hash of HMAC and HKDF is SHA-256, in SM4 mode SM3. The key of the
HMAC is HKDF(user key, salt = file_id, info = "ckptmgr/v1/sealed/" + mode). A digest is the SHA-256
of the record head in AES-GCM (48 bytes; it holds the tag, which binds the ciphertext), and the
BLAKE3 of the whole record in the CBC modes.

* **Every block can be authenticated on its own.** The seal holds a table of digests rather than one
  MAC over the file, so a reader checks the block it just read, in the same memory it decrypts from:
  random access costs only the blocks touched, one pass is enough, and the file cannot change
  between verifying and loading.
* **Every offset follows from authenticated values.** Blocks are `block_bytes` long but for the last
  one. Without that, moved bytes with valid digests could appear at a wrong plaintext offset.
* **Nothing is malleable**: the field fills the record, its length has the shortest form, reserved
  bits are zero.
* The MAC is always the last 32 bytes of the body and covers all before it, in any version.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from blake3 import blake3
from cryptography.hazmat.primitives import constant_time, hashes, hmac

from ..ciphers import CipherMode
from ..errors import DecryptionError, TamperedError, UnsupportedSuiteError
from ..keys.key import Key, derive
from .records import MAX_CIPHER_BYTES, head_size, record_size

SEAL_FILE_ID_BYTES = 16
BLOCK_DIGEST_BYTES = 32
CRC_TRAILER_BYTES = 17

_FIELD_TAG = bytes.fromhex("dab408")
_VERSION = 1
_HAS_CRC = 1
_MAC_BYTES = 32
_CRC_BYTES = 4
_FIXED = struct.Struct(f"<BBH{SEAL_FILE_ID_BYTES}sQQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """The fields of a seal: 32 bytes of `digests` per block, the `crc` of all plaintext."""

    file_id: bytes
    block_size: int
    plaintext_size: int
    digests: bytes
    crc: int | None = None

    @property
    def block_count(self) -> int:
        """The number of blocks without the seal."""
        return len(self.digests) // BLOCK_DIGEST_BYTES

    def digest(self, index: int) -> bytes:
        """Return the digest of block `index`."""
        return self.digests[index * BLOCK_DIGEST_BYTES : (index + 1) * BLOCK_DIGEST_BYTES]


def block_digest(mode: CipherMode, record: memoryview) -> bytes:
    """Return the digest that identifies one record."""
    if not mode.tag_bytes:
        return blake3(record).digest()
    digest = hashes.Hash(mode.digest)
    digest.update(record[: head_size(mode)])
    return digest.finalize()


def seal_plaintext_size(block_count: int, *, has_crc: bool) -> int:
    """Return the plaintext bytes of the seal record for a number of blocks."""
    body = _body_size(block_count, has_crc=has_crc)
    field = len(_FIELD_TAG) + len(_varint(body)) + body
    return field + (CRC_TRAILER_BYTES if has_crc else 0)


def seal_record_size(mode: CipherMode, block_count: int, *, has_crc: bool) -> int:
    """Return the bytes of the seal record for a number of blocks.

    Raises ValueError if their digests do not fit into a record that MindSpore accepts.
    """
    size = seal_plaintext_size(block_count, has_crc=has_crc)
    if mode.ciphertext_size(size) > MAX_CIPHER_BYTES:
        raise ValueError(f"{block_count} blocks are too many for one seal: use larger blocks")
    return record_size(mode, size)


def encode_seal(mode: CipherMode, key: Key, *, seal: Seal) -> bytes:
    """Return the plaintext of the seal record."""
    fixed = _FIXED.pack(
        _VERSION,
        mode.code,
        0 if seal.crc is None else _HAS_CRC,
        seal.file_id,
        seal.block_size,
        seal.block_count,
        seal.plaintext_size,
    )
    crc = b"" if seal.crc is None else seal.crc.to_bytes(_CRC_BYTES, "little")
    body = fixed + seal.digests + crc
    body += _mac(mode, key, body=body)
    field = _FIELD_TAG + _varint(len(body)) + body
    return field if seal.crc is None else field + crc_trailer(zlib.crc32(field, seal.crc))


def claimed_size(first: bytes) -> int | None:
    """Return the plaintext size of a seal record from its first 32 bytes, or None if it is no seal.

    Neither authenticated nor checked against the record: the caller does both.
    """
    if not first.startswith(_FIELD_TAG):
        return None
    length, at = _parse_varint(first, len(_FIELD_TAG))
    flags = int.from_bytes(first[at + 2 : at + 4], "little")
    return at + length + (CRC_TRAILER_BYTES if flags & _HAS_CRC else 0)


def decode_seal(mode: CipherMode, key: Key, *, plaintext: bytes) -> Seal:
    """Parse the plaintext of a seal record.

    Raises:
        DecryptionError: The MAC does not match.
        UnsupportedSuiteError: A newer version wrote the seal.
        TamperedError: Under the right key, the seal contradicts itself.
    """
    length, at = _parse_varint(plaintext, len(_FIELD_TAG))
    body = plaintext[at : at + length]
    content, mac = body[:-_MAC_BYTES], body[-_MAC_BYTES:]
    if len(body) < _FIXED.size + _MAC_BYTES or not constant_time.bytes_eq(
        _mac(mode, key, body=content), mac
    ):
        raise seal_failure()
    version, code, flags, file_id, block_size, block_count, plaintext_size = _FIXED.unpack_from(
        body
    )
    if version != _VERSION or flags & ~_HAS_CRC:
        raise UnsupportedSuiteError(
            f"the seal is of version {version} with flags {flags}",
            hint="a newer ckptmgr wrote this file",
        )
    has_crc = bool(flags & _HAS_CRC)
    is_consistent = (
        code == mode.code
        and length == _body_size(block_count, has_crc=has_crc)
        and block_size > 0
        and block_count == -(-plaintext_size // block_size)
    )
    if not is_consistent:
        raise TamperedError("the seal contradicts itself")
    end = _FIXED.size + block_count * BLOCK_DIGEST_BYTES
    seal = Seal(
        file_id=file_id,
        block_size=block_size,
        plaintext_size=plaintext_size,
        digests=body[_FIXED.size : end],
        crc=int.from_bytes(content[end:], "little") if has_crc else None,
    )
    # The field head and the trailer, which no MAC covers, are compared at once.
    if not constant_time.bytes_eq(encode_seal(mode, key, seal=seal), plaintext):
        raise seal_failure()
    return seal


def seal_failure() -> DecryptionError:
    """Return the one error of a seal that does not open: the same for padding, tag and MAC."""
    return DecryptionError("the seal does not open: the key is wrong, or the file was changed")


def crc_trailer(crc: int) -> bytes:
    """Return MindSpore's 17-byte CRC trailer."""
    return b"crc_num" + crc.to_bytes(10, "big")


def _mac(mode: CipherMode, key: Key, *, body: bytes) -> bytes:
    file_id = body[4 : 4 + SEAL_FILE_ID_BYTES]
    secret = derive(key, f"ckptmgr/v1/sealed/{mode.name}", salt=file_id, algorithm=mode.digest)
    mac = hmac.HMAC(secret, mode.digest)
    mac.update(body)
    return mac.finalize()


def _body_size(block_count: int, *, has_crc: bool) -> int:
    crc_bytes = _CRC_BYTES if has_crc else 0
    return _FIXED.size + block_count * BLOCK_DIGEST_BYTES + crc_bytes + _MAC_BYTES


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _parse_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the value and the offset behind it; at most five bytes are read."""
    value = 0
    for shift, byte in enumerate(data[at : at + 5]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    return value, len(data)
