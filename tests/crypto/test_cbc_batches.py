# SPDX-License-Identifier: Apache-2.0
"""Blocks that are sealed or opened several at once are the same blocks."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptmgr.crypto.cbc_batches import FindLanes, lanes_for
from ckptmgr.crypto.ciphers import mode_of
from ckptmgr.crypto.errors import CryptoError, DecryptionError, TamperedError
from ckptmgr.crypto.mindspore.blocks import BlockSealer, open_blocks
from ckptmgr.crypto.mindspore.records import RecordHead, pack_head
from ckptmgr.crypto.mindspore.seal import Seal, block_digest, encode_seal
from ckptmgr.crypto.mindspore.source import BlockSource
from ckptmgr.formats.source import BytesSource
from tests.crypto.lanes import Library, finder, no_lanes
from tests.crypto.mindspore.sealing import KEY, OTHER_KEY, read_range, split

BLOCK = 64
MODE = mode_of("SM4-CBC")
RECORD = 32 + BLOCK + 16
TEXT = random.Random(1).randbytes(40 * BLOCK + 7)


class Memory:
    """A source whose bytes may change."""

    def __init__(self, content: bytearray) -> None:
        self._content = content

    @property
    def size(self) -> int:
        return len(self._content)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._content[offset : offset + buffer.nbytes]


def seal_many(
    plaintext: bytes,
    find_lanes: FindLanes,
    *,
    mode: str = "SM4-CBC",
    block_bytes: int = BLOCK,
    batch: int = 16,
    is_in_place: bool = False,
    unpredictable: Callable[[int], bytes] = os.urandom,
) -> bytes:
    """Return the file of `plaintext`, sealed `batch` blocks at a time."""
    sealer = BlockSealer(
        KEY,
        mode,
        plaintext_size=len(plaintext),
        block_bytes=block_bytes,
        find_lanes=find_lanes,
        random=unpredictable,
    )
    sealed = memoryview(bytearray(sealer.sealed_size))
    for first in range(0, sealer.block_count, batch):
        plaintexts, records = [], []
        for index in range(first, min(first + batch, sealer.block_count)):
            start, size = sealer.plaintext_range(index)
            at, length = sealer.record_range(index)
            records.append(sealed[at : at + length])
            plaintexts.append(memoryview(plaintext)[start : start + size])
            if is_in_place:
                room = sealer.plaintext_room(records[-1], size)
                room[:] = plaintexts[-1]
                plaintexts[-1] = room
        sealer.seal_many(first, plaintexts, records)
    end = sealer.finish()
    sealed[len(sealed) - len(end) :] = end
    return bytes(sealed)


def opened(
    file: bytes, find_lanes: FindLanes, *, mode: str = "SM4-CBC", allow_unsealed: bool = False
) -> BlockSource:
    return open_blocks(
        BytesSource(file), KEY, mode, allow_unsealed=allow_unsealed, find_lanes=find_lanes
    )


def read_all(file: bytes, find_lanes: FindLanes, *, mode: str = "SM4-CBC") -> bytes:
    source = opened(file, find_lanes, mode=mode)
    return read_range(source, 0, source.size)


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 4, 16])
def test_file_is_the_same_with_lanes_and_without(batch: int, is_in_place: bool) -> None:
    files = [
        seal_many(
            TEXT,
            find_lanes,
            batch=batch,
            is_in_place=is_in_place,
            unpredictable=random.Random(2).randbytes,
        )
        for find_lanes in (no_lanes, finder(Library()), lanes_for)
    ]
    assert files[0] == files[1] == files[2]


@settings(max_examples=40)
@given(
    size=st.integers(0, 20 * BLOCK),
    batch=st.integers(1, 16),
    block_bytes=st.sampled_from([16, 32, 64, 80]),
    with_lanes=st.tuples(st.booleans(), st.booleans()),
)
def test_who_sealed_and_who_opens_does_not_matter(
    size: int, batch: int, block_bytes: int, with_lanes: tuple[bool, bool]
) -> None:
    sealing, opening = (finder(Library()) if one else no_lanes for one in with_lanes)
    file = seal_many(TEXT[:size], sealing, batch=batch, block_bytes=block_bytes)
    assert read_all(file, opening) == TEXT[:size]


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC"])
def test_modes_without_lanes_take_many_blocks_too(mode: str) -> None:
    file = seal_many(TEXT, finder(Library()), mode=mode, is_in_place=True)
    assert read_all(file, finder(Library()), mode=mode) == TEXT


@pytest.mark.parametrize(("blocks", "calls"), [(3, 0), (4, 1), (16, 1)])
def test_few_blocks_are_not_worth_the_lanes(blocks: int, calls: int) -> None:
    text, library = TEXT[: blocks * BLOCK], Library()
    find_lanes = finder(library)
    file = seal_many(text, find_lanes)
    assert library.calls == calls
    assert read_all(file, find_lanes) == text
    assert library.calls == 2 * calls


def test_batch_says_how_many_blocks_go_together() -> None:
    batches = []
    for find_lanes in (no_lanes, finder(Library())):
        sealer = BlockSealer(KEY, "SM4-CBC", plaintext_size=9, find_lanes=find_lanes)
        batches.append((sealer.batch, opened(seal_many(TEXT, no_lanes), find_lanes).batch))
    assert batches == [(1, 1), (16, 16)]


def test_large_records_of_others_are_opened_one_by_one() -> None:
    library, text = Library(), bytes(5 << 20)
    find_lanes = finder(library)
    file = seal_many(text, no_lanes, block_bytes=1 << 20)
    source = opened(file, find_lanes)
    assert source.batch == 1  # sixteen of MindSpore's own 64 MiB would be a gigabyte of memory
    assert read_range(source, 0, source.size) == text
    assert library.calls == 0


@settings(max_examples=60)
@given(start=st.integers(0, len(TEXT)), length=st.integers(0, len(TEXT)))
def test_any_range_read_with_lanes_equals_the_slice(start: int, length: int) -> None:
    length = min(length, len(TEXT) - start)
    source = opened(_FILE, _FIND)
    assert read_range(source, start, length) == TEXT[start : start + length]


_FILE = seal_many(TEXT, no_lanes)
_FIND = finder(Library())


@settings(max_examples=60)
@given(position=st.integers(0, 41 * RECORD - 1), bit=st.integers(0, 7))
@example(position=0, bit=1)  # another mode
@example(position=7 * RECORD + 12, bit=0)  # the IV
@example(position=7 * RECORD + 32, bit=0)
def test_changed_block_of_a_batch_is_named(position: int, bit: int) -> None:
    file = bytearray(_FILE)
    file[position] ^= 1 << bit
    block = min(position // RECORD, 40)
    is_length = position % RECORD in (*range(12), *range(28, 32))
    if is_length or block == 40:  # found when the file is opened, and so are changes of the seal
        with pytest.raises(CryptoError):
            read_all(bytes(file), _FIND)
        return
    with pytest.raises(TamperedError, match=rf"block {block} is not the one the seal lists"):
        read_all(bytes(file), _FIND)


def test_two_blocks_of_a_batch_that_changed_places_are_named() -> None:
    records = split(_FILE, "SM4-CBC")
    records[5], records[6] = records[6], records[5]
    with pytest.raises(TamperedError, match="block 5"):
        read_all(b"".join(records), _FIND)


def test_source_that_changes_while_it_is_open_is_named() -> None:
    file = bytearray(b"".join(split(_FILE, "SM4-CBC")[:-1]))
    source = open_blocks(
        Memory(file), KEY, "SM4-CBC", allow_unsealed=True, find_lanes=finder(Library())
    )
    shorter = (RECORD - 32 - 16).to_bytes(4, "little")
    file[7 * RECORD + 4 : 7 * RECORD + 8] = (RECORD - 32 - 16 + 24).to_bytes(4, "little")
    file[7 * RECORD + 28 : 7 * RECORD + 32] = shorter
    with pytest.raises(TamperedError, match="block 7 changed while the file was open"):
        read_range(source, 0, source.size)


def test_unsealed_block_of_a_batch_that_does_not_open_is_named_and_zeroed() -> None:
    file = bytearray(b"".join(split(_FILE, "SM4-CBC")[:-1]))
    source = open_blocks(
        Memory(file), KEY, "SM4-CBC", allow_unsealed=True, find_lanes=finder(Library())
    )
    file[8 * RECORD - 17] ^= 1  # in the last but one cipher block: the padding of block 7
    buffer = bytearray(b"\xff" * source.size)
    with pytest.raises(DecryptionError, match="block 7 does not open") as caught:
        source.read_into(0, memoryview(buffer))
    assert caught.value.offset == 7 * RECORD
    assert buffer[7 * BLOCK : 8 * BLOCK] == bytes(BLOCK)


def test_unsealed_blocks_under_another_key_do_not_open() -> None:
    file = b"".join(split(_FILE, "SM4-CBC")[:-1])
    with pytest.raises(DecryptionError):
        open_blocks(BytesSource(file), OTHER_KEY, "SM4-CBC", allow_unsealed=True, find_lanes=_FIND)


def test_sealed_block_whose_padding_is_wrong_is_tampering() -> None:
    # Only the owner of the key can make such a file: an honest seal over a record that does not open.
    file = seal_many(TEXT[: 4 * BLOCK], no_lanes)
    records = split(file, "SM4-CBC")
    bad = records[1][:-17] + bytes([records[1][-17] ^ 1]) + records[1][-16:]
    digests = b"".join(
        block_digest(MODE, memoryview(one)) for one in (records[0], bad, *records[2:4])
    )
    seal = Seal(file_id=bytes(16), block_size=BLOCK, plaintext_size=4 * BLOCK, digests=digests)
    plaintext = memoryview(encode_seal(MODE, KEY, seal=seal))
    ciphertext = memoryview(bytearray(MODE.ciphertext_size(plaintext.nbytes)))
    MODE.encrypt_into(KEY, iv=bytes(16), plaintext=plaintext, ciphertext=ciphertext)
    head = pack_head(MODE, RecordHead(tag=b"", iv=bytes(16), cipher_size=len(ciphertext)))
    file = b"".join((records[0], bad, *records[2:4], head, ciphertext))
    with pytest.raises(TamperedError, match="block 1 was changed"):
        read_all(file, _FIND)


def test_blocks_are_checked_before_any_is_sealed() -> None:
    sealer = BlockSealer(
        KEY, "SM4-CBC", plaintext_size=4 * BLOCK, block_bytes=BLOCK, find_lanes=_FIND
    )
    records = [memoryview(bytearray(RECORD)) for _ in range(4)]
    plaintexts = [memoryview(bytes(BLOCK))] * 3 + [memoryview(bytes(BLOCK - 1))]
    with pytest.raises(ValueError, match=r"block 3 has 64 bytes .* not 63"):
        sealer.seal_many(0, plaintexts, records)
    assert all(not any(record) for record in records)


def test_block_is_not_sealed_twice_in_batches() -> None:
    sealer = BlockSealer(
        KEY, "SM4-CBC", plaintext_size=4 * BLOCK, block_bytes=BLOCK, find_lanes=_FIND
    )
    plaintexts = [memoryview(bytes(BLOCK))] * 4
    records = [memoryview(bytearray(RECORD)) for _ in range(4)]
    sealer.seal_many(0, plaintexts, records)
    with pytest.raises(ValueError, match="block 2 is sealed twice"):
        sealer.seal_many(2, plaintexts[2:], records[2:])


def test_blocks_and_records_are_equally_many() -> None:
    sealer = BlockSealer(KEY, "SM4-CBC", plaintext_size=4 * BLOCK, block_bytes=BLOCK)
    with pytest.raises(ValueError, match="zip"):
        sealer.seal_many(0, [memoryview(bytes(BLOCK))], [])


def test_every_block_of_a_batch_has_its_own_iv() -> None:
    file = seal_many(bytes(16 * BLOCK), _FIND)
    bodies = [record[32:] for record in split(file, "SM4-CBC")[:-1]]
    assert all(a != b for a, b in itertools.combinations(bodies, 2))
