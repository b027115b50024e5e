# SPDX-License-Identifier: Apache-2.0
"""Values about the checkpoints of other tools, and the view of a directory that layouts read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ckptmgr.core.model import Checkpoint, State
from ckptmgr.io.filesystem import FileStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCheckpoint:
    """One checkpoint of another tool, a directory or a file.

    Attributes:
        checkpoint: As policies and tables see it: `series` and `format` are the tool, `state` is
            COMPLETE or INCOMPLETE, and `problem` is why it is incomplete. Nothing removes one
            whose step is not known.
        named_by: The notes of the tool that point at it, such as `latest`.
    """

    checkpoint: Checkpoint
    named_by: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether its save ended, as far as the layout shows."""
        return self.checkpoint.state is State.COMPLETE


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """Note of a tool that names a checkpoint of its directory.

    Attributes:
        source: The file or field, such as `latest`.
        target: The name that it points at, as its tool reads it; None if it cannot be read. Only a
            name of a checkpoint in the directory is right.
    """

    source: str
    target: str | None


class Folder(Protocol):
    """A directory as a layout reads it."""

    def entries(self) -> Mapping[str, FileStatus]:
        """Return its entries, links not followed; none if it is gone or no directory."""
        ...

    def folder(self, name: str) -> Folder:
        """Return the view of a directory in it."""
        ...

    def file(self, name: str) -> FileStatus | None:
        """Return the status of a file, or of that in the same tree which a link leads to."""
        ...

    def text(self, name: str) -> str | None:
        """Return the text of a small file; None if there is none, or it is too large or no text."""
        ...

    def head(self, name: str) -> bytes:
        """Return the first bytes of a file, at most 4; none if it cannot be read."""
        ...

    def holds(self, name: str, text: bytes) -> bool:
        """Return whether some bytes occur near the start of a file."""
        ...

    def link(self, name: str) -> str | None:
        """Return the target of a link: a name in this directory, else a path; None for a file.

        Of a link that leads to nothing it is the base name: the directory may have been moved.
        """
        ...
