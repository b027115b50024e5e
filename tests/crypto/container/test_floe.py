# SPDX-License-Identifier: Apache-2.0
"""FLOE against its published answers, and segment by segment."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmgr.crypto.container.floe import (
    HEADER_BYTES,
    MAX_SEGMENTS,
    FloeMessage,
    FloeParameters,
    start_decryption,
    start_encryption,
)
from ckptmgr.crypto.container.suites import FLOE_256, SUITES, Suite
from ckptmgr.crypto.errors import DecryptionError, TamperedError

VECTORS = Path(__file__).parents[2] / "vectors" / "floe"
KEY = bytes(32)
AAD = b"This is AAD"
SEGMENT_BYTES = {"64": 64, "4K": 4096, "rotation": 40, "lastSegAligned": 40, "lastSegEmpty": 40}


def hex_of(path: Path) -> bytes:
    return bytes.fromhex(path.read_text().strip())


def parameters_of(name: str) -> FloeParameters:
    kind = name.rsplit("_", 1)[1]
    parameters = FLOE_256.parameters(SEGMENT_BYTES[kind])
    return replace(parameters, rotation_bits=2) if kind == "rotation" else parameters


def decrypt(parameters: FloeParameters, message: bytes) -> bytes:
    """Decrypt a message whose length is taken as given."""
    floe = start_decryption(parameters, KEY, aad=AAD, header=message[:HEADER_BYTES])
    starts = range(HEADER_BYTES, len(message), parameters.segment_bytes)
    plaintext = b""
    for index, start in enumerate(starts):
        segment = message[start : start + parameters.segment_bytes]
        part = bytearray(len(segment) - 32)
        is_final = index == len(starts) - 1
        floe.open_into(index, memoryview(segment), memoryview(part), is_final=is_final)
        plaintext += part
    return plaintext


@pytest.mark.parametrize(
    "name",
    [
        *(f"{who}_{what}" for who in ("cpp", "go", "java", "rust", "pub_java")
          for what in ("GCM256_IV256_64", "GCM256_IV256_4K", "rotation")),
        "java_lastSegAligned",
        "java_lastSegEmpty",
    ],
)  # fmt: skip
def test_published_message_decrypts_as_published(name: str) -> None:
    plaintext = decrypt(parameters_of(name), hex_of(VECTORS / f"{name}_ct.txt"))
    assert plaintext == hex_of(VECTORS / f"{name}_pt.txt")


@pytest.mark.parametrize("name", ["go_GCM256_IV256_64", "cpp_rotation", "java_lastSegAligned"])
def test_published_message_is_made_again_from_its_random_bytes(name: str) -> None:
    expected, plaintext = (hex_of(VECTORS / f"{name}_{kind}.txt") for kind in ("ct", "pt"))
    parameters = parameters_of(name)
    starts = list(range(HEADER_BYTES, len(expected), parameters.segment_bytes))
    ivs = iter([expected[10:42], *(expected[at + 4 : at + 16] for at in starts)])
    message = start_encryption(parameters, KEY, aad=AAD, random=lambda _: next(ivs))
    made = message.header
    full = parameters.plaintext_bytes
    for index in range(len(starts)):
        part = memoryview(plaintext)[index * full : (index + 1) * full]
        segment = bytearray(parameters.segment_size(part.nbytes))
        message.seal_into(
            index,
            part,
            memoryview(segment),
            is_final=index == len(starts) - 1,
            random=lambda _: next(ivs),
        )
        made += segment
    assert made == expected


SMALL = 128
SUITE_NAMES = [suite.mode for suite in SUITES]


def started(suite: Suite) -> FloeMessage:
    return start_encryption(suite.parameters(SMALL), KEY, aad=AAD, random=os.urandom)


def segment_of(message: FloeMessage, index: int, plaintext: bytes, *, is_final: bool) -> bytearray:
    segment = bytearray(message.parameters.segment_size(len(plaintext)))
    message.seal_into(
        index, memoryview(plaintext), memoryview(segment), is_final=is_final, random=os.urandom
    )
    return segment


def open_segment(message: FloeMessage, index: int, segment: bytearray, *, is_final: bool) -> bytes:
    full = message.parameters.plaintext_bytes
    plaintext = bytearray(b"\xff" * full)
    message.open_into(index, memoryview(segment), memoryview(plaintext), is_final=is_final)
    return bytes(plaintext)


@pytest.mark.parametrize("suite", SUITES, ids=SUITE_NAMES)
def test_every_bit_of_a_segment_is_authenticated_and_failure_leaves_zeros(suite: Suite) -> None:
    message = started(suite)
    full = message.parameters.plaintext_bytes
    plaintext = os.urandom(full)
    segment = segment_of(message, 0, plaintext, is_final=False)
    assert len(segment) == SMALL
    for bit in range(8 * len(segment)):
        segment[bit // 8] ^= 1 << bit % 8
        target = bytearray(b"\xff" * full)
        with pytest.raises(TamperedError, match="segment 0 was changed"):
            message.open_into(0, memoryview(segment), memoryview(target), is_final=False)
        assert target == bytes(full)
        segment[bit // 8] ^= 1 << bit % 8
    assert open_segment(message, 0, segment, is_final=False) == plaintext


@pytest.mark.parametrize("suite", SUITES, ids=SUITE_NAMES)
def test_segment_at_another_position_or_as_the_end_is_refused(suite: Suite) -> None:
    message = started(suite)
    segment = segment_of(message, 3, bytes(message.parameters.plaintext_bytes), is_final=False)
    for index, is_final in ((2, False), (4, False), (3 + (1 << 20), False), (3, True)):
        with pytest.raises(TamperedError):
            open_segment(message, index, segment, is_final=is_final)


@pytest.mark.parametrize("suite", SUITES, ids=SUITE_NAMES)
def test_final_segment_shorter_or_longer_than_said_is_refused(suite: Suite) -> None:
    message = started(suite)
    segment = segment_of(message, 0, bytes(5), is_final=True)
    assert int.from_bytes(segment[:4], "big") == len(segment)
    with pytest.raises(TamperedError):
        message.open_into(
            0, memoryview(segment + bytes(16)), memoryview(bytearray(21)), is_final=True
        )


@pytest.mark.parametrize("suite", SUITES, ids=SUITE_NAMES)
@pytest.mark.parametrize("bit", range(0, 8 * HEADER_BYTES, 7))
def test_header_with_a_flipped_bit_does_not_open(suite: Suite, bit: int) -> None:
    header = bytearray(started(suite).header)
    assert len(header) == HEADER_BYTES
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DecryptionError, match="header tag"):
        start_decryption(suite.parameters(SMALL), KEY, aad=AAD, header=bytes(header))


def test_message_with_other_associated_data_does_not_open() -> None:
    header = started(FLOE_256).header
    with pytest.raises(DecryptionError):
        start_decryption(FLOE_256.parameters(SMALL), KEY, aad=AAD + b"!", header=header)


def test_message_under_another_key_does_not_open() -> None:
    header = started(FLOE_256).header
    with pytest.raises(DecryptionError):
        start_decryption(FLOE_256.parameters(SMALL), b"\1" * 32, aad=AAD, header=header)


def test_segments_on_both_sides_of_a_rotation_have_unrelated_keys() -> None:
    parameters = replace(FLOE_256.parameters(SMALL), rotation_bits=0)
    message = start_encryption(parameters, KEY, aad=AAD, random=os.urandom)
    segment = segment_of(message, 0, bytes(SMALL - 32), is_final=False)
    rotated = start_decryption(parameters, KEY, aad=AAD, header=message.header)
    never = replace(parameters, rotation_bits=20)
    same = start_decryption(never, KEY, aad=AAD, header=message.header)
    assert open_segment(same, 0, segment, is_final=False) == bytes(SMALL - 32)
    other = segment_of(rotated, 1, bytes(SMALL - 32), is_final=False)
    with pytest.raises(TamperedError):
        open_segment(same, 1, other, is_final=False)


@pytest.mark.parametrize(
    ("index", "plaintext", "segment", "is_final"),
    [
        (0, 95, 128, False),
        (0, 97, 129, True),
        (0, 96, 127, False),
        (-1, 96, 128, False),
        (MAX_SEGMENTS, 96, 128, False),
    ],
)
def test_segment_of_wrong_size_or_index_is_refused(
    index: int, plaintext: int, segment: int, is_final: bool
) -> None:
    message = started(FLOE_256)
    with pytest.raises(ValueError, match="segment"):
        message.open_into(
            index,
            memoryview(bytes(segment)),
            memoryview(bytearray(plaintext)),
            is_final=is_final,
        )


@pytest.mark.parametrize("suite", SUITES, ids=SUITE_NAMES)
@pytest.mark.parametrize("size", [0, 1, 32])
def test_segment_that_holds_nothing_is_no_parameter(suite: Suite, size: int) -> None:
    with pytest.raises(ValueError, match="does not suit"):
        suite.parameters(size)


@pytest.mark.parametrize("mode", ["AES-CBC", "SM4-CBC"])
def test_segment_that_cbc_cannot_fill_is_no_parameter(mode: str) -> None:
    suite = next(suite for suite in SUITES if suite.mode == mode)
    with pytest.raises(ValueError, match="does not suit"):
        suite.parameters(SMALL + 1)
