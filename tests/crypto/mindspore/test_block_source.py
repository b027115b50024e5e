# SPDX-License-Identifier: Apache-2.0
"""Reading: any range equals the slice of the plaintext, from any thread, and nothing unverified comes out."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.crypto.errors import (
    DecryptionError,
    KeyLengthError,
    TamperedError,
    TruncatedCiphertextError,
    UnsealedError,
    UnsupportedSuiteError,
)
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.mindspore.blocks import BlockSource, open_blocks
from ckptmgr.formats.source import BytesSource

from .sealing import BLOCK, KEY, MODES, OTHER_KEY, read_range, seal, split, unseal

PLAINTEXT = os.urandom(6 * BLOCK + 7)


class WatchedSource:
    """A source that counts its reads, has mutable bytes, and can call out before it reads."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.bytes_read = 0
        self.before_read: Callable[[], None] = lambda: None

    @property
    def size(self) -> int:
        return len(self.data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.before_read()
        self.bytes_read += buffer.nbytes
        BytesSource(self.data).read_into(offset, buffer)


def opened(mode: str, file: bytes, *, allow_unsealed: bool = False) -> BlockSource:
    return open_blocks(BytesSource(file), KEY, mode, allow_unsealed=allow_unsealed)


def unsealed(plaintext: bytes, mode: str, *, block_bytes: int = BLOCK) -> bytes:
    return b"".join(split(seal(plaintext, mode, block_bytes=block_bytes), mode)[:-1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_sealed", [True, False])
@given(data=st.data())
def test_read_of_any_ranges_equals_the_slices(
    mode: str, is_sealed: bool, data: st.DataObject
) -> None:
    file = seal(PLAINTEXT, mode) if is_sealed else unsealed(PLAINTEXT, mode)
    source = opened(mode, file, allow_unsealed=True)
    assert (source.size, source.is_sealed) == (len(PLAINTEXT), is_sealed)
    for _ in range(4):
        start = data.draw(st.integers(0, len(PLAINTEXT)))
        stop = data.draw(st.integers(start, len(PLAINTEXT)))
        assert read_range(source, start, stop - start) == PLAINTEXT[start:stop]


@pytest.mark.parametrize("mode", MODES)
@given(size=st.integers(1, 70))
def test_foreign_blocks_of_any_size_are_joined(mode: str, size: int) -> None:
    records = [
        split(seal(PLAINTEXT[at : at + size], mode, block_bytes=4096), mode)[0]
        for at in range(0, len(PLAINTEXT), size)
    ]
    assert unseal(b"".join(records), mode, allow_unsealed=True) == PLAINTEXT


@pytest.mark.parametrize("mode", ["AES-CBC", "SM4-CBC"])
def test_foreign_block_without_plaintext_is_passed_over(mode: str) -> None:
    first, second = split(seal(PLAINTEXT[:100], mode), mode)[:2]
    # The padding block of `first`, which fills a cipher block of its own, as a record with the block before it as IV.
    lengths = [size.to_bytes(4, "little") for size in (40, 16, 16)]
    empty = first[:4] + lengths[0] + lengths[1] + first[-32:-16] + lengths[2] + first[-16:]
    file = first + empty + second + empty
    assert unseal(file, mode, allow_unsealed=True) == PLAINTEXT[:100]


@pytest.mark.parametrize("mode", MODES)
def test_empty_plaintext_has_no_blocks_and_no_bytes(mode: str) -> None:
    source = opened(mode, seal(b"", mode))
    assert (source.size, source.block_count, source.is_sealed) == (0, 0, True)
    source.read_into(0, memoryview(bytearray()))


@pytest.mark.parametrize("mode", MODES)
def test_source_tells_what_its_seal_says(mode: str) -> None:
    first, second = (opened(mode, seal(PLAINTEXT, mode)) for _ in range(2))
    assert first.block_count == 7
    assert first.file_id is not None
    assert len(first.file_id) == 16
    assert first.file_id != second.file_id
    assert first.crc is None


@pytest.mark.parametrize("mode", MODES)
def test_source_without_seal_has_no_file_id(mode: str) -> None:
    source = opened(mode, unsealed(PLAINTEXT, mode), allow_unsealed=True)
    assert (source.file_id, source.crc, source.block_count) == (None, None, 7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [0, BLOCK, BLOCK + 1])
def test_crc_trailer_is_read_back_behind_the_plaintext(mode: str, size: int) -> None:
    plaintext = PLAINTEXT[:size]
    source = opened(mode, seal(plaintext, mode, has_crc=True))
    whole = plaintext + b"crc_num" + zlib.crc32(plaintext).to_bytes(10, "big")
    assert source.crc == zlib.crc32(plaintext)
    assert read_range(source, 0, source.size) == whole
    for start in range(len(whole)):
        assert read_range(source, start, len(whole) - start) == whole[start:]
        assert read_range(source, start, 1) == whole[start : start + 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 392), (391, 1), (10**30, 0)])
def test_read_past_the_end_is_refused(mode: str, offset: int, length: int) -> None:
    source = opened(mode, seal(PLAINTEXT, mode))
    with pytest.raises(TruncatedCiphertextError, match="the plaintext has 391"):
        source.read_into(offset, memoryview(bytearray(length)))


@pytest.mark.parametrize("mode", MODES)
def test_read_of_one_byte_reads_one_block_and_the_next_byte_none(mode: str) -> None:
    file = WatchedSource(seal(PLAINTEXT, mode))
    source = open_blocks(file, KEY, mode)
    before = file.bytes_read
    read_range(source, BLOCK, 1)
    one_block = file.bytes_read - before
    assert BLOCK < one_block < 2 * BLOCK
    read_range(source, BLOCK + 1, 1)
    assert file.bytes_read - before == one_block


@pytest.mark.parametrize("mode", MODES)
def test_read_keeps_the_blocks_used_last(mode: str) -> None:
    file = WatchedSource(seal(PLAINTEXT, mode))
    source = open_blocks(file, KEY, mode)
    for block in (0, 1, 0, 2):
        read_range(source, block * BLOCK, 1)
    before = file.bytes_read
    assert read_range(source, 1, 3) == PLAINTEXT[1:4]
    assert file.bytes_read == before
    assert read_range(source, BLOCK + 1, 3) == PLAINTEXT[BLOCK + 1 : BLOCK + 4]
    assert file.bytes_read > before


@pytest.mark.parametrize("mode", MODES)
def test_reads_by_several_threads_all_equal_the_slices(mode: str) -> None:
    plaintext = os.urandom(64 * BLOCK)
    source = opened(mode, seal(plaintext, mode))

    def read(seed: int) -> bool:
        start = seed * 7919 % (len(plaintext) - 200)
        return read_range(source, start, 200) == plaintext[start : start + 200]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(400)))


