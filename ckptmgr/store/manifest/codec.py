# SPDX-License-Identifier: Apache-2.0
"""The manifest beside every data file: its description, its writer, and its digests.

`net-3_40.ckpt` has `net-3_40.ckpt.manifest.json`. It names files without directories, so a copy of
a directory is as good as the original. With a key it has an HMAC over its canonical JSON, with a
signing key a signature (`proofs`). Ranks that save together have one manifest for all their files,
in version 2 of the schema.

While a name is being overwritten, the new manifest also contains the digests of the old data
(`replaces`), so that one of the two verifies at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmgr.core.errors import CorruptCheckpoint, KeyProblem, UnsupportedCheckpoint
from ckptmgr.core.trust import DEFAULT_TRUST, Trust
from ckptmgr.store.manifest.document import (
    checked_document,
    entry_from_document,
    entry_to_document,
    from_document,
    parse_document,
    to_bytes,
)
from ckptmgr.store.manifest.model import (
    PLACEHOLDER,
    SUFFIX,
    FileEntry,
    Manifest,
    files_of,
    manifest_name,
)
from ckptmgr.store.manifest.proofs import (
    AUTH,
    SIGNATURES,
    authenticated_by,
    check_mac,
    check_signatures,
    proofs,
)

if TYPE_CHECKING:  # slow to import, and needed with keys only
    from ckptmgr.crypto.keys.ring import Keys
    from ckptmgr.store.manifest.keys import ManifestKey

__all__ = [
    "MAX_MANIFEST_BYTES",
    "PLACEHOLDER",
    "SUFFIX",
    "FileEntry",
    "Manifest",
    "decode",
    "encode",
    "entry_from_document",
    "entry_to_document",
    "files_of",
    "manifest_name",
    "proofs_in",
    "reauthenticated",
]

MAX_MANIFEST_BYTES = 64 << 20


def encode(manifest: Manifest, *, trust: Trust = DEFAULT_TRUST) -> bytes:
    """Return the manifest as JSON, authenticated and signed with the keys in `trust`.

    Raises:
        UnsupportedCheckpoint: No reader would accept a value in it, such as an epoch of 1.5, or its
            size.
    """
    document = checked_document(manifest)
    auth = None
    if trust.keys is not None:
        from ckptmgr.store.manifest.keys import manifest_key_of

        auth = manifest.auth or manifest_key_of(trust.keys)
    document |= proofs(document, key=auth, signing_key=trust.signing_key)
    data = to_bytes(document)
    if len(data) > MAX_MANIFEST_BYTES:
        raise UnsupportedCheckpoint(
            f"the manifest of {manifest.name!r} would have {len(data)} bytes, of {MAX_MANIFEST_BYTES}",
            hint="nothing was changed; save fewer bytes at a time",
        )
    return data


def decode(
    data: bytes,
    *,
    path: Path,
    trust: Trust = DEFAULT_TRUST,
) -> Manifest:
    """Parse a manifest strictly.

    Raises:
        CorruptCheckpoint: It is not a manifest.
        UnsupportedCheckpoint: Its version is unknown.
        TamperedCheckpoint: The authentication or the signature does not match.
        UnprovenCheckpoint: It must be authenticated or signed and is not.
        KeyProblem: It is authenticated under another key, or has no trusted signature.
    """
    document = parse_document(data, path=path)
    auth, signatures = document.pop(AUTH, None), document.pop(SIGNATURES, None)
    try:
        manifest = from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptCheckpoint(f"not a valid manifest: {error!r}", path=path) from error
    if manifest_name(manifest.name) != path.name:
        raise CorruptCheckpoint(f"is the manifest of {manifest.name!r}", path=path)
    if manifest.replaces is not None and manifest.replaces.file.name != manifest.file.name:
        raise CorruptCheckpoint(f"replaces {manifest.replaces.file.name!r}", path=path)
    if auth is not None:
        from ckptmgr.store.manifest.keys import openers

        manifest = replace(manifest, opened_by=openers(auth, path=str(path)))
    try:
        if trust.keys is not None:
            ciphers = [entry.cipher for entry in manifest.shards or (manifest.file,)]
            hint = trust.hint_without_mac(ciphers)
            checked = check_mac(document, auth, key=trust.keys, path=path, accept_hint=hint)
            manifest = replace(manifest, auth=checked)
        if not trust.trusted_keys:
            return manifest
        signer = check_signatures(
            document,
            signatures,
            trusted_keys=trust.trusted_keys,
            path=path,
            accept_hint=trust.accept_hint if trust.needs_signature else None,
        )
    except RecursionError as error:
        raise CorruptCheckpoint("not valid JSON: nested too deeply", path=path) from error
    return manifest.signed(signer)


def reauthenticated(
    data: bytes, *, path: Path, key: Keys, change: Callable[[ManifestKey], ManifestKey]
) -> tuple[Manifest, bytes]:
    """Return a manifest with another authentication; its signatures still match.

    Raises:
        UnprovenCheckpoint: It has no authentication.
        CkptmgrError: As `decode`.
    """
    manifest = decode(data, path=path, trust=Trust(keys=key))
    if manifest.auth is None:
        raise KeyProblem("public keys alone cannot tell who wrote the manifest", path=path)
    auth = change(manifest.auth)
    changed = to_bytes(authenticated_by(parse_document(data, path=path), auth))
    return replace(manifest, auth=auth), changed


def proofs_in(data: bytes, *, path: Path) -> tuple[bool, bool]:
    """Return whether a manifest has an authentication, and whether a signature, without checking them."""
    document = parse_document(data, path=path)
    return AUTH in document, SIGNATURES in document
