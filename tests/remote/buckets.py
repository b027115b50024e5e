# SPDX-License-Identifier: Apache-2.0
"""Object stores in memory for tests, and their conditions after a crash."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from ckptmgr import Trust
from ckptmgr.core.model import State
from ckptmgr.core.trust import DEFAULT_TRUST
from ckptmgr.objects.directory import RemoteDirectory
from ckptmgr.objects.place import ObjectPlace
from ckptmgr.objects.requests import Objects, open_objects
from ckptmgr.remote.download import download
from ckptmgr.store.store import Store

_numbers = itertools.count()


def new_url() -> str:
    """Return the address of an empty store."""
    return f"memory://bucket-{next(_numbers)}/run"


def new_objects() -> Objects:
    """Return an empty store."""
    return open_objects(new_url())


def directory_of(objects: Objects, *, later_s: float = 0) -> RemoteDirectory:
    """Return the directory of a store, `later_s` seconds from now."""
    return RemoteDirectory(objects, clock=lambda: time.time() + later_s)


def listed(objects: Objects, *, trust: Trust = DEFAULT_TRUST) -> dict[str, State]:
    """Return name to state in the listing of a store."""
    return {one.name: one.state for one in ObjectPlace(objects, trust=trust).scan()}


def whole_names(objects: Objects, work: Path) -> set[str]:
    """Return the names of the listed checkpoints, each of which is whole and downloads."""
    states = listed(objects)
    assert set(states.values()) <= {State.OK}, states
    for number, name in enumerate(states):
        target = Store(work / f"check-{next(_numbers)}-{number}")
        with target.lease("net"):
            download(directory_of(objects), name, target)
        assert [one.state for one in target.scan()] == [State.OK]
    return set(states)
