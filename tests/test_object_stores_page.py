# SPDX-License-Identifier: Apache-2.0
"""docs/object-stores.md: its example runs, and its commands, events and figures are those of the code."""

from __future__ import annotations

import inspect
import re
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest

from ckptmgr import Mirror
from ckptmgr.io.threads import PIECE_BYTES, REMOTE_READERS
from ckptmgr.objects.directory import LEFTOVER_AGE
from ckptmgr.objects.ranged import BLOCK_BYTES, HEAD_BYTES
from ckptmgr.observe import events

PAGE = Path(__file__).parents[1] / "docs/object-stores.md"

pytestmark = pytest.mark.skipif(
    not PAGE.exists(), reason="needs the sources: the pages are not installed"
)


def test_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(examples) == 3
    exec(compile("".join(examples), str(PAGE), "exec"), {"__name__": "example"})  # noqa: S102


def test_figures_of_the_page_are_those_of_the_code() -> None:
    text = PAGE.read_text()
    defaults = {name: one.default for name, one in inspect.signature(Mirror).parameters.items()}
    assert f"`queue` ({defaults['queue']})" in text
    assert defaults["close_timeout_s"] == 600
    assert "`close_timeout_s` (10 min)" in text
    assert timedelta(days=7) == LEFTOVER_AGE
    assert "7 days old" in text
    assert f"at most {PIECE_BYTES >> 20} MiB, up to {REMOTE_READERS} at a time" in text
    assert f"the first {HEAD_BYTES >> 10} KiB" in text
    assert f"up to {2 * BLOCK_BYTES >> 10} KiB for each tensor" in text
    for name in re.findall(r"event `(mirror[.\w]*)`", text):
        assert f"`{name}`" in (events.__doc__ or "")
