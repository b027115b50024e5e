# SPDX-License-Identifier: Apache-2.0
"""Compressed files of version 1, written once and readable for ever, also by who knows only the page about them.

`reference` is written from `docs/container-format.md`, section 6, and shares no code with ours.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import zstandard
from blake3 import blake3

from ckptmgr.core.trust import Trust
from ckptmgr.crypto.keys.key import Key
from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.values import read_values
from ckptmgr.formats.source import BytesSource, read_bytes

GOLDEN = Path(__file__).parents[1] / "golden/compressed"
PLAIN = (GOLDEN / "plain.safetensors").read_bytes()
KEY = Key(bytes(range(32)))


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
        if method:
            planes = zstandard.decompress(frame)
            rows = raw // group
            frame = bytes(planes[j * rows + i] for i in range(rows) for j in range(group))
        assert len(frame) == raw
        expanded += frame
    assert (len(expanded), zero) == (raw_bytes, 0)
    return expanded


def test_reference_expands_the_golden_file() -> None:
    assert reference((GOLDEN / "plain.safetensors.ckpz").read_bytes()) == PLAIN


@pytest.mark.parametrize(
    "name", ["plain.safetensors.ckpz", "AES-GCM.safetensors.ckpe", "SM4-CBC.safetensors.ckpe"]
)
def test_golden_file_is_read(name: str) -> None:
    options = ReadOptions(trust=Trust(keys=None if name.endswith(".ckpz") else KEY))
    opened = open_source(
        BytesSource((GOLDEN / name).read_bytes()), path=name, options=options, is_for_loading=True
    )
    assert read_bytes(opened.source, 0, opened.source.size) == PLAIN
    assert read_values(opened).keys() == {"w", "h", "ids", "flags", "noise", "none"}
