# SPDX-License-Identifier: Apache-2.0
"""The job of one save as a training loop gives it, and the order that a writer makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import extension_of
from ckptmgr.formats.tensor import Item
from ckptmgr.io.digest import FileDigest
from ckptmgr.io.permissions import DEFAULT_FILE_MODE
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.store.manifest.codec import FileEntry, Manifest

if TYPE_CHECKING:  # slow to import, and needed with keys only
    from ckptmgr.crypto.keys.ring import Keys

_NOT_WRITTEN = FileDigest(size_bytes=0, ranges=())


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How files are written.

    Attributes:
        format: `ckpt` or `safetensors`.
        key: Encrypts and seals, or None.
        mode: Cipher mode used with a key.
        has_crc: Write a CRC32 trailer (`.ckpt`; inside the encryption) or `crc_num` (`.safetensors`).
        compression_level: Level of zstd for `safetensors`, or None.
        file_mode: Permission bits of data and manifest; MindSpore's 0400 by default.
        is_as_library: Write a `safetensors` file as the library does, byte for byte.
        verify_after_write: Read the file back from the disk before it is published, and compare it.
        has_manifest: Leave a manifest beside the file; without one its CRC may be one that
            MindSpore cannot check.
    """

    format: str = "ckpt"
    key: Keys | None = None
    mode: str = "AES-GCM"
    has_crc: bool = False
    compression_level: int | None = None
    file_mode: int = DEFAULT_FILE_MODE
    is_as_library: bool = False
    verify_after_write: bool = False
    has_manifest: bool = True

    @property
    def extension(self) -> str:
        """The extension of the file name: format, and ending of a container or compressed file."""
        return extension_of(
            self.format,
            is_encrypted=self.key is not None,
            is_compressed=self.compression_level is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFacts:
    """Facts about a save that the training loop knows.

    Attributes:
        step: Global step.
        attempt: Number of the save of this step; None for the next one.
        at: Time of the request, in seconds since the epoch; None for now.
        epoch: Epoch number, or None.
        why: The trigger.
        metrics: Name to value.
    """

    step: int
    attempt: int | None = None
    at: float | None = None
    epoch: int | None = None
    why: str = "manual"
    metrics: Mapping[str, float] | None = None


class Naming(Protocol):
    """Finds the name of a save when the save begins: before that, an earlier save may take it."""

    def free_name(
        self, step: int, present: Sequence[Checkpoint], *, format: str
    ) -> tuple[str, int | None]:
        """Return a file name with the extension `format`, and the attempt at the step (None: next).

        `present` is the listing of the directory.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedName:
    """The naming of a save whose file replaces any other of that name."""

    name: str
    attempt: int | None = None

    def free_name(
        self, step: int, present: Sequence[Checkpoint], *, format: str
    ) -> tuple[str, int | None]:
        """Return the name."""
        return self.name, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One save as the training loop asks for it.

    Attributes:
        naming: Finds the name.
        facts: Step, epoch, metrics, trigger.
        items: The tensors and texts; empty where there is an `error`.
        metadata: Strings that are stored in the file.
        options: Overrides the options of the writer.
        retention: Applied once the save is durable; None for no retention.
        error: Why there are no items. Other ranks wait for this one, so the job is run all the same.
    """

    naming: Naming
    facts: SaveFacts
    items: Sequence[Item] = ()
    metadata: Mapping[str, str] | None = None
    options: SaveOptions | None = None
    retention: RetentionPolicy | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """One file to be written: its name, content, format and manifest.

    Attributes:
        name: Base name of the data file.
        items: The tensors and texts.
        options: How the file is written.
        series: Series of the temporary file and of the lease.
        draft: The manifest but for the file entry and the figures of the writing; see `draft_entry`.
        metadata: Strings that are stored in the file.
        is_rank_file: The file is one of a set: it gets no manifest of its own.
    """

    name: str
    items: Sequence[Item]
    options: SaveOptions
    series: str
    draft: Manifest
    metadata: Mapping[str, str] | None = None
    is_rank_file: bool = False


def draft_entry(name: str, options: SaveOptions) -> FileEntry:
    """Return the file entry of a draft: that of a file that is not written yet."""
    return FileEntry(name=name, digest=_NOT_WRITTEN, format=options.format)
