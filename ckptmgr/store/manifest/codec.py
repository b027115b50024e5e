# SPDX-License-Identifier: Apache-2.0
"""The manifest beside every data file: its description, its writer, and its digests.

`net-3_40.ckpt` has `net-3_40.ckpt.manifest.json`. It names files without directories, so a copy of
a directory is as good as the original. With a key it has an HMAC over its canonical JSON, with a
signing key a signature (`proofs`). Ranks that save together have one manifest for all their files,
in version 2 of the schema.

While a name is being overwritten, the new manifest also contains the digests of the old data
(`replaces`), so that one of the two verifies at any time.

The JSON is read strictly; docs/manifest-format.md lists the fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmgr.core.errors import CorruptCheckpoint, KeyProblem, UnsupportedCheckpoint
from ckptmgr.core.model import Figures, Pin
from ckptmgr.core.shard_names import is_set_name, parse_shard_name
from ckptmgr.core.trust import DEFAULT_TRUST, Trust
from ckptmgr.io.digest import ALGORITHM, DIGEST_BYTES, MAX_RANGE_BYTES, FileDigest
from ckptmgr.store.manifest.fields import (
    base_name,
    count,
    link_from_document,
    link_to_document,
    number_from_json,
    number_to_json,
    optional_text,
    series_name,
    strict_json,
    time_text,
    typed,
    utc_time,
)
from ckptmgr.store.manifest.model import (
    NOT_FINITE,
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
SCHEMA = "ckptmgr.manifest/1"
SHARDED_SCHEMA = "ckptmgr.manifest/2"
_SCHEMAS = (SCHEMA, SHARDED_SCHEMA)
_ANY_SCHEMA = re.compile(r"ckptmgr\.manifest/[0-9]+")
_NEW = "new"  # in `run.start`
_MAX_BLANK_BYTES = 2 << 16  # two header copies of the largest size


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


def parse_document(data: bytes, *, path: Path) -> dict[str, Any]:
    """Return the JSON of a manifest whose version is known.

    Raises:
        CorruptCheckpoint: It is not a manifest.
        UnsupportedCheckpoint: Its version is unknown.
    """
    try:
        document = strict_json(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"not valid JSON: {error}", path=path) from error
    found = document.get("schema") if isinstance(document, dict) else None
    if isinstance(found, str) and found not in _SCHEMAS and _ANY_SCHEMA.fullmatch(found):
        raise UnsupportedCheckpoint(
            f"is of version {found[:40]}, which this ckptmgr cannot read",
            path=path,
            hint="upgrade ckptmgr",
        )
    if not isinstance(document, dict) or found not in _SCHEMAS:
        raise CorruptCheckpoint(f"not a {SCHEMA} document (schema: {found!r})", path=path)
    return document


def to_bytes(document: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON document."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    # File names that are no UTF-8 contain lone surrogates; the parser accepts them.
    return text.encode("utf-8", "surrogatepass") + b"\n"


def checked_document(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest as JSON that every reader accepts.

    Raises:
        UnsupportedCheckpoint: No reader would accept a value in it, such as an epoch of 1.5; names
            it.
    """
    # A manifest that no reader accepts would make an intact checkpoint look damaged.
    try:
        document = _to_document(manifest)
        from_document(document)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnsupportedCheckpoint(
            f"cannot be noted in the manifest of {manifest.name!r}: {error}",
            hint="nothing was changed; give another value",
        ) from error
    return document


def _to_document(manifest: Manifest) -> dict[str, Any]:
    document: dict[str, Any] = {
        "schema": SHARDED_SCHEMA if manifest.shards else SCHEMA,
        "series": manifest.series,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "epoch": manifest.epoch,
        "sequence": manifest.sequence,
        "saved_at": time_text(manifest.saved_at),
        "why": manifest.why,
        "run": {
            "id": manifest.run_id,
            "parents": list(manifest.parent_run_ids),
            **({"start": _NEW} if manifest.starts_anew else {}),
        },
        "world": {"size": manifest.world_size},
        "metrics": {name: number_to_json(value) for name, value in manifest.metrics.items()},
        "pins": [{"name": pin.name, "reason": pin.reason} for pin in manifest.pins],
        **({"tags": list(manifest.tags)} if manifest.tags else {}),
        **({} if manifest.keep is None else {"keep": manifest.keep}),
        **({} if manifest.keep_at is None else {"keep_at": manifest.keep_at}),
        "stats": {name: number_to_json(value) for name, value in manifest.stats.items()},
        **({} if manifest.health is None else {"health": _plain_health(manifest)}),
        **({"revision": manifest.revision} if manifest.revision else {}),
        "files": [entry_to_document(entry) for entry in manifest.shards or (manifest.file,)],
    }
    if manifest.previous is not None:
        document["previous"] = link_to_document(manifest.previous)
    if manifest.replaces is not None:
        replaced = _to_document(manifest.replaces.without_replaced())
        preserved = manifest.replaces.preserved
        document["replaces"] = replaced if preserved is None else {**replaced, "kept": preserved}
    return document


def _plain_health(manifest: Manifest) -> str | None:
    """Return the health without the name of a tensor of a file that was encrypted since its save."""
    return manifest.health if manifest.file.cipher is None else NOT_FINITE


