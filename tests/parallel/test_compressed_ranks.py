# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of many ranks whose files are compressed: loaded by as many and by fewer ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.training import KEY
from tests.parallel.test_sharded_state import fresh, job, saved, state_of, values_of


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_state_comes_back_to_any_number_of_ranks(key: bytes | None, is_whole: bool) -> None:
    config: dict[str, Any] = {
        "format": "safetensors",
        "compression": "zstd",
        "enc_key": key,
        "remove_redundancy": not is_whole,
    }
    disk = saved(3, **config)
    for world in (3,) if is_whole else (3, 2, 1):
        found = job(disk, world, lambda ours, rank: values_of(ours.resume(fresh()).state), **config)
        assert found == [values_of(state_of(rank)) for rank in range(world)]
