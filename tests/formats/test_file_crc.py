# SPDX-License-Identifier: Apache-2.0
"""The CRC32 of the start of a file that is read in any order."""

from __future__ import annotations

import itertools
import random
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.formats.file_crc import BodyCrc


@given(
    st.binary(max_size=60),
    st.integers(0, 70),
    st.lists(st.integers(0, 60), max_size=4),
    st.randoms(use_true_random=False),
)
def test_crc_of_pieces_in_any_order_is_that_of_the_bytes_before_the_stop(
    data: bytes, stop: int, cuts: list[int], order: random.Random
) -> None:
    crc = BodyCrc(stop)
    ends = sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
    pieces = list(itertools.pairwise(ends))
    order.shuffle(pieces)
    for first, last in pieces:
        crc.add(first, memoryview(data)[first:last])
    assert crc.value() == crc32(data[:stop])
