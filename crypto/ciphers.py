# SPDX-License-Identifier: Apache-2.0
"""The three cipher modes of MindSpore behind one Protocol: AES-GCM, AES-CBC, SM4-CBC.

* Input and output are memory that the caller owns; no plaintext-sized object is made in between.
* In CBC, bad padding and a bad length give the same error: distinct ones would be a padding oracle.
* A mode does not depend on records, files or seals.

>>> import os
>>> mode = mode_of("AES-GCM")
>>> key, iv = Key(bytes(16)), mode.new_iv(os.urandom)
>>> record = bytearray(mode.ciphertext_size(5))
>>> tag = mode.encrypt_into(key, iv=iv, plaintext=memoryview(b"hello"), ciphertext=memoryview(record))
>>> clear = bytearray(5)
>>> mode.decrypt_into(key, iv=iv, tag=tag, ciphertext=memoryview(record), plaintext=memoryview(clear))
>>> bytes(clear)
b'hello'
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, CipherAlgorithm, algorithms, modes

from .errors import KeyLengthError, UnsupportedSuiteError, wrong_key_or_changed
from .keys.key import Key

IV_BYTES = 16
CIPHER_PIECE_BYTES = 2 << 20

Random = Callable[[int], bytes]
"""Returns that many unpredictable bytes."""

_BLOCK_BYTES = 16
_NONCE_BYTES = 12
_GCM_TAG_BYTES = 16
_LEAST_BYTES = 4096  # of the last piece: the tag at the end of a segment is in one piece


class GcmDecryption:
    """Decrypts one ciphertext in pieces, while it is read; loads are a tenth faster so.

    The plaintext, as long as the ciphertext, is not authentic before `finish` accepted the tag; it
    is zeroed when the `with` block ends without that.

    Source: NIST SP 800-38D section 7.2.
    """

    def __init__(
        self, algorithm: CipherAlgorithm, nonce: bytes, *, aad: bytes, plaintext: memoryview
    ) -> None:
        self._decryptor = Cipher(algorithm, modes.GCM(nonce)).decryptor()
        self._decryptor.authenticate_additional_data(aad)
        self._plaintext = plaintext
        self._done_bytes = 0
        self._is_authentic = False

    def update(self, ciphertext: memoryview) -> None:
        """Decrypt the next bytes."""
        stop = self._done_bytes + ciphertext.nbytes
        self._decryptor.update_into(ciphertext, self._plaintext[self._done_bytes : stop])
        self._done_bytes = stop

    def finish(self, tag: bytes) -> None:
        """Check the tag, 16 bytes, over all pieces; raise DecryptionError if it does not match."""
        try:
            self._decryptor.finalize_with_tag(tag)
        except InvalidTag:
            raise wrong_key_or_changed() from None
        self._is_authentic = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_authentic:
            self._plaintext[:] = bytes(self._plaintext.nbytes)


def read_in_pieces(
    read: Callable[[int, memoryview], None], buffer: memoryview
) -> Iterator[memoryview]:
    """Fill `buffer` in pieces and yield each; it is valid until the next one.

    `read` fills memory with the bytes from an offset on.
    """
    start = 0
    while start < buffer.nbytes:
        rest = buffer.nbytes - start
        piece = buffer[: rest if rest < CIPHER_PIECE_BYTES + _LEAST_BYTES else CIPHER_PIECE_BYTES]
        read(start, piece)
        yield piece
        start += piece.nbytes


class CipherMode(Protocol):
    """One cipher in one mode.

    `name` is MindSpore's, case-sensitive; `code` is 0 AES-GCM, 1 AES-CBC, 2 SM4-CBC; `key_sizes`
    and `tag_bytes` (0 without a tag) are lengths; `digest` is the hash that goes with the cipher.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 - described above

    @property
    def code(self) -> int: ...  # noqa: D102

    @property
    def key_sizes(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def tag_bytes(self) -> int: ...  # noqa: D102

    @property
    def digest(self) -> hashes.HashAlgorithm: ...  # noqa: D102

    def ciphertext_size(self, plaintext_size: int) -> int:
        """Return the ciphertext bytes, without the tag, of `plaintext_size` bytes."""
        ...

    def new_iv(self, random: Random) -> bytes:
        """Return 16 fresh bytes for the IV field of a record."""
        ...

    def encrypt_into(
        self, key: Key, *, iv: bytes, plaintext: memoryview, ciphertext: memoryview
    ) -> bytes:
        """Fill `ciphertext` (`ciphertext_size` bytes) and return the tag."""
        ...

    def decrypt_into(
        self, key: Key, *, iv: bytes, tag: bytes, ciphertext: memoryview, plaintext: memoryview
    ) -> None:
        """Fill `plaintext` (its length is right), or zero it and raise DecryptionError."""
        ...

    def peek(self, key: Key, *, iv: bytes, ciphertext: memoryview) -> bytes:
        """Decrypt the start of a ciphertext, unauthenticated and with its padding.

        The CBC modes want a multiple of 16 bytes.
        """
        ...

    def peek_at(
        self, key: Key, *, iv: bytes, preceding: bytes, first_block: int, ciphertext: memoryview
    ) -> bytes:
        """Decrypt cipher blocks in the middle, unauthenticated.

        `preceding` are the 16 bytes before `ciphertext` (the IV, or the cipher block before);
        `first_block` is the number of its first cipher block. In AES-GCM the last block may be
        short.
        """
        ...

    def plaintext_size(self, key: Key, *, ciphertext_size: int, end: bytes) -> int:
        """Return the plaintext bytes of a ciphertext, or raise DecryptionError.

        `end` are the last 32 bytes of IV and ciphertext together.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GcmMode:
    """AES-GCM with a 12-byte random nonce and no associated data.

    Source: NIST SP 800-38D section 8.2.2 (random nonces: at most 2^32 blocks per key, over all
    files).
    """

    name: str
    code: int
    key_sizes: tuple[int, ...]
    tag_bytes: int
    digest: hashes.HashAlgorithm

    def ciphertext_size(self, plaintext_size: int) -> int:
        """Return `plaintext_size`: the mode adds nothing."""
        return plaintext_size

    def new_iv(self, random: Random) -> bytes:
        """Return a 12-byte nonce and four zero bytes, which MindSpore stores and ignores."""
        return random(_NONCE_BYTES) + bytes(IV_BYTES - _NONCE_BYTES)

    def encrypt_into(
        self, key: Key, *, iv: bytes, plaintext: memoryview, ciphertext: memoryview
    ) -> bytes:
        """Fill `ciphertext` and return the 16-byte tag."""
        # AESGCM.encrypt_into is no faster (both 10 GB/s, without the GIL) and appends the tag,
        # which a record has in front.
        encryptor = Cipher(
            algorithms.AES(_fitting(key, self)), modes.GCM(iv[:_NONCE_BYTES])
        ).encryptor()
        encryptor.update_into(plaintext, ciphertext)
        encryptor.finalize()
        return encryptor.tag

    def decrypt_into(
        self, key: Key, *, iv: bytes, tag: bytes, ciphertext: memoryview, plaintext: memoryview
    ) -> None:
        """Fill `plaintext`; if the tag does not match, zero it and raise DecryptionError."""
        with self.decryption(key, iv=iv, plaintext=plaintext) as decryption:
            decryption.update(ciphertext)
            decryption.finish(tag)

    def decryption(self, key: Key, *, iv: bytes, plaintext: memoryview) -> GcmDecryption:
        """Return the decryption of a ciphertext that comes in pieces, for a `with` block."""
        algorithm = algorithms.AES(_fitting(key, self))
        return GcmDecryption(algorithm, iv[:_NONCE_BYTES], aad=b"", plaintext=plaintext)

    def peek(self, key: Key, *, iv: bytes, ciphertext: memoryview) -> bytes:
        """Decrypt the start of a ciphertext, unauthenticated."""
        decryptor = Cipher(
            algorithms.AES(_fitting(key, self)), modes.GCM(iv[:_NONCE_BYTES])
        ).decryptor()
        return decryptor.update(ciphertext)

    def peek_at(
        self, key: Key, *, iv: bytes, preceding: bytes, first_block: int, ciphertext: memoryview
    ) -> bytes:
        """Decrypt cipher blocks in the middle, unauthenticated.

        Source: NIST SP 800-38D section 7.1: the first block of text is encrypted under counter 2.
        """
        counter = iv[:_NONCE_BYTES] + (2 + first_block).to_bytes(4, "big")
        decryptor = Cipher(algorithms.AES(_fitting(key, self)), modes.CTR(counter)).decryptor()
        return decryptor.update(ciphertext)

    def plaintext_size(self, key: Key, *, ciphertext_size: int, end: bytes) -> int:
        """Return `ciphertext_size`."""
        return ciphertext_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CbcMode:
    """A block cipher in CBC mode with PKCS#7 padding; authenticates nothing by itself.

    Source: NIST SP 800-38A section 6.2, RFC 5652 section 6.3; draft-ribose-cfrg-sm4-10 for SM4.
    """

    name: str
    code: int
    key_sizes: tuple[int, ...]
    tag_bytes: int
    digest: hashes.HashAlgorithm
    algorithm: Callable[[bytes], CipherAlgorithm]

    def ciphertext_size(self, plaintext_size: int) -> int:
        """Return the size with 1 to 16 bytes of padding."""
        return plaintext_size // _BLOCK_BYTES * _BLOCK_BYTES + _BLOCK_BYTES

    def new_iv(self, random: Random) -> bytes:
        """Return 16 random bytes."""
        return random(IV_BYTES)

    def encrypt_into(
        self, key: Key, *, iv: bytes, plaintext: memoryview, ciphertext: memoryview
    ) -> bytes:
        """Fill `ciphertext`; the tag is empty."""
        encryptor = Cipher(self.algorithm(_fitting(key, self)), modes.CBC(iv)).encryptor()
        whole = plaintext.nbytes // _BLOCK_BYTES * _BLOCK_BYTES
        # update_into wants 15 bytes of room beyond its output: the padded block gives it 16.
        encryptor.update_into(plaintext[:whole], ciphertext)
        padding = _BLOCK_BYTES - plaintext.nbytes % _BLOCK_BYTES
        ciphertext[whole:] = encryptor.update(bytes(plaintext[whole:]) + bytes([padding]) * padding)
        encryptor.finalize()
        return b""

    def decrypt_into(
        self, key: Key, *, iv: bytes, tag: bytes, ciphertext: memoryview, plaintext: memoryview
    ) -> None:
        """Fill `plaintext`; if the padding does not match, zero it and raise DecryptionError."""
        decryptor = Cipher(self.algorithm(_fitting(key, self)), modes.CBC(iv)).decryptor()
        padding = ciphertext.nbytes - plaintext.nbytes
        # The last two cipher blocks go through a small object: update_into wants more room than
        # `plaintext` may have.
        direct = max(0, ciphertext.nbytes - 2 * _BLOCK_BYTES)
        if direct:
            decryptor.update_into(ciphertext[:direct], plaintext)
        tail = decryptor.update(ciphertext[direct:]) + decryptor.finalize()
        kept = len(tail) - padding
        if not _is_padding(tail[kept:], padding):
            plaintext[:] = bytes(plaintext.nbytes)
            raise wrong_key_or_changed()
        plaintext[direct:] = tail[:kept]

    def peek(self, key: Key, *, iv: bytes, ciphertext: memoryview) -> bytes:
        """Decrypt the first cipher blocks, unauthenticated and with their padding."""
        decryptor = Cipher(self.algorithm(_fitting(key, self)), modes.CBC(iv)).decryptor()
        return decryptor.update(ciphertext)

    def peek_at(
        self, key: Key, *, iv: bytes, preceding: bytes, first_block: int, ciphertext: memoryview
    ) -> bytes:
        """Decrypt cipher blocks in the middle, unauthenticated and with their padding."""
        return self.peek(key, iv=preceding, ciphertext=ciphertext)

    def plaintext_size(self, key: Key, *, ciphertext_size: int, end: bytes) -> int:
        """Return the size without padding, from the last block alone."""
        previous, last = end[:_BLOCK_BYTES], end[_BLOCK_BYTES:]
        decryptor = Cipher(self.algorithm(_fitting(key, self)), modes.CBC(previous)).decryptor()
        clear = decryptor.update(last) + decryptor.finalize()
        padding = clear[-1]
        if not _is_padding(clear[-padding:], padding):
            raise wrong_key_or_changed()
        return ciphertext_size - padding


def _is_padding(tail: bytes, padding: int) -> bool:
    in_range = 1 <= padding <= _BLOCK_BYTES
    return hmac.compare_digest(tail, bytes([padding & 0xFF]) * len(tail)) and in_range


def check_key(key: Key, mode: CipherMode) -> None:
    """Raise KeyLengthError unless the key fits the mode."""
    if len(key.raw) not in mode.key_sizes:
        sizes = " or ".join(map(str, mode.key_sizes))
        raise KeyLengthError(f"{mode.name} takes a key of {sizes} bytes, not {len(key.raw)}")


def _fitting(key: Key, mode: CipherMode) -> bytes:
    check_key(key, mode)
    return key.raw


AES_GCM = GcmMode(
    name="AES-GCM",
    code=0,
    key_sizes=(16, 24, 32),
    tag_bytes=_GCM_TAG_BYTES,
    digest=hashes.SHA256(),
)
AES_CBC = CbcMode(
    name="AES-CBC",
    code=1,
    key_sizes=(16, 24, 32),
    tag_bytes=0,
    digest=hashes.SHA256(),
    algorithm=algorithms.AES,
)
SM4_CBC = CbcMode(
    name="SM4-CBC",
    code=2,
    key_sizes=(16,),
    tag_bytes=0,
    digest=hashes.SM3(),
    algorithm=algorithms.SM4,
)

MODES: tuple[CipherMode, ...] = (AES_GCM, AES_CBC, SM4_CBC)

_BY_NAME = {mode.name: mode for mode in MODES}


def mode_of(name: str) -> CipherMode:
    """Return the mode of that name (as in MindSpore), or raise UnsupportedSuiteError."""
    mode = _BY_NAME.get(name)
    if mode is None:
        raise UnsupportedSuiteError(
            f"unknown cipher mode {name!r}", hint=f"use one of {', '.join(_BY_NAME)}"
        )
    return mode
