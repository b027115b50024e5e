# SPDX-License-Identifier: Apache-2.0
"""Sealing: sizes known in advance, aligned records, fresh nonces, and refusals of misuse."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.crypto.ciphers import mode_of
from ckptmgr.crypto.errors import KeyLengthError, UnsupportedSuiteError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.mindspore.blocks import BlockSealer
from ckptmgr.crypto.mindspore.records import head_size, parse_head

from .sealing import BLOCK, KEY, MODES, seal, split, unseal


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_crc", [False, True])
@given(plaintext=st.binary(max_size=5 * BLOCK))
def test_sealed_plaintext_comes_back(mode: str, has_crc: bool, plaintext: bytes) -> None:
    opened = unseal(seal(plaintext, mode, has_crc=has_crc), mode)
    assert opened[: len(plaintext)] == plaintext
    assert len(opened) == len(plaintext) + (17 if has_crc else 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 63, 64, 65, 128, 129, 192])
def test_sealed_size_is_known_in_advance(mode: str, size: int) -> None:
    sealer = BlockSealer(KEY, mode, plaintext_size=size, block_bytes=BLOCK)
    file = seal(bytes(size), mode)
    assert len(file) == sealer.sealed_size
    assert len(split(file, mode)) == sealer.block_count + 1


@pytest.mark.parametrize("mode", MODES)
def test_ranges_cover_plaintext_and_file_without_gap(mode: str) -> None:
    sealer = BlockSealer(KEY, mode, plaintext_size=200, block_bytes=BLOCK)
    plaintext_end = record_end = 0
    for index in range(sealer.block_count):
        start, size = sealer.plaintext_range(index)
        at, length = sealer.record_range(index)
        assert (start, at) == (plaintext_end, record_end)
        plaintext_end, record_end = start + size, at + length
    assert plaintext_end == 200


@pytest.mark.parametrize(
    ("mode", "plaintext_size", "record_bytes"),
    [
        ("AES-GCM", 10 * 2**30, 2**22),
        ("AES-CBC", 10 * 2**30, 2**22),
        ("SM4-CBC", 10 * 2**30, 2**19),
        ("SM4-CBC", 2**40, 2**22),  # that many small blocks would not fit into one seal
    ],
)
def test_full_records_of_the_default_size_are_aligned(
    mode: str, plaintext_size: int, record_bytes: int
) -> None:
    sealer = BlockSealer(KEY, mode, plaintext_size=plaintext_size)
    assert sealer.record_bytes == record_bytes
    assert [sealer.record_range(k) for k in (0, 1, 2000)] == [
        (k * record_bytes, record_bytes) for k in (0, 1, 2000)
    ]
    assert sealer.plaintext_range(1) == (record_bytes - 48, record_bytes - 48)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("key_bytes", [16, 24, 32])
def test_every_key_length_of_the_mode_seals(mode: str, key_bytes: int) -> None:
    key = Key(bytes(range(key_bytes)))
    if key_bytes in mode_of(mode).key_sizes:
        assert unseal(seal(b"weights", mode, key=key), mode, key=key) == b"weights"
        return
    with pytest.raises(KeyLengthError):
        BlockSealer(key, mode, plaintext_size=7)


@pytest.mark.parametrize("mode", MODES)
def test_nonces_of_many_blocks_and_files_never_repeat(mode: str) -> None:
    suite = mode_of(mode)
    used = [
        parse_head(suite, record[: head_size(suite)], offset=0).iv
        for _ in range(20)
        for record in split(seal(bytes(50 * 16), mode, block_bytes=16), mode)
    ]
    assert len(set(used)) == len(used) == 20 * 51


@pytest.mark.parametrize("mode", MODES)
def test_same_plaintext_twice_gives_different_bytes(mode: str) -> None:
    assert seal(b"weights", mode) != seal(b"weights", mode)


@pytest.mark.parametrize("mode", MODES)
def test_same_randomness_gives_the_same_file(mode: str) -> None:
    files = {seal(bytes(100), mode, random=lambda size: b"\x05" * size) for _ in range(2)}
    assert len(files) == 1


def test_randomness_is_asked_for_each_block_and_the_seal() -> None:
    asked: list[int] = []

    def random(size: int) -> bytes:
        asked.append(size)
        return os.urandom(size)

    seal(bytes(2 * BLOCK), "AES-GCM", random=random)
    assert asked == [12, 12, 16, 12]


@pytest.mark.parametrize("mode", MODES)
def test_blocks_sealed_by_several_threads_in_any_order_open(mode: str) -> None:
    plaintext = os.urandom(40 * BLOCK + 5)
    sealer = BlockSealer(KEY, mode, plaintext_size=len(plaintext), block_bytes=BLOCK)
    sealed = memoryview(bytearray(sealer.sealed_size))

    def seal_one(index: int) -> None:
        (start, size), (at, length) = sealer.plaintext_range(index), sealer.record_range(index)
        sealer.seal_into(
            index, memoryview(plaintext)[start : start + size], sealed[at : at + length]
        )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(seal_one, reversed(range(sealer.block_count))))
    end = sealer.finish()
    sealed[-len(end) :] = end
    assert unseal(bytes(sealed), mode) == plaintext


def test_plaintext_may_be_of_any_element_type() -> None:
    sealer = BlockSealer(KEY, "AES-GCM", plaintext_size=16)
    record = bytearray(sealer.record_range(0)[1])
    with pytest.raises(ValueError, match="has 16 bytes and a record of 64, not 15 and 64"):
        sealer.seal_into(0, memoryview(bytes(15)), memoryview(record))
    sealer.seal_into(0, memoryview(bytes(16)), memoryview(record))


def test_block_sealed_twice_is_refused() -> None:
    sealer = BlockSealer(KEY, "AES-GCM", plaintext_size=16)
    record = bytearray(sealer.record_range(0)[1])
    sealer.seal_into(0, memoryview(bytes(16)), memoryview(record))
    with pytest.raises(ValueError, match="block 0 is sealed twice"):
        sealer.seal_into(0, memoryview(bytes(16)), memoryview(record))


def test_finish_without_every_block_is_refused() -> None:
    sealer = BlockSealer(KEY, "AES-GCM", plaintext_size=100, block_bytes=BLOCK)
    record = bytearray(sealer.record_range(0)[1])
    sealer.seal_into(0, memoryview(bytes(BLOCK)), memoryview(record))
    with pytest.raises(ValueError, match="block 1 of 2 was not sealed"):
        sealer.finish()


@pytest.mark.parametrize(("has_crc", "crc"), [(False, 0), (True, None)])
def test_finish_with_a_crc_where_none_belongs_or_without_one_is_refused(
    has_crc: bool, crc: int | None
) -> None:
    sealer = BlockSealer(KEY, "AES-GCM", plaintext_size=0, has_crc_trailer=has_crc)
    with pytest.raises(ValueError, match="exactly when the file has a CRC trailer"):
        sealer.finish(crc=crc)


@pytest.mark.parametrize("index", [-1, 2])
def test_range_of_a_block_that_is_not_there_is_refused(index: int) -> None:
    sealer = BlockSealer(KEY, "AES-GCM", plaintext_size=100, block_bytes=BLOCK)
    with pytest.raises(ValueError, match=f"there is no block {index} of 2"):
        sealer.plaintext_range(index)
    with pytest.raises(ValueError, match=f"there is no block {index} of 2"):
        sealer.record_range(index)


@pytest.mark.parametrize("block_bytes", [0, -16, 8, 65, 64 * 2**20 + 16])
def test_block_size_out_of_range_is_refused(block_bytes: int) -> None:
    with pytest.raises(ValueError, match="no multiple of 16 up to 64 MiB"):
        BlockSealer(KEY, "AES-GCM", plaintext_size=1, block_bytes=block_bytes)


def test_negative_plaintext_size_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        BlockSealer(KEY, "AES-GCM", plaintext_size=-1)


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(UnsupportedSuiteError):
        BlockSealer(KEY, "SM4-GCM", plaintext_size=1)
