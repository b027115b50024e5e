# SPDX-License-Identifier: Apache-2.0
"""Declared dependencies: nothing that the package does not import, and no version that is older than those we test."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
TESTED_EXTRAS = ("otel", "prometheus")  # what `make wheel` installs; the others are large

pytestmark = pytest.mark.skipif(
    not (ROOT / "constraints-oldest.txt").exists(), reason="needs a checkout"
)


def pins(name: str) -> dict[str, Version]:
    """Return the versions that a constraints file names, by canonical name."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(package): Version(version) for package, version in pairs}


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def lower_bounds(requirements: list[str]) -> dict[str, Version]:
    """Return the lower bound of each requirement; one without is an error."""
    bounds: dict[str, Version] = {}
    for requirement in map(Requirement, requirements):
        (bound,) = (part for part in requirement.specifier if part.operator in (">=", "~="))
        bounds[canonicalize_name(requirement.name)] = Version(bound.version)
    return bounds


def required() -> list[str]:
    """Return the requirements of the package and of the extras that are tested with them."""
    project = settings()["project"]
    lists = [project["optional-dependencies"][name] for name in TESTED_EXTRAS]
    return [text for texts in (project["dependencies"], *lists) for text in texts]


def imported_modules() -> set[str]:
    """Return the top-level names of all modules that the package imports, at its start or later."""
    imported: set[str] = set()
    for folder in ("ckptmgr", "formats", "crypto"):
        for source in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(source.read_bytes())):
                if isinstance(node, ast.Import):
                    imported |= {name.name.split(".")[0] for name in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module.split(".")[0])
    return imported


def test_oldest_tested_versions_are_the_lower_bounds() -> None:
    bounds = lower_bounds(required())
    oldest = pins("constraints-oldest.txt")
    assert {name: oldest.get(name) for name in bounds} == bounds


def test_tools_beside_the_oldest_versions_are_those_of_the_other_tests() -> None:
    tools = {Requirement(tool).name for tool in settings()["dependency-groups"]["test"]}
    oldest, newest = pins("constraints-oldest.txt"), pins("constraints.txt")
    assert {tool: oldest.get(tool) for tool in tools} == {tool: newest[tool] for tool in tools}


@pytest.mark.slow
def test_dependencies_are_all_imported() -> None:
    names = {Requirement(text).name for text in settings()["project"]["dependencies"]}
    assert names - imported_modules() == set()


def locked() -> dict[str, tuple[Version, int]]:
    """Return version and number of hashes of each package in requirements.lock, by canonical name."""
    entries = re.findall(
        r"^([\w.-]+)==(\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
        lock_text(),
        re.MULTILINE,
    )
    return {canonicalize_name(n): (Version(v), h.count("--hash=")) for n, v, h in entries}


def lock_text() -> str:
    return (ROOT / "requirements.lock").read_text(encoding="utf-8")


def test_lock_pins_every_dependency_to_the_version_that_is_tested() -> None:
    names = {
        canonicalize_name(Requirement(text).name) for text in settings()["project"]["dependencies"]
    }
    newest = pins("constraints.txt")
    assert names <= set(locked())
    assert {name: version for name, (version, _) in locked().items()} == {
        name: newest.get(name) for name in locked()
    }


def test_lock_is_nothing_but_pins_with_hashes() -> None:
    lines = [line for line in lock_text().splitlines() if not line.startswith("#")]
    hashes = sum(count for _, count in locked().values())
    assert len(lines) == len(locked()) + hashes
    assert min(count for _, count in locked().values()) >= 1
