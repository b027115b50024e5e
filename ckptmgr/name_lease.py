# SPDX-License-Identifier: Apache-2.0
"""The lease on one name, for files that belong to no run: functions that write single files hold it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckptmgr.lease import lease_path
from ckptmgr.store import Store


@contextmanager
def lease_of_name(store: Store, name: str) -> Iterator[None]:
    """Be the only writer of one file, and first remove what dead writers of it left; no lease file stays behind.

    Two at once could leave the data of one beside the manifest of the other. The lease is of this name alone, so that ranks
    may write their files side by side.

    Raises:
        StoreLocked: Somebody else is writing it.
    """
    with store.lease(name):
        try:
            if any(found.endswith(".tmp") for found in store.fs.list(store.directory)):
                store.recover(name)
            yield
        finally:
            with suppress(OSError):
                store.fs.unlink(lease_path(store.directory, name))
