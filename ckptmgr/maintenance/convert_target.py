# SPDX-License-Identifier: Apache-2.0
"""Output of a conversion: the file that is written, its manifest, and files it may overwrite."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import (
    CheckpointFileNotFound,
    CheckpointNotFound,
    UnprovenCheckpoint,
    UnsafeWrite,
    UnsupportedCheckpoint,
)
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import DATA_SUFFIXES, parse_name, stem_of
from ckptmgr.core.trust import Trust
from ckptmgr.crypto.container.writer import ContainerSealer
from ckptmgr.crypto.keys.ring import Keys
from ckptmgr.crypto.mindspore.blocks import BlockSealer
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.save.pipeline import write_image
from ckptmgr.formats.image import Image
from ckptmgr.io.digest import FileDigest
from ckptmgr.io.filesystem import OsFileSystem, OutputFile
from ckptmgr.io.leases import lease_path
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
    if not target.parent.is_dir():
        raise CheckpointNotFound("no such directory", path=target.parent)
    if is_reserved_name(target.name):
        raise UnsafeWrite(
            "is the name of a manifest, a lease or another file of ckptmgr",
            path=target,
            hint="choose another name",
        )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOutput:
    """Plaintext of a new file, and its encryption; `mode` is None for a plain file."""

    image: Image
    format: str
    mode: str | None = None
    key: Keys | None = None
    sealer: BlockSealer | ContainerSealer | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self.image.size if self.sealer is None else self.sealer.sealed_size

    def write(self, file: OutputFile) -> FileDigest:
        """Write the file, and return its digests."""
        return write_image(self.image, file, sealer=self.sealer).digest

    def entry(self, name: str, digest: FileDigest) -> FileEntry:
        """Return the manifest's entry of the file."""
        return FileEntry(
            name=name, digest=digest, format=self.format, cipher=self.mode, key_id=self.key_id
        )

    @property
    def key_id(self) -> str | None:
        """Id of the key, or None."""
        return None if self.key is None else self.key.key_id


def publish(
    source: Path,
    target: Path,
    content: ConversionOutput,
    *,
    options: ReadOptions,
    manifest: Manifest | None,
    force: bool,
    clock: Callable[[], float],
) -> ConversionResult:
    """Make the target durable, with the facts about the source in its manifest.

    `target` was checked by `check_target`. A source without a `manifest` is looked up in its
    directory with `options`; if it has none there, `clock` (seconds since 1970) stamps the new one.

    Raises:
        StoreFull, OSError: From the disk; nothing was changed.
        StoreLocked: A live process writes the target, or this series in its directory.
        UnsafeWrite: The target was created after it was checked.
    """
    real = Path(os.path.realpath(source))
    directory = Path(os.path.realpath(target.parent))
    described = _description(real, directory / target.name, manifest, options, clock)
    store = Store(
        directory,
        fs=OsFileSystem(keeps_owner=True),
        trust=Trust(keys=content.key, allow_unencrypted=True),
    )

    with exclusive_writer(store, target.name, described.series):
        check_target(source, target, force=force)
        with store.publisher.new_file(
            target.name,
            series=described.series,
            size_bytes=content.size_bytes,
            mode=private_mode(real),
        ) as new:
            with new.writing() as file:
                digest = content.write(file)
            written = replace(described, file=content.entry(target.name, digest))
            new.publish(written)
    return ConversionResult(
        source=source, target=written.to_checkpoint(directory), source_bytes=real.stat().st_size
    )


def publish_non_checkpoint(
    source: Path,
    target: Path,
    content: ConversionOutput,
    *,
    force: bool,
    clock: Callable[[], float],
) -> ConversionResult:
    """Make a target durable that is no checkpoint: complete or absent, and without a manifest.

    Raises:
        StoreLocked: A live process writes the target.
        UnsafeWrite: It was created after it was checked, or has the name of a checkpoint.
        StoreFull, OSError: From the disk; nothing was changed.
    """
    real = Path(os.path.realpath(source))
    path = Path(os.path.realpath(target.parent)) / target.name
    store = Store(path.parent, fs=OsFileSystem(keeps_owner=True))
    with lease_of_name(store, path.name):
        check_target(source, target, force=force)
        _refuse_checkpoint(store, path)
        place(store, path.name, content, mode=private_mode(real))
    written = Checkpoint(
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
    return ConversionResult(source=source, target=written, source_bytes=real.stat().st_size)


def place(store: Store, name: str, content: ConversionOutput, *, mode: int) -> None:
    """Make a non-checkpoint file durable under `name`, whose lease must be held; no manifest."""
    with store.publisher.new_file(
        name, series=name, size_bytes=content.size_bytes, mode=mode, is_rank_file=True
    ) as new:
        with new.writing() as file:
            content.write(file)
        new.give_name()


def _refuse_checkpoint(store: Store, path: Path) -> None:
    """Raise UnsafeWrite where a non-checkpoint file would be listed as a checkpoint."""
    has_manifest = store.fs.status(path.parent / manifest_name(path.name)) is not None
    if has_manifest or path.name.endswith(DATA_SUFFIXES):
        raise UnsafeWrite(
            "is the name of a checkpoint, and what would be written is none",
            path=path,
            hint="choose another name",
        )


def permission_bits_of(store: Store, name: str) -> int | None:
    """Return the permission bits of a file in a store, or None where there is none."""
    status = store.fs.status(store.directory / name)
    return None if status is None else status.mode


def private_mode(source: Path) -> int:
    """Return the permission bits of an output: 0600 without those that the input's owner lacks."""
    return _PRIVATE & stat.S_IMODE(source.stat().st_mode) or stat.S_IRUSR


def unproven_step(checkpoint: Checkpoint, trust: Trust) -> UnprovenCheckpoint:
    """Return the error of a file without manifest whose new manifest would vouch for its step."""
    return UnprovenCheckpoint(
        "has no manifest, so nothing but its name says which checkpoint it is; it would get one that vouches for that",
        path=checkpoint.path,
        hint=trust.accept_hint,
    )


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
    return Manifest(
        file=placeholder,
        series=series,
        run_id="",
        step=0 if known is None else known.step,
        epoch=None if known is None else known.epoch,
        sequence=0,
        saved_at=datetime.fromtimestamp(clock(), UTC) if known is None else known.saved_at,
        why="manual" if known is None else known.why,
    )
