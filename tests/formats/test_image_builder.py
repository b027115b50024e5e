# SPDX-License-Identifier: Apache-2.0
"""Runs of small tensors: the same bytes as one extent for each, asked for only when needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.finite import FiniteWatch
from ckptmgr.formats.image import Extent, Image, ImageBuilder
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.formats.tensor import Tensor
from tests.support.strategies import named_tensor, tensor_of

RUN_BYTES = 256 << 10


def small(size: int, fill: int = 0) -> Tensor:
    return named_tensor(f"t{fill}", "uint8", (size,), bytes([fill % 256]) * size)


def bytes_of(builder: ImageBuilder) -> bytes:
    image = Image(builder.finish())
    return b"".join(image.views(0, image.body_size))


@given(parts=st.lists(st.tuples(st.sampled_from(["head", "tensor", "extent"]), st.integers())))
@settings(max_examples=60)
def test_parts_of_all_kinds_keep_their_order(parts: list[tuple[str, int]]) -> None:
    sizes = (0, 1, 7, 16 << 10, (16 << 10) + 1)
    builder, expected = ImageBuilder(), b""
    for number, (kind, choice) in enumerate(parts):
        data = bytes([number % 256]) * sizes[choice % len(sizes)]
        expected += data
        if kind == "head":
            builder.add(data)
        elif kind == "tensor":
            builder.add_tensor(small(len(data), number), size_bytes=len(data))
        else:
            builder.add_extent(Extent.of(data))
    assert bytes_of(builder) == expected


def test_run_ends_when_it_is_long_enough() -> None:
    builder = ImageBuilder()
    for number in range(50):
        builder.add_tensor(small(16 << 10, number), size_bytes=16 << 10)
    found = builder.finish()
    assert [extent.stop for extent in found] == [RUN_BYTES] * 3 + [2 * (16 << 10)]


def test_heads_alone_are_kept_in_memory() -> None:
    builder = ImageBuilder()
    builder.add(b"one")
    builder.add(b"two")
    (extent,) = builder.finish()
    assert extent.data is not None
    assert bytes(extent.data) == b"onetwo"


def test_large_tensor_stays_where_it_is() -> None:
    content = memoryview(bytearray(20 << 10))
    spec = small(20 << 10).spec
    builder = ImageBuilder()
    builder.add_tensor(Tensor(spec=spec, content=lambda: content), size_bytes=spec.size_bytes)
    (view,) = Image(builder.finish()).views(0, spec.size_bytes)
    content[0] = 7
    assert view[0] == 7


def test_small_tensor_is_asked_for_when_its_bytes_are() -> None:
    asked: list[str] = []

    def content() -> memoryview:
        asked.append("w")
        return memoryview(b"ab")

    builder = ImageBuilder()
    builder.add_tensor(Tensor(spec=small(2).spec, content=content), size_bytes=2)
    image = Image(builder.finish())
    assert not asked
    assert b"".join(image.views(0, 2)) == b"ab"
    assert asked == ["w"]


def test_content_of_another_length_is_refused_with_its_name() -> None:
    builder = ImageBuilder()
    for number, content in enumerate((b"ab", b"abc", b"a")):  # together as long as they should be
        tensor = tensor_of(small(2, number).spec, content)
        builder.add_tensor(tensor, size_bytes=2)
    with pytest.raises(FormatError, match=r"has 3 bytes.*'t1'"):
        bytes_of(builder)


def test_tensor_in_several_extents_is_used_up_with_the_last_of_them() -> None:
    image = build_ckpt_image([small(100_000), small(7, fill=1)], slice_bytes=40_000)
    used: list[str] = []
    image.watch_uses(lambda tensor: used.append(tensor.spec.name))
    for offset in range(0, 90_000, 10_000):
        image.release(offset, 10_000)
    assert used == []
    image.release(90_000, image.body_size - 90_000)
    assert used == ["t0", "t1"]


def test_joined_copies_are_wiped_when_all_their_bytes_are_used() -> None:
    builder = ImageBuilder()
    for number in (1, 2, 3):
        builder.add_tensor(small(100, number), size_bytes=100)
    image, used = Image(builder.finish()), list[str]()
    image.watch_uses(lambda tensor: used.append(tensor.spec.name))
    views = [view for start in (0, 150) for view in image.views(start, 150)]
    assert [set(view) for view in views] == [{1, 2}, {2, 3}]
    image.release(0, 150)
    assert [set(view) for view in views] == [{1, 2}, {2, 3}]
    image.release(150, 150)
    assert [set(view) for view in views] == [{0}, {0}]
    assert used == ["t1", "t2", "t3"]


def test_run_that_is_read_in_pieces_is_looked_at_once_for_floats_that_are_not_finite() -> None:
    values = np.array([1.0, np.nan, np.inf], np.float32).tobytes()
    builder = ImageBuilder()
    for name in ("a", "b"):
        builder.add_tensor(named_tensor(name, "float32", (3,), values), size_bytes=len(values))
    image, watch = Image(builder.finish()), FiniteWatch({})
    image.watch_finite(watch)
    pieces = [*image.views(0, 10), *image.views(10, image.body_size - 10)]
    assert b"".join(pieces) == 2 * values
    assert (watch.first, watch.count) == ("a", 4)
