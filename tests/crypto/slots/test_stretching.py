# SPDX-License-Identifier: Apache-2.0
"""The budget for stretching passphrases: free and paid work, refusals, and the refill."""

from __future__ import annotations

import pytest

from ckptmgr.crypto.errors import DecryptionError, StretchingError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.ring import unwrap_first
from ckptmgr.crypto.keys.run_passphrase import RunPassphrase
from ckptmgr.crypto.slots import Slot, stretching
from ckptmgr.crypto.slots.secret import Argon2id, Passphrase, PassphraseCost, RawKey, Scrypt
from ckptmgr.crypto.slots.stretching import StretchedKeys, StretchingBudget
from tests.support.stretches import Stretches, stretches

__all__ = ["stretches"]

DATA_KEY = Key(bytes(range(32)))
BOUND = bytes(64)
USUAL = Argon2id()
USUAL_KIB = 3 << 16
PAYS_FOR_10 = 11 * USUAL_KIB  # the last of them costs half of the rest


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def writer(text: str, cost: PassphraseCost = USUAL, *, is_run: bool = True) -> Slot:
    """Return the slot of a process that has just been started with a passphrase."""
    if is_run:
        assert isinstance(cost, Argon2id)
        return RunPassphrase(Passphrase(text), cost=cost).wrap(DATA_KEY, bound=BOUND)
    return Passphrase(text, cost).wrap(DATA_KEY, bound=BOUND)


def reader(budget: StretchingBudget) -> RunPassphrase:
    return RunPassphrase(Passphrase("mine", stretched_keys=StretchedKeys(budget)))


def wrong(me: RunPassphrase, slot: Slot) -> None:
    with pytest.raises(DecryptionError, match="the passphrase is wrong"):
        me.unwrap(slot, bound=BOUND)


def refused(me: RunPassphrase, slot: Slot) -> None:
    with pytest.raises(StretchingError, match="more stretching of passphrases") as caught:
        me.unwrap(slot, bound=BOUND)
    assert "move away files that you do not know" in str(caught.value.hint)


@pytest.mark.parametrize("is_run", [True, False])
def test_stretchings_that_open_something_are_free_and_done_once(
    stretches: Stretches, is_run: bool
) -> None:
    slots = [writer("mine", is_run=is_run) for _ in range(30)]
    stretches.asked.clear()
    me = reader(StretchingBudget(most_kib=2 * USUAL_KIB))
    for slot in [*slots, *slots]:
        assert me.unwrap(slot, bound=BOUND) == DATA_KEY.raw
    assert len(stretches.asked) == 30


@pytest.mark.parametrize("is_run", [True, False])
def test_slot_that_does_not_open_is_stretched_once_and_paid_once(
    stretches: Stretches, is_run: bool
) -> None:
    theirs = writer("theirs", is_run=is_run)
    stretches.asked.clear()
    me = reader(StretchingBudget(most_kib=2 * USUAL_KIB))
    for _ in range(5):
        wrong(me, theirs)
    assert len(stretches.asked) == 1
    refused(me, writer("theirs"))


def test_slots_that_do_not_open_share_a_budget_among_passphrases(stretches: Stretches) -> None:
    budget = StretchingBudget(most_kib=PAYS_FOR_10)
    for _ in range(10):
        wrong(reader(budget), writer("theirs"))
    refused(reader(budget), writer("theirs"))


def test_slot_that_opened_before_opens_when_the_budget_is_used_up(stretches: Stretches) -> None:
    me = reader(StretchingBudget(most_kib=2 * USUAL_KIB))
    mine, another = writer("mine"), writer("mine")
    assert me.unwrap(mine, bound=BOUND) == DATA_KEY.raw
    wrong(me, writer("theirs"))
    assert me.unwrap(mine, bound=BOUND) == DATA_KEY.raw
    refused(me, another)


def test_budget_fills_up_again_within_an_hour(stretches: Stretches) -> None:
    clock = Clock()
    me = reader(StretchingBudget(most_kib=PAYS_FOR_10, clock=clock))
    for _ in range(10):
        wrong(me, writer("theirs"))
    one_more = writer("theirs")
    refused(me, one_more)
    clock.now_s += 3600 / 11
    wrong(me, one_more)
    refused(me, writer("theirs"))
    clock.now_s += 100_000  # and holds no more than at the start
    for _ in range(10):
        wrong(me, writer("theirs"))
    refused(me, writer("theirs"))


def test_dear_slots_leave_enough_for_the_usual_ones(stretches: Stretches) -> None:
    me = reader(StretchingBudget())
    dear = [writer("theirs", Argon2id(memory_kib=1 << 20, passes=16)) for _ in range(50)]
    wrong(me, dear[0])
    for slot in dear[1:]:
        refused(me, slot)
    for _ in range(50):
        wrong(me, writer("theirs", is_run=False))
    assert me.unwrap(writer("mine"), bound=BOUND) == DATA_KEY.raw


def test_key_opens_what_a_passphrase_was_not_tried_on(stretches: Stretches) -> None:
    me = reader(StretchingBudget(most_kib=0))
    dear, own = writer("theirs", Scrypt(log2_n=20), is_run=False), RawKey(DATA_KEY)
    slots = [dear, own.wrap(DATA_KEY, bound=BOUND)]
    assert unwrap_first(slots, [me, own], bound=BOUND) == DATA_KEY.raw
    with pytest.raises(StretchingError):
        unwrap_first(slots, [me], bound=BOUND)
    assert unwrap_first(slots, [RawKey(Key(bytes(32)))], bound=BOUND) is None


def test_oldest_of_too_many_slots_that_did_not_open_is_forgotten(
    stretches: Stretches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretching, "_MOST_TRIED", 3)
    me = reader(StretchingBudget())
    theirs = [writer("theirs") for _ in range(4)]
    stretches.asked.clear()
    for slot in (*theirs, *theirs[1:]):
        wrong(me, slot)
    assert len(stretches.asked) == 4
    wrong(me, theirs[0])
    assert len(stretches.asked) == 5