def entry_to_document(entry: FileEntry) -> dict[str, Any]:
    """Return the entry of one file as JSON."""
    digest = entry.digest
    return {
        "name": entry.name,
        "size_bytes": digest.size_bytes,
        "format": entry.format,
        "cipher": entry.cipher,
        "key_id": entry.key_id,
        "digest": {
            "algorithm": digest.algorithm,
            "range_bytes": digest.range_bytes,
            **({"blank_bytes": digest.blank_bytes} if digest.blank_bytes else {}),
            "total": digest.total.hex(),
            "ranges": [value.hex() for value in digest.ranges],
        },
    }


def from_document(document: Mapping[str, Any]) -> Manifest:
    """Return the manifest in a JSON document; ignore its proofs.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: It is no such document.
    """
    files = tuple(entry_from_document(entry) for entry in document["files"])
    shards = files if document["schema"] == SHARDED_SCHEMA else ()
    _check_names(files, is_sharded=bool(shards))
    replaces = document.get("replaces")
    run = document["run"]
    return Manifest(
        file=files[0],
        shards=shards,
        series=series_name(document["series"]),
        run_id=typed(run["id"], str),
        parent_run_ids=tuple(typed(parent, str) for parent in run["parents"]),
        starts_anew=run.get("start") == _NEW,
        step=count(document, "step"),
        attempt=count(document, "attempt"),
        epoch=None if document["epoch"] is None else count(document, "epoch"),
        sequence=count(document, "sequence"),
        saved_at=utc_time(document["saved_at"]),
        why=typed(document["why"], str),
        metrics=_figures(document["metrics"]),
        pins=tuple(
            Pin(name=typed(pin["name"], str), reason=typed(pin["reason"], str))
            for pin in document["pins"]
        ),
        tags=_tags(document.get("tags", [])),
        keep=optional_text(document.get("keep")),
        keep_at=optional_text(document.get("keep_at")),
        world_size=count(document["world"], "size"),
        stats=_figures(document["stats"]),
        health=optional_text(document.get("health")),
        revision=count(document, "revision") if "revision" in document else 0,
        replaces=None if replaces is None else _replaced_from_document(replaces),
        previous=link_from_document(document.get("previous")),
    )


def _tags(names: object) -> tuple[str, ...]:
    if not isinstance(names, list):
        raise TypeError(f"tags are a list, not {type(names)}")
    return tuple(typed(name, str) for name in names)


def _figures(document: Mapping[str, object]) -> Figures:
    return Figures({name: number_from_json(value) for name, value in document.items()})


def _replaced_from_document(document: Mapping[str, Any]) -> Manifest:
    old = from_document({**document, "replaces": None})
    return replace(old, preserved=optional_text(document.get("kept")))


def _check_names(files: tuple[FileEntry, ...], *, is_sharded: bool) -> None:
    """Check that there is one file, or those of all ranks in order; a repaired one has its own attempt."""
    if not is_sharded:
        if len(files) != 1 or is_set_name(files[0].name):
            raise ValueError(f"{[entry.name for entry in files[:2]]} is not one data file")
        return
    first = parse_shard_name(files[0].name)
    for rank, entry in enumerate(files):
        shard = parse_shard_name(entry.name)
        is_right = (
            first is not None
            and shard is not None
            and (shard.stem, shard.rank, shard.world) == (first.stem, rank, len(files))
        )
        if not is_right:
            raise ValueError(f"{entry.name!r} is not the file of rank {rank} of {len(files)}")


def entry_from_document(entry: Mapping[str, Any]) -> FileEntry:
    """Return the entry of one file.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: It is no such document.
    """
    name = base_name(entry["name"])
    digest = entry["digest"]
    if digest["algorithm"] != ALGORITHM:
        raise ValueError(f"unknown digest algorithm {digest['algorithm']!r}")
    size_bytes, range_bytes = count(entry, "size_bytes"), count(digest, "range_bytes")
    if not 1 <= range_bytes <= MAX_RANGE_BYTES:
        raise ValueError(f"{range_bytes} bytes is no sensible digest range")
    ranges = tuple(bytes.fromhex(value) for value in digest["ranges"])
    if len(ranges) != -(-size_bytes // range_bytes) or any(len(r) != DIGEST_BYTES for r in ranges):
        raise ValueError(f"{len(ranges)} digests do not cover {size_bytes} bytes")
    blank_bytes = count(digest, "blank_bytes") if "blank_bytes" in digest else 0
    if blank_bytes > min(size_bytes, _MAX_BLANK_BYTES):
        raise ValueError(f"{blank_bytes} bytes are not covered by the digest")
    result = FileDigest(
        size_bytes=size_bytes, ranges=ranges, range_bytes=range_bytes, blank_bytes=blank_bytes
    )
    if result.total.hex() != digest["total"]:
        raise ValueError("the total digest does not match the range digests")
    return FileEntry(
        name=name,
        digest=result,
        format=typed(entry["format"], str),
        cipher=optional_text(entry["cipher"]),
        key_id=optional_text(entry["key_id"]),
    )
