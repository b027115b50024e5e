# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of many ranks: signed by the one that commits, and linked to each other."""

from __future__ import annotations

from typing import Any

import pytest

from ckptmgr import CheckpointManager
from ckptmgr.store.manifest.lineage import Lineage
from tests.faults.training import KEY, RUNS
from tests.parallel.test_rank_manager import run, state
from tests.support import api
from tests.support.crashmodel import ModelDisk
from tests.support.damage import flip_bit

SIGNER = api.SigningKey(bytes(range(32)))


def train(ours: CheckpointManager, rank: int) -> list[str | None]:
    """Resume, save two steps, and return the ids of both."""
    found = ours.resume(state(rank, 0))
    ids = []
    for step in (found.step + 1, found.step + 2):
        handle = ours.save(step, state(rank, step))
        assert handle is not None
        ids.append(handle.durable.result().id)
    return ids


@pytest.mark.parametrize("config", [{}, {"enc_key": KEY, "format": "safetensors"}])
def test_all_files_of_all_ranks_verify_with_the_public_key(config: dict[str, Any]) -> None:
    disk = ModelDisk()
    for _ in range(2):
        for outcome in run(disk, train, signing_key=SIGNER, **config):
            outcome.must()
        disk = disk.restart()
    trusted = (SIGNER.public_key,)
    store = api.place(RUNS, fs=disk, trusted_keys=trusted)
    found = sorted(store.scan(), key=lambda c: c.order)
    assert [c.state for c in found] == [api.State.OK] * 4
    options = api.reading(trusted_keys=trusted)
    answers = [api.verify(store, one, options=options) for one in found]
    assert [a.status for a in answers] == [api.Status.OK] * 4
    flip_bit(disk, found[1].shards[1])
    answers = [api.verify(store, one, options=options, lineage=Lineage(found)) for one in found]
    assert [a.status for a in answers] == [
        api.Status.OK,
        api.Status.DAMAGED,
        api.Status.OK,
        api.Status.OK,
    ]


def test_all_ranks_agree_on_the_ids_and_each_checkpoint_names_the_one_before() -> None:
    disk = ModelDisk()
    ids = [outcome.must() for outcome in run(disk, train)]
    assert ids == [ids[0]] * len(ids)
    first, second = sorted(api.listed(RUNS, fs=disk), key=lambda c: c.order)
    assert [first.id, second.id] == ids[0]
    assert second.previous is not None
    assert (second.previous.name, second.previous.id) == (first.name, first.id)
