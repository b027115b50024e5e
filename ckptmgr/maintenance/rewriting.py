# SPDX-License-Identifier: Apache-2.0
"""Rewrite a file: read it, change it, write it beside, read that back, publish it.

`write_beside` has the order of a save, so at every instant there is the old file or the new one.
Each work gives four hooks: `write` writes the changed content; `read_back` compares the content
that the disk holds; `describe` makes the manifest; `mode` has the permission bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import UnprovenCheckpoint
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.trust import Trust
from ckptmgr.io.digest import FileDigest
from ckptmgr.io.filesystem import InputFile, OutputFile
from ckptmgr.store.change_leases import lease_of_checkpoint
from ckptmgr.store.manifest.codec import FileEntry, Manifest
from ckptmgr.store.store import Store


@contextmanager
def held_for_change(store: Store, checkpoint: Checkpoint) -> Iterator[None]:
    """Hold the leases of a checkpoint, after a swap of it that was interrupted is finished."""
    with lease_of_checkpoint(store, checkpoint):
        store.finish_swap(checkpoint)
        yield


@contextmanager
def opened_raw(store: Store, path: Path) -> Iterator[InputFile]:
    """Open a file; errors of its content name it."""
    with translated_errors(str(path)), contextlib.closing(store.fs.open(path)) as raw:
        yield raw


def write_beside(
    store: Store,
    name: str,
    write: Callable[[OutputFile], FileDigest],
    *,
    size_bytes: int,
    mode: int,
    series: str | None = None,
    read_back: Callable[[InputFile, FileDigest], None] | None = None,
    describe: Callable[[FileDigest], Manifest] | None = None,
    manifest_mode: int | None = None,
    is_rank_file: bool = False,
) -> FileDigest:
    """Make new content durable under a name, as `Publisher.new_file`; return its digest.

    Without `describe` there is no manifest, and the lease of the name must be held. The file of a
    rank (`is_rank_file`) has a new name and no manifest; `series` is the name by default.
    """
    with store.publisher.new_file(
        name,
        series=name if series is None else series,
        size_bytes=size_bytes,
        mode=mode,
        is_rank_file=is_rank_file or describe is None,
    ) as new:
        with new.writing() as file:
            digest = write(file)
        if read_back is not None:
            with new.reading() as stored:
                read_back(stored, digest)
        if describe is None:
            new.give_name()
        else:
            new.publish(describe(digest), mode=manifest_mode)
    return digest


def permission_bits_of(store: Store, name: str) -> int | None:
    """Return the permission bits of a file in a store, or None where there is none."""
    status = store.fs.status(store.directory / name)
    return None if status is None else status.mode


def mode_like(store: Store, name: str) -> int:
    """Return the permission bits of the file that a new one replaces."""
    return permission_bits_of(store, name) or 0o400


def check_proofs(
    store: Store, checkpoint: Checkpoint, manifest: Manifest | None, trust: Trust
) -> None:
    """Raise where the new manifest would prove less, or more, than the old one.

    Raises:
        KeyProblem: The key that signed the old one is missing.
        UnprovenCheckpoint: There is none, and the new one would vouch for its step.
    """
    if manifest is not None:
        store.check_rewritable(checkpoint)
    elif trust.is_strict:
        raise UnprovenCheckpoint(
            "has no manifest, so nothing but its name says which checkpoint it is; it would get one that vouches for that",
            path=checkpoint.path,
            hint=trust.accept_hint,
        )


def manifest_of_bare(checkpoint: Checkpoint, entry: FileEntry) -> Manifest:
    """Return the first manifest of a file, with the facts that its name gives."""
    return Manifest(
        file=entry,
        series=checkpoint.series,
        run_id="",
        step=max(checkpoint.step, 0),
        epoch=checkpoint.epoch,
        sequence=0,
        saved_at=checkpoint.saved_at,
        why=checkpoint.why,
    )
