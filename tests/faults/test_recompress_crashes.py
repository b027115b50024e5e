# SPDX-License-Identifier: Apache-2.0
"""A power cut at every moment of a conversion leaves each checkpoint whole, and doing the same again finishes it."""

from __future__ import annotations

import numpy as np
import pytest

from ckptmgr import Checkpoint, CheckpointConfig
from ckptmgr.maintenance.recompress import recompress
from tests.faults.scenarios import first_broken
from tests.faults.training import KEY, RUNS, ModelProcesses
from tests.support import api
from tests.support.crashmodel import Crash, ModelDisk, Order, every_crash
from tests.support.runs import manager_on

STATE = {"w": np.zeros(2000, np.float32)}


def saved_disk(key: bytes | None) -> ModelDisk:
    """Return a disk on which a run has saved two steps."""
    disk = ModelDisk()
    config = CheckpointConfig(format="safetensors", enc_key=key)
    with manager_on(
        RUNS, config, fs=disk, processes=ModelProcesses(disk), clock=lambda: 1e9, prefix="net"
    ) as manager:
        for step in (1, 2):
            manager.save(step, STATE)
    return disk


def store_on(disk: ModelDisk, key: bytes | None) -> api.Place:
    return api.place(
        RUNS,
        fs=disk,
        keys=secret_of(key),
        allow_unencrypted=True,
        processes=ModelProcesses(disk),
    )


def secret_of(key: bytes | None) -> api.Key | None:
    return None if key is None else api.Key(key)


def whole_ones(store: api.Place, step: int) -> list[Checkpoint]:
    return [c for c in store.scan() if c.step == step and c.state is api.State.OK]


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_conversion_keeps_its_promises_after_every_power_cut(key: bytes | None) -> None:
    options = api.reading(keys=secret_of(key))

    def convert(disk: ModelDisk) -> None:
        store = store_on(disk, key)
        for checkpoint in whole_ones(store, 1):
            recompress(store, checkpoint, level=1, options=options)

    def check(crash: Crash) -> None:
        store = store_on(crash.disk, key)
        for step in (1, 2):
            answers = [api.verify(store, c, options=options) for c in whole_ones(store, step)]
            assert answers
            assert {answer.status for answer in answers} == {api.Status.OK}
        convert(crash.disk)
        (left,) = whole_ones(store, 1)
        assert left.size_bytes < whole_ones(store, 2)[0].size_bytes

    assert first_broken(every_crash(saved_disk(key), convert, order=Order.WEAK), check) is None
