# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of boxes, against sets of elements; and where bytes lie in a file that holds a tensor in several runs."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core.regions import (
    Interval,
    Region,
    intersection,
    region_at,
    region_shape,
    subtract,
    whole_region,
)
from ckptmgr.files.load.shard_pieces import placed
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.index import ContentRun, TensorEntry
from ckptmgr.formats.tensor import TensorSpec

intervals = st.builds(
    lambda start, length: Interval(start, start + length), st.integers(0, 5), st.integers(0, 5)
)
pairs = st.integers(0, 3).flatmap(lambda n: st.tuples(*[st.tuples(*[intervals] * n)] * 2))


def elements(region: Region) -> set[tuple[int, ...]]:
    return set(product(*(range(*one) for one in region)))


@given(pairs)
def test_common_part_and_the_rest_make_up_a_box(pair: tuple[Region, Region]) -> None:
    region, other = pair
    both = intersection(region, other)
    if both is None:
        assert not elements(region) & elements(other)
        return
    assert elements(both) == elements(region) & elements(other)
    left = subtract(region, both)
    assert sum(len(elements(one)) for one in left) == len(elements(region)) - len(elements(both))
    assert set().union(*map(elements, left)) == elements(region) - elements(both)


def test_boxes_are_made_from_shapes() -> None:
    assert region_at((1, 2), (3, 4)) == (Interval(1, 4), Interval(2, 6))
    assert region_shape(whole_region((3, 4))) == (3, 4)


@given(st.integers(0, 12), st.integers(0, 12))
def test_bytes_of_a_tensor_in_several_runs_are_found(start: int, length: int) -> None:
    file = bytes(range(40))
    runs = (ContentRun(3, 5), ContentRun(10, 0), ContentRun(20, 7))
    content = b"".join(file[run.offset : run.offset + run.length] for run in runs)
    length = min(length, len(content) - start)
    spec = TensorSpec(name="w", dtype=BY_NAME["uint8"], shape=(12,))
    target = bytearray(max(0, length))
    for one in placed(TensorEntry(spec=spec, pieces=runs), start, memoryview(target)):
        one.target[:] = file[one.offset : one.stop]
    assert bytes(target) == content[start : start + max(0, length)]
