# SPDX-License-Identifier: Apache-2.0
"""Attacks by a writer of the file without a key, and bit rot."""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.crypto.container.header import CONTAINER_MAGIC, Content, HeaderCopy, parse_fixed
from ckptmgr.crypto.container.unlock import CopyState, find_copies
from ckptmgr.crypto.errors import (
    CryptoError,
    DecryptionError,
    StretchingError,
    TamperedError,
    TruncatedCiphertextError,
    UnsupportedSuiteError,
)
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.keys.run_passphrase import RunPassphrase
from ckptmgr.crypto.slots import Slot
from ckptmgr.crypto.slots.secret import Argon2id, Passphrase, PassphraseCost, RawKey, Scrypt
from ckptmgr.crypto.slots.stretching import StretchedKeys, StretchingBudget
from ckptmgr.formats.source import BytesSource

from . import container_reference as reference
from .containers import HEAD, ME, MODES, OTHER, SEGMENT, opened, seal, segments, unseal

COPY = 4096
PLAINTEXT = os.urandom(4 * 48)
USED = 80 + 92  # of a header copy with one slot for a key
FUZZED = seal(PLAINTEXT)
PHRASE = Passphrase("correct horse", Scrypt(log2_n=14))


def flipped(file: bytes, *positions: int, mask: int = 1) -> bytes:
    changed = bytearray(file)
    for position in positions:
        changed[position] ^= mask
    return bytes(changed)


