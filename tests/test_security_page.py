# SPDX-License-Identifier: Apache-2.0
"""The statements of the page on security are true of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptmgr import CheckpointConfig
from ckptmgr.cli.key_options import _SCHEMES
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.providers.registry import BUILT_IN

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "security.md"
ATTACKS = ROOT / "docs" / "attacks.md"


@pytest.fixture
def page() -> str:
    if not PAGE.exists():
        pytest.skip("needs the sources: the page is not installed")
    return PAGE.read_text(encoding="utf-8")


def test_example_of_a_key_service_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEK", "ab" * 32)
    monkeypatch.setenv("CKPTMGR_KEY_SERVICE", "local:env:KEK")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)  # noqa: S102 - our own page
    config, key = names["config"], names["key"]
    assert isinstance(config, CheckpointConfig)
    assert isinstance(key, Key)
    assert config.enc_key == key.raw


def test_tables_name_every_key_source_and_service(page: str) -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+:)", page, re.MULTILINE)
    assert sorted(rows) == sorted([*_SCHEMES, *(f"{scheme}:" for scheme in BUILT_IN)])


def test_links_lead_to_pages(page: str) -> None:
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


def test_list_of_attacks_names_tests_that_exist() -> None:
    if not ATTACKS.exists():
        pytest.skip("needs the sources: the page is not installed")
    named = re.findall(
        r"`(tests/[a-z_/]+(?:\.py)?)(?:::(\w+))?`", ATTACKS.read_text(encoding="utf-8")
    )
    assert len(named) > 60
    for file, test in named:
        content = (ROOT / file).read_text(encoding="utf-8") if test else ""
        assert (ROOT / file).exists()
        assert f"def {test}(" in content or not test, f"{file}::{test}"
