# SPDX-License-Identifier: Apache-2.0
"""Output of a conversion: the file that is written, its manifest, and files it may overwrite."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import (
    CheckpointFileNotFound,
    CheckpointNotFound,
    UnsafeWrite,
    UnsupportedCheckpoint,
)
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import DATA_SUFFIXES, OPAQUE, parse_name, stem_of
from ckptmgr.core.trust import Trust
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.io.digest import FileDigest
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.io.leases import lease_path
from ckptmgr.maintenance.contents import NewContent
from ckptmgr.maintenance.rewriting import manifest_of_bare, write_beside
from ckptmgr.store.change_leases import lease_of_name
from ckptmgr.store.manifest.codec import FileEntry, Manifest, manifest_name
from ckptmgr.store.numbering import LARGEST_FOLLOWED
from ckptmgr.store.reserved_names import is_reserved_name
from ckptmgr.store.store import Store

_PRIVATE = 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionResult:
    """Result of a conversion; `source_bytes` is the size of the input."""

    source: Path
    target: Checkpoint
    source_bytes: int


def check_target(source: Path, target: Path, *, force: bool) -> None:
    """Raise unless `target` may be written.

    Raises:
        CheckpointNotFound: There is no such input, or no directory for the output.
        UnsafeWrite: The target is the input (by any name), exists, is no file, or has the name of a
            manifest, a lease or another file that ckptmgr keeps.
    """
    if not source.is_file():
        raise CheckpointFileNotFound("no such file", path=source)
    check_name_and_place(target)
    if not os.path.lexists(target):
        return
    if target.exists() and target.samefile(source):
        raise UnsafeWrite(
            "is the input itself", path=target, hint="write to another file and rename it then"
        )
    if target.is_dir() or not force:
        raise UnsafeWrite("exists", path=target, hint="choose another name, or pass --force")
    if target.exists() and not target.is_file():
        # A rename would replace /dev/null by a file.
        raise UnsafeWrite("is a device or a pipe", path=target, hint="-o - writes to a pipe")


def check_name_and_place(target: Path) -> None:
    """Raise unless an output may have this name, in a directory that exists."""
    if not target.parent.is_dir():
        raise CheckpointNotFound("no such directory", path=target.parent)
    if is_reserved_name(target.name):
        raise UnsafeWrite(
            "is the name of a manifest, a lease or another file of ckptmgr",
            path=target,
            hint="choose another name",
        )


def publish(
    source: Path,
    target: Path,
    content: NewContent,
    *,
    options: ReadOptions,
    manifest: Manifest | None,
    force: bool,
    clock: Callable[[], float],
) -> ConversionResult:
    """Make the target durable, with the facts about the source in its manifest.

    `target` was checked by `check_target`. A source without a `manifest` is looked up in its
    directory with `options`; if it has none there, `clock` (seconds since 1970) stamps the new one.
    Content that is no checkpoint gets no manifest.

    Raises:
        StoreFull, OSError: From the disk; nothing was changed.
        StoreLocked: A live process writes the target, or this series in its directory.
        UnsafeWrite: The target was created after it was checked, or has the name of a checkpoint
            and would be none.
    """
    real, path = Path(os.path.realpath(source)), Path(os.path.realpath(target.parent)) / target.name
    write = partial(
        write_beside, name=path.name, size_bytes=content.size_bytes, mode=private_mode(real)
    )
    fs = OsFileSystem(keeps_owner=True)
    if content.format == OPAQUE:
        store = Store(path.parent, fs=fs)
        with lease_of_name(store, path.name):
            check_target(source, target, force=force)
            _refuse_checkpoint(store, path)
            write(store, write=content.write)
        written = _listed(path, content, clock)
    else:
        draft = _description(real, path, manifest, options, clock)
        store = Store(path.parent, fs=fs, trust=Trust(keys=content.key, allow_unencrypted=True))

        def described(digest: FileDigest) -> Manifest:
            return replace(draft, file=content.entry(path.name, digest))

        with exclusive_writer(store, path.name, draft.series):
            check_target(source, target, force=force)
            digest = write(store, write=content.write, series=draft.series, describe=described)
        written = described(digest).to_checkpoint(path.parent)
    return ConversionResult(source=source, target=written, source_bytes=real.stat().st_size)


def _listed(path: Path, content: NewContent, clock: Callable[[], float]) -> Checkpoint:
    """Return a file that is no checkpoint as a listing would show it."""
    return Checkpoint(
        path=path,
        series=stem_of(path.name),
        step=0,
        saved_at=datetime.fromtimestamp(clock(), UTC),
        size_bytes=content.size_bytes,
        state=State.UNVERIFIED,
        format=content.format,
        cipher=content.mode,
        key_id=content.key_id,
    )


def _refuse_checkpoint(store: Store, path: Path) -> None:
    """Raise UnsafeWrite where a non-checkpoint file would be listed as a checkpoint."""
    has_manifest = store.fs.status(path.parent / manifest_name(path.name)) is not None
    if has_manifest or path.name.endswith(DATA_SUFFIXES):
        raise UnsafeWrite(
            "is the name of a checkpoint, and what would be written is none",
            path=path,
            hint="choose another name",
        )


def private_mode(source: Path) -> int:
    """Return the permission bits of an output: 0600 without those that the input's owner lacks."""
    return _PRIVATE & stat.S_IMODE(source.stat().st_mode) or stat.S_IRUSR


@contextmanager
def exclusive_writer(store: Store, name: str, series: str) -> Iterator[None]:
    """Hold the leases for writing a file, in a directory where a run may be writing its series.

    Raises:
        StoreLocked: Another process is writing it.
    """
    with contextlib.ExitStack() as leases:
        # A run that is writing the series has left its lease; without one there is no such run.
        is_used = store.fs.status(lease_path(store.directory, series)) is not None
        if is_used and series != name:
            leases.enter_context(store.lease(series))
        leases.enter_context(lease_of_name(store, name))
        yield


def _description(
    source: Path,
    target: Path,
    manifest: Manifest | None,
    options: ReadOptions,
    clock: Callable[[], float],
) -> Manifest:
    """Return the manifest of the target without its file: all that is known about the source.

    In the directory of the source it belongs to no run, so that no run counts or removes it.
    """
    parsed = parse_name(target.name)
    series = stem_of(target.name) if parsed is None else parsed.prefix
    placeholder = FileEntry(name=target.name, digest=FileDigest(size_bytes=0, ranges=()), format="")
    if manifest is not None:
        if manifest.sequence > LARGEST_FOLLOWED:
            raise UnsupportedCheckpoint(
                f"its manifest says that it is commit {manifest.sequence}; proven by a key, that would leave no number to "
                "later saves",
                path=source,
                hint="the manifest was probably changed; without it the file can be converted, too",
            )
        run_id = "" if source.parent == target.parent else manifest.run_id
        return replace(
            manifest,
            file=placeholder,
            series=series,
            run_id=run_id,
            stats={},
            replaces=None,
            auth=None,
            opened_by=(),
            previous=None,  # the links of a run name the original files, not their copies
        )
    store = Store(source.parent, trust=options.trust)
    known = next((c for c in store.scan() if c.path == source), None)
    if known is not None:
        return replace(manifest_of_bare(known, placeholder), series=series)
    return Manifest(
        file=placeholder,
        series=series,
        run_id="",
        step=0,
        sequence=0,
        saved_at=datetime.fromtimestamp(clock(), UTC),
    )
