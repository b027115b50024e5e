# SPDX-License-Identifier: Apache-2.0
"""Prediction of small reads: where they go on as they did, and nothing where they do not."""

from __future__ import annotations

from itertools import accumulate, cycle, islice

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.io.page_cache import ReadAheadPredictor

KIB = 1 << 10
MIB = 1 << 20
PAGES = (4 * KIB).__mul__


def foretold(offsets: list[int]) -> list[tuple[int, ...]]:
    """Return the prediction at each of some reads."""
    predictor = ReadAheadPredictor()
    return [predictor.next_reads(offset) for offset in offsets]


@settings(max_examples=60)
@given(
    start=st.integers(0, MIB),
    layer=st.lists(st.integers(16, 16384).map(PAGES), min_size=1, max_size=32),
    drift=st.integers(0, 2),
)
def test_reads_of_layers_that_are_alike_are_foretold_from_the_fourth_on(
    start: int, layer: list[int], drift: int
) -> None:
    steps = [step + drift for step in islice(cycle(layer), 6 * len(layer))]
    offsets = list(accumulate(steps, initial=start))
    predictor, known = ReadAheadPredictor(), set[int]()
    for index, offset in enumerate(offsets):
        if index > 3 * len(layer):  # by then, what looked like a shorter period has failed
            assert min(abs(offset - one) for one in known) <= 256
        known.update(predictor.next_reads(offset))


@given(st.lists(st.integers(0, 10 * MIB), max_size=80))
def test_no_more_is_foretold_than_the_repetitions_bear_out(offsets: list[int]) -> None:
    for told in foretold(offsets):
        assert len(told) <= 64


def test_names_that_get_longer_do_not_matter() -> None:
    offsets = [index * MIB + 20 * index for index in range(9)]
    assert foretold(offsets)[2][0] == offsets[3]
    assert [len(told) for told in foretold([0, MIB, 2 * MIB + 256, 3 * MIB + 512])] == [0, 0, 4, 0]


def test_steps_that_differ_foretell_nothing() -> None:
    assert not any(foretold([index * index * MIB for index in range(40)]))


def test_reads_close_together_foretell_nothing() -> None:
    assert not any(foretold([index * 63 * KIB for index in range(40)]))


def test_reads_backwards_foretell_nothing() -> None:
    assert not any(foretold([(40 - index) * MIB for index in range(40)][1:]))


def test_wrong_foretelling_is_forgotten() -> None:
    offsets = [0, MIB, 2 * MIB, 9 * MIB, 10 * MIB, 11 * MIB]
    told = foretold(offsets)
    assert told[2] == (3 * MIB, 4 * MIB, 5 * MIB, 6 * MIB)
    assert told[3:5] == [(), ()]
    assert told[5][0] == 12 * MIB


def test_more_is_foretold_the_longer_it_was_right() -> None:
    lengths = [len(told) for told in foretold([index * MIB for index in range(200)]) if told]
    assert lengths[0] == 4
    assert sorted(lengths) == lengths
    assert lengths[-1] == 64
