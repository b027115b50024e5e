# SPDX-License-Identifier: Apache-2.0
"""Leases for the change of one checkpoint: of a file that belongs to no run, or of a series."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.model import Checkpoint
from ckptmgr.store.name_leases import leased_name
from ckptmgr.store.store import Store


@contextmanager
def lease_of_name(store: Store, name: str) -> Iterator[None]:
    """Be the only writer of one file, and first remove what dead writers of it left behind.

    Two writers at once could leave the data of one beside the manifest of the other. The lease
    covers this name alone, so that ranks can write their files side by side. No lease file remains.

    Raises:
        StoreLocked: Another process is writing it.
    """
    with store.lease(name):
        if any(_is_left(found, name) for found in store.fs.names(store.directory)):
            store.recover(name)
        yield


def _is_left(found: str, name: str) -> bool:
    """Return whether a dead writer of single files may have left this file."""
    return found.endswith(".tmp") or leased_name(found) not in (None, name)


@contextmanager
def lease_of_checkpoint(store: Store, checkpoint: Checkpoint) -> Iterator[None]:
    """Be the only process that changes an existing checkpoint, also of those that prune its series.

    Raises:
        StoreLocked: Another process is writing it, or its series.
    """
    series, name = checkpoint.series, checkpoint.name
    with ExitStack() as leases:
        if series != name:
            leases.enter_context(store.lease(series))
        leases.enter_context(lease_of_name(store, name))
        yield
