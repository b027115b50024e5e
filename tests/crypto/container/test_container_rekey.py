# SPDX-License-Identifier: Apache-2.0
"""Changing the recipients of a container: the payload is untouched, and it opens at every instant."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from ckptmgr.crypto.container.rekey import HeaderWrite, rewrite_header
from ckptmgr.crypto.container.unlock import CopyState
from ckptmgr.crypto.errors import DecryptionError
from ckptmgr.crypto.slots.secret import Argon2id, Passphrase

from .containers import ME, OTHER, opened, seal, unseal

PLAINTEXT = os.urandom(300)
COPY = 4096
PHRASE = Passphrase("correct horse", Argon2id(memory_kib=8, passes=1, lanes=1))
MY_ID = bytes.fromhex(ME.key.key_id)


def applied(file: bytes, writes: Sequence[HeaderWrite]) -> bytes:
    changed = bytearray(file)
    for write in writes:
        changed[write.offset : write.offset + len(write.data)] = write.data
    return bytes(changed)


def test_added_recipients_open_the_file_and_the_payload_is_untouched() -> None:
    file = seal(PLAINTEXT)
    changed = applied(file, rewrite_header(opened(file).unlocked, add=[OTHER, PHRASE]))
    assert changed[2 * COPY :] == file[2 * COPY :]
    assert changed[:64] == file[:64]
    for one in (ME, OTHER, PHRASE):
        assert unseal(changed, one) == PLAINTEXT


def test_removed_recipient_opens_it_no_longer() -> None:
    file = seal(PLAINTEXT, recipients=[ME, OTHER])
    writes = rewrite_header(opened(file).unlocked, remove=lambda slot: slot.key_id == MY_ID)
    changed = applied(file, writes)
    assert unseal(changed, OTHER) == PLAINTEXT
    with pytest.raises(DecryptionError, match="another key"):
        unseal(changed, ME)


def test_generation_counts_the_rewrites() -> None:
    file = seal(PLAINTEXT)
    for generation in (2, 3):
        file = applied(file, rewrite_header(opened(file).unlocked))
        assert opened(file).unlocked.header.generation == generation


def test_copy_b_is_written_before_copy_a() -> None:
    writes = rewrite_header(opened(seal(PLAINTEXT)).unlocked)
    assert [write.offset for write in writes] == [COPY, 0]


@pytest.mark.parametrize("torn", range(0, 4097, 256))
@pytest.mark.parametrize("step", [0, 1])
def test_rewrite_torn_anywhere_opens_for_old_or_new_and_can_be_repaired(
    step: int, torn: int
) -> None:
    file = seal(PLAINTEXT)
    writes = rewrite_header(opened(file).unlocked, add=[OTHER])
    cut = HeaderWrite(offset=writes[step].offset, data=writes[step].data[:torn])
    state = applied(file, [*writes[:step], cut])
    assert unseal(state, ME) == PLAINTEXT
    if step == 1:
        assert unseal(state, OTHER) == PLAINTEXT
    repaired = opened(applied(state, rewrite_header(opened(state).unlocked)))
    assert set(repaired.unlocked.states) == {CopyState.CURRENT}


def test_copy_that_is_not_damaged_is_overwritten_last() -> None:
    file = bytearray(seal(PLAINTEXT))
    file[100] ^= 1
    unlocked = opened(bytes(file)).unlocked
    assert unlocked.states == (CopyState.DAMAGED, CopyState.CURRENT)
    assert [write.offset for write in rewrite_header(unlocked)] == [0, COPY]


def test_interrupted_rewrite_shows_an_outdated_copy() -> None:
    file = seal(PLAINTEXT)
    state = applied(file, rewrite_header(opened(file).unlocked)[:1])
    assert opened(state).unlocked.states == (CopyState.OUTDATED, CopyState.CURRENT)


def test_last_slot_cannot_be_removed() -> None:
    with pytest.raises(ValueError, match="1 to 16 key slots, not 0"):
        rewrite_header(opened(seal(PLAINTEXT)).unlocked, remove=lambda slot: True)


def test_more_slots_than_the_header_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 16 key slots, not 17"):
        rewrite_header(opened(seal(PLAINTEXT)).unlocked, add=[OTHER] * 16)


def test_writes_do_not_show_their_bytes() -> None:
    assert (
        repr(rewrite_header(opened(seal(PLAINTEXT)).unlocked)[0]) == f"HeaderWrite(offset={COPY})"
    )
