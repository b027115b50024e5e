# SPDX-License-Identifier: Apache-2.0
"""The manifest beside every data file: what it is, who wrote it, and the digests that prove it.

`net-3_40.ckpt` has `net-3_40.ckpt.manifest.json`. It is self-contained (base names only), so a copied directory is as good as
the original. With a key it carries an HMAC over its canonical JSON, with a signing key a signature (`manifest_proof`).

Many ranks that save together have one manifest for all their files (`shard_names`), in version 2 of the schema.

While a name is being overwritten the new manifest also accepts the digests of the old data (`replaces`), so that at every
instant one of the two verifies.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ckptmgr.crypto.keyring import Keys
from ckptmgr.crypto.signing import PublicKey, SigningKey
from ckptmgr.digest import ALGORITHM, DIGEST_BYTES, FileDigest
from ckptmgr.errors import CorruptCheckpoint, KeyProblem, UnsupportedCheckpoint
from ckptmgr.manifest_fields import (
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
from ckptmgr.manifest_keys import ManifestKey, id_of_opener, manifest_key_of, openers
from ckptmgr.manifest_proof import (
    AUTH,
    SIGNATURES,
    authenticated_by,
    canonical,
    check_mac,
    check_signatures,
    proofs,
)
from ckptmgr.model import Checkpoint, Link, Pin, State
from ckptmgr.shard_names import is_set_name, parse_shard_name

SCHEMA = "ckptmgr.manifest/1"
SHARDED_SCHEMA = "ckptmgr.manifest/2"
SUFFIX = ".manifest.json"
_SCHEMAS = (SCHEMA, SHARDED_SCHEMA)
_ANY_SCHEMA = re.compile(r"ckptmgr\.manifest/[0-9]+")
FOREIGN = "foreign"
MAX_MANIFEST_BYTES = 64 << 20
_MAX_RANGE_BYTES = 1 << 30
_MAX_BLANK_BYTES = 2 << 16  # two header copies of the largest size
_ID_PREFIX = b"ckptmgr/v1/checkpoint-id\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One data file.

    Attributes:
        name: Base name.
        digest: Size and digests of the stored bytes.
        format: `ckpt` or `safetensors`.
        cipher: The cipher mode, or None for a plain file.
        key_id: Short identifier of the key, or None.
    """

    name: str
    digest: FileDigest
    format: str
    cipher: str | None = None
    key_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that is known about one checkpoint besides its tensors.

    Attributes:
        file: The data file; of a sharded checkpoint the one of rank 0.
        series: Name of the series.
        run_id: The run that wrote it.
        parent_run_ids: The runs it was resumed from, newest first.
        step: Global training step.
        attempt: Which save of this step it is, from 0.
        sequence: Order of commits in the directory, from 1.
        saved_at: UTC.
        epoch: Epoch number, or None.
        why: `policy`, `end`, `manual`, or `exception: ...`.
        metrics: Name to value.
        pins: Reasons to keep it for ever.
        world_size: Number of ranks that saved together.
        stats: Seconds and bytes of the stages of the save.
        replaces: The manifest of the data that has this name until the swap, or None.
        shards: The data files of a sharded checkpoint, by rank; else empty.
        previous: The checkpoint of the series that was newest before, or None.
        signed_by: Id of the trusted key whose signature was checked when it was read, or None.
        auth: What authenticated it when it was read, and will when it is written again; or None.
        opened_by: What the authentication is for, as it says; for people.
        kept: In what is replaced: the manifest file as it was, to be put back with its own proofs if the swap fails; or None.
    """

    file: FileEntry
    series: str
    run_id: str
    step: int
    sequence: int
    saved_at: datetime
    parent_run_ids: tuple[str, ...] = ()
    attempt: int = 0
    epoch: int | None = None
    why: str = "manual"
    metrics: Mapping[str, float] = field(default_factory=dict)
    pins: tuple[Pin, ...] = ()
    world_size: int = 1
    stats: Mapping[str, float] = field(default_factory=dict)
    replaces: Manifest | None = None
    shards: tuple[FileEntry, ...] = ()
    previous: Link | None = None
    signed_by: str | None = field(default=None, compare=False)
    auth: ManifestKey | None = field(default=None, compare=False, repr=False)
    opened_by: tuple[str, ...] = field(default=(), compare=False)
    kept: str | None = field(default=None, compare=False, repr=False)

    @property
    def id(self) -> str:
        """64 hex digits that name this checkpoint and no other: what never changes of it, and of all that came before."""
        document = {
            "series": self.series,
            "step": self.step,
            "attempt": self.attempt,
            "epoch": self.epoch,
            "sequence": self.sequence,
            "saved_at": time_text(self.saved_at),
            "why": self.why,
            "run": {"id": self.run_id, "parents": list(self.parent_run_ids)},
            "world": {"size": self.world_size},
            "files": [
                [entry.name, entry.digest.size_bytes, entry.digest.total.hex()]
                for entry in self.shards or (self.file,)
            ],
            "previous": None if self.previous is None else self.previous.id,
        }
        return hashlib.sha256(_ID_PREFIX + canonical(document)).hexdigest()

    @property
    def name(self) -> str:
        """Base name of the checkpoint: its data file, or what all its shards have in common."""
        shard = parse_shard_name(self.file.name) if self.shards else None
        return self.file.name if shard is None else shard.set_name

    @property
    def is_made_up(self) -> bool:
        """Whether it was made for a file that had none, so that it can be overwritten; nobody vouches for such a file."""
        return self.why == FOREIGN and self.sequence == 0

    def of_shard(self, rank: int) -> Manifest:
        """Return what there is to know about the file of one rank, as a manifest of that file alone."""
        return replace(self, file=self.shards[rank], shards=())

    def signed(self, key_id: str | None) -> Manifest:
        """Return the manifest, noting whose signature covers it and what it replaces."""
        old = None if self.replaces is None else replace(self.replaces, signed_by=key_id)
        return replace(self, signed_by=key_id, replaces=old)

    def without_replaced(self) -> Manifest:
        """Return the manifest as it is after the swap."""
        return replace(self, replaces=None)

    def completed(self, file: FileEntry, stats: Mapping[str, float]) -> Manifest:
        """Return this draft with the data file that was written, and what is known about its cost by now."""
        return replace(self, file=file, stats={**self.stats, **stats})

    def to_checkpoint(
        self, directory: Path, *, state: State = State.OK, problem: str | None = None
    ) -> Checkpoint:
        """Return the value that policies see."""
        return Checkpoint(
            path=directory / self.name,
            series=self.series,
            step=self.step,
            saved_at=self.saved_at,
            size_bytes=sum(entry.digest.size_bytes for entry in self.shards or (self.file,)),
            run_id=self.run_id,
            attempt=self.attempt,
            sequence=self.sequence,
            epoch=self.epoch,
            why=self.why,
            metrics=self.metrics,
            pins=self.pins,
            state=state,
            format=self.file.format,
            cipher=self.file.cipher,
            key_id=id_of_opener(self.opened_by) or self.file.key_id,
            opened_by=self.opened_by,
            problem=problem,
            shards=tuple(entry.name for entry in self.shards),
            id=self.id,
            previous=self.previous,
        )


def manifest_name(data_name: str) -> str:
    """Return the name of the manifest of a data file."""
    return data_name + SUFFIX


def files_of(checkpoint: Checkpoint) -> tuple[str, tuple[str, ...]]:
    """Return the name of the file without which it is no checkpoint any more, and those of its other files."""
    if is_set_name(checkpoint.name):
        return manifest_name(checkpoint.name), checkpoint.shards
    return checkpoint.name, (manifest_name(checkpoint.name),)


def encode(
    manifest: Manifest, *, key: Keys | None = None, signing_key: SigningKey | None = None
) -> bytes:
    """Return the manifest as JSON, authenticated when there is a key, and signed when there is one for that.

    Raises:
        UnsupportedCheckpoint: It could not be read back: a value in it, such as an epoch of 1.5, or its size.
    """
    document = _checked_document(manifest)
    auth = None if key is None else manifest.auth or manifest_key_of(key)
    document |= proofs(document, key=auth, signing_key=signing_key)
    data = to_bytes(document)
    if len(data) > MAX_MANIFEST_BYTES:
        raise UnsupportedCheckpoint(
            f"the manifest of {manifest.name!r} would have {len(data)} bytes, of {MAX_MANIFEST_BYTES}",
            hint="nothing was changed; save fewer bytes at a time",
        )
    return data


def to_bytes(document: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest that is JSON already."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    # File names that are no UTF-8 come as lone surrogates; the parser takes them back.
    return text.encode("utf-8", "surrogatepass") + b"\n"


def decode(
    data: bytes,
    *,
    path: Path,
    key: Keys | None = None,
    trusted_keys: Sequence[PublicKey] = (),
    must_authenticate: bool = False,
) -> Manifest:
    """Parse a manifest strictly.

    Args:
        data: The file's bytes.
        path: For messages, and to check that the manifest belongs to the file it lies beside.
        key: Checks the authentication of a manifest made under this key.
        trusted_keys: Of those who may sign; check the signature of a manifest that has one.
        must_authenticate: Given a key, refuse a manifest without authentication; given trusted keys, one without signature.

    Raises:
        CorruptCheckpoint: It is not a manifest.
        UnsupportedCheckpoint: It is of a version that is not known here.
        TamperedCheckpoint: The authentication or the signature does not match.
        UnsealedCheckpoint: It must be authenticated or signed and is not.
        KeyProblem: It is authenticated under another key, or signed by nobody who is trusted.
    """
    document = _parse(data, path)
    auth, signatures = document.pop(AUTH, None), document.pop(SIGNATURES, None)
    try:
        manifest = _from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptCheckpoint(f"not a valid manifest: {error!r}", path=path) from error
    if manifest_name(manifest.name) != path.name:
        raise CorruptCheckpoint(f"is the manifest of {manifest.name!r}", path=path)
    if manifest.replaces is not None and manifest.replaces.file.name != manifest.file.name:
        raise CorruptCheckpoint(f"replaces {manifest.replaces.file.name!r}", path=path)
    manifest = replace(manifest, opened_by=openers(auth, path=str(path)))
    try:
        if key is not None:
            checked = check_mac(document, auth, key=key, path=path, is_required=must_authenticate)
            manifest = replace(manifest, auth=checked)
        if not trusted_keys:
            return manifest
        signer = check_signatures(
            document,
            signatures,
            trusted_keys=trusted_keys,
            path=path,
            is_required=must_authenticate,
        )
    except RecursionError as error:
        raise CorruptCheckpoint("not valid JSON: nested too deeply", path=path) from error
    return manifest.signed(signer)


def reauthenticated(
    data: bytes, *, path: Path, key: Keys, change: Callable[[ManifestKey], ManifestKey]
) -> tuple[Manifest, bytes]:
    """Return a manifest with another authentication and nothing else changed: its signatures still hold.

    Args:
        data: The file's bytes.
        path: For messages.
        key: Opens the authentication that it has.
        change: Gives the new one.

    Raises:
        UnsealedCheckpoint: It has none.
        CkptmgrError: As `decode`.
    """
    manifest = decode(data, path=path, key=key, must_authenticate=True)
    if manifest.auth is None:
        raise KeyProblem("public keys alone cannot tell who wrote the manifest", path=path)
    auth = change(manifest.auth)
    changed = to_bytes(authenticated_by(_parse(data, path), auth))
    return replace(manifest, auth=auth), changed


def _checked_document(manifest: Manifest) -> dict[str, Any]:
    # A manifest that no reader accepts would make a whole checkpoint look damaged.
    try:
        document = _to_document(manifest)
        _from_document(document)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnsupportedCheckpoint(
            f"cannot be noted in the manifest of {manifest.name!r}: {error}",
            hint="nothing was changed; give another value",
        ) from error
    return document


def proofs_in(data: bytes, *, path: Path) -> tuple[bool, bool]:
    """Return whether a manifest carries an authentication, and whether a signature, without checking them.

    Raises:
        CorruptCheckpoint: It is not a manifest.
        UnsupportedCheckpoint: It is of a version that is not known here.
    """
    document = _parse(data, path)
    return AUTH in document, SIGNATURES in document


def _parse(data: bytes, path: Path) -> dict[str, Any]:
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
        "run": {"id": manifest.run_id, "parents": list(manifest.parent_run_ids)},
        "world": {"size": manifest.world_size},
        "metrics": {name: number_to_json(value) for name, value in manifest.metrics.items()},
        "pins": [{"name": pin.name, "reason": pin.reason} for pin in manifest.pins],
        "stats": {name: number_to_json(value) for name, value in manifest.stats.items()},
        "files": [entry_to_document(entry) for entry in manifest.shards or (manifest.file,)],
    }
    if manifest.previous is not None:
        document["previous"] = link_to_document(manifest.previous)
    if manifest.replaces is not None:
        replaced = _to_document(manifest.replaces.without_replaced())
        kept = manifest.replaces.kept
        document["replaces"] = replaced if kept is None else {**replaced, "kept": kept}
    return document


def entry_to_document(entry: FileEntry) -> dict[str, Any]:
    """Return what a manifest says about one file, as JSON."""
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


def _from_document(document: Mapping[str, Any]) -> Manifest:
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
        step=count(document, "step"),
        attempt=count(document, "attempt"),
        epoch=None if document["epoch"] is None else count(document, "epoch"),
        sequence=count(document, "sequence"),
        saved_at=utc_time(document["saved_at"]),
        why=typed(document["why"], str),
        metrics={name: number_from_json(value) for name, value in document["metrics"].items()},
        pins=tuple(
            Pin(name=typed(pin["name"], str), reason=typed(pin["reason"], str))
            for pin in document["pins"]
        ),
        world_size=count(document["world"], "size"),
        stats={name: number_from_json(value) for name, value in document["stats"].items()},
        replaces=None if replaces is None else _replaced_from_document(replaces),
        previous=link_from_document(document.get("previous")),
    )


def _replaced_from_document(document: Mapping[str, Any]) -> Manifest:
    old = _from_document({**document, "replaces": None})
    return replace(old, kept=optional_text(document.get("kept")))


def _check_names(files: tuple[FileEntry, ...], *, is_sharded: bool) -> None:
    """Check that there is one file, or those of all ranks in their order; one that was healed has an attempt of its own."""
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
    """Return what a manifest says about one file.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: It is no such document.
    """
    name = base_name(entry["name"])
    digest = entry["digest"]
    if digest["algorithm"] != ALGORITHM:
        raise ValueError(f"unknown digest algorithm {digest['algorithm']!r}")
    size_bytes, range_bytes = count(entry, "size_bytes"), count(digest, "range_bytes")
    if not 1 <= range_bytes <= _MAX_RANGE_BYTES:
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
