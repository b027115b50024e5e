# SPDX-License-Identifier: Apache-2.0
"""Key slots for keys and passphrases: opening, refusals, and secrets that are never shown."""

from __future__ import annotations

import os
import struct

import pytest

from ckptmgr.crypto.errors import (
    DecryptionError,
    KeySourceError,
    TamperedError,
    UnsupportedSuiteError,
)
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.slots import NO_KEY_ID, Slot, SlotType, pack_slots, parse_slots
from ckptmgr.crypto.slots.secret import Argon2id, Passphrase, PassphraseCost, RawKey, Scrypt
from tests.crypto.container.containers import ME, OTHER, seal, unseal

DATA_KEY = Key(bytes(range(32)))
BOUND = bytes(64)
CHEAP_SCRYPT = Scrypt(log2_n=14)
CHEAP_ARGON2ID = Argon2id(memory_kib=8, passes=1, lanes=1)
COSTS = [pytest.param(CHEAP_SCRYPT, id="scrypt"), pytest.param(CHEAP_ARGON2ID, id="argon2id")]


@pytest.mark.parametrize("size", [16, 24, 32])
def test_raw_slot_opens_for_its_key_and_only_there(size: int) -> None:
    me = RawKey(Key(os.urandom(size)))
    slot = me.wrap(DATA_KEY, bound=BOUND)
    assert (slot.type, slot.key_id.hex(), slot.size) == (SlotType.RAW, me.key.key_id, 92)
    assert me.unwrap(slot, bound=BOUND) == DATA_KEY.raw
    with pytest.raises(TamperedError, match="but the slot is damaged"):
        me.unwrap(slot, bound=bytes([1]) + BOUND[1:])


def test_raw_slot_of_another_key_is_not_tried() -> None:
    assert OTHER.unwrap(ME.wrap(DATA_KEY, bound=BOUND), bound=BOUND) is None


def test_raw_slot_with_a_colliding_key_id_is_damaged_not_opened() -> None:
    slot = OTHER.wrap(DATA_KEY, bound=BOUND)
    colliding = Slot(type=slot.type, key_id=bytes.fromhex(ME.key.key_id), body=slot.body)
    with pytest.raises(TamperedError):
        ME.unwrap(colliding, bound=BOUND)


@pytest.mark.parametrize("bit", range(0, 8 * 80, 11))
def test_raw_slot_with_a_flipped_bit_is_damaged(bit: int) -> None:
    slot = ME.wrap(DATA_KEY, bound=BOUND)
    body = bytearray(slot.body)
    body[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TamperedError):
        ME.unwrap(Slot(type=slot.type, key_id=slot.key_id, body=bytes(body)), bound=BOUND)


@pytest.mark.parametrize("size", [0, 79, 81])
def test_raw_slot_of_wrong_length_is_damaged(size: int) -> None:
    slot = Slot(type=SlotType.RAW, key_id=bytes.fromhex(ME.key.key_id), body=bytes(size))
    with pytest.raises(TamperedError, match=f"{size} bytes, not 80"):
        ME.unwrap(slot, bound=BOUND)


@pytest.mark.parametrize("cost", COSTS)
def test_passphrase_opens_its_slot(cost: PassphraseCost) -> None:
    slot = Passphrase("correct horse", cost).wrap(DATA_KEY, bound=BOUND)
    assert (slot.type, slot.key_id) == (cost.slot_type, NO_KEY_ID)
    assert Passphrase("correct horse").unwrap(slot, bound=BOUND) == DATA_KEY.raw


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("text", ["Correct horse", "correct horse ", "x"])
def test_passphrase_that_differs_does_not_open(cost: PassphraseCost, text: str) -> None:
    slot = Passphrase("correct horse", cost).wrap(DATA_KEY, bound=BOUND)
    with pytest.raises(DecryptionError, match="the passphrase is wrong, or the key slot is"):
        Passphrase(text).unwrap(slot, bound=BOUND)


def test_passphrase_opens_however_its_accents_are_spelled() -> None:
    composed, decomposed = "caf\u00e9 \u1e9b\u0323", "cafe\u0301 \u017f\u0323\u0307"
    slot = Passphrase(composed, CHEAP_ARGON2ID).wrap(DATA_KEY, bound=BOUND)
    assert Passphrase(decomposed).unwrap(slot, bound=BOUND) == DATA_KEY.raw


