# SPDX-License-Identifier: Apache-2.0
"""Shared staging: another process builds the same items from a description and descriptors."""

from __future__ import annotations

import hashlib
import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import MemoryConfig
from ckptmgr.engine.staging import StagingPool, items_from
from ckptmgr.formats.tensor import Item, Text, tensor_from_array
from tests.support.staging_memory import MIB, filled, map_tensors, values

ITEMS: list[Item] = [
    tensor_from_array("w", np.arange(6.0).reshape(2, 3)),
    Text(name="t", text="lone \ud800 surrogate"),
    map_tensors("m"),
    tensor_from_array("big", np.arange(3 * MIB, dtype=np.uint8)),
    filled("none", 0),
]

OTHER_PROCESS = """
import hashlib, json, mmap, sys
from ckptmgr.engine.staging import items_from
message = json.load(sys.stdin)
slabs = [memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ)) for fd in message["descriptors"]]
(item,) = items_from(message["items"], slabs)
print(item.spec.name, item.spec.shape, hashlib.sha256(item.content()).hexdigest())
"""


def mapped(descriptors: dict[int, int]) -> list[memoryview]:
    return [
        memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        for descriptor in descriptors.values()
    ]


@pytest.mark.parametrize("budget_bytes", [None, MIB])
def test_described_items_over_mapped_slabs_equal_the_staged_ones(
    tmp_path: Path, budget_bytes: int | None
) -> None:
    config = MemoryConfig(host_budget_bytes=budget_bytes, spill_directory=tmp_path)
    with StagingPool(config, is_shared=True) as pool:
        staged = pool.stage(ITEMS)
        description = json.loads(json.dumps(staged.describe()))
        slabs = mapped(staged.descriptors())
        assert values(items_from(description, slabs)) == values(ITEMS)
        staged.release()


def test_items_in_another_process_have_the_same_bytes() -> None:
    array = np.arange(5 * MIB, dtype=np.uint8)
    with StagingPool(is_shared=True) as pool:
        staged = pool.stage([tensor_from_array("w", array)])
        descriptors = list(staged.descriptors().values())
        done = subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS],
            input=json.dumps({"items": staged.describe(), "descriptors": descriptors}),
            pass_fds=descriptors,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        staged.release()
    assert (
        done.stdout.split(" ", 1)[1]
        == f"(5242880,) {hashlib.sha256(array.tobytes()).hexdigest()}\n"
    )


def test_region_ids_stay_with_their_slab_and_are_not_used_again() -> None:
    with StagingPool(MemoryConfig(slab_bytes=4096), is_shared=True) as pool:
        first = pool.stage([filled("a", 1)])
        ids = first.descriptors()
        first.release()
        second = pool.stage([filled("a", 2)])
        assert second.descriptors() == ids
        assert pool.descriptors() == list(ids.values())
        second.release()
        third = pool.stage([filled("a", 9000)])
        assert not set(third.descriptors()) & set(ids)
        third.release()


GOOD = {"name": "w", "dtype": "uint8", "shape": [4], "slab": 0, "offset": 0, "length": 4}


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 5},
        {"offset": -1},
        {"length": 3},
        {"slab": 1},
        {"dtype": "int3"},
        {"shape": None},
        {"offset": "0"},
        {"map": []},
    ],
)
def test_description_that_does_not_fit_its_slabs_is_refused(change: dict[str, Any]) -> None:
    slabs = [memoryview(b"12345678")]
    assert len(items_from([GOOD], slabs)) == 1
    with pytest.raises(ValueError, match=r"'w' (has|lies)|describes no staged items|unpack"):
        items_from([GOOD | change], slabs)
