# SPDX-License-Identifier: Apache-2.0
"""Leases for the change of one checkpoint: of a file that belongs to no run, or of a series."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import StoreLocked
from ckptmgr.core.model import Checkpoint
from ckptmgr.io.signals import deliver_signals
from ckptmgr.store.name_leases import leased_name
from ckptmgr.store.store import Store

_LOG = logging.getLogger(__name__)
_ENDING_S = 30.0
_SILENT_S = 1.0
_PAUSE_S = 0.05


@contextmanager
def lease_of_name(store: Store, name: str) -> Iterator[None]:
    """Be the only writer of one file, and first remove what dead writers of it left behind.

    Two writers at once could leave the data of one beside the manifest of the other. The lease
    covers this name alone, so that ranks can write their files side by side. No lease file remains.

    Waits for a process that holds the lease only to clean up, and for one whose run has ended.

    Raises:
        StoreLocked: Another process is writing it.
    """
    with ExitStack() as lease:
        _take(store, name, lease)
        if any(_is_left(found, name) for found in store.fs.names(store.directory)):
            store.recover(name)
        yield


def _take(store: Store, name: str, lease: ExitStack) -> None:
    start = time.monotonic()
    has_said = False
    while True:
        try:
            lease.enter_context(store.lease(name))
        except StoreLocked as locked:
            waited_s = time.monotonic() - start
            if not locked.is_ending or waited_s >= _ENDING_S:
                raise
            if waited_s >= _SILENT_S and not has_said:
                _LOG.warning("%s; waiting for its end, up to %g s", locked.message, _ENDING_S)
                has_said = True
            with deliver_signals():
                time.sleep(_PAUSE_S)
        else:
            return


def _is_left(found: str, name: str) -> bool:
    """Return whether a dead writer of single files may have left this file."""
    return found.endswith(".tmp") or leased_name(found) not in (None, name)


@contextmanager
def lease_of_checkpoint(store: Store, checkpoint: Checkpoint) -> Iterator[None]:
    """Be the only process that changes an existing checkpoint, also of those that prune its series.

    Raises:
        UnsafeWrite: It belongs to a stranger.
        StoreLocked: Another process is writing it, or its series.
    """
    store.check_owner(checkpoint)
    series, name = checkpoint.series, checkpoint.name
    with ExitStack() as leases:
        if series != name:
            _take(store, series, leases)
        leases.enter_context(lease_of_name(store, name))
        yield