@pytest.mark.parametrize("mode", MODES)
def test_block_that_two_readers_miss_at_once_is_right_for_both(mode: str) -> None:
    file = WatchedSource(seal(PLAINTEXT, mode))
    source = open_blocks(file, KEY, mode)

    def second_reader() -> None:
        file.before_read = lambda: None
        assert read_range(source, 1, 5) == PLAINTEXT[1:6]

    file.before_read = second_reader
    assert read_range(source, 2, 9) == PLAINTEXT[2:11]
    before = file.bytes_read
    assert read_range(source, 3, 9) == PLAINTEXT[3:12]
    assert file.bytes_read == before


@pytest.mark.parametrize("mode", MODES)
def test_readers_that_use_more_buffers_than_are_kept_are_right(mode: str) -> None:
    file = WatchedSource(seal(PLAINTEXT, mode))
    source = open_blocks(file, KEY, mode)
    readers = iter(range(6))

    def next_reader() -> None:
        index = next(readers, None)
        if index is not None:
            whole = PLAINTEXT[index * BLOCK : (index + 1) * BLOCK]
            assert read_range(source, index * BLOCK, BLOCK) == whole

    file.before_read = next_reader
    assert read_range(source, 0, len(PLAINTEXT)) == PLAINTEXT
    assert next(readers, None) is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, BLOCK])
def test_block_changed_after_opening_is_tampered_and_leaves_zeros(mode: str, length: int) -> None:
    file = WatchedSource(seal(PLAINTEXT, mode))
    source = open_blocks(file, KEY, mode)
    file.data[100] ^= 1
    buffer = bytearray(b"\xee" * length)
    with pytest.raises(TamperedError, match="block 0") as caught:
        source.read_into(0, memoryview(buffer))
    assert caught.value.offset == 0
    assert set(buffer) <= {0, 0xEE}


@pytest.mark.parametrize("mode", MODES)
def test_block_of_unsealed_file_that_changes_length_after_opening_is_tampered(mode: str) -> None:
    records = split(seal(PLAINTEXT[: 2 * BLOCK], mode), mode)[:2]
    shorter = split(seal(PLAINTEXT[:16], mode), mode)[0]
    file = WatchedSource(b"".join(records))
    source = open_blocks(file, KEY, mode, allow_unsealed=True)
    file.data[: len(shorter)] = shorter
    with pytest.raises(TamperedError, match="block 0 changed while the file was open"):
        read_range(source, 0, BLOCK)


