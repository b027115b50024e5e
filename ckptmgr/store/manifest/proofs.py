# SPDX-License-Identifier: Apache-2.0
"""Proofs of the writer of a manifest: an HMAC under the key of the run, and a signature.

Both are members of the document (`auth`, `signatures`) and cover its canonical JSON without these
two, so either works without the other. docs/manifest-format.md specifies the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptmgr.core.errors import (
    CorruptCheckpoint,
    KeyProblem,
    TamperedCheckpoint,
    UnprovenCheckpoint,
)

if TYPE_CHECKING:  # slow to import, and needed with keys only
    from ckptmgr.crypto.keys.ring import Keys
    from ckptmgr.crypto.keys.signing import PublicKey, SigningKey
    from ckptmgr.store.manifest.keys import ManifestKey


PAYLOAD_TYPE = "application/vnd.ckptmgr.manifest+json"
AUTH, SIGNATURES = "auth", "signatures"
_MAC_ALGORITHM = "HMAC-SHA-256"
_SIGNATURE_ALGORITHM = "Ed25519"
_MAX_SIGNATURES = 16
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return the canonical form of a JSON document, which is hashed, authenticated and signed."""
    return _CANONICAL.encode(document).encode()


def proofs(
    document: Mapping[str, Any], *, key: ManifestKey | None, signing_key: SigningKey | None
) -> dict[str, Any]:
    """Return the members that authenticate and sign a document."""
    found: dict[str, Any] = {}
    if key is not None:
        found[AUTH] = _auth(document, key)
    if signing_key is not None:
        signature = signing_key.sign(_signed_bytes(document))
        found[SIGNATURES] = [
            {
                "algorithm": _SIGNATURE_ALGORITHM,
                "key_id": signing_key.public_key.key_id,
                "signature": signature.hex(),
            }
        ]
    return found


def _auth(document: Mapping[str, Any], key: ManifestKey) -> dict[str, Any]:
    from ckptmgr.crypto.keys.key import manifest_mac

    mac = manifest_mac(key.key, canonical(document))
    return {"algorithm": _MAC_ALGORITHM, "mac": mac.hex(), **key.to_document()}


def authenticated_by(document: Mapping[str, Any], key: ManifestKey) -> dict[str, Any]:
    """Return a document with another authentication; its signatures do not cover that, and stay."""
    signatures = {SIGNATURES: document[SIGNATURES]} if SIGNATURES in document else {}
    bare = {name: value for name, value in document.items() if name not in (AUTH, SIGNATURES)}
    return {**bare, AUTH: _auth(bare, key), **signatures}


def check_mac(
    document: Mapping[str, Any], auth: object, *, key: Keys, path: object, accept_hint: str | None
) -> ManifestKey | None:
    """Check the HMAC `auth` of a document; return its key, or None if there was no check.

    Public keys check nothing. With `accept_hint=None` a document without an HMAC is accepted.

    Raises:
        UnprovenCheckpoint: It has no HMAC and must have one.
        CorruptCheckpoint: Its algorithm is unknown.
        KeyProblem: It is under another key.
        TamperedCheckpoint: It does not match.
    """
    from ckptmgr.crypto.keys.key import is_manifest_mac
    from ckptmgr.crypto.keys.ring import ring_of
    from ckptmgr.store.manifest.keys import opened_manifest_key

    place = str(path)
    if not ring_of(key).can_open:
        return None
    if auth is None:
        if accept_hint is not None:
            raise UnprovenCheckpoint(
                "the manifest is not authenticated although a key was given",
                path=place,
                hint=f"it was written without a key, or its authentication was removed; {accept_hint}",
            )
        return None
    if not isinstance(auth, dict) or auth.get("algorithm") != _MAC_ALGORITHM:
        raise CorruptCheckpoint("unknown authentication in the manifest", path=place)
    found = opened_manifest_key(auth, key, path=place)
    if not is_manifest_mac(found.key, canonical(document), mac=_from_hex(auth.get("mac"))):
        raise TamperedCheckpoint(
            "the manifest was changed: its authentication does not match", path=place
        )
    return found


def check_signatures(
    document: Mapping[str, Any],
    signatures: object,
    *,
    trusted_keys: Sequence[PublicKey],
    path: object,
    accept_hint: str | None,
) -> str | None:
    """Check the signatures of a document; return the id of the trusted key that signed it, or None.

    Raises:
        UnprovenCheckpoint: It must be signed and is not.
        CorruptCheckpoint: Their algorithm is unknown.
        KeyProblem: None of them is by a trusted key.
        TamperedCheckpoint: One by a trusted key does not match.
    """
    place = str(path)
    if signatures is None:
        if accept_hint is not None:
            raise UnprovenCheckpoint(
                "the manifest is not signed although public keys to trust were given",
                path=place,
                hint="it was written without a signing key, or its signature was removed; "
                + accept_hint,
            )
        return None
    by_id = {key.key_id: key for key in trusted_keys}
    found = _parsed(signatures, place)
    for key_id, signature in found:
        if key_id not in by_id:
            continue
        if not by_id[key_id].has_signed(_signed_bytes(document), signature):
            raise TamperedCheckpoint(
                "the manifest was changed: its signature does not match", path=place
            )
        return key_id
    signers = ", ".join(key_id[:16] for key_id, _ in found)
    raise KeyProblem(
        f"the manifest is signed by {signers}, the trusted keys are {', '.join(by_id)}", path=place
    )


def _parsed(signatures: object, place: str) -> list[tuple[str, bytes]]:
    if not isinstance(signatures, list) or not 1 <= len(signatures) <= _MAX_SIGNATURES:
        raise CorruptCheckpoint("unknown signatures in the manifest", path=place)
    found = []
    for one in signatures:
        if not isinstance(one, dict) or one.get("algorithm") != _SIGNATURE_ALGORITHM:
            raise CorruptCheckpoint("unknown signatures in the manifest", path=place)
        found.append((str(one.get("key_id")), _from_hex(one.get("signature"))))
    return found


def _signed_bytes(document: Mapping[str, Any]) -> bytes:
    from ckptmgr.crypto.keys.signing import dsse_bytes

    return dsse_bytes(PAYLOAD_TYPE, canonical(document))


def _from_hex(value: object) -> bytes:
    try:
        return bytes.fromhex(str(value))
    except ValueError:
        return b""
