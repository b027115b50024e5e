# SPDX-License-Identifier: Apache-2.0
"""Sizes and rates as texts for people, and sizes that people write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core.sizes import bytes_in, rate_text, size_text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (int(1023.49 * 1024), "1023 KiB"),
        (int(1023.6 * 1024), "1.0 MiB"),
        (301 << 20, "301 MiB"),
        (11 * 2**30 + 800 * 2**20, "11.8 GiB"),
        (2**70, "1024 EiB"),
    ],
)
def test_sizes_are_short(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


@given(st.integers(0, 2**64))
def test_size_never_exceeds_nine_characters(size_bytes: int) -> None:
    assert len(size_text(size_bytes)) <= 9


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [(0, "0 B/s"), (999, "999 B/s"), (1000, "1.0 kB/s"), (10**18, "1000.0 PB/s")],
)
def test_rates_are_decimal(bytes_per_s: float, text: str) -> None:
    assert rate_text(bytes_per_s) == text


WRITTEN = {
    **{"0": 0, "7": 7, "7B": 7, "1k": 1024, "1KB": 1000, "1KiB": 1024, "2.5 g": 5 << 29},
    **{"240.5KB": 240_500, "1.5 MiB": 3 << 19, "5GB": 5 * 10**9, " 2tib ": 2 << 40, "1PB": 10**15},
}


@pytest.mark.parametrize("text", WRITTEN)
def test_written_sizes_have_units_of_either_base(text: str) -> None:
    assert bytes_in(text) == WRITTEN[text]


@pytest.mark.parametrize(
    "text", ["", "B", "-1", "1e9", "1.", ".5k", "1ib", "5 apples", "1 k b", "1EB"]
)
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size such as 500MB"):
        bytes_in(text)


@given(st.integers(0, 2**59))
def test_shown_size_written_again_is_the_size_to_its_last_digit(size_bytes: int) -> None:
    shown = size_text(size_bytes)
    assert size_text(bytes_in(shown)) == shown