@pytest.mark.parametrize("cost", COSTS)
def test_passphrase_slot_in_another_file_does_not_open(cost: PassphraseCost) -> None:
    slot = Passphrase("secret", cost).wrap(DATA_KEY, bound=BOUND)
    with pytest.raises(DecryptionError):
        Passphrase("secret").unwrap(slot, bound=b"\1" * 64)


def test_passphrase_does_not_try_the_slot_of_a_key() -> None:
    assert Passphrase("x").unwrap(ME.wrap(DATA_KEY, bound=BOUND), bound=BOUND) is None


@pytest.mark.parametrize("text", ["", "hidden \ud800"])
def test_passphrase_that_is_no_text_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(KeySourceError, match="passphrase") as caught:
        Passphrase(text)
    assert "hidden" not in str(caught.value)


def test_passphrase_and_keys_are_never_shown() -> None:
    secret = Passphrase("correct horse")
    slot = RawKey(DATA_KEY).wrap(DATA_KEY, bound=BOUND)
    shown = f"{secret!r} {secret} {[secret]} {RawKey(DATA_KEY)!r} {slot!r}"
    assert "horse" not in shown
    assert DATA_KEY.raw.hex() not in shown
    assert repr(bytes(DATA_KEY.raw))[2:-1] not in shown


def test_machine_with_too_little_memory_for_a_passphrase_says_so() -> None:
    class Greedy:
        slot_type = SlotType.SCRYPT

        stretching_kib = 1 << 20

        def pack(self) -> bytes:
            return bytes(4)

        def stretch(self, passphrase: bytes, *, salt: bytes) -> bytes:
            raise MemoryError

    with pytest.raises(UnsupportedSuiteError, match="more memory than there is"):
        Passphrase("secret", Greedy()).wrap(DATA_KEY, bound=BOUND)


@pytest.mark.parametrize("log2_n", [0, 1, 13, 21, 40, 63, 255])
def test_scrypt_outside_its_limits_is_refused_before_it_costs_anything(log2_n: int) -> None:
    body = struct.pack("<BBBB", log2_n, 8, 1, 0) + bytes(80)
    with pytest.raises(UnsupportedSuiteError, match="scrypt"):
        Passphrase("x").unwrap(Slot(type=SlotType.SCRYPT, key_id=NO_KEY_ID, body=body), bound=BOUND)


@pytest.mark.parametrize("costs", [(7, 1, 0), (8, 2, 0), (255, 255, 0), (8, 1, 1)])
def test_scrypt_with_other_parameters_is_refused(costs: tuple[int, int, int]) -> None:
    body = struct.pack("<BBBB", 14, *costs) + bytes(80)
    with pytest.raises(UnsupportedSuiteError, match="scrypt"):
        Passphrase("x").unwrap(Slot(type=SlotType.SCRYPT, key_id=NO_KEY_ID, body=body), bound=BOUND)


@pytest.mark.parametrize(
    "costs",
    [
        (2**20 + 1, 1, 1, 0),
        (2**32 - 1, 1, 1, 0),
        (64, 0, 1, 0),
        (64, 17, 1, 0),
        (64, 1, 0, 0),
        (256, 1, 17, 0),
        (7, 1, 1, 0),
        (127, 1, 16, 0),
        (64, 1, 1, 1),
    ],
)
def test_argon2id_outside_its_limits_is_refused_before_it_costs_anything(
    costs: tuple[int, int, int, int],
) -> None:
    body = struct.pack("<IBBH", *costs) + bytes(80)
    with pytest.raises(UnsupportedSuiteError, match="argon2id"):
        Passphrase("x").unwrap(
            Slot(type=SlotType.ARGON2ID, key_id=NO_KEY_ID, body=body), bound=BOUND
        )


@pytest.mark.parametrize("slot_type", [SlotType.SCRYPT, SlotType.ARGON2ID])
@pytest.mark.parametrize("size", [0, 83, 89])
def test_passphrase_slot_of_wrong_length_is_damaged(slot_type: SlotType, size: int) -> None:
    slot = Slot(type=slot_type, key_id=NO_KEY_ID, body=bytes(size))
    with pytest.raises(TamperedError, match=f"{size} bytes"):
        Passphrase("x").unwrap(slot, bound=BOUND)


