# SPDX-License-Identifier: Apache-2.0
"""The cipher suites of the container: what `enc_mode` selects there.

| mode | suite | segments | key derivation | header MAC |
|---|---|---|---|---|
| AES-GCM | 0x0010 | AES-256-GCM: FLOE-256 as published | HKDF-Expand-SHA-384 | HMAC-SHA-256 |
| SM4-GCM | 0x0011 | AEAD_SM4_GCM | HKDF-Expand-SM3 | HMAC-SM3 |
| AES-CBC | 0x0101 | A256CBC-HS512 (encrypt-then-MAC) | HKDF-Expand-SHA-384 | HMAC-SHA-256 |
| SM4-CBC | 0x0102 | SM4-CBC and HMAC-SM3, the same way | HKDF-Expand-SM3 | HMAC-SM3 |

The data key has 32 bytes in every suite; a user's key only wraps it, so any key of 16, 24 or 32
bytes fits every suite.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives import hashes

from ..aead import A256CBC_HS512, AES_256_GCM, SM4_CBC_HMAC_SM3, SM4_GCM, Aead
from ..errors import UnsupportedSuiteError
from .floe import FloeParameters

_CBC_ALIGNMENT_BYTES = 12  # with the length, 16: then a segment of 4 MiB is filled exactly
_SHA384_ID, _SM3_ID = 0, 0xE1  # E0 and above: never assigned by FLOE so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A cipher suite.

    `mode` is its name for users, `code` its number in a header. `aead` encrypts the segments,
    `kdf_digest` is the hash of the key derivation; `aead_id` and `kdf_id` are their numbers in a
    FLOE header. `mac_digest` is the hash of the header MAC.
    """

    mode: str
    code: int
    aead: Aead
    aead_id: int
    kdf_digest: hashes.HashAlgorithm
    kdf_id: int
    mac_digest: hashes.HashAlgorithm
    alignment_bytes: int = 0

    def parameters(self, segment_bytes: int) -> FloeParameters:
        """Return the parameters of messages with segments of that length."""
        return FloeParameters(
            aead=self.aead,
            aead_id=self.aead_id,
            digest=self.kdf_digest,
            kdf_id=self.kdf_id,
            segment_bytes=segment_bytes,
            alignment_bytes=self.alignment_bytes,
        )


FLOE_256 = Suite(
    mode="AES-GCM",
    code=0x0010,
    aead=AES_256_GCM,
    aead_id=0,
    kdf_digest=hashes.SHA384(),
    kdf_id=_SHA384_ID,
    mac_digest=hashes.SHA256(),
)
SUITES = (
    FLOE_256,
    Suite(
        mode="SM4-GCM",
        code=0x0011,
        aead=SM4_GCM,
        aead_id=0xE2,
        kdf_digest=hashes.SM3(),
        kdf_id=_SM3_ID,
        mac_digest=hashes.SM3(),
    ),
    Suite(
        mode="AES-CBC",
        code=0x0101,
        aead=A256CBC_HS512,
        aead_id=0xE1,
        kdf_digest=hashes.SHA384(),
        kdf_id=_SHA384_ID,
        mac_digest=hashes.SHA256(),
        alignment_bytes=_CBC_ALIGNMENT_BYTES,
    ),
    Suite(
        mode="SM4-CBC",
        code=0x0102,
        aead=SM4_CBC_HMAC_SM3,
        aead_id=0xE3,
        kdf_digest=hashes.SM3(),
        kdf_id=_SM3_ID,
        mac_digest=hashes.SM3(),
        alignment_bytes=_CBC_ALIGNMENT_BYTES,
    ),
)

_BY_MODE = {suite.mode: suite for suite in SUITES}
_BY_CODE = {suite.code: suite for suite in SUITES}


def suite_of(mode: str) -> Suite:
    """Return the suite of a cipher mode, or raise UnsupportedSuiteError."""
    suite = _BY_MODE.get(mode)
    if suite is None:
        raise UnsupportedSuiteError(
            f"unknown cipher mode {mode!r}", hint=f"use one of {', '.join(_BY_MODE)}"
        )
    return suite


def suite_with(code: int, *, offset: int) -> Suite:
    """Return the suite of a number at `offset` of a file, or raise UnsupportedSuiteError."""
    suite = _BY_CODE.get(code)
    if suite is None:
        raise UnsupportedSuiteError(
            f"the file uses cipher suite {code:#06x}, which this version does not know",
            offset=offset,
            hint="a newer ckptmgr wrote it, or its header is damaged",
        )
    return suite
