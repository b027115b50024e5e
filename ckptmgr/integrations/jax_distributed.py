# SPDX-License-Identifier: Apache-2.0
"""Coordinator of JAX processes over the table of `jax.distributed`; it needs no collectives.

The table is in process 0. When that process ends, JAX ends the others, too; until then they wait.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import distributed  # no public module has the table; Orbax takes it from here, too

from ckptmgr.parallel.coordinator import KeyValueCoordinator, waited_in_pieces

_SHORTEST_WAIT_MS = 1
_made = itertools.count()


def jax_coordinator() -> KeyValueCoordinator:
    """Return a coordinator for the processes of `jax.distributed.initialize`.

    Raises:
        ValueError: It was not called.
    """
    state = distributed.global_state
    if state.client is None:
        raise ValueError("this process is alone: call jax.distributed.initialize() first")
    # The same number on the other processes, which run the same program; each start has a table.
    table = _Table(state.client, f"ckptmgr/{next(_made)}")
    return KeyValueCoordinator(table, rank=state.process_id, world=state.num_processes)


class _Table:
    """The table of JAX. An unreachable one counts as missing ranks: the storage decides then."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    def put(self, key: str, value: bytes) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set_bytes(self._path(key), value)

    def get(self, key: str, *, timeout_s: float) -> bytes | None:
        found: list[bytes] = []

        def wait(wait_s: float) -> bool:
            wait_ms = max(_SHORTEST_WAIT_MS, round(wait_s * 1000))
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                value = self._client.blocking_key_value_get_bytes(self._path(key), wait_ms)
                found.append(bytes(value))
            return bool(found)

        return found[0] if waited_in_pieces(wait, timeout_s=timeout_s) else None

    def get_many(self, keys: Sequence[str], *, timeout_s: float) -> dict[str, bytes]:
        stop = time.monotonic() + timeout_s
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while True:
                found = self._present(keys[0].rpartition("/")[0])
                missing = next((key for key in keys if key not in found), None)
                left_s = stop - time.monotonic()
                if missing is None or left_s <= 0 or self.get(missing, timeout_s=left_s) is None:
                    return found
        # Together they exceed the size of a message.
        values = ((key, self.get(key, timeout_s=max(0.0, stop - time.monotonic()))) for key in keys)
        return {key: value for key, value in values if value is not None}

    def _present(self, folder: str) -> dict[str, bytes]:
        start = len(self._path(""))
        found = self._client.key_value_dir_get_bytes(self._path(f"{folder}/"))
        return {key[start:]: bytes(value) for key, value in found}

    def drop(self, key: str) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_delete(self._path(key))

    def _path(self, key: str) -> str:
        return f"{self._prefix}/{key}"
