# SPDX-License-Identifier: Apache-2.0
"""The page about errors has every public class of errors, once, with an answer to "retry?"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ckptmgr
from ckptmgr.core import errors

PAGE = Path(__file__).parents[1] / "docs" / "errors-and-retries.md"

pytestmark = pytest.mark.skipif(
    not PAGE.exists(), reason="needs the sources: the page is not installed"
)


def public_errors() -> set[str]:
    """Return the names of the public classes of errors, and of those in `ckptmgr.errors`."""
    named = {name: getattr(ckptmgr, name) for name in ckptmgr.__all__}
    found = {**named, **vars(errors)}
    return {
        name
        for name, one in found.items()
        if isinstance(one, type) and issubclass(one, Exception) and not name.startswith("_")
    }


def rows() -> list[tuple[str, str, str]]:
    return re.findall(r"^\| `(\w+)` \| ([^|]+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)


def test_every_public_class_of_errors_has_one_row() -> None:
    names = [name for name, _, _ in rows()]
    assert sorted(names) == sorted(public_errors())


def test_every_row_answers_whether_to_retry() -> None:
    answers = ("no", "yes", "later", "restart the job", "by its subclass", "a key service")
    assert [name for name, retry, _ in rows() if not retry.startswith(answers)] == []
