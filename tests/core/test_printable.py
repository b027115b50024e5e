# SPDX-License-Identifier: Apache-2.0
"""Texts of others in messages and logs: printable and of limited length, whatever they hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import CkptmgrError
from ckptmgr.core.printable import MOST_CHARACTERS, error_text, printable, quoted


@given(st.text(), st.integers(8, 50))
def test_text_of_others_is_printable_and_bounded(text: str, most: int) -> None:
    shown = printable(text, most)
    assert shown.isprintable()
    assert len(shown) <= most
    assert printable(text).isprintable()


@given(st.text(st.characters(whitelist_categories=("L", "N", "P")), max_size=20))
def test_printable_text_is_shown_as_it_is(text: str) -> None:
    assert printable(text, 20) == text
    assert quoted(text) == f'"{text}"'


def test_error_of_others_is_one_bounded_line_and_ours_keeps_its_hint() -> None:
    assert error_text(ValueError("a\nb\x1b[2J")) == "a\\nb\\x1b[2J"
    assert len(error_text(ValueError("x" * 10_000))) <= MOST_CHARACTERS
    assert error_text(CkptmgrError("no", hint="wait")) == "no\nhint: wait"
