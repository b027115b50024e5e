# SPDX-License-Identifier: Apache-2.0
"""The pages on MindSpore and on memory: each claim names tests that exist, each setting is explained."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointConfig, MemoryConfig
from ckptmgr.config.memory_keys import checked_offload_config

ROOT = Path(__file__).parent.parent
TRAINING = ROOT / "docs" / "training.md"
ENCRYPTION = ROOT / "docs" / "encryption.md"
PAGE = ROOT / "docs" / "mindspore.md"
MEMORY = ROOT / "docs" / "memory.md"
EXPORTS = ROOT / "ckptmgr" / "integrations" / "mindspore" / "__init__.py"

CLAIMS = "What this page says, and its tests"
TESTS_OF_MEMORY = "Memory options, and their tests"
_OFFLOAD = (  # of MindSpore's documentation
    *("offload_path", "offload_cpu_size", "offload_disk_size", "hbm_ratio", "cpu_ratio"),
    *("enable_pinned_mem", "enable_aio", "aio_block_size", "aio_queue_depth", "offload_param"),
    *("offload_checkpoint", "auto_offload", "host_mem_block_size"),
)
_DTR = ("eviction_threshold", "evictee_minimum_size", "recomp_memory_factor", "recomp_time_factor")
_ASCEND = ("atomic_clean_policy", "static_memory_policy")
_PROPERTIES = ("append_dict", "map_param_inc", "get_checkpoint_policy", "kwargs")
_OURS = "keep"  # the first parameter that MindSpore does not have

pytestmark = pytest.mark.skipif(
    not PAGE.exists(), reason="needs the sources: the pages are not installed"
)


def rows(page: Path, heading: str) -> dict[str, str]:
    """Return the first cell and the row of each row of the table below a heading."""
    text = page.read_text(encoding="utf-8")
    part = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (.+?) \|(.*)$", part, re.MULTILINE)
    return {first: row for first, row in found if first not in ("key", "option", "this page says")}


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 30
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).exists()
        or f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert missing == []


def test_every_row_of_the_compatibility_names_a_test() -> None:
    claims = rows(PAGE, CLAIMS)
    assert [claim for claim, row in claims.items() if "::" not in row] == []
    table = re.findall(
        r"^\| ([^|]+) \|",
        PAGE.read_text(encoding="utf-8").partition("## Compatibility\n")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
    assert len(table) > 10
    assert [claim for claim in table if claim not in claims] == []


def test_every_claim_stands_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8").partition(f"## {CLAIMS}")[0]
    said = " ".join(f"{text} {ENCRYPTION.read_text(encoding='utf-8')}".split())
    claims = rows(PAGE, CLAIMS)
    assert [claim for claim in claims if claim not in said] == []


def test_every_setting_of_checkpoint_config_is_explained() -> None:
    parameters = list(inspect.signature(CheckpointConfig.__init__).parameters)
    theirs = parameters[1 : parameters.index(_OURS)]
    explained = rows(PAGE, "`CheckpointConfig`")
    assert [name for name in (*theirs, *_PROPERTIES) if f"`{name}`" not in explained] == []


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("MindSpore: `set_offload_context`", _OFFLOAD),
        ("MegEngine: `DTRConfig`", _DTR),
        ("CANN: `MemoryConfig`", _ASCEND),
    ],
    ids=["mindspore", "megengine", "cann"],
)
def test_every_memory_option_is_explained_and_names_a_test(
    heading: str, names: tuple[str, ...]
) -> None:
    explained, tested = rows(MEMORY, heading), rows(PAGE, TESTS_OF_MEMORY)
    assert [name for name in names if f"`{name}`" not in explained] == []
    assert [name for name in names if "::" not in tested.get(f"`{name}`", "")] == []


def test_memory_options_of_the_page_are_those_that_are_taken() -> None:
    for name in _OFFLOAD:
        with pytest.raises((TypeError, ValueError), match=name):
            checked_offload_config({name: object()})
    for make, names in ((MemoryConfig.from_dtr, _DTR), (MemoryConfig.from_ascend, _ASCEND)):
        assert set(names) <= set(inspect.signature(make).parameters)


def test_page_lists_the_names_of_the_import() -> None:
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(EXPORTS.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    part = PAGE.read_text(encoding="utf-8").partition("## The import\n")[2]
    listed = part.partition("are ours:")[2].partition("All other names")[0]
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(names)


def test_examples_of_memory_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", MEMORY.read_text("utf-8"), re.DOTALL):
        exec(example, names)  # noqa: S102 - our own page
    assert names["from_mindspore"].usable_host_bytes == 8 << 30
    assert (names["found"].step, names["state"]["step"]) == (2, 2)


@pytest.mark.parametrize("page", [TRAINING, MEMORY], ids=lambda page: page.stem)
def test_ways_from_other_frameworks_and_back_are_named(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = ("from_mindspore", "from_dtr", "from_ascend", "rollback", "Snapshots(")
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize("page", [PAGE, MEMORY], ids=lambda page: page.stem)
def test_links_lead_to_pages(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
