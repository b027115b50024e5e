# SPDX-License-Identifier: Apache-2.0
"""Sizes and rates as texts for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core.sizes import rate_text, size_text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (int(1023.99 * 1024), "1.0 MiB"),
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
