# SPDX-License-Identifier: Apache-2.0
"""Count what passphrases are stretched for, in real key derivations of the least cost, and make files that ask for much."""

from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from ckptmgr.crypto.slots import NO_KEY_ID, Slot, SlotType
from ckptmgr.crypto.slots import secret as wrapping
from ckptmgr.store.manifest.codec import manifest_name

DEAREST = struct.pack("<IBBH", 1 << 20, 16, 4, 0)
DEAREST_KIB = 16 << 20
USUAL = struct.pack("<IBBH", 1 << 16, 3, 4, 0)


@dataclass
class Stretches:
    """The requests.

    Attributes:
        asked: The salt, and KiB of memory times the passes over them, of each stretching.
    """

    asked: list[tuple[bytes, int]] = field(default_factory=list)

    @property
    def salts(self) -> list[bytes]:
        return [salt for salt, _ in self.asked]

    @property
    def kib(self) -> int:
        return sum(kib for _, kib in self.asked)


@pytest.fixture
def stretches(monkeypatch: pytest.MonkeyPatch) -> Stretches:
    """Count stretchings; each is done at the least cost, so that dear ones can be asked for."""
    found = Stretches()

    class Cheap:
        def __init__(self, *, salt: bytes, kib: int) -> None:
            self.salt, self.kib = salt, kib

        def derive(self, passphrase: bytes) -> bytes:
            found.asked.append((self.salt, self.kib))
            kdf = Argon2id(salt=self.salt, length=32, iterations=1, lanes=1, memory_cost=8)
            return kdf.derive(passphrase)

    def argon2id(*, salt: bytes, iterations: int, memory_cost: int, **_: int) -> Cheap:
        return Cheap(salt=salt, kib=iterations * memory_cost)

    def scrypt(*, salt: bytes, n: int, **_: int) -> Cheap:
        return Cheap(salt=salt, kib=2 * n)

    monkeypatch.setattr(wrapping, "_Argon2id", argon2id)
    monkeypatch.setattr(wrapping, "_Scrypt", scrypt)
    return found


def hostile_slot(slot_type: SlotType, costs: bytes) -> Slot:
    """Return a slot that opens for nobody, with a salt of its own."""
    size = {SlotType.SCRYPT: 84, SlotType.ARGON2ID: 88, SlotType.RUN_PASSPHRASE: 120}[slot_type]
    body = costs + os.urandom(size - len(costs))
    return Slot(type=slot_type, key_id=NO_KEY_ID, body=body)


def add_hostile_manifest(data: Path, name: str, slots: list[Slot], **changes: Any) -> Path:
    """Put a copy of a checkpoint beside it, whose manifest has other slots, and return it."""
    document = json.loads(data.with_name(manifest_name(data.name)).read_text())
    document.update(changes)
    document["files"][0]["name"] = name
    document["auth"]["slots"] = [slot.pack().hex() for slot in slots]
    shutil.copy(data, data.with_name(name))
    data.with_name(manifest_name(name)).write_text(json.dumps(document))
    return data.with_name(name)