def header_bits() -> list[int]:
    """Every bit of the fields of a header copy, one of each random byte, and some of the rest."""
    fields = [*range(16), *range(32, 64), *range(64, 92)]
    random = [byte for byte in range(USED) if byte not in fields]
    some = [*random, *range(USED, COPY, 251), *range(4064, COPY)]
    return [
        *(8 * byte + bit for byte in fields for bit in range(8)),
        *(8 * b + b % 8 for b in some),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_flip_of_a_bit_of_one_header_copy_still_opens_and_is_reported(mode: str) -> None:
    file = seal(PLAINTEXT, mode)
    for copy in (0, 1):
        for bit in header_bits():
            source = opened(flipped(file, copy * COPY + bit // 8, mask=1 << bit % 8))
            states = source.unlocked.states
            assert (states[copy], states[1 - copy]) == (CopyState.DAMAGED, CopyState.CURRENT)


@pytest.mark.parametrize("mode", MODES)
def test_flip_of_the_same_bit_of_both_header_copies_is_refused(mode: str) -> None:
    file = seal(PLAINTEXT, mode)
    for bit in header_bits():
        with pytest.raises(CryptoError) as caught:
            unseal(flipped(file, bit // 8, COPY + bit // 8, mask=1 << bit % 8))
        assert type(caught.value) in (
            DecryptionError,
            TamperedError,
            TruncatedCiphertextError,
            UnsupportedSuiteError,
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [0, 20, 192])
def test_flip_of_a_bit_anywhere_behind_the_headers_is_tampered(mode: str, size: int) -> None:
    file = seal(PLAINTEXT[:size], mode)
    zeros = range(8 * 2 * COPY, 8 * (HEAD - 74), 1009)
    payload = range(8 * (HEAD - 74), 8 * len(file), 11)  # test_floe flips every bit of a segment
    for bit in (*zeros, *payload):
        with pytest.raises(TamperedError) as caught:
            unseal(flipped(file, bit // 8, mask=1 << bit % 8))
        assert caught.value.offset is not None


def test_flip_in_a_segment_names_it_and_its_offset_and_leaves_the_others_readable() -> None:
    file = seal(os.urandom(3 * 96))
    source = opened(flipped(file, HEAD + SEGMENT + 50))
    buffer = memoryview(bytearray(96))
    source.read_into(0, buffer)
    source.read_into(192, buffer)
    for offset, length in ((96, 96), (150, 1)):
        with pytest.raises(TamperedError, match="segment 1 was changed") as caught:
            source.read_into(offset, buffer[:length])
        assert caught.value.offset == HEAD + SEGMENT
    assert bytes(buffer[:96]) == bytes(96)


Attack = Callable[[list[bytes], list[bytes]], list[bytes]]

# a, b: head and four segments of two files of the same shape and key.
ATTACKS: dict[str, tuple[Attack, type[CryptoError]]] = {
    "swap segments 0 and 1": (lambda a, b: [a[0], a[2], a[1], *a[3:]], TamperedError),
    "swap segments 1 and 2": (lambda a, b: [*a[:2], a[3], a[2], a[4]], TamperedError),
    "duplicate segment 1": (lambda a, b: [*a[:3], a[2], a[4]], TamperedError),
    "insert a copy of segment 1": (lambda a, b: [*a[:3], *a[2:]], TamperedError),
    "last segment first": (lambda a, b: [a[0], a[4], *a[2:4], a[1]], TamperedError),
    "drop a middle segment": (lambda a, b: [*a[:2], *a[3:]], TruncatedCiphertextError),
    "drop the first segment": (lambda a, b: [a[0], *a[2:]], TruncatedCiphertextError),
    "drop the last segment": (lambda a, b: a[:4], TruncatedCiphertextError),
    "drop all segments": (lambda a, b: a[:1], TruncatedCiphertextError),
    "splice a segment": (lambda a, b: [*a[:2], b[2], *a[3:]], TamperedError),
    "splice the last segment": (lambda a, b: [*a[:4], b[4]], TamperedError),
    "splice the payload": (lambda a, b: [a[0][:-74], b[0][-74:], *b[1:]], TamperedError),
    "splice the headers": (lambda a, b: [b[0][:-74], a[0][-74:], *a[1:]], TamperedError),
    "splice the segments": (lambda a, b: [a[0], *b[1:]], TamperedError),
    "headers of another file": (lambda a, b: [b[0], *a[1:]], TamperedError),
    "another file behind it": (lambda a, b: a + b, TamperedError),
    "a byte behind it": (lambda a, b: [*a, b"\0"], TamperedError),
    "a segment behind it": (lambda a, b: [*a, b[1]], TamperedError),
    "only its headers, twice": (lambda a, b: [a[0], a[0]], TamperedError),
    "empty the file": (lambda a, b: [], TruncatedCiphertextError),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_on_the_segments_has_its_own_error(mode: str, attack: str) -> None:
    manipulate, expected = ATTACKS[attack]
    size = 4 * (96 if mode.endswith("GCM") else 48)
    a, b = (segments(seal(os.urandom(size), mode)) for _ in range(2))
    with pytest.raises(expected) as caught:
        unseal(b"".join(manipulate(a, b)))
    assert type(caught.value) is expected


@pytest.mark.parametrize("copy", [0, 1])
def test_header_copy_of_another_file_does_not_stand_in_the_way(copy: int) -> None:
    a, b = seal(PLAINTEXT), seal(os.urandom(len(PLAINTEXT)))
    start = copy * COPY
    spliced = a[:start] + b[start : start + COPY] + a[start + COPY :]
    assert unseal(spliced) == PLAINTEXT
    assert opened(spliced).unlocked.states[copy] is CopyState.DAMAGED


@pytest.mark.parametrize("mode", MODES)
def test_truncation_anywhere_is_truncated(mode: str) -> None:
    file = seal(PLAINTEXT, mode)
    edges = [
        *range(20),
        63,
        64,
        65,
        COPY,
        2 * COPY,
        HEAD - 74,
        *range(HEAD, len(file) + 1, SEGMENT),
    ]
    for cut in {max(0, edge + more) for edge in edges for more in (-1, 0, 1)}:
        if cut < len(file):
            with pytest.raises(TruncatedCiphertextError):
                unseal(file[:cut])


# offset in the immutable bytes, new bytes, what happens when both copies say so
DOWNGRADES: dict[str, tuple[int, bytes, type[CryptoError]]] = {
    "version 0": (8, b"\0", UnsupportedSuiteError),
    "version 2": (8, b"\2", UnsupportedSuiteError),
    "a header copy of 2 KiB": (9, b"\x0b", TamperedError),
    "a header copy of 8 KiB": (9, b"\x0d", TamperedError),
    "a header copy of 2^255 bytes": (9, b"\xff", TamperedError),
    "no suite": (10, b"\0\0", UnsupportedSuiteError),
    "an unauthenticated suite": (10, b"\x01\0", UnsupportedSuiteError),
    "a flag": (12, b"\1", UnsupportedSuiteError),
    "the highest flag": (15, b"\x80", UnsupportedSuiteError),
    "another file id": (16, b"\0" * 16, TamperedError),
    "a shorter plaintext": (32, struct.pack("<Q", len(PLAINTEXT) - 1), TamperedError),
    "no plaintext": (32, bytes(8), TamperedError),
    "a plaintext of 2^63 - 1 bytes": (32, struct.pack("<Q", 2**63 - 1), TamperedError),
    "a plaintext of 2^64 - 1 bytes": (32, b"\xff" * 8, TamperedError),
    "other content": (40, b"\2\0", TamperedError),
    "unknown content": (40, b"\x09\0", UnsupportedSuiteError),
    "a reserved byte": (42, b"\1", TamperedError),
    "segments of 0 bytes": (44, bytes(4), TamperedError),
    "segments of 33 bytes": (44, struct.pack("<I", 33), TamperedError),
    "segments of 4 GiB": (44, b"\xff" * 4, TamperedError),
    "the last reserved byte": (63, b"\1", TamperedError),
    "no slots": (72, bytes(2), TamperedError),
    "17 slots": (72, b"\x11\0", TamperedError),
    "another reserved byte": (74, b"\1", TamperedError),
    "slots longer than the header": (76, b"\xff" * 4, TamperedError),
    "slots one byte longer": (76, struct.pack("<I", 93), TamperedError),
    "slots one byte shorter": (76, struct.pack("<I", 91), TamperedError),
    "a higher generation": (64, b"\2", TamperedError),
    "a slot of unknown type": (80, b"\xc8", DecryptionError),
    "a slot of another key": (84, bytes(8), DecryptionError),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("downgrade", DOWNGRADES)
def test_downgrade_of_both_header_copies_is_refused(mode: str, downgrade: str) -> None:
    at, data, expected = DOWNGRADES[downgrade]
    file = seal(PLAINTEXT, mode)
    changed = bytearray(file)
    for start in (at, COPY + at):
        changed[start : start + len(data)] = data
    assert changed != file
    with pytest.raises(expected) as caught:
        unseal(bytes(changed))
    assert type(caught.value) is expected


@pytest.mark.parametrize(("mode", "other"), [*itertools.permutations(MODES, 2)])
def test_file_of_one_suite_is_not_read_as_another(mode: str, other: str) -> None:
    file, suite = bytearray(seal(PLAINTEXT, mode)), seal(b"", other)[10:12]
    for start in (10, COPY + 10):
        file[start : start + 2] = suite
    with pytest.raises(TamperedError):
        unseal(bytes(file))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("content", "other"), [*itertools.permutations(Content, 2)])
def test_file_of_one_content_is_not_taken_for_another(
    mode: str, content: Content, other: Content
) -> None:
    plaintext = PLAINTEXT[: len(PLAINTEXT) // 16 * 16]
    file = bytearray(seal(plaintext, mode, content=content))
    for start in (40, COPY + 40):
        file[start] = other
    with pytest.raises(TamperedError):
        unseal(bytes(file))


def resealed(file: bytes, **changes: object) -> bytes:
    """Return a file whose header was changed with the data key."""
    unlocked = opened(file).unlocked
    header = unlocked.header
    values = {"fixed": header.fixed, "generation": 1, "slots": header.slots, **changes}
    data = HeaderCopy(**values).pack(unlocked.data_key)  # type: ignore[arg-type]
    return data + data + file[2 * len(data) :]


@pytest.mark.parametrize("mode", MODES)
def test_slot_that_wraps_another_data_key_is_refused(mode: str) -> None:
    # Key commitment: all keys that open the file give the same plaintext.
    file = seal(PLAINTEXT, mode)
    foreign = OTHER.wrap(Key(bytes(32)), bound=file[:64])
    both = resealed(file, slots=(*opened(file).unlocked.header.slots, foreign))
    assert unseal(both, ME) == PLAINTEXT
    with pytest.raises(TamperedError, match="MAC"):
        unseal(both, OTHER)


@pytest.mark.parametrize("mode", MODES)
def test_header_under_a_data_key_the_payload_does_not_commit_to_is_refused(mode: str) -> None:
    file = seal(PLAINTEXT, mode)
    evil = Key(os.urandom(32))
    slot = ME.wrap(evil, bound=file[:64])
    header = HeaderCopy(fixed=opened(file).unlocked.header.fixed, generation=9, slots=(slot,))
    data = header.pack(evil)
    with pytest.raises(TamperedError, match="the payload does not belong to the header"):
        unseal(data + data + file[2 * COPY :])
    assert unseal(data + file[COPY:]) == PLAINTEXT


@pytest.mark.parametrize(
    ("at", "mode"), [(COPY - 33, MODES[0]), (COPY - 33, MODES[-1]), (2000, MODES[0])]
)
def test_bytes_behind_the_slots_are_refused_though_the_mac_is_right(at: int, mode: str) -> None:
    file = seal(PLAINTEXT, mode)
    content = bytearray(file[: COPY - 32])
    content[at] = 1
    copy = bytes(content)
    suite = reference.SUITES[reference.CODES[mode]]
    copy += reference.header_mac(suite, opened(file).unlocked.data_key.raw, copy)
    with pytest.raises(TamperedError, match="reserved bytes of the header"):
        unseal(copy + copy + file[2 * COPY :])


@pytest.mark.parametrize("offset", [8192, 16384, 65536])
def test_header_copy_that_lies_elsewhere_than_it_says_is_not_looked_at(offset: int) -> None:
    file = bytearray(seal(bytes(80_000), segment_bytes=4096))
    copy = file[:COPY]
    file[: 2 * COPY] = bytes(2 * COPY)
    file[offset : offset + COPY] = copy
    with pytest.raises(DecryptionError, match="not a container"):
        unseal(bytes(file))


@pytest.mark.parametrize("slot_type", [2, 3])
def test_hostile_passphrase_costs_are_refused_at_once(slot_type: int) -> None:
    class Hostile:
        def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
            costs = b"\x28\x08\x01\0" if slot_type == 2 else b"\xff" * 4 + b"\1\1\0\0"
            return Slot(type=slot_type, key_id=bytes(8), body=costs + bytes(80))

    with pytest.raises(UnsupportedSuiteError):
        unseal(seal(PLAINTEXT, recipients=[Hostile()]), PHRASE)


def test_wrong_passphrase_is_tried_once_though_there_are_two_copies() -> None:
    class Counting:
        tries = 0

        def unwrap(self, slot: Slot, *, bound: bytes) -> bytes | None:
            self.tries += 1
            return Passphrase("wrong").unwrap(slot, bound=bound)

    counting = Counting()
    with pytest.raises(DecryptionError, match="the passphrase is wrong"):
        unseal(seal(PLAINTEXT, recipients=[PHRASE]), counting)
    assert counting.tries == 1


@pytest.mark.parametrize(
    ("cost", "slots"),
    [(Scrypt(log2_n=14), 3), (Argon2id(memory_kib=1024, passes=8), 12), ("a run's", 12)],
)
def test_file_gets_no_more_passphrases_stretched_than_the_budget_pays_for(
    cost: PassphraseCost | str, slots: int
) -> None:
    def phrase(text: str) -> Passphrase | RunPassphrase:
        keys = StretchedKeys(StretchingBudget(most_kib=64 << 10))
        if isinstance(cost, str):
            usual = Argon2id(memory_kib=1024, passes=8)
            return RunPassphrase(Passphrase(text, stretched_keys=keys), cost=usual)
        return Passphrase(text, cost, stretched_keys=keys)

    file = seal(PLAINTEXT, recipients=[phrase(str(number)) for number in range(slots)])
    last = str(slots - 1)
    assert unseal(file, RunPassphrase(Passphrase(last))) == PLAINTEXT
    assert unseal(file, phrase("0")) == PLAINTEXT
    with pytest.raises(StretchingError, match="more stretching of passphrases"):
        unseal(file, phrase(last))
    assert unseal(seal(PLAINTEXT, recipients=[ME, PHRASE]), ME) == PLAINTEXT


# The damage, and the message.
CLASSES: dict[str, tuple[Callable[[bytes], bytes], RawKey, type[CryptoError], str]] = {
    "another key": (lambda file: file, OTHER, DecryptionError, "encrypted for another key"),
    "a damaged slot": (lambda file: flipped(file, 100, COPY + 100), ME, TamperedError, "slot is"),
    "a damaged header": (lambda file: flipped(file, 64, COPY + 64), ME, TamperedError, "its MAC"),
    "a damaged payload": (lambda file: flipped(file, -1), ME, TamperedError, "segment"),
    "a short file": (lambda file: file[:-1], ME, TruncatedCiphertextError, "1 bytes too early"),
    "a long file": (lambda file: file + b"\0", ME, TamperedError, "added behind"),
    "a newer version": (
        lambda file: flipped(file, 8, COPY + 8, mask=3),
        ME,
        UnsupportedSuiteError,
        "version 2",
    ),
    "no container": (lambda file: b"x" * 20000, ME, DecryptionError, "not a container"),
    "a start of one": (lambda file: CONTAINER_MAGIC[:5], ME, TruncatedCiphertextError, "5 bytes"),
    "nothing": (lambda file: b"", ME, TruncatedCiphertextError, "0 bytes"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrong", CLASSES)
def test_failure_says_what_is_wrong(mode: str, wrong: str) -> None:
    change, key, expected, message = CLASSES[wrong]
    with pytest.raises(expected, match=message) as caught:
        unseal(change(seal(PLAINTEXT, mode)), key)
    assert type(caught.value) is expected


def test_header_without_magic_is_tampered() -> None:
    with pytest.raises(TamperedError, match="no header starts here") as caught:
        parse_fixed(bytes(64), offset=COPY)
    assert caught.value.offset == COPY


def test_file_whose_first_bytes_are_damaged_opens_from_its_second_copy() -> None:
    file = seal(PLAINTEXT)
    assert unseal(bytes(COPY) + file[COPY:]) == PLAINTEXT


def test_copies_can_be_looked_at_without_a_key() -> None:
    file = seal(PLAINTEXT, "SM4-CBC", recipients=[ME, PHRASE])
    copies = find_copies(BytesSource(file))
    assert [copy.offset for copy in copies] == [0, COPY]
    header = copies[0].header
    assert (header.fixed.suite.mode, header.fixed.plaintext_size) == ("SM4-CBC", len(PLAINTEXT))
    assert [slot.label for slot in header.slots] == [
        f"key {ME.key.key_id}",
        "passphrase (scrypt)",
    ]


def test_nothing_about_an_open_container_shows_its_data_key() -> None:
    source = opened(seal(PLAINTEXT))
    secret = bytes(source.unlocked.data_key.raw)
    shown = f"{source!r} {source.unlocked!r} {find_copies(BytesSource(seal(PLAINTEXT)))!r}"
    assert secret.hex() not in shown
    assert repr(secret)[2:-1] not in shown


@pytest.mark.parametrize("offset", [16384, 32768, 65536])
def test_header_of_another_file_inside_the_payload_is_never_taken(offset: int) -> None:
    file = bytearray(seal(bytes(80_000), segment_bytes=4096))
    other = seal(b"evil", copy_bytes=offset)
    file[offset : offset + 64] = other[:64]
    with pytest.raises(TamperedError, match="segment"):
        unseal(bytes(file))


@settings(max_examples=150)
@given(data=st.data())
def test_header_of_any_bytes_gives_the_plaintext_or_one_of_our_errors(data: st.DataObject) -> None:
    changed = bytearray(FUZZED)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, USED) | st.integers(COPY, COPY + USED) | st.just(9))
        new = data.draw(st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 8))
        changed[at : at + len(new)] = new
    file = bytes(changed[: data.draw(st.just(len(changed)) | st.integers(0, len(changed)))])
    with contextlib.suppress(CryptoError):
        assert unseal(file) == PLAINTEXT


@settings(max_examples=100)
@given(file=st.binary(max_size=200).map(CONTAINER_MAGIC.__add__))
def test_any_bytes_behind_the_magic_are_refused_with_one_of_our_errors(file: bytes) -> None:
    with pytest.raises(CryptoError):
        unseal(file.ljust(20_000, b"\0"))
