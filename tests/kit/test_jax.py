# SPDX-License-Identifier: Apache-2.0
"""The example with JAX, Flax NNX and optax goes on bit for bit: `make kit FRAMEWORK=jax`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.testing.grid import Cell
from tests.kit.cuts import every_cut, every_pair

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


@every_pair("tests/kit/jax_grid_programs.py:train", "docs/jax.md")
def test_cell_of_the_grid_is_as_its_page_says(
    cell: Cell, check_pair: Callable[[Cell], None]
) -> None:
    check_pair(cell)