def test_default_costs_are_those_of_the_documentation() -> None:
    assert (Scrypt().log2_n, Argon2id()) == (17, Argon2id(memory_kib=65536, passes=3, lanes=4))


def test_container_opens_for_each_of_its_recipients() -> None:
    everybody: list[RawKey | Passphrase] = [
        ME,
        OTHER,
        Passphrase("a", CHEAP_SCRYPT),
        Passphrase("b", CHEAP_ARGON2ID),
    ]
    file = seal(b"weights", recipients=everybody)
    for one in everybody:
        assert unseal(file, one) == b"weights"


def test_container_opens_when_only_one_of_several_identities_fits() -> None:
    file = seal(b"weights", recipients=[Passphrase("a", CHEAP_SCRYPT), OTHER])
    assert unseal(file, ME, Passphrase("wrong"), OTHER) == b"weights"


def test_container_for_another_key_names_what_opens_it() -> None:
    file = seal(b"weights", recipients=[OTHER, Passphrase("a", CHEAP_SCRYPT)])
    with pytest.raises(DecryptionError, match="encrypted for another key") as caught:
        unseal(file, ME)
    assert caught.value.hint == f"it opens with: key {OTHER.key.key_id}, passphrase (scrypt)"


def test_slots_of_unknown_type_are_passed_over() -> None:
    class Newer:
        def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
            return Slot(type=200, key_id=bytes(8), body=b"later")

    file = seal(b"weights", recipients=[Newer(), ME])
    assert unseal(file) == b"weights"
    with pytest.raises(DecryptionError) as caught:
        unseal(file, OTHER)
    assert str(caught.value.hint).startswith("it opens with: type 200, key ")


def test_key_service_is_one_small_class_away() -> None:
    class Service:
        """Wraps with a key that never leaves it, as a key management service does."""

        def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
            blob = bytes(a ^ 0x55 for a in data_key.raw)
            return Slot(type=SlotType.KEY_SERVICE, key_id=b"the-arn-", body=blob)

        def unwrap(self, slot: Slot, *, bound: bytes) -> bytes | None:
            return bytes(a ^ 0x55 for a in slot.body) if slot.key_id == b"the-arn-" else None

    assert unseal(seal(b"weights", recipients=[Service()]), Service()) == b"weights"


def test_identity_that_gives_no_data_key_is_refused() -> None:
    class Broken:
        def unwrap(self, slot: Slot, *, bound: bytes) -> bytes | None:
            return b"short"

    with pytest.raises(TamperedError, match="a key slot holds 5 bytes"):
        unseal(seal(b"x"), Broken())


@pytest.mark.parametrize(
    ("slot_type", "key_id", "body"),
    [(-1, bytes(8), b""), (256, bytes(8), b""), (1, bytes(7), b""), (1, bytes(8), bytes(65536))],
)
def test_slot_with_a_field_that_does_not_fit_is_refused(
    slot_type: int, key_id: bytes, body: bytes
) -> None:
    with pytest.raises(ValueError, match="slot"):
        Slot(type=slot_type, key_id=key_id, body=body)


def test_packed_slots_are_parsed_back() -> None:
    slots = (ME.wrap(DATA_KEY, bound=BOUND), Slot(type=9, key_id=bytes(8), body=b""))
    assert parse_slots(pack_slots(slots), count=2, offset=80) == slots


@pytest.mark.parametrize(
    ("data", "count", "message", "offset"),
    [
        (bytes(11), 1, "cut off", 80),
        (bytes(12) + b"x", 2, "cut off", 92),
        (b"\1\0\1\0" + bytes(8), 1, "inconsistent", 80),
        (b"\1\1\0\0" + bytes(8), 1, "inconsistent", 80),
        (b"\1\0\xff\xff" + bytes(8), 1, "inconsistent", 80),
        (bytes(24), 1, "2 key slots where 1", 80),
        (b"", 0, "0 key slots are announced", 80),
        (bytes(12 * 17), 17, "17 key slots are announced", 80),
        (bytes(12 * 5000), 5000, "5000 key slots are announced", 80),
        (b"", 1, "0 key slots where 1", 80),
    ],
)
def test_slots_that_lie_are_tampered(data: bytes, count: int, message: str, offset: int) -> None:
    with pytest.raises(TamperedError, match=message) as caught:
        parse_slots(data, count=count, offset=80)
    assert caught.value.offset == offset
