# SPDX-License-Identifier: Apache-2.0
"""Coordinators of PyTorch ranks over the rendezvous store of `torch.distributed`; no collectives.

Under `torchrun` the store is in the agent, not in a rank, and outlives all ranks, and restarts. The
restart number of the environment is one per agent, so the ranks agree on a name for their start.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

from torch import distributed
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from ckptmgr.parallel.coordinator import KeyValueCoordinator, waited_in_pieces
from ckptmgr.parallel.shared_directory import agreed_session

# A wait of 0 would never end.
_SHORTEST_WAIT_S = 0.001


def store_coordinator(store: Store, *, rank: int, world: int) -> KeyValueCoordinator:
    """Return a coordinator over a store of `torch.distributed`.

    Args:
        store: Any store that all ranks have; wrap it in a `PrefixStore` with another prefix after
            every restart.
        rank: Number of this rank.
        world: Number of ranks.
    """
    return KeyValueCoordinator(_Table(store), rank=rank, world=world)


def _own_connection(store: Store) -> Store:
    # A client waits with its lock held: a save in the background would block all other users of
    # the same one, collectives or saves of another series, for which the other ranks may wait.
    # Older torch and stores without connections have no clone.
    try:
        own: Store = store.clone()  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        return store
    return own


def torchrun_coordinator(*, timeout_s: float = 60.0) -> KeyValueCoordinator:
    """Return a coordinator for a process that `torchrun` has started; it needs no process group.

    Args:
        timeout_s: How long to try to reach the store, and then to wait for the other ranks.

    Raises:
        ValueError: `torchrun` has not started this process.
        RuntimeError: The store cannot be reached.
        RanksMissing: Some ranks did not come in time.
    """
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except KeyError as error:
        raise ValueError(f"{error} is not set: start the program with torchrun") from None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError(
            "the store of this job lives in rank 0 and would die with it; start the program with torchrun, "
            "or use store_coordinator() with a store of your own"
        )
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return _in_session(store, job, rank=rank, world=world, timeout_s=timeout_s)


def group_coordinator(
    group: ProcessGroup | None = None, *, timeout_s: float = 60.0
) -> KeyValueCoordinator:
    """Return a coordinator for the ranks of a process group, over the store of process groups.

    Unless `torchrun` has started the job, that store is in rank 0. When rank 0 dies, a save in
    flight fails, or is found to be committed, on all other ranks; nothing is damaged.

    Args:
        group: The group; None for all ranks.
        timeout_s: How long to wait for the other ranks.

    Raises:
        ValueError: There is no process group, or this process is not in it.
        RanksMissing: Some ranks did not come in time.
    """
    store: Store = distributed.distributed_c10d._get_default_store()  # its only name
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    name = "" if group is None else group.group_name
    return _in_session(store, f"group {name}", rank=rank, world=world, timeout_s=timeout_s)


_made: Counter[tuple[str, int]] = Counter()


def _in_session(
    store: Store, job: str, *, rank: int, world: int, timeout_s: float
) -> KeyValueCoordinator:
    """Return a coordinator of this start of a job, and of no other."""
    _made[job, rank] += 1  # the same on the other ranks, which run the same program
    place = PrefixStore(f"ckptmgr/{job}/{_made[job, rank]}", store)
    name = agreed_session(_Table(place), rank=rank, world=world, timeout_s=timeout_s)
    return store_coordinator(PrefixStore(name, place), rank=rank, world=world)


class _Table:
    """A store as a table. An unreachable one counts as missing ranks: the storage decides then."""

    def __init__(self, store: Store) -> None:
        self._shared = store
        self._of_thread = threading.local()
        self._of_thread.store = _own_connection(store)

    @property
    def _store(self) -> Store:
        """The store, over a connection of this thread."""
        if not hasattr(self._of_thread, "store"):
            self._of_thread.store = _own_connection(self._shared)
        store: Store = self._of_thread.store
        return store

    def put(self, key: str, value: bytes) -> None:
        with contextlib.suppress(DistError):
            self._store.set(key, value.decode())

    def get(self, key: str, *, timeout_s: float) -> bytes | None:
        try:
            if timeout_s >= _SHORTEST_WAIT_S:
                if not self._waited([key], timeout_s):
                    return None
            elif not self._store.check([key]):
                return None
            return bytes(self._store.get(key))
        except DistError:
            return None

    def get_many(self, keys: Sequence[str], *, timeout_s: float) -> dict[str, bytes]:
        with contextlib.suppress(DistError):
            if self._waited(keys, timeout_s):
                return dict(zip(keys, map(bytes, self._store.multi_get([*keys])), strict=True))
        values = ((key, self.get(key, timeout_s=0.0)) for key in keys)
        return {key: value for key, value in values if value is not None}

    def _waited(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Return whether all keys are set in time; no wait returns to Python before its end."""

        def wait(wait_s: float) -> bool:
            try:
                self._store.wait([*keys], timedelta(seconds=max(_SHORTEST_WAIT_S, wait_s)))
            except DistError:
                return False
            return True

        return waited_in_pieces(wait, timeout_s=timeout_s)

    def drop(self, key: str) -> None:
        with contextlib.suppress(DistError):
            self._store.delete_key(key)
