# SPDX-License-Identifier: Apache-2.0
"""Files that are verified in one reading: right only if digests and contents both are."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import ChecksumMismatch, CkptmgrError, save_checkpoint
from ckptmgr.crypto.errors import CryptoError
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.source import BytesSource
from ckptmgr.io.digest import RANGE_BYTES, FileDigest, digest_of
from ckptmgr.io.threads import PIECE_BYTES
from ckptmgr.maintenance.check_file import HashingSource, verify_in_one_pass
from tests.support import api
from tests.support.saved import GOLDEN_FILES
from tests.support.surface import KEY

WITH_KEY = api.reading(keys=api.Key(KEY))
PLAIN: dict[str, Any] = {"enc_key": None}
BLANK_BYTES = 8192
WAYS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "plain crc": {**PLAIN, "crc_check": True},
    "safetensors": {**PLAIN, "format": "safetensors"},
    "safetensors crc": {**PLAIN, "format": "safetensors", "crc_check": True},
    "gcm": {},
    "gcm crc": {"crc_check": True},
    "cbc": {"enc_mode": "AES-CBC"},
    "sm4": {"enc_mode": "SM4-CBC"},
    "container": {"format": "safetensors"},
    "container crc": {"format": "safetensors", "crc_check": True},
}


class Counted(BytesSource):
    """Counts the bytes that are read."""

    read_bytes = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.read_bytes += buffer.nbytes
        super().read_into(offset, buffer)


def options_of(way: str) -> api.ReadOptions:
    return api.reading() if "enc_key" in WAYS[way] else WITH_KEY


def saved(directory: Path, way: str, size: int) -> tuple[bytes, FileDigest]:
    """Save tensors of so many bytes; return the file and its digests."""
    rng = np.random.default_rng(0)
    state = {"large": np.frombuffer(rng.bytes(size), np.uint8), "small": np.ones(3)}
    options = {"enc_key": KEY, **WAYS[way]}
    save_checkpoint(state, directory / f"x.{options.get('format', 'ckpt')}", **options)
    (path,) = (
        one for one in directory.iterdir() if one.name.startswith("x.") and one.suffix != ".json"
    )
    manifest = api.place(
        directory, keys=options_of(way).trust.keys, allow_unencrypted=True
    ).read_manifest(path.name)
    assert manifest is not None
    return path.read_bytes(), manifest.file.digest


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 17 << 20])
def test_file_is_right_after_one_reading(tmp_path: Path, way: str, size: int) -> None:
    data, digest = saved(tmp_path, way, size)
    source = Counted(data)
    checks = verify_in_one_pass(source, digest, path="x", options=options_of(way))
    assert checks == (("CRC32",) if way.endswith("crc") else ())
    assert source.read_bytes < 1.3 * len(data) + 100_000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, FileDigest]]:
    return {way: saved(tmp_path_factory.mktemp(way), way, 17 << 20) for way in WAYS}


@settings(max_examples=25)
@given(way=st.sampled_from(sorted(WAYS)), place=st.randoms(use_true_random=False))
def test_flipped_bit_is_never_right(
    files: dict[str, tuple[bytes, FileDigest]], way: str, place: random.Random
) -> None:
    content, digest = files[way]
    damaged = bytearray(content)
    # The header copies of a container are not digested: one is as good as the other.
    first = BLANK_BYTES if way.startswith("container") else 0
    damaged[place.choice([first, len(damaged) - 1, place.randrange(first, len(damaged))])] ^= 4
    try:
        checks = verify_in_one_pass(BytesSource(damaged), digest, path="x", options=options_of(way))
    except (CkptmgrError, CryptoError, FormatError):
        return
    assert checks is None


@pytest.mark.parametrize("way", ["plain", "gcm", "container"])
def test_digests_of_another_save_are_never_right(
    files: dict[str, tuple[bytes, FileDigest]], way: str
) -> None:
    content, digest = files[way]
    ranges = (digest.ranges[1], *digest.ranges[1:])
    other = FileDigest(size_bytes=len(content), ranges=ranges, blank_bytes=digest.blank_bytes)
    with pytest.raises(CkptmgrError):
        verify_in_one_pass(BytesSource(content), other, path="x", options=options_of(way))


@pytest.mark.parametrize("way", ["plain crc", "safetensors crc"])
def test_wrong_crc_is_not_right_though_the_digests_are(
    files: dict[str, tuple[bytes, FileDigest]], way: str
) -> None:
    content = bytearray(files[way][0])
    at = len(content) - 1
    if way == "safetensors crc":
        start = content.index(b"crc_num") + len(b"crc_num")
        at = next(place for place in range(start, at) if content[place : place + 1].isdigit())
    content[at] ^= 1
    source = BytesSource(content)
    with pytest.raises(FormatError, match="the CRC32 is"):
        verify_in_one_pass(source, digest_of(source), path="x", options=api.reading())


def test_file_that_is_not_sealed_is_left_to_others() -> None:
    data = (GOLDEN_FILES / "gcm128.ckpt").read_bytes()
    options = api.reading(keys=api.Key(bytes(range(16))), allow_unencrypted=True)
    digest = digest_of(BytesSource(data))
    assert verify_in_one_pass(BytesSource(data), digest, path="x", options=options) is None


def test_ranges_of_another_length_are_left_to_others() -> None:
    digest = FileDigest(size_bytes=1, ranges=(bytes(32),), range_bytes=1 << 20)
    assert verify_in_one_pass(BytesSource(b"x"), digest, path="x", options=WITH_KEY) is None


def test_source_that_was_not_started_is_not_right() -> None:
    content = b"content"
    digest = digest_of(BytesSource(content))
    assert not HashingSource(BytesSource(content), digest, path="x").finish()


LONG = 70_000  # more than is read twice to close a gap


@settings(max_examples=30)
@given(
    scale=st.sampled_from([1, LONG]),
    cuts=st.lists(st.integers(0, 40), max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_pieces_in_any_order_and_what_was_left_out_are_hashed(
    scale: int, cuts: list[int], order: random.Random
) -> None:
    content = bytes(range(40)) * scale
    source = HashingSource(BytesSource(content), digest_of(BytesSource(content)), path="x")
    source.start(head_bytes=3 * scale)
    ends = sorted({3, 40, *(cut for cut in cuts if cut > 3)})
    pieces = list(itertools.pairwise(ends))
    order.shuffle(pieces)
    for start, stop in pieces[1:]:
        source.read_into(start * scale, memoryview(bytearray((stop - start) * scale)))
    assert source.finish()


@pytest.mark.parametrize("is_early", [False, True])
def test_block_that_reaches_into_the_next_range_may_come_after_that(*, is_early: bool) -> None:
    content = bytes(RANGE_BYTES + PIECE_BYTES)
    source = Counted(content)
    digested = HashingSource(source, digest_of(BytesSource(content)), path="x")
    digested.start(head_bytes=9)
    blocks = [(start + 9, PIECE_BYTES) for start in range(0, RANGE_BYTES, PIECE_BYTES)]
    last = (RANGE_BYTES + 9, PIECE_BYTES - 9)
    for start, length in [last, *blocks] if is_early else [*blocks, last]:
        digested.read_into(start, memoryview(bytearray(length)))
    assert digested.finish()
    assert source.read_bytes == len(content) + 9 * is_early


def test_block_that_changes_where_it_reaches_into_the_next_range_is_found() -> None:
    content = bytearray(RANGE_BYTES + PIECE_BYTES)
    source = HashingSource(BytesSource(content), digest_of(BytesSource(content)), path="x")
    source.start(head_bytes=0)
    content[RANGE_BYTES] = 1
    with pytest.raises(ChecksumMismatch):
        source.read_into(RANGE_BYTES + 9, memoryview(bytearray(PIECE_BYTES - 9)))


def test_piece_that_is_read_twice_is_not_right() -> None:
    content = bytes(range(40))
    source = HashingSource(BytesSource(content), digest_of(BytesSource(content)), path="x")
    source.start(head_bytes=0)
    source.read_into(5, memoryview(bytearray(5)))
    source.read_into(5, memoryview(bytearray(7)))
    assert not source.finish()
