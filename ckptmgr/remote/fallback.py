# SPDX-License-Identifier: Apache-2.0
"""The way back from a mirror: a run that has no checkpoint here downloads the newest one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from ckptmgr.core.model import Checkpoint
from ckptmgr.objects.directory import RemoteDirectory
from ckptmgr.remote.download import download
from ckptmgr.series.candidates import Skipped, first_that_loads, newest_first
from ckptmgr.store.store import Store

_LOG = logging.getLogger(__name__)


class Fetched(NamedTuple):
    """The address of the checkpoint that was downloaded, if any, and those that were skipped."""

    url: str | None
    skipped: tuple[Skipped, ...]


class MirroredCandidates:
    """The checkpoints of a series in a mirror, newest first; `load` downloads one."""

    def __init__(
        self, directory: RemoteDirectory, listing: Store, target: Store, *, series: str
    ) -> None:
        self._directory = directory
        self._listing = listing
        self._target = target
        self._series = series

    def listed(self) -> Sequence[Checkpoint]:
        """List the mirror; return the checkpoints of the series."""
        present = self._listing.scan()
        return newest_first([one for one in present if one.series == self._series])

    def load(self, checkpoint: Checkpoint) -> Checkpoint:
        """Download a checkpoint; return it as it is here."""
        return download(self._directory, checkpoint.name, self._target)


def fetch_newest(
    directory: RemoteDirectory, listing: Store, target: Store, *, series: str
) -> Fetched:
    """Download the newest checkpoint of a series that the keys prove, if there is one.

    The lease of the series must be held.

    Raises:
        OSError: The mirror cannot be reached: a start without it would lose the run in silence.
        CkptmgrError: No checkpoint can be had, and not because all are damaged.
    """
    candidates = MirroredCandidates(directory, listing, target, series=series)
    found, here, skipped = first_that_loads(candidates, listing.fs)
    for one in skipped:
        _LOG.warning("skipped %s: %s", one.checkpoint.path, one.reason)
    if found is None or here is None:
        return Fetched(None, tuple(skipped))
    url = f"{directory.objects.url}/{found.name}"
    _LOG.warning(
        "%s had no checkpoint of %r to resume from: step %d was downloaded from %s",
        target.directory,
        series,
        here.step,
        url,
    )
    return Fetched(url, tuple(skipped))
