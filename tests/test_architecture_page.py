# SPDX-License-Identifier: Apache-2.0
"""The pages for maintainers name files, classes and functions that exist, and every room."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ARCHITECTURE = ROOT / "docs" / "architecture.md"
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = pytest.mark.parametrize("page", [ARCHITECTURE, GLOSSARY], ids=lambda page: page.name)

_PATH = re.compile(r"`([\w.-]+/[\w./-]*|\w+\.(?:py|toml))`")
_NAMED = re.compile(r"`([\w/]+\.py)`((?:,?\s+`[A-Za-z_]\w*(?:\.\w+)?`)+)")
_NAME = re.compile(r"`([\w.]+)`")
_NOT_NAMES = (".py", ".toml", ".md")

pytestmark = pytest.mark.skipif(
    not ARCHITECTURE.exists(), reason="needs the sources: the pages are not installed"
)


def found(path: str) -> Path | None:
    """Return the file or folder that a page names, relative to the package or the repository."""
    places = (ROOT / "ckptmgr" / path, ROOT / path)
    return next((place for place in places if place.exists()), None)


@lru_cache
def names_in(file: Path) -> frozenset[str]:
    """Return the functions, classes, methods (`Class.method`) and variables of a module."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)
            }
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return frozenset(names)


@PAGES
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    paths = _PATH.findall(page.read_text(encoding="utf-8"))
    assert len(paths) > 50
    assert sorted({path for path in paths if found(path) is None}) == []


@PAGES
def test_every_name_behind_a_path_is_defined_there(page: Path) -> None:
    missing: list[str] = []
    count = 0
    for path, names in _NAMED.findall(page.read_text(encoding="utf-8")):
        file = found(path)
        defined = frozenset[str]() if file is None else names_in(file)
        named = [name for name in _NAME.findall(names) if not name.endswith(_NOT_NAMES)]
        count += len(named)
        missing += [f"{path} {name}" for name in named if name not in defined]
    assert count > 40
    assert missing == []


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
