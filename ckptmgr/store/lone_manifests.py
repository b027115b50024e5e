# SPDX-License-Identifier: Apache-2.0
"""Manifests whose data file is absent: the remains of an interrupted save or removal, or lost data.

A save publishes the manifest before it renames the data, so an interrupted save leaves the
described data in a temporary file. A removal only takes a checkpoint that a newer whole one
supersedes, and removes the data first. Neither explains a manifest that is newer than every whole
checkpoint and has no such temporary file: its data is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckptmgr.core.model import Checkpoint, State
from ckptmgr.io.passing_errors import no_such_file
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.manifest.reader import ManifestReader


class LoneManifest(NamedTuple):
    """A manifest of a single file, proven as far as the reader has keys, without its data file."""

    manifest: Manifest

    def newer_in(self, present: Iterable[Checkpoint]) -> Checkpoint | None:
        """Return the newest whole checkpoint that supersedes it, or None.

        That is one as new or newer, of its run or of a run that resumed from it; where no run is
        known, or an emergency save may have been replaced, of its series. A run that was not
        resumed removes nothing of another one.

        A save made while an exception unwound the training does not count: retention removes
        nothing because of it.
        """
        own = self.manifest.to_checkpoint(Path())
        newer = [
            one
            for one in present
            if one.state is State.OK
            and one.is_countable
            and _is_of_line(own, one)
            and one.order >= own.order
        ]
        return max(newer, key=lambda one: one.order, default=None)

    def is_completed_by(self, files: ManifestReader, temp: str) -> bool:
        """Return whether a temporary file holds the data that the manifest describes; reads it.

        Never true if another file had the name when the manifest was published: that file is
        missing.
        """
        path, digest = files.directory / temp, self.manifest.file.digest
        if self.manifest.replaces is not None:
            return False
        try:
            status = files.fs.status(path)
            has_size = status is not None and status.size_bytes == digest.size_bytes
            return has_size and files.is_described(path, self.manifest.file)
        except OSError:  # removed meanwhile, or unreadable
            return False

    def missing(self, directory: Path) -> Checkpoint:
        """Return the entry of the listing for missing data."""
        problem = (
            "its data file is missing; put it back (where a copy is still going on, wait), or remove the manifest "
            "if the data is given up"
        )
        found = self.manifest.to_checkpoint(directory, state=State.MISSING, problem=problem)
        return replace(found, size_bytes=0, obstacle=no_such_file(found.path))


def _is_of_line(own: Checkpoint, other: Checkpoint) -> bool:
    if own.run_id and own.run_id in (other.run_id, *other.parent_run_ids):
        return True
    is_known = own.run_id and other.run_id and not own.is_emergency
    return own.series == other.series and not is_known
