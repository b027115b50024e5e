# SPDX-License-Identifier: Apache-2.0
"""A second implementation of containers, written from docs/container-format.md alone; it shares no code with ours.

Slow and short on purpose, and every check that the page names is an assertion. Slots are in `slots_reference`.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256, SM4
from cryptography.hazmat.primitives.ciphers.modes import CBC, GCM

from tests.crypto.slots.slots_reference import Secret, open_slot, raw_slot

MAGIC = b"\x8fCKPE\r\n\x1a"
HASHES: dict[str, hashes.HashAlgorithm] = {
    "sha256": hashes.SHA256(),
    "sha384": hashes.SHA384(),
    "sha512": hashes.SHA512(),
    "sm3": hashes.SM3(),
}


@dataclass(frozen=True)
class Suite:
    """A row of the table in section 4, and H of section 2."""

    code: int
    cipher: type[AES256 | SM4]
    h: str
    k: str
    ids: bytes
    key_bytes: int
    tag_hash: str | None = None

    @property
    def zeros(self) -> int:
        return 0 if self.tag_hash is None else 12

    @property
    def iv_bytes(self) -> int:
        return 12 if self.tag_hash is None else 16

    @property
    def tag_bytes(self) -> int:
        return 16 if self.tag_hash is None else 32

    @property
    def overhead(self) -> int:
        return 32 if self.tag_hash is None else 80

    def last_bytes(self, plaintext_bytes: int) -> int:
        """Length of a last segment."""
        if self.tag_hash is None:
            return plaintext_bytes + 32
        return 64 + 16 * (plaintext_bytes // 16 + 1)


SUITES = {
    suite.code: suite
    for suite in (
        Suite(0x0010, AES256, "sha256", "sha384", b"\0\0", 32),
        Suite(0x0011, SM4, "sm3", "sm3", b"\xe2\xe1", 16),
        Suite(0x0101, AES256, "sha256", "sha384", b"\xe1\0", 64, "sha512"),
        Suite(0x0102, SM4, "sm3", "sm3", b"\xe3\xe1", 48, "sm3"),
    )
}
CODES = {"AES-GCM": 0x0010, "SM4-GCM": 0x0011, "AES-CBC": 0x0101, "SM4-CBC": 0x0102}


def mac(key: bytes, data: bytes, name: str) -> bytes:
    """HMAC (RFC 2104)."""
    made = hmac.HMAC(key, HASHES[name])
    made.update(data)
    return made.finalize()


def expand(key: bytes, info: bytes, length: int, name: str) -> bytes:
    """HKDF-Expand (RFC 5869)."""
    block, output = b"", b""
    for counter in range(1, 9):
        block = mac(key, block + info + bytes([counter]), name)
        output += block
    return output[:length]


def encrypt(suite: Suite, key: bytes, iv: bytes, aad: bytes, plaintext: bytes) -> bytes:
    """Ciphertext and tag of a segment."""
    if suite.tag_hash is None:
        cipher = Cipher(suite.cipher(key), GCM(iv)).encryptor()
        cipher.authenticate_additional_data(aad)
        return cipher.update(plaintext) + cipher.finalize() + cipher.tag
    padding = 16 - len(plaintext) % 16
    cbc = Cipher(suite.cipher(key[32:]), CBC(iv)).encryptor()
    ciphertext = cbc.update(plaintext + bytes([padding]) * padding) + cbc.finalize()
    return ciphertext + cbc_tag(suite, key, iv, aad, ciphertext)


def cbc_tag(suite: Suite, key: bytes, iv: bytes, aad: bytes, ciphertext: bytes) -> bytes:
    assert suite.tag_hash is not None
    bits = struct.pack(">Q", 8 * len(aad))
    return mac(key[:32], aad + iv + ciphertext + bits, suite.tag_hash)[:32]


def decrypt(suite: Suite, key: bytes, iv: bytes, aad: bytes, sealed: bytes) -> bytes:
    """The plaintext of a segment."""
    ciphertext, tag = sealed[: -suite.tag_bytes], sealed[-suite.tag_bytes :]
    if suite.tag_hash is None:
        cipher = Cipher(suite.cipher(key), GCM(iv, tag)).decryptor()
        cipher.authenticate_additional_data(aad)
        return cipher.update(ciphertext) + cipher.finalize()
    if tag != cbc_tag(suite, key, iv, aad, ciphertext):
        raise InvalidTag
    cbc = Cipher(suite.cipher(key[32:]), CBC(iv)).decryptor()
    padded = cbc.update(ciphertext) + cbc.finalize()
    assert padded.endswith(bytes([padded[-1]]) * padded[-1])
    return padded[: -padded[-1]]


def floe_header(suite: Suite, key: bytes, aad: bytes, iv: bytes, segment_bytes: int) -> bytes:
    prefix = suite.ids + struct.pack(">II", segment_bytes, 32) + iv
    return prefix + expand(key, prefix + b"HEADER_TAG:" + aad, 32, suite.k)


def segment_key(suite: Suite, key: bytes, aad: bytes, prefix: bytes, index: int) -> bytes:
    size = HASHES[suite.k].digest_size
    message_key = expand(key, prefix + b"MESSAGE_KEY:" + aad, size, suite.k)
    number = struct.pack(">Q", index & ~0xFFFFF)
    return expand(message_key, prefix + b"DEK:" + number + aad, suite.key_bytes, suite.k)


def floe_encrypt(
    key: bytes, aad: bytes, plaintext: bytes, iv: bytes, segment_bytes: int, suite: Suite
) -> bytes:
    """A FLOE message, with made-up segment IVs."""
    output = floe_header(suite, key, aad, iv, segment_bytes)
    prefix, full = output[:42], segment_bytes - suite.overhead
    count = max(1, -(-len(plaintext) // full))
    for index in range(count):
        is_final = index == count - 1
        part = plaintext[index * full : (index + 1) * full]
        length = suite.last_bytes(len(part)) if is_final else 0xFFFFFFFF
        nonce = hashlib.sha256(iv + index.to_bytes(8, "big")).digest()[: suite.iv_bytes]
        associated = struct.pack(">QB", index, is_final)
        own_key = segment_key(suite, key, aad, prefix, index)
        sealed = encrypt(suite, own_key, nonce, associated, part)
        output += struct.pack(">I", length) + bytes(suite.zeros) + nonce + sealed
    return output


def floe_decrypt(
    key: bytes, aad: bytes, message: bytes, segment_bytes: int, suite: Suite = SUITES[0x0010]
) -> bytes:
    """The plaintext of a FLOE message."""
    prefix, body = message[:42], message[74:]
    assert message[:74] == floe_header(suite, key, aad, prefix[10:], segment_bytes)
    output = b""
    for index, at in enumerate(range(0, len(body), segment_bytes)):
        segment = body[at : at + segment_bytes]
        is_final = at + segment_bytes >= len(body)
        length = len(segment) if is_final else 0xFFFFFFFF
        start = 4 + suite.zeros
        assert segment[:start] == struct.pack(">I", length) + bytes(suite.zeros)
        associated = struct.pack(">QB", index, is_final)
        iv, sealed = segment[start : start + suite.iv_bytes], segment[start + suite.iv_bytes :]
        own_key = segment_key(suite, key, aad, prefix, index)
        output += decrypt(suite, own_key, iv, associated, sealed)
    return output


def seal(
    plaintext: bytes, user_key: bytes, *, segment_bytes: int, seed: bytes, mode: str = "AES-GCM"
) -> bytes:
    """Return a container of opaque bytes for one key."""
    suite = SUITES[CODES[mode]]
    data_key, file_id, salt, iv = (
        hashlib.sha256(seed + bytes([number])).digest() for number in range(4)
    )
    fixed = struct.pack(
        "<8sBBHI16sQHHI16x", MAGIC, 1, 12, suite.code, 0, file_id[:16], len(plaintext), 3, 0,
        segment_bytes,
    )  # fmt: skip
    slot = raw_slot(user_key, salt, data_key, fixed)
    copy = (fixed + struct.pack("<QHHI", 1, 1, 0, len(slot)) + slot).ljust(4064, b"\0")
    copy += header_mac(suite, data_key, copy)
    payload = floe_encrypt(data_key, fixed, plaintext, iv, segment_bytes, suite)
    return (copy + copy).ljust(12288 - 74, b"\0") + payload


def header_mac(suite: Suite, data_key: bytes, content: bytes) -> bytes:
    key = expand(data_key, b"ckptmgr/v1/header-mac" + content[:64], 32, suite.k)
    return mac(key, content, suite.h)


def unseal(file: bytes, secret: Secret) -> bytes:
    """Return the plaintext of a container; of content 4 the compressed file that it is."""
    for copy in copies(file):
        suite = SUITES[struct.unpack_from("<H", copy, 10)[0]]
        for slot in slots(copy):
            data_key = open_slot(slot, secret, copy[:64])
            if data_key is not None and counts(file, copy, data_key, suite):
                return payload(file, copy, data_key, suite)
    raise ValueError("nothing opens it")


def counts(file: bytes, copy: bytes, data_key: bytes, suite: Suite) -> bool:
    """Tell whether a header copy and the payload are those of a data key."""
    (segment_bytes,) = struct.unpack_from("<I", copy, 44)
    start = 2 * len(copy) + 4096 - 74
    wanted = floe_header(suite, data_key, copy[:64], file[start + 10 : start + 42], segment_bytes)
    return (
        copy[-32:] == header_mac(suite, data_key, copy[:-32]) and file[start : start + 74] == wanted
    )


def copies(file: bytes) -> list[bytes]:
    """Return the header copies that can be parsed, in the order in which they count."""
    found = []
    for at in (0, 4096, 8192, 16384, 32768, 65536):
        if len(file) < at + 64 or file[at : at + 9] != MAGIC + b"\1":
            continue
        size = 1 << file[at + 9]
        if at not in (0, size) or not 12 <= file[at + 9] <= 16:
            continue
        copy = file[at : at + size]
        code, flags = struct.unpack_from("<HI", copy, 10)
        content, zero, segment_bytes = struct.unpack_from("<HHI", copy, 40)
        generation, _, none, _ = struct.unpack_from("<QHHI", copy, 64)
        if code not in SUITES or content not in (1, 2, 3, 4):
            continue
        if flags or zero or none or any(copy[48:64]) or not 0 < segment_bytes <= 64 << 20:
            continue
        found.append((-generation, at, copy))
    return [copy for _, _, copy in sorted(found)]


def slots(copy: bytes) -> list[bytes]:
    count, _, size = struct.unpack_from("<HHI", copy, 72)
    assert 1 <= count <= 16
    assert not any(copy[80 + size : -32])
    found, at = [], 80
    for _ in range(count):
        _, zero, body_bytes = struct.unpack_from("<BBH", copy, at)
        assert not zero
        found.append(copy[at : at + 12 + body_bytes])
        at += 12 + body_bytes
    assert at == 80 + size
    return found


def payload(file: bytes, copy: bytes, data_key: bytes, suite: Suite) -> bytes:
    (size,), (content,) = struct.unpack_from("<Q", copy, 32), struct.unpack_from("<H", copy, 40)
    (segment_bytes,) = struct.unpack_from("<I", copy, 44)
    start, full = 2 * len(copy) + 4096, segment_bytes - suite.overhead
    assert not any(file[2 * len(copy) : start - 74])
    if content == 4:
        count = -(-(len(file) - start) // segment_bytes)
        last = len(file) - start - (count - 1) * segment_bytes
        size = (count - 1) * full + last - suite.overhead
        assert size % 16 == 0
    count = max(1, -(-size // full))
    end = start + (count - 1) * segment_bytes + suite.last_bytes(size - (count - 1) * full)
    assert len(file) == end
    plaintext = floe_decrypt(data_key, copy[:64], file[start - 74 :], segment_bytes, suite)
    assert len(plaintext) == size
    return plaintext
