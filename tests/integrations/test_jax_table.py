# SPDX-License-Identifier: Apache-2.0
"""The table of JAX as ranks use it, where the real one is hard to bring into a state."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")

from ckptmgr.integrations.jax_distributed import _Table  # noqa: E402


class Client:
    """Answers as the client of JAX."""

    def __init__(self, *, most_bytes: int = 1 << 20) -> None:
        self.values: dict[str, bytes] = {}
        self._most_bytes = most_bytes

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def blocking_key_value_get_bytes(self, key: str, timeout_ms: int) -> bytes:
        assert timeout_ms >= 1
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]

    def key_value_dir_get_bytes(self, folder: str) -> list[tuple[str, bytes]]:
        found = [(key, value) for key, value in self.values.items() if key.startswith(folder)]
        if sum(len(value) for _, value in found) > self._most_bytes:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        return found

    def key_value_delete(self, key: str) -> None:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE")


@pytest.mark.parametrize("most_bytes", [1 << 20, 1], ids=["in one message", "one by one"])
def test_values_of_all_ranks_are_told_and_missing_ones_are_not(most_bytes: int) -> None:
    table = _Table(Client(most_bytes=most_bytes), "ckptmgr/0")
    for rank in (0, 2):
        table.put(f"tag/{rank}", b"of %d" % rank)
    table.put("other/1", b"of another round")
    keys = [f"tag/{rank}" for rank in range(3)]
    found = table.get_many(keys, timeout_s=0.001)
    assert found == {"tag/0": b"of 0", "tag/2": b"of 2"}
    table.put("tag/1", b"of 1")
    assert set(table.get_many(keys, timeout_s=60)) == set(keys)


def test_table_that_is_gone_is_like_ranks_that_do_not_come() -> None:
    table = _Table(Client(), "ckptmgr/0")
    assert table.get("tag/0", timeout_s=0) is None
    table.drop("tag/0")
