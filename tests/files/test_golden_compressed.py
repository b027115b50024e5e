# SPDX-License-Identifier: Apache-2.0
"""Compressed files of each version, written once and readable for ever, also by a reader made from the page about them.

`reference` is written from `docs/container-format.md`, section 6, and shares no code with ours.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3

from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.values import read_values
from ckptmgr.formats.source import BytesSource, read_bytes
from tests.support import api

GOLDEN = Path(__file__).parents[1] / "golden/compressed"
PLAIN = (GOLDEN / "plain.safetensors").read_bytes()
KEY = api.Key(bytes(range(32)))


def reference(file: bytes) -> bytes:
    """Expand a compressed file."""
    end = file[-64:]
    assert end[56:] == b"CKPZTBL1"
    count, raw_bytes, zero = struct.unpack_from("<QQQ", end)
    table = file[-64 - 56 * count : -64]
    assert blake3(file[:16] + table + end[:24]).digest() == end[24:56]
    expanded = b""
    for index in range(count):
        offset, stored, raw, group, method = struct.unpack_from("<QIIBB", table, 56 * index)
        frame = file[offset : offset + stored]
        assert blake3(frame).digest() == table[56 * index + 24 : 56 * index + 56]
        if method == 2:
            frame = planes_of(frame, group, raw // group)
        elif method:
            planes = zstandard.decompress(frame)
            rows = raw // group
            frame = bytes(planes[j * rows + i] for i in range(rows) for j in range(group))
        assert len(frame) == raw
        expanded += frame
    assert (len(expanded), zero) == (raw_bytes, 0)
    return expanded


def planes_of(frame: bytes, group: int, rows: int) -> bytes:
    """Expand a frame of planes."""
    elements = [bytearray(group) for _ in range(rows)]
    form, planes = frame[0], frame[1]
    at = 8 + 8 * planes
    for index in range(planes):
        first, width, method, _, stored = struct.unpack_from("<BBBBI", frame, 8 + 8 * index)
        content = frame[at : at + stored]
        at += stored
        if method == 1:
            content = zstandard.decompress(content)
        elif method == 2:
            content *= rows
        for row, element in enumerate(elements):
            element[first : first + width] = content[row * width : (row + 1) * width]
    assert at == len(frame)
    if form == 0:
        return b"".join(elements)
    below, bits = 8 * group - 9, (int.from_bytes(element, "little") for element in elements)
    return b"".join(
        (
            (one >> below & 1) << 8 * group - 1
            | (one >> below + 1) << below
            | one & (1 << below) - 1
        ).to_bytes(group, "little")
        for one in bits
    )


@pytest.mark.parametrize("name", ["plain.safetensors.ckpz", "planes.safetensors.ckpz"])
def test_reference_expands_the_golden_file(name: str) -> None:
    assert reference((GOLDEN / name).read_bytes()) == PLAIN


@pytest.mark.parametrize(
    "name",
    [
        "plain.safetensors.ckpz",
        "AES-GCM.safetensors.ckpe",
        "SM4-CBC.safetensors.ckpe",
        "planes.safetensors.ckpz",
        "planes.AES-GCM.safetensors.ckpe",
    ],
)
def test_golden_file_is_read(name: str) -> None:
    options = api.reading(keys=None if name.endswith(".ckpz") else KEY)
    opened = open_source(
        BytesSource((GOLDEN / name).read_bytes()), path=name, options=options, is_for_loading=True
    )
    assert read_bytes(opened.source, 0, opened.source.size) == PLAIN
    assert read_values(opened).keys() == {"w", "h", "ids", "flags", "noise", "none"}
