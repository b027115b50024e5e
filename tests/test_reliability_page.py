# SPDX-License-Identifier: Apache-2.0
"""The page on reliability names tests that exist, and the page on reporting leads to pages that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reliability.md"
REPORTING = ROOT / "SECURITY.md"

pytestmark = pytest.mark.skipif(
    not PAGE.exists(), reason="needs the sources: the pages are not installed"
)


def test_every_promise_names_tests_that_exist() -> None:
    page = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 40
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).exists()
        or f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_every_row_of_a_promise_names_a_test() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [line for line in page.partition("## The harness")[0].splitlines() if line[:2] == "| "]
    promises = [row for row in rows if not row.startswith(("| | promise", "|---"))]
    assert len(promises) >= 18
    assert [row for row in promises if "::" not in row] == []


@pytest.mark.parametrize("page", [PAGE, REPORTING])
def test_links_lead_to_pages(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []
