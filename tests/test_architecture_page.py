# SPDX-License-Identifier: Apache-2.0
"""The pages for maintainers name files that exist, and every room."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ARCHITECTURE = ROOT / "docs" / "architecture.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = pytest.mark.parametrize("page", [ARCHITECTURE, GLOSSARY], ids=lambda page: page.name)

_PATH = re.compile(r"`([\w.-]+/[\w./-]*|\w+\.(?:py|toml))`")
pytestmark = pytest.mark.skipif(
    not ARCHITECTURE.exists(), reason="needs the sources: the pages are not installed"
)


def found(path: str) -> Path | None:
    """Return the file or folder that a page names, relative to the package or the repository."""
    places = (ROOT / "ckptmgr" / path, ROOT / path)
    return next((place for place in places if place.exists()), None)


@PAGES
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    paths = _PATH.findall(page.read_text(encoding="utf-8"))
    assert len(paths) > 50
    assert sorted({path for path in paths if found(path) is None}) == []


def test_the_table_names_every_room_in_the_order_of_the_layers() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (house,) = (
        contract
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    )
    rooms = [room for layer in house["layers"] for room in re.split(r"\s*[|:]\s*", layer)]
    table = ARCHITECTURE.read_text(encoding="utf-8").partition("## The rooms")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == rooms


@PAGES
def test_links_lead_to_pages(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []
