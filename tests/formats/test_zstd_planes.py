# SPDX-License-Identifier: Apache-2.0
"""Frames of planes: only what compresses is coded, every division reads back, and a bad one is a clear error."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.formats.compressed.packer import FramePacker, Packed
from ckptmgr.formats.compressed.plan import PlannedFrame
from ckptmgr.formats.compressed.planes import (
    AS_IT_IS,
    CONSTANT,
    FLOAT,
    STORED,
    ZSTD,
    Plane,
    encode_head,
    read_head,
)
from ckptmgr.formats.compressed.table import FRAME_BYTES, PLANES, Frame, frame_digest
from ckptmgr.formats.errors import FormatError
from tests.formats.zstd_files import expanded, file_of, file_of_frame, packed

RNG = np.random.default_rng(0)
WEIGHTS = (RNG.standard_normal(50_000) * 0.02).astype(np.float32)
BFLOATS = WEIGHTS.astype(ml_dtypes.bfloat16)


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def pack(array: np.ndarray, *, level: int = 1) -> Packed:
    raw = array.tobytes()
    item_bytes = array.dtype.itemsize
    [frame] = packed(raw, [PlannedFrame(0, len(raw), item_bytes, "")], level=level)
    assert expanded(file_of([frame], [len(raw)])) == raw
    return frame


def division(array: np.ndarray, *, level: int = 1) -> tuple[int, list[Plane]]:
    """Return form and planes of the frame for an array."""
    frame = pack(array, level=level)
    assert frame.method == PLANES
    stored = memoryview(frame.stored)
    entry = Frame(
        offset=0,
        stored_bytes=stored.nbytes,
        raw_bytes=array.nbytes,
        group_bytes=frame.group_bytes,
        method=frame.method,
        digest=frame_digest(stored),
    )
    form, planes = read_head(entry, stored)
    return form, [plane for plane, _ in planes]


def methods(planes: list[Plane]) -> dict[int, tuple[int, int]]:
    return {one.first_byte: (one.width, one.method) for one in planes}


def test_only_the_exponents_of_weights_are_coded() -> None:
    form, planes = division(WEIGHTS)
    assert (form, methods(planes)) == (FLOAT, {0: (2, STORED), 2: (1, STORED), 3: (1, ZSTD)})
    form, planes = division(BFLOATS)
    assert (form, methods(planes)) == (FLOAT, {0: (1, STORED), 1: (1, ZSTD)})
    assert len(pack(WEIGHTS).stored) < 0.835 * WEIGHTS.nbytes
    assert len(pack(BFLOATS).stored) < 0.67 * BFLOATS.nbytes


def test_low_bytes_of_widened_weights_cost_nothing() -> None:
    widened = BFLOATS.astype(np.float32)
    form, planes = division(widened)
    assert (form, methods(planes)) == (FLOAT, {0: (2, CONSTANT), 2: (1, STORED), 3: (1, ZSTD)})
    assert len(pack(widened).stored) < 0.34 * widened.nbytes


def test_high_bytes_of_small_integers_cost_nothing() -> None:
    ids = RNG.integers(0, 50_000, 20_000)
    form, planes = division(ids)
    assert (form, methods(planes)) == (AS_IT_IS, {0: (2, STORED), 2: (6, CONSTANT)})
    assert len(pack(ids).stored) < 0.2502 * ids.nbytes


def test_elements_that_are_all_the_same_are_stored_once() -> None:
    _, planes = division(np.full(20_000, 7.5, np.float64))
    assert methods(planes) == {0: (8, CONSTANT)}


def test_byte_that_is_the_same_in_the_sample_alone_is_not_taken_for_constant() -> None:
    numbers = RNG.integers(0, 1 << 16, 1 << 20).astype(np.uint32)
    numbers[123_457] = 1 << 24 | 5
    _, planes = division(numbers)
    assert methods(planes) == {0: (2, STORED), 2: (1, CONSTANT), 3: (1, ZSTD)}


@pytest.mark.parametrize("dtype", [np.float16, np.int16, np.uint32, np.float64])
def test_noise_is_stored_as_the_callers_own_memory(dtype: type) -> None:
    noise = memoryview(RNG.bytes(80_000))
    frame = FramePacker(level=1).pack(noise, item_bytes=np.dtype(dtype).itemsize)
    assert frame.stored is noise


def test_frame_that_planes_would_make_longer_is_stored() -> None:
    few = np.frombuffer(bytes([7, 1, 7, 2]), np.uint16)
    assert bytes(pack(few).stored) == few.tobytes()


def test_plane_that_compresses_in_the_sample_alone_is_stored() -> None:
    noise = np.frombuffer(RNG.bytes(FRAME_BYTES), np.uint32).copy()
    for start in (0, (1 << 20) // 3, 2 * (1 << 20) // 3, (1 << 20) - 4096):
        noise[max(0, start - 4096) : start + 4096] &= 0x7FFFFFFF
    noise[:4096] &= 0x0FFFFFFF
    assert bytes(pack(noise).stored) == noise.tobytes()


def test_repeated_noise_is_found() -> None:
    assert len(pack(np.tile(np.frombuffer(RNG.bytes(8000), np.uint32), 20)).stored) < 9000


@pytest.mark.parametrize("array", [WEIGHTS, BFLOATS, np.arange(30_000, dtype=np.int64)])
def test_higher_level_is_never_worse(array: np.ndarray) -> None:
    lengths = [len(pack(array, level=level).stored) for level in (1, 3, 9)]
    assert lengths == sorted(lengths, reverse=True)


def test_bytes_of_unequal_frequency_are_coded_by_frequency() -> None:
    counts = RNG.binomial(12, 0.4, 50_000).astype(np.uint8)
    assert len(pack(counts).stored) < 0.95 * len(zstd(counts.tobytes()))


def kinds_of_data(seed: int, count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    normal = (rng.standard_normal(count) * np.exp(rng.normal(-4, 2))).astype(np.float32)
    strewn = np.where(rng.random(count) < 0.1, normal, np.float32(0))
    return {
        "fp32": normal,
        "bf16": normal.astype(ml_dtypes.bfloat16),
        "fp16": normal.astype(np.float16),
        "fp64": normal.astype(np.float64),
        "squares": np.square(normal),
        "widened": normal.astype(ml_dtypes.bfloat16).astype(np.float32),
        "strewn": strewn,
        "ids": rng.integers(-2, 1 << int(rng.integers(2, 40)), count),
        "powers": np.exp2(rng.integers(-9, 9, count)).astype(np.float32),
        "between one and two": 1 + rng.random(count, np.float32),
        "any bits": np.frombuffer(rng.bytes(4 * count), np.float32),
    }


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 30_000),
    kind=st.sampled_from(sorted(kinds_of_data(0, 1))),
    level=st.sampled_from([1, 1, 3]),
)
def test_elements_of_any_kind_come_back(seed: int, count: int, kind: str, level: int) -> None:
    array = kinds_of_data(seed, count)[kind]
    assert len(pack(array, level=level).stored) <= array.nbytes


@pytest.mark.parametrize("array", [WEIGHTS, BFLOATS, RNG.integers(0, 50_000, 50_000)])
def test_frame_longer_than_a_block_comes_back(array: np.ndarray) -> None:
    assert pack(np.resize(array, FRAME_BYTES // array.itemsize)).method == PLANES


def in_float_form(numbers: np.ndarray) -> np.ndarray:
    """Return the elements in the float form, bit by bit as the page about the format says."""
    bits = np.unpackbits(numbers.astype(numbers.dtype.newbyteorder(">")).view(np.uint8))
    rows = bits.reshape(len(numbers), -1)
    moved = np.concatenate([rows[:, 1:9], rows[:, :1], rows[:, 9:]], axis=1)
    return np.packbits(moved).view(numbers.dtype.newbyteorder(">")).astype(numbers.dtype)


@st.composite
def divisions(draw: st.DrawFn, group: int) -> list[tuple[int, int, int]]:
    """Draw planes that cover elements of `group` bytes: first byte, width and method of each."""
    found, at = [], 0
    while at < group:
        method = draw(st.sampled_from([STORED, ZSTD, CONSTANT]))
        widths = range(1, group + 1) if method == CONSTANT else (1, 2, 4)
        width = draw(st.sampled_from([one for one in widths if at + one <= group]))
        found.append((at, width, method))
        at += width
    return draw(st.permutations(found))


@settings(max_examples=100, deadline=None)
@given(
    group=st.sampled_from([2, 4, 8]),
    count=st.integers(1, 300),
    form=st.sampled_from([AS_IT_IS, FLOAT]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_every_division_that_the_format_allows_is_read(
    group: int, count: int, form: int, seed: int, data: st.DataObject
) -> None:
    numbers = np.frombuffer(np.random.default_rng(seed).bytes(group * count), f"<u{group}").copy()
    columns = numbers.view(np.uint8).reshape(count, group)
    planes, content = [], b""
    for first_byte, width, method in data.draw(divisions(group)):
        part = columns[:, first_byte : first_byte + width]
        if method == CONSTANT:
            part[:] = part[0]
        stored = part.tobytes() if method != CONSTANT else part[0].tobytes()
        if method == ZSTD and len(zstd(stored)) <= len(stored):
            stored = zstd(stored)
        elif method == ZSTD:
            method = STORED
        content += stored
        planes.append(
            Plane(first_byte=first_byte, width=width, method=method, stored_bytes=len(stored))
        )
    head = encode_head(form, planes)
    raw_bytes = numbers.nbytes
    if len(head + content) > raw_bytes:
        return
    file = file_of_frame(head + content, raw_bytes, method=PLANES, group=group)
    raw = np.frombuffer(expanded(file), numbers.dtype)
    np.testing.assert_array_equal(raw if form == AS_IT_IS else in_float_form(raw), numbers)


COUNT = 500
NOISE = RNG.bytes(COUNT)
ZEROS = bytes(COUNT)


def planes_file(
    *planes: tuple[int, int, int, bytes], form: int = AS_IT_IS, group: int = 2, count: int = COUNT
) -> bytes:
    """Return a file with one frame of planes: first byte, width, method and stored bytes."""
    entries = [
        Plane(first_byte=at, width=width, method=method, stored_bytes=len(stored))
        for at, width, method, stored in planes
    ]
    stored = encode_head(form, entries) + b"".join(one[3] for one in planes)
    return file_of_frame(stored, group * count, method=PLANES, group=group)


def raw_file(stored: bytes) -> bytes:
    return file_of_frame(stored, 2 * COUNT, method=PLANES, group=2)


def big_plane_file(said: int) -> bytes:
    head = struct.pack("<BB6sBBBBI", 0, 1, bytes(6), 0, 2, ZSTD, 0, said)
    return raw_file(head + bytes(100))


LOW = (0, 1, STORED, NOISE)
HIGH = (1, 1, ZSTD, zstd(ZEROS))
GIB = 1 << 30
BAD_FRAMES: dict[str, tuple[Callable[[], bytes], str]] = {
    "that ends in its head": (lambda: raw_file(b"\0\1\0\0"), "ends in its head"),
    "that ends in the list of its planes": (
        lambda: raw_file(b"\0\3" + bytes(20)),
        "ends in its head",
    ),
    "of 255 planes that are not there": (lambda: raw_file(b"\0\xff" + bytes(9)), "in its head"),
    "of no planes": (lambda: planes_file(), "each of 2 bytes once"),
    "of an unknown form": (lambda: planes_file(LOW, HIGH, form=2), "unknown form 2"),
    "with something reserved": (
        lambda: raw_file(b"\0\2\1" + bytes(21)),
        "unknown form 0",
    ),
    "by an unknown method": (lambda: planes_file(LOW, (1, 1, 3, b"1")), "unknown method 3"),
    "with something reserved in a plane": (
        lambda: raw_file(struct.pack("<BB6sBBBBI", 0, 1, bytes(6), 0, 2, 2, 1, 2) + b"12"),
        "unknown method 2",
    ),
    "without a byte": (lambda: planes_file(LOW), "each of 2 bytes once"),
    "with a byte twice": (lambda: planes_file(HIGH, HIGH, (0, 1, 2, b"1")), "bytes once"),
    "with planes that overlap": (lambda: planes_file(HIGH, (0, 2, 2, b"12")), "bytes once"),
    "with a plane behind the element": (
        lambda: planes_file((0, 1, 2, b"1"), (2, 1, 2, b"1")),
        "bytes once",
    ),
    "with a plane of three bytes": (
        lambda: planes_file((0, 3, ZSTD, b"123"), (3, 1, 2, b"1"), group=4),
        "plane of 3 bytes",
    ),
    "with a plane of nothing": (lambda: planes_file((0, 0, 2, b"")), "plane of 0 bytes"),
    "with a constant of three of two bytes": (
        lambda: planes_file((0, 3, 2, b"123")),
        "plane of 3 bytes",
    ),
    "with a constant of another size": (
        lambda: planes_file((0, 2, CONSTANT, b"1")),
        "1 bytes stands for 2",
    ),
    "with a stored plane of another size": (
        lambda: planes_file((0, 1, STORED, NOISE[:-1]), HIGH),
        "499 bytes stands for 500",
    ),
    "with a plane of no bytes": (lambda: planes_file(LOW, (1, 1, ZSTD, b"")), "0 bytes stands"),
    "with a plane longer than it stands for": (
        lambda: planes_file((0, 1, ZSTD, NOISE + b"x"), (1, 1, 2, b"1")),
        "501 bytes stands for 500",
    ),
    "with a plane of 1 GiB by its head": (lambda: big_plane_file(GIB), f"{GIB} bytes stands"),
    "with a plane of 1 GiB by itself": (
        lambda: planes_file(
            LOW, (1, 1, ZSTD, b"\x28\xb5\x2f\xfd\xa0" + GIB.to_bytes(4, "little") + bytes(100))
        ),
        f"window of {GIB} bytes",
    ),
    "with a plane that is cut off": (lambda: big_plane_file(101), "planes up to 117"),
    "with bytes behind its planes": (lambda: big_plane_file(99), "planes up to 115"),
    "with a zstd frame that is cut off": (
        lambda: planes_file(LOW, (1, 1, ZSTD, zstd(bytes(range(200)) * 2 + bytes(100))[:-3])),
        "expand",
    ),
    "with a zstd frame that is too short": (
        lambda: planes_file(LOW, (1, 1, ZSTD, zstd(ZEROS[1:]))),
        "of 499 bytes, the table says 500",
    ),
    "with bytes behind a zstd frame": (
        lambda: planes_file(LOW, (1, 1, ZSTD, zstd(ZEROS) + b"more")),
        "expand",
    ),
    "with a plane that is no zstd frame": (
        lambda: planes_file(LOW, (1, 1, ZSTD, NOISE[:100])),
        "no zstd frame",
    ),
    "of elements of three bytes": (
        lambda: file_of_frame(bytes(30), 300, method=PLANES, group=3),
        "in groups of 3",
    ),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bad_frame_of_planes_is_a_clear_error_and_costs_no_memory(name: str) -> None:
    make, message = BAD_FRAMES[name]
    file = make()
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=message):
            expanded(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_sound_frame_that_the_bad_ones_are_made_of_is_read() -> None:
    expected = bytes(one for byte in NOISE for one in (byte, 0))
    assert expanded(planes_file(LOW, HIGH)) == expected
