# SPDX-License-Identifier: Apache-2.0
"""The values of a manifest: one data file, and all facts about a checkpoint besides its tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmgr.core.model import Checkpoint, Link, Pin, State
from ckptmgr.core.printable import MOST_CHARACTERS, printable
from ckptmgr.core.shard_names import is_set_name, parse_shard_name
from ckptmgr.io.digest import FileDigest
from ckptmgr.store.manifest.fields import time_text

if TYPE_CHECKING:  # slow to import, and needed with keys only
    from ckptmgr.store.manifest.keys import ManifestKey

SUFFIX = ".manifest.json"
PLACEHOLDER = "foreign"
NOT_FINITE = "not finite"
_LONGEST_NAME = 500
_ID_PREFIX = b"ckptmgr/v1/checkpoint-id\n"
_quoted = json.encoder.encode_basestring_ascii


def checkpoint_id(
    *,
    series: str,
    step: str,
    attempt: str,
    epoch: str,
    sequence: str,
    saved_at: str,
    why: str,
    run_id: str,
    parents: str,
    world_size: str,
    files: str,
    previous: str,
) -> str:
    """Return the hash of the facts of a checkpoint that never change, each given as its JSON.

    The text is their canonical JSON (docs/manifest-format.md): of `files` name, bytes and digest of
    each, of `previous` the id. A large listing has each fact as text already.
    """
    text = (
        f'{{"attempt":{attempt},"epoch":{epoch},"files":[{files}],"previous":{previous}'
        f',"run":{{"id":{run_id},"parents":[{parents}]}},"saved_at":{saved_at}'
        f',"sequence":{sequence},"series":{series},"step":{step}'
        f',"why":{why},"world":{{"size":{world_size}}}}}'
    )
    return hashlib.sha256(_ID_PREFIX + text.encode()).hexdigest()


def health_of(name: str, *, is_encrypted: bool) -> str:
    """Return the health of a file whose tensor `name` is not finite; encrypted files keep names secret."""
    return NOT_FINITE if is_encrypted else f"{NOT_FINITE}: {name[:_LONGEST_NAME]}"


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
    """The facts about one checkpoint besides its tensors.

    Attributes:
        file: The data file; of a sharded checkpoint the one of rank 0.
        series: Name of the series.
        run_id: The run that wrote it.
        parent_run_ids: The runs it was resumed from, newest first.
        starts_anew: Whether the run asked to begin beside the checkpoints that were there.
        step: Global training step.
        attempt: Which save of this step it is, from 0.
        sequence: Order of commits in the directory, from 1.
        saved_at: UTC.
        epoch: Epoch number, or None.
        why: `policy`, `end`, `preempted`, `manual`, or `exception:NAME`.
        metrics: Name to value.
        pins: Reasons to keep it for ever.
        tags: Names that people gave it.
        keep: Text of the retention policy that its run applied after the save; None for none, and
            for one without text.
        keep_at: Mark of the address of an object store at which the run applied it; None in a directory.
        world_size: Number of ranks that saved together.
        stats: Seconds and bytes of the stages of the save.
        health: `not finite: NAME` of the first tensor with such floats, `not finite` of an encrypted
            file; None where all are finite, and where no save has looked.
        revision: How often it was changed after the save; of two of one save the higher is the newer.
        replaces: The manifest of the data that has this name until the swap, or None.
        shards: The data files of a sharded checkpoint, by rank; else empty.
        previous: The checkpoint of the series that was newest before, or None.
        signed_by: Id of the trusted key whose signature was checked when it was read, or None.
        auth: The key that authenticated it when it was read, and will when it is written again; or
            None.
        opened_by: Labels of the keys that check the authentication, unproven; for people.
        preserved: In a replaced manifest: the original manifest file, to be restored with its
            proofs if the swap fails; or None.
    """

    file: FileEntry
    series: str
    run_id: str
    step: int
    sequence: int
    saved_at: datetime
    parent_run_ids: tuple[str, ...] = ()
    starts_anew: bool = False
    attempt: int = 0
    epoch: int | None = None
    why: str = "manual"
    metrics: Mapping[str, float] = field(default_factory=dict)
    pins: tuple[Pin, ...] = ()
    tags: tuple[str, ...] = ()
    keep: str | None = None
    keep_at: str | None = None
    world_size: int = 1
    stats: Mapping[str, float] = field(default_factory=dict)
    health: str | None = None
    revision: int = 0
    replaces: Manifest | None = None
    shards: tuple[FileEntry, ...] = ()
    previous: Link | None = None
    signed_by: str | None = field(default=None, compare=False)
    auth: ManifestKey | None = field(default=None, compare=False, repr=False)
    opened_by: tuple[str, ...] = field(default=(), compare=False)
    preserved: str | None = field(default=None, compare=False, repr=False)

    @property
    def id(self) -> str:
        """64 hex digits: a hash over the facts that never change, and the id of the predecessor."""
        return checkpoint_id(
            series=_quoted(self.series),
            step=f"{self.step:d}",
            attempt=f"{self.attempt:d}",
            epoch="null" if self.epoch is None else f"{self.epoch:d}",
            sequence=f"{self.sequence:d}",
            saved_at=_quoted(time_text(self.saved_at)),
            why=_quoted(self.why),
            run_id=_quoted(self.run_id),
            parents=",".join([_quoted(parent) for parent in self.parent_run_ids]),
            world_size=f"{self.world_size:d}",
            files=",".join(
                [
                    f'[{_quoted(entry.name)},{entry.digest.size_bytes:d},"{entry.digest.total.hex()}"]'
                    for entry in self.shards or (self.file,)
                ]
            ),
            previous="null" if self.previous is None else _quoted(self.previous.id),
        )

    @property
    def name(self) -> str:
        """Base name of the checkpoint: its data file, or the set of its shards."""
        shard = parse_shard_name(self.file.name) if self.shards else None
        return self.file.name if shard is None else shard.set_name

    @property
    def save(self) -> tuple[str, str, str, int, int, datetime]:
        """The save that wrote it, which stays the same while keys, pins or metrics change."""
        return self.name, self.series, self.run_id, self.sequence, self.step, self.saved_at

    def changed(self, **fields: Any) -> Manifest:
        """Return it with some fields of the same save changed, as the next revision."""
        return replace(self, revision=self.revision + 1, **fields)

    @property
    def is_placeholder(self) -> bool:
        """Whether it was made for a file without a manifest, to overwrite that; it proves nothing."""
        return self.why == PLACEHOLDER and self.sequence == 0

    def of_shard(self, rank: int) -> Manifest:
        """Return a manifest of the file of one rank alone."""
        return replace(self, file=self.shards[rank], shards=())

    def signed(self, key_id: str | None) -> Manifest:
        """Return the manifest with the key id of its signature, which also covers `replaces`."""
        old = None if self.replaces is None else replace(self.replaces, signed_by=key_id)
        return replace(self, signed_by=key_id, replaces=old)

    def without_replaced(self) -> Manifest:
        """Return the manifest as it is after the swap."""
        return replace(self, replaces=None)

    def completed(
        self, file: FileEntry, stats: Mapping[str, float], *, health: str | None = None
    ) -> Manifest:
        """Return this draft with the data file that was written, its health, and more `stats`."""
        return replace(self, file=file, stats={**self.stats, **stats}, health=health)

    def to_checkpoint(
        self, directory: Path, *, state: State = State.OK, problem: str | None = None
    ) -> Checkpoint:
        """Return the value that policies see."""
        key_id = self.file.key_id
        if self.opened_by:
            from ckptmgr.store.manifest.keys import id_of_opener

            key_id = id_of_opener(self.opened_by) or key_id
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
            tags=self.tags,
            health=None if self.health is None else printable(self.health, MOST_CHARACTERS),
            state=state,
            format=self.file.format,
            cipher=self.file.cipher,
            key_id=key_id,
            opened_by=self.opened_by,
            problem=problem,
            shards=tuple(entry.name for entry in self.shards),
            id=self.id,
            previous=self.previous,
            parent_run_ids=self.parent_run_ids,
            starts_anew=self.starts_anew,
        )


def manifest_name(data_name: str) -> str:
    """Return the name of the manifest of a data file."""
    return data_name + SUFFIX


def files_of(checkpoint: Checkpoint) -> tuple[str, tuple[str, ...]]:
    """Return the file without which a checkpoint does not exist, and its other files."""
    if is_set_name(checkpoint.name):
        return manifest_name(checkpoint.name), checkpoint.shards
    return checkpoint.name, (manifest_name(checkpoint.name),)
