# SPDX-License-Identifier: Apache-2.0
"""A stranger's files that ask for dear stretching of passphrases: their total cost for a command and a program."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    KeyProblem,
    UnsupportedCheckpoint,
    load_checkpoint,
)
from ckptmgr.cli.exits import Exit
from ckptmgr.crypto.slots import Slot, SlotType
from ckptmgr.crypto.slots.stretching import MOST_STRETCHING_KIB
from tests.cli.running import run, run_json
from tests.crypto.container.containers import seal
from tests.support import api
from tests.support.stretches import (
    DEAREST,
    DEAREST_KIB,
    Stretches,
    add_hostile_manifest,
    hostile_slot,
    stretches,
)

__all__ = ["stretches"]

HOSTILE = 50
KEY = "passphrase:env:RUN_PHRASE"
KINDS = {
    "scrypt": (SlotType.SCRYPT, struct.pack("<BBBB", 20, 8, 1, 0)),
    "argon2id": (SlotType.ARGON2ID, DEAREST),
    "argon2id of a run": (SlotType.RUN_PASSPHRASE, DEAREST),
}


@pytest.fixture(autouse=True)
def phrase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_PHRASE", "correct horse")


def config() -> CheckpointConfig:
    return CheckpointConfig(enc_key=KEY, format="safetensors", keep="all")


@pytest.fixture
def runs(tmp_path: Path, stretches: Stretches) -> Path:
    """Return three checkpoints under a passphrase, of which every process of the run that saved them made one."""
    runs = tmp_path / "runs"
    for step in (1, 2, 3):
        with CheckpointManager(runs, config(), prefix="net") as manager:
            manager.save(step, {"w": np.full(4, float(step))})
    return runs


def besiege(runs: Path, kind: str, *, count: int = HOSTILE) -> set[bytes]:
    """Put hostile checkpoints into a directory, newer than the others and listed first; return the salts of their slots."""
    slot_type, costs = KINDS[kind]
    salts = set()
    for number in range(count):
        slot = hostile_slot(slot_type, costs)
        salts.add(slot.body[len(costs) :][:32])
        step = 1000 + number
        name = f"net-{step}.safetensors.ckpe"
        add_hostile_manifest(
            runs / "net-3.safetensors.ckpe", name, [slot], step=step, sequence=step
        )
    return salts


COMMANDS: dict[str, list[str]] = {
    "ls": ["ls", "{}"],
    "verify": ["verify", "{}"],
    "verify --quick": ["verify", "{}", "--quick"],
    "prune": ["prune", "{}", "--keep", "last(1)", "--dry-run"],
    "inspect latest": ["inspect", "latest", "--dir", "{}"],
    "verify latest": ["verify", "latest", "--dir", "{}"],
    "rekey": ["rekey", "{}", "--remove", "env:OTHER_KEY", "--add", "env:NEW_KEY", "--yes"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_command_stretches_for_strangers_no_more_than_its_budget(
    command: str, runs: Path, stretches: Stretches
) -> None:
    hostile = besiege(runs, "argon2id")
    stretches.asked.clear()
    arguments = [word.replace("{}", str(runs)) for word in COMMANDS[command]]
    env = {"RUN_PHRASE": "correct horse", "OTHER_KEY": "ab" * 32, "NEW_KEY": "cd" * 32}
    run(*arguments, "--key", KEY, env=env)
    assert len(set(stretches.salts)) == len(stretches.salts)
    paid = sum(kib for salt, kib in stretches.asked if salt in hostile)
    assert 0 < paid <= MOST_STRETCHING_KIB


@pytest.mark.parametrize("kind", KINDS)
def test_program_stretches_each_slot_once_and_finds_its_own_checkpoints(
    kind: str, runs: Path, stretches: Stretches
) -> None:
    hostile = besiege(runs, kind)
    stretches.asked.clear()
    state = {"w": np.zeros(4)}
    with CheckpointManager(runs, config(), prefix="net") as manager:
        latest = manager.latest()
        resumed = manager.resume(state)
        manager.latest()
    assert latest is not None
    assert resumed.step == 3
    assert state["w"].tolist() == [3.0] * 4
    assert len(set(stretches.salts)) == len(stretches.salts)
    assert sum(kib for salt, kib in stretches.asked if salt in hostile) <= MOST_STRETCHING_KIB
    refused = [one for one in resumed.skipped if "more stretching" in one.reason]
    assert len(refused) >= HOSTILE - MOST_STRETCHING_KIB // (2 << 20)


def test_file_that_was_not_tried_is_named_with_the_way_out(runs: Path) -> None:
    besiege(runs, "argon2id")
    listed = run_json("ls", runs, "--key", KEY)["items"]
    untried = [one for one in listed if "more stretching" in (one["problem"] or "")]
    assert len(untried) == HOSTILE - 1
    assert [one["step"] for one in listed if one["state"] == "ok"] == [1, 2, 3]
    checked = run("inspect", untried[0]["path"], "--key", KEY)
    assert checked.exit_code == Exit.FAILED
    assert f"{untried[0]['path']}" in checked.stderr
    assert "move away files that you do not know" in checked.stderr


def test_containers_share_the_budget_of_a_program(tmp_path: Path, stretches: Stretches) -> None:
    class Hostile:
        def wrap(self, data_key: api.Key, *, bound: bytes) -> Slot:
            return hostile_slot(SlotType.ARGON2ID, DEAREST)

    said = []
    for number in range(5):
        path = tmp_path / f"net-{number}.safetensors.ckpe"
        path.write_bytes(seal(b"plain", recipients=[Hostile()]))
        with pytest.raises((KeyProblem, UnsupportedCheckpoint)) as caught:
            load_checkpoint(str(path), dec_key=KEY, allow_unsealed=True)
        assert caught.value.path == str(path)
        said.append(caught.value.message)
    assert "the passphrase is wrong" in said[0]
    assert all("more stretching of passphrases" in message for message in said[1:])
    assert stretches.kib == DEAREST_KIB
