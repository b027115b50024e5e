# SPDX-License-Identifier: Apache-2.0
"""Detection by the first bytes of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.formats.detect import Kind, detect
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.formats.safetensors_file import build_safetensors_image
from ckptmgr.formats.source import BytesSource
from tests.support.stored import image_bytes
from tests.support.strategies import named_tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "files"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", Kind.EMPTY),
        (b"\n", Kind.MINDSPORE_CKPT),
        (b"\xd8\x5e\x3a\x7f", Kind.MINDSPORE_ENCRYPTED),
        (b"\xd9\x5e\x3a\x7f....", Kind.MINDSPORE_ENCRYPTED),
        (b"\xda\x5e\x3a\x7f....", Kind.MINDSPORE_ENCRYPTED),
        (b"\xd8\x5e\x3a", Kind.UNKNOWN),
        (b"\x8fCKPE\r\n\x1a....", Kind.CKPTMGR_CONTAINER),
        (b"\x8fCKPE\n\x1a....", Kind.UNKNOWN),
        (b"PK\x03\x04....", Kind.ZIP_PICKLE),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", Kind.UNKNOWN),
        (bytes(64), Kind.UNKNOWN),
        (b"crc_num" + bytes(10), Kind.UNKNOWN),
        (b"\x02" + bytes(7) + b"{}", Kind.SAFETENSORS),
        (b"\x0a" + bytes(7) + b"{} ", Kind.SAFETENSORS),
        (b"\x05" + bytes(7) + b" \r\n\t{}", Kind.SAFETENSORS),
        (b"\x20" + bytes(7) + b" " * 30 + b"{}", Kind.SAFETENSORS),
        (b"\x02" + bytes(7) + b"[]", Kind.UNKNOWN),
        (b"\x03" + bytes(7) + b" []", Kind.UNKNOWN),
        (b"\xff" * 8 + b"{}", Kind.UNKNOWN),
        (b"\x02" + bytes(7), Kind.UNKNOWN),
    ],
)
def test_detect_names_the_kind(data: bytes, kind: Kind) -> None:
    assert detect(BytesSource(data)) is kind


def test_detect_knows_what_our_writers_write() -> None:
    item = named_tensor("w")
    written = {
        Kind.MINDSPORE_CKPT: [build_ckpt_image([item]), build_ckpt_image([item], metadata={})],
        Kind.SAFETENSORS: [build_safetensors_image([item])],
    }
    for kind, images in written.items():
        assert {detect(BytesSource(image_bytes(image))) for image in images} == {kind}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.*")), ids=lambda path: path.name)
def test_detect_knows_what_mindspore_writes(path: Path) -> None:
    if path.suffix == ".json":
        kind = Kind.UNKNOWN
    elif path.suffix == ".safetensors":
        kind = Kind.SAFETENSORS
    elif path.name.startswith(("ckpt_", "slices_sync", "slices_async", "complex64")):
        kind = Kind.MINDSPORE_CKPT
    else:
        kind = Kind.MINDSPORE_ENCRYPTED
    assert detect(BytesSource(path.read_bytes())) is kind
