# SPDX-License-Identifier: Apache-2.0
"""FLOE: a message of segments that are encrypted, authenticated and read independently.

```
message   parameters(10) || iv(32) || header_tag(32) || segment 0 || segment 1 || ... || final
segment
segment   length(4, big-endian) || zeros(alignment) || iv || ciphertext || tag
```
`length` is 0xFFFFFFFF, in the final segment its whole length. All other segments have
`segment_bytes`.

* The header tag commits to the key: no second key opens the message.
* Position and finality are associated data of each segment, so moved, repeated, dropped and
  appended segments fail.
* Every 2^20 segments another key is derived, so that random nonces stay far from their limit.
* The caller knows the number of segments from an authenticated length, see `source`.

With AES-256-GCM, HKDF-Expand-SHA-384 and no alignment this is FLOE to the byte. The other ciphers
use the same structure with parameter numbers that FLOE has not assigned; `alignment` makes room for
CBC, whose ciphertext is a multiple of 16.

Source: c2sp.org/FLOE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from cryptography.hazmat.primitives import constant_time, hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from ..aead import Aead, GcmAead
from ..ciphers import Random, read_in_pieces
from ..errors import DecryptionError, TamperedError

HEADER_BYTES = 74
SEGMENT_LENGTH_BYTES = 4
MAX_SEGMENTS = 2**40

_IV_BYTES = 32
_TAG_BYTES = 32
_PARAMETER_BYTES = 10
_NOT_FINAL = b"\xff\xff\xff\xff"


@dataclass(frozen=True, slots=True, kw_only=True)
class FloeParameters:
    """The parameters of a message.

    `aead` encrypts the segments, `digest` is the hash of HKDF-Expand; `aead_id` and `kdf_id` are
    their numbers in the header. `segment_bytes` is the length of every segment but the last, with
    `alignment_bytes` zeros behind its length field; 2 ** `rotation_bits` segments share a key.

    Raises:
        ValueError: Nothing fits into a segment, or it cannot be filled exactly.
    """

    aead: Aead
    aead_id: int
    digest: hashes.HashAlgorithm
    kdf_id: int
    segment_bytes: int
    alignment_bytes: int = 0
    rotation_bits: int = 20

    def __post_init__(self) -> None:
        room = self.segment_bytes - self._overhead
        if self.plaintext_bytes <= 0 or self.aead.ciphertext_size(self.plaintext_bytes) != room:
            raise ValueError(f"a segment of {self.segment_bytes} bytes does not suit the cipher")

    @property
    def _overhead(self) -> int:
        return (
            SEGMENT_LENGTH_BYTES + self.alignment_bytes + self.aead.iv_bytes + self.aead.tag_bytes
        )

    @property
    def plaintext_bytes(self) -> int:
        """Plaintext bytes of every segment but the last."""
        return self.aead.plaintext_room(self.segment_bytes - self._overhead)

    def segment_size(self, plaintext_size: int) -> int:
        """Return the length of the segment that holds `plaintext_size` bytes."""
        return self._overhead + self.aead.ciphertext_size(plaintext_size)

    def encode(self) -> bytes:
        """Return the first ten bytes of a header."""
        numbers = (self.segment_bytes.to_bytes(4, "big"), _IV_BYTES.to_bytes(4, "big"))
        return bytes((self.aead_id, self.kdf_id)) + b"".join(numbers)


def start_encryption(
    parameters: FloeParameters, key: bytes, *, aad: bytes, random: Random
) -> FloeMessage:
    """Return a new message under a key of 32 bytes, bound to `aad`."""
    iv = random(_IV_BYTES)
    tag = _derive(parameters, key, iv=iv, purpose=b"HEADER_TAG:", aad=aad, length=_TAG_BYTES)
    return FloeMessage(parameters, key, aad=aad, header=parameters.encode() + iv + tag)


def start_decryption(
    parameters: FloeParameters, key: bytes, *, aad: bytes, header: bytes
) -> FloeMessage:
    """Return the message of `header` (74 bytes).

    Raises:
        DecryptionError: The header was changed, or is of another key, other parameters or other
            associated data.
    """
    iv = header[_PARAMETER_BYTES : _PARAMETER_BYTES + _IV_BYTES]
    tag = _derive(parameters, key, iv=iv, purpose=b"HEADER_TAG:", aad=aad, length=_TAG_BYTES)
    if not constant_time.bytes_eq(parameters.encode() + iv + tag, header):
        raise DecryptionError("the header tag does not match: another key, or changed bytes")
    return FloeMessage(parameters, key, aad=aad, header=header)


class FloeMessage:
    """One started message; `header` is its first 74 bytes. Safe to use from several threads."""

    def __init__(
        self, parameters: FloeParameters, key: bytes, *, aad: bytes, header: bytes
    ) -> None:
        self.parameters = parameters
        self.header = header
        self._aad = aad
        self._message_key = self._derive(key, b"MESSAGE_KEY:", parameters.digest.digest_size)
        self._epoch_key = (-1, b"")

    def seal_into(
        self,
        index: int,
        plaintext: memoryview,
        segment: memoryview,
        *,
        is_final: bool,
        random: Random,
    ) -> None:
        """Encrypt segment `index` and fill `segment`; every index is encrypted once.

        Raises ValueError for a wrong length or index.
        """
        self._check(index, plaintext, segment, is_final=is_final)
        aead, start = self.parameters.aead, SEGMENT_LENGTH_BYTES + self.parameters.alignment_bytes
        iv, end = random(aead.iv_bytes), segment.nbytes - aead.tag_bytes
        segment[end:] = aead.encrypt_into(
            self._key(index),
            iv=iv,
            aad=_segment_aad(index, is_final=is_final),
            plaintext=plaintext,
            ciphertext=segment[start + len(iv) : end],
        )
        segment[: start + len(iv)] = self._prefix(segment, is_final=is_final) + iv

    def open_into(
        self, index: int, segment: memoryview, plaintext: memoryview, *, is_final: bool
    ) -> None:
        """Authenticate and decrypt segment `index` into `plaintext`.

        Raises:
            TamperedError: It is not the segment of this message at this position; `plaintext` holds
                zeros.
            ValueError: A length is wrong, or there is no such index.
        """
        self._check(index, plaintext, segment, is_final=is_final)
        aead, start = self.parameters.aead, SEGMENT_LENGTH_BYTES + self.parameters.alignment_bytes
        end = segment.nbytes - aead.tag_bytes
        with _segment_errors(index):
            if bytes(segment[:start]) != self._prefix(segment, is_final=is_final):
                plaintext[:] = bytes(plaintext.nbytes)
                raise _wrong_segment(index)
            aead.decrypt_into(
                self._key(index),
                iv=bytes(segment[start : start + aead.iv_bytes]),
                aad=_segment_aad(index, is_final=is_final),
                tag=bytes(segment[end:]),
                ciphertext=segment[start + aead.iv_bytes : end],
                plaintext=plaintext,
            )

    def open_from(
        self,
        index: int,
        read: Callable[[int, memoryview], None],
        segment: memoryview,
        plaintext: memoryview,
        *,
        is_final: bool,
    ) -> None:
        """Like `open_into`, but read the segment, too; in GCM it is decrypted while it is read.

        `read` fills memory with the bytes of the segment from an offset on; `segment` is memory for
        them.
        """
        aead = self.parameters.aead
        if not isinstance(aead, GcmAead):
            read(0, segment)
            self.open_into(index, segment, plaintext, is_final=is_final)
            return
        self._check(index, plaintext, segment, is_final=is_final)
        prefix = self._prefix(segment, is_final=is_final)
        pieces = read_in_pieces(read, segment)
        first = next(pieces)
        start, left = len(prefix) + aead.iv_bytes, plaintext.nbytes
        decryption = aead.decryption(
            self._key(index),
            iv=bytes(first[len(prefix) : start]),
            aad=_segment_aad(index, is_final=is_final),
            plaintext=plaintext,
        )
        with decryption, _segment_errors(index):
            if first[: len(prefix)] != prefix:
                raise _wrong_segment(index)
            piece = first
            for piece in chain([first[start:]], pieces):
                decryption.update(piece[:left])
                left -= min(left, piece.nbytes)
            decryption.finish(bytes(piece[-aead.tag_bytes :]))

    def _prefix(self, segment: memoryview, *, is_final: bool) -> bytes:
        length = segment.nbytes.to_bytes(SEGMENT_LENGTH_BYTES, "big") if is_final else _NOT_FINAL
        return length + bytes(self.parameters.alignment_bytes)

    def _check(
        self, index: int, plaintext: memoryview, segment: memoryview, *, is_final: bool
    ) -> None:
        full = self.parameters.plaintext_bytes
        is_fitting = plaintext.nbytes <= full if is_final else plaintext.nbytes == full
        if not is_fitting or segment.nbytes != self.parameters.segment_size(plaintext.nbytes):
            raise ValueError(
                f"{plaintext.nbytes} bytes in a segment of {segment.nbytes} are not segment {index}"
            )
        if not 0 <= index < MAX_SEGMENTS:
            raise ValueError(f"there is no segment {index}")

    def _key(self, index: int) -> bytes:
        epoch = index >> self.parameters.rotation_bits << self.parameters.rotation_bits
        known, key = self._epoch_key
        if known != epoch:
            purpose = b"DEK:" + epoch.to_bytes(8, "big")
            key = self._derive(self._message_key, purpose, self.parameters.aead.key_bytes)
            self._epoch_key = (epoch, key)  # threads may overtake each other; a pair is never torn
        return key

    def _derive(self, key: bytes, purpose: bytes, length: int) -> bytes:
        iv = self.header[_PARAMETER_BYTES : _PARAMETER_BYTES + _IV_BYTES]
        return _derive(self.parameters, key, iv=iv, purpose=purpose, aad=self._aad, length=length)


def read_length(start: bytes) -> int | None:
    """Return the length that a segment states in its first four bytes, or None if it is not final.

    Nothing is authenticated.
    """
    return None if start == _NOT_FINAL else int.from_bytes(start, "big")


def _derive(
    parameters: FloeParameters, key: bytes, *, iv: bytes, purpose: bytes, aad: bytes, length: int
) -> bytes:
    info = parameters.encode() + iv + purpose + aad
    return HKDFExpand(algorithm=parameters.digest, length=length, info=info).derive(key)


def _segment_aad(index: int, *, is_final: bool) -> bytes:
    return index.to_bytes(8, "big") + bytes([is_final])


@contextmanager
def _segment_errors(index: int) -> Iterator[None]:
    try:
        yield
    except DecryptionError:
        raise _wrong_segment(index) from None


def _wrong_segment(index: int) -> TamperedError:
    return TamperedError(f"segment {index} was changed, moved or replaced")
