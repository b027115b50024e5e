# SPDX-License-Identifier: Apache-2.0
"""Authenticated ciphers with associated data: GCM, and CBC with an HMAC over the ciphertext.

* Input and output are memory that the caller owns.
* A tag, a MAC and padding that do not match give the same error. The MAC is checked before anything
  is decrypted.
* After a failure the plaintext buffer holds zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cryptography.hazmat.primitives import constant_time, hashes, hmac
from cryptography.hazmat.primitives.ciphers import Cipher, CipherAlgorithm, algorithms, modes

from .ciphers import AES_CBC, SM4_CBC, CbcMode, GcmDecryption
from .errors import DecryptionError, wrong_key_or_changed
from .keys.key import Key

_BLOCK_BYTES = 16
_GCM_IV_BYTES = 12
_GCM_TAG_BYTES = 16
_MAC_BYTES = 32


class Aead(Protocol):
    """One authenticated cipher.

    `key_bytes`, `iv_bytes` (a random nonce or IV) and `tag_bytes` are lengths.
    """

    @property
    def key_bytes(self) -> int: ...  # noqa: D102 - described above

    @property
    def iv_bytes(self) -> int: ...  # noqa: D102

    @property
    def tag_bytes(self) -> int: ...  # noqa: D102

    def ciphertext_size(self, plaintext_size: int) -> int:
        """Return the ciphertext bytes, without the tag, of `plaintext_size` bytes."""
        ...

    def plaintext_room(self, ciphertext_size: int) -> int:
        """Return the plaintext bytes that fill `ciphertext_size` bytes (a multiple of 16)."""
        ...

    def encrypt_into(
        self, key: bytes, *, iv: bytes, aad: bytes, plaintext: memoryview, ciphertext: memoryview
    ) -> bytes:
        """Fill `ciphertext` (`ciphertext_size` bytes) and return the tag."""
        ...

    def decrypt_into(
        self,
        key: bytes,
        *,
        iv: bytes,
        aad: bytes,
        tag: bytes,
        ciphertext: memoryview,
        plaintext: memoryview,
    ) -> None:
        """Fill `plaintext` (its length is right), or zero it and raise DecryptionError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GcmAead:
    """A block cipher in GCM, with a nonce of 12 and a tag of 16 bytes.

    Source: NIST SP 800-38D; RFC 8998 for AEAD_SM4_GCM.
    """

    key_bytes: int
    algorithm: Callable[[bytes], CipherAlgorithm]
    iv_bytes: int = _GCM_IV_BYTES
    tag_bytes: int = _GCM_TAG_BYTES

    def ciphertext_size(self, plaintext_size: int) -> int:
        """Return `plaintext_size`: the mode adds nothing."""
        return plaintext_size

    def plaintext_room(self, ciphertext_size: int) -> int:
        """Return `ciphertext_size`."""
        return ciphertext_size

    def encrypt_into(
        self, key: bytes, *, iv: bytes, aad: bytes, plaintext: memoryview, ciphertext: memoryview
    ) -> bytes:
        """Fill `ciphertext` and return the tag."""
        encryptor = Cipher(self.algorithm(key), modes.GCM(iv)).encryptor()
        encryptor.authenticate_additional_data(aad)
        encryptor.update_into(plaintext, ciphertext)
        encryptor.finalize()
        return encryptor.tag

    def decrypt_into(
        self,
        key: bytes,
        *,
        iv: bytes,
        aad: bytes,
        tag: bytes,
        ciphertext: memoryview,
        plaintext: memoryview,
    ) -> None:
        """Fill `plaintext`; when the tag does not match, zero it and raise DecryptionError."""
        with self.decryption(key, iv=iv, aad=aad, plaintext=plaintext) as decryption:
            decryption.update(ciphertext)
            decryption.finish(tag)

    def decryption(
        self, key: bytes, *, iv: bytes, aad: bytes, plaintext: memoryview
    ) -> GcmDecryption:
        """Return the decryption of a ciphertext that comes in pieces, for a `with` block."""
        return GcmDecryption(self.algorithm(key), iv, aad=aad, plaintext=plaintext)


@dataclass(frozen=True, slots=True, kw_only=True)
class CbcHmacAead:
    """CBC with PKCS#7 padding, then an HMAC over associated data, IV, ciphertext and their length.

    The key is the 32-byte MAC key followed by the encryption key. The length is that of the
    associated data, in bits.

    Source: RFC 7518 section 5.2.2 and draft-mcgrew-aead-aes-cbc-hmac-sha2-05 section 2
    (A256CBC-HS512).
    """

    mode: CbcMode
    encryption_key_bytes: int
    digest: hashes.HashAlgorithm
    iv_bytes: int = _BLOCK_BYTES
    tag_bytes: int = _MAC_BYTES

    @property
    def key_bytes(self) -> int:
        """The length of both keys together."""
        return _MAC_BYTES + self.encryption_key_bytes

    def ciphertext_size(self, plaintext_size: int) -> int:
        """Return the size with 1 to 16 bytes of padding."""
        return self.mode.ciphertext_size(plaintext_size)

    def plaintext_room(self, ciphertext_size: int) -> int:
        """Return the size without a whole block of padding."""
        return ciphertext_size - _BLOCK_BYTES

    def encrypt_into(
        self, key: bytes, *, iv: bytes, aad: bytes, plaintext: memoryview, ciphertext: memoryview
    ) -> bytes:
        """Fill `ciphertext` and return the first 32 bytes of the MAC."""
        secret = Key(key[_MAC_BYTES:])
        self.mode.encrypt_into(secret, iv=iv, plaintext=plaintext, ciphertext=ciphertext)
        return self._mac(key, iv=iv, aad=aad, ciphertext=ciphertext)

    def decrypt_into(
        self,
        key: bytes,
        *,
        iv: bytes,
        aad: bytes,
        tag: bytes,
        ciphertext: memoryview,
        plaintext: memoryview,
    ) -> None:
        """Fill `plaintext`; if MAC or padding do not match, zero it and raise DecryptionError."""
        expected = self._mac(key, iv=iv, aad=aad, ciphertext=ciphertext)
        if not constant_time.bytes_eq(expected, tag):
            plaintext[:] = bytes(plaintext.nbytes)
            raise wrong_key_or_changed()
        secret = Key(key[_MAC_BYTES:])
        try:
            self.mode.decrypt_into(
                secret, iv=iv, tag=b"", ciphertext=ciphertext, plaintext=plaintext
            )
        except DecryptionError:
            raise wrong_key_or_changed() from None

    def _mac(self, key: bytes, *, iv: bytes, aad: bytes, ciphertext: memoryview) -> bytes:
        mac = hmac.HMAC(key[:_MAC_BYTES], self.digest)
        mac.update(aad + iv)
        mac.update(ciphertext)
        mac.update((8 * len(aad)).to_bytes(8, "big"))
        return mac.finalize()[:_MAC_BYTES]


AES_256_GCM = GcmAead(key_bytes=32, algorithm=algorithms.AES)
SM4_GCM = GcmAead(key_bytes=16, algorithm=algorithms.SM4)
A256CBC_HS512 = CbcHmacAead(mode=AES_CBC, encryption_key_bytes=32, digest=hashes.SHA512())
SM4_CBC_HMAC_SM3 = CbcHmacAead(mode=SM4_CBC, encryption_key_bytes=16, digest=hashes.SM3())
