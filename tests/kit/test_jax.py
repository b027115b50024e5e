# SPDX-License-Identifier: Apache-2.0
"""The example with JAX, Flax NNX and optax goes on bit for bit: `make kit FRAMEWORK=jax`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.cuts import every_cut

pytest.importorskip("flax", reason="needs flax: make kit FRAMEWORK=jax")

pytestmark = pytest.mark.kit
ROOT = Path(__file__).parents[2]


@every_cut({"examples/jax_loop.py:main": {"steps_per_epoch": 10, "keep": 2}})
def test_loop_goes_on_as_if_it_had_not_been_cut(cut: str, check: Callable[[str], None]) -> None:
    check(cut)


def test_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/jax.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(block, names)  # noqa: S102 - our own page
    assert names["step"] == 20
