# SPDX-License-Identifier: Apache-2.0
"""The lease on one name, for files that belong to no run, and all leases that the change of one checkpoint needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ckptmgr.core.model import Checkpoint
from ckptmgr.store.name_leases import leased_name
from ckptmgr.store.store import Store


@contextmanager
def lease_of_name(store: Store, name: str) -> Iterator[None]:
    """Be the only writer of one file, and first remove what dead writers of it left; no lease file stays behind.

    Two at once could leave the data of one beside the manifest of the other. The lease is of this name alone, so that ranks
    may write their files side by side.

    Raises:
        StoreLocked: Somebody else is writing it.
    """
    with store.lease(name):
        if any(_is_left(found, name) for found in store.fs.list(store.directory)):
            store.recover(name)
        yield


def _is_left(found: str, name: str) -> bool:
    """Return whether a file may have been left by a dead writer of single files."""
    return found.endswith(".tmp") or leased_name(found) not in (None, name)


@contextmanager
def lease_of_checkpoint(store: Store, checkpoint: Checkpoint) -> Iterator[None]:
    """Be the only one who changes a checkpoint that is there; whoever prunes, repairs or continues its series waits.

    Raises:
        StoreLocked: Somebody else is writing it, or its series.
    """
    series, name = checkpoint.series, checkpoint.name
    with ExitStack() as leases:
        if series != name:
            leases.enter_context(store.lease(series))
        leases.enter_context(lease_of_name(store, name))
        yield
