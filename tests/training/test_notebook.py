# SPDX-License-Identifier: Apache-2.0
"""The view of a notebook of a manager and of its list of checkpoints."""

from __future__ import annotations

import copy
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager
from tests.support.runs import manager_on
from tests.support.saved import flip

HOSTILE = "<script>alert(1)</script><img src=x onerror='alert(2)'>\x1b[31m&\"\n"


class _Page(HTMLParser):
    """Collects the tags, attributes and rows of some HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str | None]] = set()
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(attrs)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.rstrip("\n")


def displayed(value: object) -> _Page:
    """Display a value as Jupyter does: by its method, unless the object answers to every name."""
    assert not hasattr(value, "_ipython_canary_method_should_not_exist_")
    method = value._repr_html_  # type: ignore[attr-defined]
    html = method()
    assert isinstance(html, str)
    return _Page(html)


def run(directory: Path, **options: object) -> CheckpointManager:
    """Save four steps, of which the policy keeps three."""
    config = CheckpointConfig(keep="last(2) | best(1, loss, min)", **options)  # type: ignore[arg-type]
    manager = manager_on(directory, config, clock=lambda: 1.7e9, prefix="net")
    with manager:
        for step, loss in ((1, 0.5), (2, float("nan")), (3, 0.25), (4, 0.75)):
            manager.save(step, {"w": np.zeros(8)}, metrics={"loss": loss})
    return manager


def test_list_of_checkpoints_is_a_table_with_what_keeps_them(tmp_path: Path) -> None:
    manager = run(tmp_path)
    manager.pin(3, reason="paper")
    page = displayed(manager.checkpoints())
    header, *rows = page.rows
    assert header == ["step", "saved", "size", "loss", "state", "fate", "why", "file"]
    assert [row[:1] + row[3:6] for row in rows] == [
        ["4", "0.75", "ok", "kept"],
        ["3", "0.25", "ok", "kept"],
    ]
    assert rows[0][6] == "last 1/2"
    assert rows[1][6] == "last 2/2; best 1/1 loss=0.25; pinned: paper"
    assert rows[0][1] == "2023-11-14 22:13:20Z"
    assert page.texts[0] == "policy last(2) | best(1, loss, min)"


def test_manager_shows_its_directory_above_the_table(tmp_path: Path) -> None:
    manager = run(tmp_path)
    page = displayed(manager)
    assert page.texts[0] == f"{manager.directory}, series net"
    assert len(page.rows) == 3


def test_manager_without_checkpoints_says_so(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "runs")
    assert displayed(manager.checkpoints()).texts == ["no checkpoints"]
    assert not (tmp_path / "runs").exists()


def test_policy_is_the_one_that_the_run_recorded(tmp_path: Path) -> None:
    run(tmp_path)
    viewer = CheckpointManager(tmp_path, CheckpointConfig(keep="last(1)"), prefix="net")
    page = displayed(viewer.checkpoints())
    assert page.texts[0] == "policy last(2) | best(1, loss, min)"
    assert "goes" not in page.texts


def test_texts_of_others_are_escaped_and_nothing_is_run_or_loaded(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, prefix="net") as manager:
        manager.save(1, {"w": np.zeros(3)}, metrics={HOSTILE: 1.0})
        manager.pin(1, reason=HOSTILE)
    page = displayed(manager.checkpoints())
    assert page.tags <= {"p", "div", "table", "tr", "th", "td"}
    assert {name for name, _ in page.attributes} <= {"class"}
    shown = HOSTILE.replace("\x1b", r"\x1b").replace("\n", r"\n")
    assert page.rows[0][3] == shown
    assert shown in page.rows[1][6]


def test_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    manager = run(tmp_path)
    manifest = tmp_path / "net-4.ckpt.manifest.json"
    flip(manifest, 5)
    rows = displayed(manager.checkpoints()).rows
    assert [row[4:6] for row in rows if row[-1] == "net-4.ckpt"] == [["corrupt", "damaged"]]


def test_table_says_why_it_cannot_tell_what_keeps_checkpoints(tmp_path: Path) -> None:
    found = run(tmp_path).checkpoints()
    (tmp_path / "net-4.ckpt.manifest.json").chmod(0o666)  # anybody could have written the policy
    page = displayed(found)
    assert page.texts[0].startswith("what keeps them is unknown: ")
    assert [row[5:7] for row in page.rows[1:]] == [["-", "-"]] * len(found)


def test_copies_of_the_list_are_plain_lists(tmp_path: Path) -> None:
    found = run(tmp_path).checkpoints()
    for copied in (copy.copy(found), copy.deepcopy(found)):
        assert type(copied) is list
        assert copied == found


def test_longer_lists_show_the_newest_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = run(tmp_path)
    monkeypatch.setattr("ckptmgr.training.notebook._MOST_ROWS", 1)
    page = displayed(manager.checkpoints())
    assert [row[0] for row in page.rows] == ["step", "4"]
    assert page.texts[-1] == "and 1 older ones"
