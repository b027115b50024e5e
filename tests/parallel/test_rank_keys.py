# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of many ranks for several keys, and their keys changed afterwards."""

from __future__ import annotations

from pathlib import Path

from ckptmgr import ResumeFailed
from ckptmgr.crypto.keys.pem import generate_pair
from ckptmgr.maintenance.rekey_change import KeyChange
from tests.faults.training import KEY, RUNS, ModelProcesses
from tests.parallel.ranks import WORLD
from tests.parallel.test_rank_manager import run, train
from tests.support import api
from tests.support.crashmodel import ModelDisk
from tests.support.rekeying import NEW, openers, rekey, ring

OLD = api.Key(KEY)


def test_ranks_save_for_several_and_resume_after_a_rotation(tmp_path: Path) -> None:
    private, public = generate_pair("x25519")
    (tmp_path / "alice.pem.pub").write_bytes(public)
    (tmp_path / "alice.pem.pub").chmod(0o644)
    disk = ModelDisk()
    alice = f"file:{tmp_path / 'alice.pem.pub'}"
    config = {"enc_key": KEY, "enc_recipients": [alice], "format": "safetensors"}
    assert [one.must() for one in run(disk, train, **config)] == [0] * WORLD
    everybody = [ring(OLD), ring(private), ring(NEW)]
    sets = api.listed(RUNS, fs=disk)
    assert [openers(one, everybody, fs=disk) for one in sets] == [[0, 1]] * 2
    rotation = KeyChange(keys=ring(private), add=(ring(NEW),), remove=(ring(OLD),))
    after = disk.restart()
    rekey(rotation, fs=after, processes=ModelProcesses(after))
    sets = api.listed(RUNS, fs=after)
    assert [openers(one, everybody, fs=after) for one in sets] == [[1, 2]] * 2
    new = {"enc_key": NEW.raw, "format": "safetensors"}
    assert [one.must() for one in run(after.restart(), train, **new)] == [2] * WORLD
    old = {"enc_key": KEY, "format": "safetensors"}
    outcomes = run(after.restart(), train, **old)
    for outcome in outcomes:
        assert isinstance(outcome.raised, ResumeFailed)
        assert OLD.key_id in str(outcome.raised)
