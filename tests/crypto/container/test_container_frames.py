# SPDX-License-Identifier: Apache-2.0
"""Containers whose length is known last: complete they open, and any other length is refused."""

from __future__ import annotations

import pytest

from ckptmgr.crypto.container.compressed_writer import FramesSealer
from ckptmgr.crypto.container.header import Content
from ckptmgr.crypto.container.rekey import rewrite_header
from ckptmgr.crypto.container.source import ContainerSource, open_container
from ckptmgr.crypto.container.writer import ContainerSealer
from ckptmgr.crypto.errors import CryptoError, TamperedError, TruncatedCiphertextError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.slots.secret import RawKey
from ckptmgr.formats.source import BytesSource, read_bytes

from .containers import seal

ME = RawKey(Key(bytes(range(32))))
MODES = ("AES-GCM", "SM4-GCM", "AES-CBC", "SM4-CBC")
SEGMENT_BYTES = 1024
RAW_BYTES = 10**12


def frames_container(
    plaintext: bytes, mode: str = "AES-GCM", *, segment_bytes: int = SEGMENT_BYTES
) -> bytes:
    sealer = FramesSealer([ME], mode, raw_size=RAW_BYTES, segment_bytes=segment_bytes)
    file = bytearray(sealer.head)
    full = sealer.plaintext_bytes
    starts = range(0, len(plaintext), full)
    for index, start in enumerate(starts):
        part = memoryview(plaintext)[start : start + full]
        segment = memoryview(bytearray(sealer.segment_size(part.nbytes)))
        sealer.seal_into(index, part, segment, is_final=start == starts[-1])
        file += segment
    return bytes(file)


def opened(file: bytes) -> ContainerSource:
    return open_container(BytesSource(file), [ME])


def plaintext_in(file: bytes) -> bytes:
    container = opened(file)
    return read_bytes(container, 0, container.size)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", [-32, -16, 0, 16, 32, 944, 992, 2000])
def test_length_of_the_plaintext_follows_from_the_file(mode: str, extra: int) -> None:
    full = FramesSealer([ME], mode, raw_size=1, segment_bytes=SEGMENT_BYTES).plaintext_bytes
    plaintext = bytes(range(256)) * 20
    plaintext = plaintext[: (full + extra) // 16 * 16]
    container = opened(frames_container(plaintext, mode))
    assert read_bytes(container, 0, container.size) == plaintext
    assert container.content is Content.FRAMES
    assert container.unlocked.header.fixed.plaintext_size == RAW_BYTES


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", [-16, 0, 16, 32, 944, 992, 2000])
def test_frames_of_a_known_length_are_sealed_like_any_other_content(mode: str, extra: int) -> None:
    full = FramesSealer([ME], mode, raw_size=1, segment_bytes=SEGMENT_BYTES).plaintext_bytes
    plaintext = (bytes(range(256)) * 20)[: (full + extra) // 16 * 16]
    container = opened(
        seal(
            plaintext,
            mode,
            recipients=[ME],
            content=Content.FRAMES,
            raw_size=RAW_BYTES,
            segment_bytes=SEGMENT_BYTES,
        )
    )
    assert read_bytes(container, 0, container.size) == plaintext
    assert container.content is Content.FRAMES
    assert container.unlocked.header.fixed.plaintext_size == RAW_BYTES


@pytest.mark.parametrize(
    ("content", "size", "raw_size"),
    [
        (Content.FRAMES, 32, None),
        (Content.SAFETENSORS, 32, 64),
        (Content.FRAMES, 33, 64),
        (Content.FRAMES, 0, 64),
    ],
)
def test_frames_and_what_they_expand_to_belong_together(
    content: Content, size: int, raw_size: int | None
) -> None:
    with pytest.raises(ValueError, match="frames"):
        ContainerSealer([ME], plaintext_size=size, content=content, raw_size=raw_size)


@pytest.mark.parametrize("mode", MODES)
def test_segments_that_cannot_tell_the_length_of_frames_are_refused(mode: str) -> None:
    with pytest.raises(ValueError, match="segment"):
        ContainerSealer(
            [ME],
            mode,
            plaintext_size=80,
            content=Content.FRAMES,
            raw_size=80,
            segment_bytes=SEGMENT_BYTES + 4,
        )


@pytest.mark.parametrize("mode", MODES)
def test_every_other_length_is_refused(mode: str) -> None:
    file = frames_container(bytes(2400), mode)
    for length in range(len(file) - 3 * SEGMENT_BYTES, len(file)):
        with pytest.raises(CryptoError):
            plaintext_in(file[: max(0, length)])


def test_cut_between_two_segments_is_truncation() -> None:
    file = frames_container(bytes(2400))
    with pytest.raises(TruncatedCiphertextError, match="before its last segment"):
        opened(file[: 12288 + 2 * SEGMENT_BYTES])


@pytest.mark.parametrize(
    "length", [12287, 12288, 12288 + 20, len(frames_container(bytes(2400))) - 3]
)
def test_cut_inside_a_segment_is_truncation(length: int) -> None:
    with pytest.raises(TruncatedCiphertextError):
        opened(frames_container(bytes(2400))[:length])


def test_bytes_behind_the_last_segment_are_tampering() -> None:
    file = frames_container(bytes(2400))
    with pytest.raises(TamperedError, match="added behind the last"):
        opened(file + bytes(16))


def test_whole_segments_behind_the_last_one_are_refused() -> None:
    file = frames_container(bytes(2400))
    last = file[-(len(file) - 12288) % SEGMENT_BYTES :]
    padded = file + bytes(-(len(file) - 12288) % SEGMENT_BYTES) + last
    with pytest.raises(CryptoError):
        plaintext_in(padded)


def test_segment_that_was_made_the_last_one_is_found() -> None:
    file = bytearray(frames_container(bytes(2400)))
    cut = file[: 12288 + 2 * SEGMENT_BYTES]
    cut[12288 + SEGMENT_BYTES : 12292 + SEGMENT_BYTES] = SEGMENT_BYTES.to_bytes(4, "big")
    with pytest.raises(TamperedError, match="segment 1 was changed"):
        plaintext_in(bytes(cut))


def test_keys_are_added_without_touching_the_payload() -> None:
    file = bytearray(frames_container(bytes(2400)))
    payload = file[8192:]
    other = RawKey(Key(bytes(32)))
    for write in rewrite_header(opened(bytes(file)).unlocked, add=[other]):
        file[write.offset : write.offset + len(write.data)] = write.data
    container = open_container(BytesSource(bytes(file)), [other])
    assert read_bytes(container, 0, container.size) == bytes(2400)
    assert file[8192:] == payload


def test_content_of_another_container_cannot_be_called_frames() -> None:
    sealer = ContainerSealer([ME], plaintext_size=32, content=Content.SAFETENSORS)
    segment = memoryview(bytearray(sealer.record_range(0)[1]))
    sealer.seal_into(0, memoryview(bytes(32)), segment)
    file = bytearray(sealer.head + bytes(segment))
    for copy in (0, 4096):
        file[copy + 40] = Content.FRAMES
    with pytest.raises(CryptoError):
        opened(bytes(file))
