# SPDX-License-Identifier: Apache-2.0
"""Containers written, read in any order, and compared with a second implementation."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.crypto.container.header import COPY_SIZES, MAX_SEGMENT_BYTES, Content
from ckptmgr.crypto.container.source import open_container
from ckptmgr.crypto.container.unlock import CopyState
from ckptmgr.crypto.container.writer import SEGMENT_BYTES, ContainerSealer
from ckptmgr.crypto.errors import (
    TamperedError,
    TruncatedCiphertextError,
    UnsupportedSuiteError,
)
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.slots import Recipient, Slot
from ckptmgr.formats.detect import Kind, detect
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.mindspore.reader import read_ckpt_index
from ckptmgr.formats.safetensors_file import read_safetensors_index
from ckptmgr.formats.source import BytesSource
from tests.crypto.mindspore.sealing import read_range

from . import container_reference as reference
from .containers import HEAD, ME, MODES, SEGMENT, opened, seal, segments, unseal

FULL = {"AES-GCM": 96, "SM4-GCM": 96, "AES-CBC": 48, "SM4-CBC": 48}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("segment_count", [0, 1, 2, 3])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_plaintext_of_any_size_comes_back(mode: str, segment_count: int, more: int) -> None:
    size = max(0, segment_count * FULL[mode] + more)
    plaintext = os.urandom(size)
    file = seal(plaintext, mode)
    assert unseal(file) == plaintext
    assert len(segments(file)) - 1 == max(1, -(-size // FULL[mode]))


@pytest.mark.parametrize("mode", MODES)
def test_segment_of_default_size_is_aligned_and_exact(mode: str) -> None:
    sealer = ContainerSealer([ME], mode, plaintext_size=2**25)
    assert [sealer.record_range(index) for index in (0, 1)] == [
        (HEAD, SEGMENT_BYTES),
        (HEAD + SEGMENT_BYTES, SEGMENT_BYTES),
    ]
    assert len(sealer.head) == HEAD
    assert sum(sealer.record_range(sealer.block_count - 1)) == sealer.sealed_size


@settings(max_examples=60)
@given(data=st.data())
def test_any_range_of_the_plaintext_can_be_read(data: st.DataObject) -> None:
    plaintext = data.draw(st.binary(max_size=5 * 96))
    source = opened(seal(plaintext, data.draw(st.sampled_from(MODES))))
    for _ in range(6):
        start = data.draw(st.integers(0, len(plaintext)))
        stop = data.draw(st.integers(start, len(plaintext)))
        assert read_range(source, start, stop - start) == plaintext[start:stop]


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 11), (10, 1), (11, 0)])
def test_range_outside_the_plaintext_is_refused(offset: int, length: int) -> None:
    source = opened(seal(bytes(10)))
    with pytest.raises(TruncatedCiphertextError, match="the plaintext has 10"):
        source.read_into(offset, memoryview(bytearray(length)))


def test_payload_is_a_floe_message_of_its_own() -> None:
    file = seal(b"weights")
    data_key = opened(file).unlocked.data_key.raw
    message = file[HEAD - 74 :]
    assert reference.floe_decrypt(data_key, file[:64], message, SEGMENT) == b"weights"


@pytest.mark.parametrize("mode", MODES)
def test_same_plaintext_twice_gives_unrelated_files(mode: str) -> None:
    a, b = seal(bytes(200), mode), seal(bytes(200), mode)
    assert opened(a).unlocked.data_key != opened(b).unlocked.data_key
    assert opened(a).file_id != opened(b).file_id
    assert not set(segments(a)[1:]) & set(segments(b)[1:])


def test_opened_container_says_what_it_is() -> None:
    source = opened(seal(bytes(100), "SM4-GCM", content=Content.SAFETENSORS))
    assert (source.size, source.mode, source.content) == (100, "SM4-GCM", Content.SAFETENSORS)
    assert (source.block_count, source.block_bytes, source.head_bytes) == (2, 96, HEAD)
    assert source.unlocked.states == (CopyState.CURRENT, CopyState.CURRENT)


def test_segments_sealed_by_several_threads_in_any_order_make_the_file() -> None:
    plaintext = os.urandom(50 * 96)
    sealer = ContainerSealer([ME], plaintext_size=len(plaintext), segment_bytes=SEGMENT)
    file = memoryview(bytearray(sealer.sealed_size))
    file[: len(sealer.head)] = sealer.head

    def work(first: int) -> None:
        for index in reversed(range(first, sealer.block_count, 4)):
            start, size = sealer.plaintext_range(index)
            at, length = sealer.record_range(index)
            part = memoryview(plaintext)[start : start + size]
            sealer.seal_into(index, part, file[at : at + length])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sealer.finish()
    assert unseal(bytes(file)) == plaintext


def test_container_read_by_several_threads_gives_each_its_bytes() -> None:
    plaintext = os.urandom(20 * 96)
    source = opened(seal(plaintext))
    wrong: list[int] = []

    def work(first: int) -> None:
        for step in range(200):
            start = (first * 37 + step * 91) % (len(plaintext) - 150)
            if read_range(source, start, 150) != plaintext[start : start + 150]:
                wrong.append(start)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_head_is_refused_by_other_readers() -> None:
    source = BytesSource(seal(bytes(100)))
    assert detect(source) is Kind.CKPTMGR_CONTAINER
    with pytest.raises(FormatError):
        read_safetensors_index(source)
    with pytest.raises(FormatError):
        read_ckpt_index(source)


def test_unfinished_file_is_named_by_its_first_missing_segment() -> None:
    sealer = ContainerSealer([ME], plaintext_size=3 * 96, segment_bytes=SEGMENT)
    for index in (0, 2):
        sealer.seal_into(index, memoryview(bytes(96)), memoryview(bytearray(SEGMENT)))
    with pytest.raises(ValueError, match="segment 1 of 3 was not sealed"):
        sealer.finish()


def test_segment_is_sealed_once() -> None:
    sealer = ContainerSealer([ME], plaintext_size=5, segment_bytes=SEGMENT)
    sealer.seal_into(0, memoryview(bytes(5)), memoryview(bytearray(37)))
    with pytest.raises(ValueError, match="segment 0 is sealed twice"):
        sealer.seal_into(0, memoryview(bytes(5)), memoryview(bytearray(37)))


@pytest.mark.parametrize(("plaintext", "segment"), [(4, 37), (5, 38), (6, 38)])
def test_segment_of_wrong_size_is_refused(plaintext: int, segment: int) -> None:
    sealer = ContainerSealer([ME], plaintext_size=5, segment_bytes=SEGMENT)
    with pytest.raises(ValueError, match="segment 0 has 37 bytes for 5"):
        sealer.seal_into(0, memoryview(bytes(plaintext)), memoryview(bytearray(segment)))


@pytest.mark.parametrize("index", [-1, 1])
def test_segment_that_does_not_exist_is_refused(index: int) -> None:
    sealer = ContainerSealer([ME], plaintext_size=5, segment_bytes=SEGMENT)
    with pytest.raises(ValueError, match="there is no segment"):
        sealer.record_range(index)


@pytest.mark.parametrize("recipients", [[], [ME] * 17])
def test_number_of_recipients_out_of_range_is_refused(recipients: list[Recipient]) -> None:
    with pytest.raises(ValueError, match="1 to 16 key slots"):
        seal(b"x", recipients=recipients)


@pytest.mark.parametrize(
    "sizes",
    [
        (-1, SEGMENT, 4096),
        (2**63, SEGMENT, 4096),
        (1, 0, 4096),
        (1, 32, 4096),
        (1, MAX_SEGMENT_BYTES + 16, 4096),
        (1, SEGMENT, 4095),
        (2**62, 48, 4096),
    ],
)
def test_size_out_of_range_is_refused(sizes: tuple[int, int, int]) -> None:
    plaintext_size, segment_bytes, copy_bytes = sizes
    with pytest.raises(ValueError, match=r"range|none of|more than|suit"):
        ContainerSealer(
            [ME], plaintext_size=plaintext_size, segment_bytes=segment_bytes, copy_bytes=copy_bytes
        )


def test_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedSuiteError, match="AES-XTS") as caught:
        seal(b"x", "AES-XTS")
    assert caught.value.hint == "use one of AES-GCM, SM4-GCM, AES-CBC, SM4-CBC"


class LargeSlots:
    """A recipient whose slots are as long as hybrid ones."""

    def wrap(self, data_key: Key, *, bound: bytes) -> Slot:
        return Slot(type=99, key_id=bound[:8], body=bytes(1168))


@pytest.mark.parametrize(("count", "copy_bytes"), [(2, 4096), (3, 4096), (4, 8192), (15, 32768)])
def test_header_copies_grow_with_the_slots(count: int, copy_bytes: int) -> None:
    file = seal(b"weights", recipients=[*[LargeSlots()] * count, ME])
    assert (len(file), copy_bytes in COPY_SIZES) == (2 * copy_bytes + 4096 + 39, True)
    assert unseal(file) == b"weights"


def test_header_copies_of_a_given_size_do_not_grow() -> None:
    with pytest.raises(ValueError, match="do not fit into"):
        seal(b"x", recipients=[LargeSlots()] * 4, copy_bytes=4096)
    assert unseal(seal(b"x", copy_bytes=65536)) == b"x"


def test_damaged_empty_plaintext_is_found_when_it_is_opened() -> None:
    file = bytearray(seal(b""))
    file[-1] ^= 1
    with pytest.raises(TamperedError, match="segment 0"):
        opened(bytes(file))


class EndlessFile:
    """A container of zeros whose segments are encrypted when they are read."""

    def __init__(self, plaintext_size: int) -> None:
        self._sealer = ContainerSealer([ME], plaintext_size=plaintext_size)
        self.size = self._sealer.sealed_size
        self.reads: list[tuple[int, int]] = []
        self._segments: dict[int, bytearray] = {}

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.reads.append((offset, buffer.nbytes))
        if offset < HEAD:
            buffer[:] = self._sealer.head[offset : offset + buffer.nbytes]
            return
        if buffer.nbytes < SEGMENT_BYTES // 4:
            return  # a reader looks for a header there
        index, at = divmod(offset - HEAD, SEGMENT_BYTES)
        if index not in self._segments:
            zeros = memoryview(bytes(self._sealer.plaintext_range(index)[1]))
            self._segments = {index: bytearray(SEGMENT_BYTES)}
            self._sealer.seal_into(index, zeros, memoryview(self._segments[index]))
        buffer[:] = self._segments[index][at : at + buffer.nbytes]


def test_range_far_behind_the_first_key_rotation_costs_one_segment() -> None:
    full = SEGMENT_BYTES - 32
    file = EndlessFile((2**20 + 3) * full)
    source = open_container(file, [ME])
    file.reads.clear()
    for index in (2**20 + 2, 2**20, 2**20 - 1, 0):
        assert read_range(source, index * full + 5, 100) == bytes(100)
        assert file.reads[0][0] == HEAD + index * SEGMENT_BYTES
        assert sum(length for _, length in file.reads) == SEGMENT_BYTES
        file.reads.clear()