@pytest.mark.parametrize(("mode", "place"), [("AES-GCM", -1), ("AES-CBC", -21), ("SM4-CBC", -21)])
def test_end_of_unsealed_file_that_changes_after_opening_does_not_open(
    mode: str, place: int
) -> None:
    file = WatchedSource(unsealed(PLAINTEXT, mode))
    source = open_blocks(file, KEY, mode, allow_unsealed=True)
    file.data[place] ^= 1  # in CBC, of the IV of a single cipher block, and so of the padding
    with pytest.raises(DecryptionError, match="does not open"):
        read_range(source, 0, len(PLAINTEXT))


def test_block_of_unsealed_gcm_file_that_is_changed_does_not_open() -> None:
    file = bytearray(unsealed(PLAINTEXT, "AES-GCM"))
    file[-1] ^= 1
    source = opened("AES-GCM", bytes(file), allow_unsealed=True)
    assert read_range(source, 0, 6 * BLOCK) == PLAINTEXT[: 6 * BLOCK]
    with pytest.raises(DecryptionError, match="block 6 does not open") as caught:
        read_range(source, 6 * BLOCK, 1)
    assert caught.value.offset == 6 * (48 + BLOCK)
    assert not isinstance(caught.value, TamperedError)


@pytest.mark.parametrize("mode", ["AES-CBC", "SM4-CBC"])
def test_unsealed_cbc_file_under_another_key_does_not_open(mode: str) -> None:
    file = unsealed(PLAINTEXT, mode, block_bytes=16)
    with pytest.raises(DecryptionError, match=r"block \d+ does not open"):
        open_blocks(BytesSource(file), OTHER_KEY, mode, allow_unsealed=True)


@pytest.mark.parametrize("mode", MODES)
def test_unsealed_file_is_refused_unless_allowed(mode: str) -> None:
    file = unsealed(PLAINTEXT, mode)
    with pytest.raises(UnsealedError) as caught:
        opened(mode, file)
    assert caught.value.hint is not None
    assert "its end was cut off" in caught.value.hint


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [0, 7, BLOCK, 391])
def test_sealed_file_under_another_key_does_not_open(mode: str, size: int) -> None:
    file = seal(PLAINTEXT[:size], mode)
    for _ in range(20):
        with pytest.raises(DecryptionError, match="the seal does not open") as caught:
            open_blocks(BytesSource(file), Key(os.urandom(16)), mode)
        assert not isinstance(caught.value, TamperedError)


def test_key_that_does_not_fit_the_mode_is_refused_before_reading() -> None:
    file = WatchedSource(seal(PLAINTEXT, "SM4-CBC"))
    with pytest.raises(KeyLengthError):
        open_blocks(file, Key(bytes(32)), "SM4-CBC")
    assert file.bytes_read == 0


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(UnsupportedSuiteError):
        open_blocks(BytesSource(b""), KEY, "SM4-GCM")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_crc", [True, False])
@given(data=st.data())
def test_peek_into_any_range_equals_the_slice(
    mode: str, has_crc: bool, data: st.DataObject
) -> None:
    file = seal(PLAINTEXT, mode, has_crc=has_crc)
    whole = unseal(file, mode)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    buffer = bytearray(stop - start)
    opened(mode, file).peek_into(start, memoryview(buffer))
    assert bytes(buffer) == whole[start:stop]


@pytest.mark.parametrize("mode", MODES)
def test_peek_reads_only_what_it_decrypts(mode: str) -> None:
    source = WatchedSource(seal(PLAINTEXT, mode))
    blocks = open_blocks(source, KEY, mode)
    source.bytes_read = 0
    buffer = bytearray(16)
    blocks.peek_into(BLOCK + 32, memoryview(buffer))
    assert bytes(buffer) == PLAINTEXT[BLOCK + 32 :][:16]
    assert source.bytes_read <= 32  # in CBC the block before is needed, too


@pytest.mark.parametrize("mode", MODES)
def test_seal_offset_is_where_the_seal_starts(mode: str) -> None:
    file = seal(PLAINTEXT, mode)
    assert opened(mode, file).seal_offset == len(file) - len(split(file, mode)[-1])


@pytest.mark.parametrize("mode", MODES)
def test_peek_into_past_the_end_is_truncated(mode: str) -> None:
    source = opened(mode, seal(PLAINTEXT, mode))
    with pytest.raises(TruncatedCiphertextError):
        source.peek_into(len(PLAINTEXT), memoryview(bytearray(1)))


@pytest.mark.parametrize("mode", MODES)
def test_block_bytes_are_known_with_a_seal_only(mode: str) -> None:
    assert opened(mode, seal(PLAINTEXT, mode)).block_bytes == BLOCK
    assert opened(mode, unsealed(PLAINTEXT, mode), allow_unsealed=True).block_bytes is None
