# SPDX-License-Identifier: Apache-2.0
"""Compressed files: written bytes read back, and any change is an error that costs no memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import TruncatedError
from ckptmgr.formats.compressed.packer import FramePacker
from ckptmgr.formats.compressed.plan import ElementRun, PlannedFrame, plan_frames, runs_of
from ckptmgr.formats.compressed.source import open_frames
from ckptmgr.formats.compressed.table import FRAME_BYTES, HEAD, STORED, ZSTD
from ckptmgr.formats.detect import Kind, detect
from ckptmgr.formats.errors import ChecksumError, FormatError, UnsupportedError
from ckptmgr.formats.safetensors_file import build_safetensors_image, read_safetensors_index
from ckptmgr.formats.source import BytesSource, read_bytes
from ckptmgr.formats.tensor import tensor_from_array
from tests.formats.zstd_files import (
    as_version,
    compressed,
    expanded,
    file_of,
    file_of_frame,
    packed,
)

WEIGHTS = (np.random.default_rng(0).standard_normal(3000) * 0.02).astype(np.float32)
RAW = WEIGHTS.tobytes()
PLAN = plan_frames([ElementRun("header", 1, 100), ElementRun("float32", 4, 11_900)])
GIB = 1 << 30


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def test_frames_written_in_any_order_expand_to_the_same_bytes() -> None:
    plan = [PlannedFrame(start, 3000, 4, "float32") for start in range(0, 12_000, 3000)]
    file = file_of(packed(RAW, plan), [3000] * 4, order=[2, 0, 3, 1])
    assert expanded(file) == RAW


@settings(max_examples=40, deadline=None)
@given(
    runs=st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(0, 700)), min_size=1, max_size=8
    ),
    seed=st.integers(0, 100),
    spread=st.sampled_from([1, 2, 256]),
    data=st.data(),
)
def test_any_part_of_any_file_reads_back(
    runs: list[tuple[int, int]], seed: int, spread: int, data: st.DataObject
) -> None:
    plan = plan_frames([ElementRun(f"t{item}", item, item * count) for item, count in runs])
    size = sum(item * count for item, count in runs)
    raw = np.random.default_rng(seed).integers(0, spread, size, np.uint8).tobytes()
    source = open_frames(BytesSource(compressed(raw, plan)))
    assert read_bytes(source, 0, size) == raw
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert read_bytes(source, start, stop - start) == raw[start:stop]


def test_small_reads_all_over_a_file_are_right_though_few_frames_are_kept() -> None:
    plan = [PlannedFrame(start, 400, 4, "float32") for start in range(0, 12_000, 400)]
    source = open_frames(BytesSource(compressed(RAW, plan)))
    for start in [*range(0, 11_990, 97), *range(11_990, 0, -101)]:
        assert read_bytes(source, start, 10) == RAW[start : start + 10]


def test_read_past_the_end_is_refused() -> None:
    source = open_frames(BytesSource(compressed(RAW, PLAN)))
    with pytest.raises(TruncatedError, match="ends at 12000"):
        source.read_into(11_999, memoryview(bytearray(2)))


def test_empty_file_of_no_frames_expands_to_nothing() -> None:
    assert expanded(compressed(b"", [])) == b""


def test_noise_is_stored_as_it_is() -> None:
    noise = np.random.default_rng(0).bytes(5000)
    (frame,) = packed(noise, [PlannedFrame(0, 5000, 4, "float32")])
    assert (frame.method, bytes(frame.stored)) == (STORED, noise)


def test_weights_are_divided_and_strewn_zeros_are_not() -> None:
    rng = np.random.default_rng(0)
    strewn = np.where(rng.random(20_000) < 0.1, rng.standard_normal(20_000), 0).astype(np.float32)
    plan = [PlannedFrame(0, 12_000, 4, "float32")]
    assert packed(RAW, plan)[0].group_bytes == 4
    plan = [PlannedFrame(0, strewn.nbytes, 4, "float32")]
    (frame,) = packed(strewn.tobytes(), plan)
    assert (frame.method, frame.group_bytes) == (ZSTD, 1)


@pytest.mark.parametrize(("size", "item"), [(0, 1), (6, 4), (FRAME_BYTES + 1, 1)])
def test_frame_of_a_wrong_size_is_refused_by_the_packer(size: int, item: int) -> None:
    with pytest.raises(ValueError, match="are no frame"):
        FramePacker(level=1).pack(memoryview(bytes(size)), item_bytes=item)


@pytest.mark.parametrize("level", [0, 20, -5])
def test_unknown_level_is_refused(level: int) -> None:
    with pytest.raises(UnsupportedError, match="1 to 19"):
        FramePacker(level=level)


def test_large_tensor_has_frames_of_its_own_and_small_ones_share() -> None:
    plan = plan_frames(
        [
            ElementRun("header", 1, 80),
            ElementRun("int64", 8, 64),
            ElementRun("float32", 4, 5 << 20),
            ElementRun("float32", 4, 400),
            ElementRun("int32", 4, 40),
            ElementRun("float16", 2, 0),
            ElementRun("bfloat16", 2, 20),
        ]
    )
    assert [(one.size, one.label) for one in plan] == [
        (80, "header"),
        (64, "int64"),
        (4 << 20, "float32"),
        (1 << 20, "float32"),
        (440, "mixed"),
        (20, "mixed"),
    ]
    assert [one.start for one in plan] == [
        0,
        80,
        144,
        144 + (4 << 20),
        144 + (5 << 20),
        584 + (5 << 20),
    ]


def test_small_tensors_fill_a_frame_and_go_on_in_the_next() -> None:
    plan = plan_frames([ElementRun("float32", 4, 1_000_000)] * 5)
    assert [one.size for one in plan] == [4_000_000, 1_000_000]


def test_runs_of_a_safetensors_file_cover_it() -> None:
    image = build_safetensors_image([tensor_from_array("w", WEIGHTS)])
    file = b"".join(bytes(view) for view in image.views(0, image.size))
    runs = list(runs_of(read_safetensors_index(BytesSource(file)), len(file)))
    assert [run.label for run in runs] == ["header", "float32"]
    assert sum(run.size for run in runs) == len(file)
    nothing = build_safetensors_image([])
    head = b"".join(bytes(view) for view in nothing.views(0, nothing.size))
    (only,) = runs_of(read_safetensors_index(BytesSource(head)), len(head))
    assert only.size == len(head)


def test_complex_numbers_are_compressed_as_the_two_floats_they_are() -> None:
    image = build_safetensors_image([tensor_from_array("c", WEIGHTS.view(np.complex64))])
    file = b"".join(bytes(view) for view in image.views(0, image.size))
    plan = plan_frames(runs_of(read_safetensors_index(BytesSource(file)), len(file)))
    assert [(one.label, one.item_bytes) for one in plan] == [("header", 1), ("complex64", 4)]
    assert len(compressed(file, plan)) < 0.9 * len(file)


def test_kind_is_told_from_the_first_bytes() -> None:
    assert detect(BytesSource(compressed(RAW, PLAN))) is Kind.COMPRESSED


def test_every_flipped_bit_is_an_error() -> None:
    small = np.arange(60, dtype=np.int32).tobytes()
    file = compressed(
        small, plan_frames([ElementRun("header", 1, 40), ElementRun("int32", 4, 200)])
    )
    for position in range(len(file)):
        damaged = bytearray(file)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(FormatError):
            expanded(bytes(damaged))


def test_every_cut_is_an_error() -> None:
    small = np.arange(60, dtype=np.int32).tobytes()
    file = compressed(small, plan_frames([ElementRun("int32", 4, 240)]))
    for length in range(len(file)):
        with pytest.raises(FormatError):
            expanded(file[:length])


@pytest.mark.parametrize("added", [b"\0", bytes(16), HEAD])
def test_bytes_behind_the_end_are_an_error(added: bytes) -> None:
    with pytest.raises(TruncatedError, match="something was added"):
        expanded(compressed(RAW, PLAN) + added)


def test_newer_version_is_told_from_damage() -> None:
    file = bytearray(compressed(RAW, PLAN))
    file[8] = 3
    with pytest.raises(UnsupportedError, match="version 3"):
        expanded(bytes(file))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_frames_that_version_1_grouped_are_read(group: int) -> None:
    grouped = np.frombuffer(RAW, np.uint8).reshape(-1, group).T.tobytes()
    file = file_of_frame(zstd(grouped), len(RAW), group=group)
    assert expanded(as_version(1, file)) == expanded(file) == RAW


def test_method_of_a_later_version_is_refused() -> None:
    file = compressed(RAW, PLAN)
    assert expanded(file) == RAW
    with pytest.raises(UnsupportedError, match="unknown method 2"):
        expanded(as_version(1, file))


def test_file_that_ends_in_its_head_is_truncated() -> None:
    with pytest.raises(TruncatedError, match="in its head"):
        expanded(HEAD[:12])


def test_file_of_another_kind_is_refused() -> None:
    with pytest.raises(FormatError, match="no compressed file"):
        expanded(b"PK\x03\x04" + bytes(100))


SEVEN = bytes(7)
BAD_FRAMES: dict[str, tuple[Callable[[], bytes], str]] = {
    "of more than 4 MiB": (
        lambda: file_of_frame(zstd(bytes(FRAME_BYTES + 1)), FRAME_BYTES + 1),
        "at most",
    ),
    "of 1 GiB by the table": (lambda: file_of_frame(bytes(1000), GIB), "at most"),
    "of 1 GiB by itself": (
        lambda: file_of_frame(
            b"\x28\xb5\x2f\xfd\xa0" + GIB.to_bytes(4, "little") + bytes(1000), 4000
        ),
        f"window of {GIB} bytes",
    ),
    "longer than what it stands for": (lambda: file_of_frame(bytes(20), 10), "never more"),
    "that stands for nothing": (lambda: file_of_frame(b"", 0), "stands for 0"),
    "shorter than the table says": (lambda: file_of_frame(zstd(bytes(900)), 1000), "of 900 bytes"),
    "longer than the table says": (lambda: file_of_frame(zstd(bytes(1100)), 1000), "of 1100 bytes"),
    "without a size": (
        lambda: file_of_frame(
            zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)), 1000
        ),
        "the table says 1000",
    ),
    "with a dictionary": (
        lambda: file_of_frame(b"\x28\xb5\x2f\xfd\x21\x07\x64\x23\x03\x00\x00", 100),
        "asks for dictionary 7",
    ),
    "with a window of 16 MiB": (
        lambda: file_of_frame(b"\x28\xb5\x2f\xfd\x00\x70" + bytes(50), 100),
        "window of 16777216",
    ),
    "that is to be skipped": (
        lambda: file_of_frame(b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd", 100),
        "no zstd frame",
    ),
    "of two zstd frames": (
        lambda: file_of_frame(zstd(bytes(500)) + zstd(bytes(500)), 500),
        "expand",
    ),
    "with bytes behind it": (lambda: file_of_frame(zstd(bytes(500)) + b"more", 500), "expand"),
    "that is cut off": (lambda: file_of_frame(zstd(RAW)[:-5], len(RAW)), "expand"),
    "with no header": (lambda: file_of_frame(b"\x28\xb5\x2f\xfd", 100), "expand"),
    "in groups that do not fit": (
        lambda: file_of_frame(zstd(SEVEN * 9), 63, group=4),
        "groups of 4",
    ),
    "in groups of nothing": (lambda: file_of_frame(zstd(bytes(64)), 64, group=0), "groups of 0"),
    "stored, of another size": (lambda: file_of_frame(SEVEN, 8, method=STORED), "stands for 8"),
    "by an unknown method": (lambda: file_of_frame(SEVEN, 7, method=3), "unknown method 3"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bad_frame_is_a_clear_error_and_costs_no_memory(name: str) -> None:
    make, message = BAD_FRAMES[name]
    file = make()
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=message):
            expanded(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_frames_that_hold_a_range_are_found() -> None:
    plan = [PlannedFrame(start, 3000, 4, "float32") for start in range(0, 12_000, 3000)]
    source = open_frames(BytesSource(file_of(packed(RAW, plan), [3000] * 4)))
    assert [source.frames_of(*one) for one in ((0, 1), (2999, 3001), (3000, 12_000))] == [
        range(1),
        range(2),
        range(1, 4),
    ]
    assert source.frame_range(2) == (6000, 9000)


def test_reader_of_a_part_of_a_damaged_frame_gets_an_error_each_time() -> None:
    file = bytearray(compressed(RAW, PLAN))
    file[3000] ^= 1
    source = open_frames(BytesSource(bytes(file)))
    for _ in range(6):
        with pytest.raises(ChecksumError, match="frame does not match"):
            read_bytes(source, 5000, 10)
