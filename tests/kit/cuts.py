# SPDX-License-Identifier: Apache-2.0
"""`every_cut`: a test for every cut of programs; `every_pair`: one for each pair of a grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from ckptmgr.testing import Kit
from ckptmgr.testing.grid import PAIRS

CUTS = [cut.name for cut in Kit("any.py:main", steps_per_epoch=3).cuts]
KILLS_AT_EDGES = [name for name in CUTS if name.startswith("killed") and "epoch" in name]
Test = Callable[..., None]


def every_cut(
    programs: Mapping[str, Mapping[str, Any]], cuts: Sequence[str] = CUTS
) -> Callable[[Test], Test]:
    """Call a test with `check` and `cut` for every cut of programs.

    `programs` are `file.py:function` from the root of the repository, each to the options of `Kit`.
    """

    def decorate(test: Test) -> Test:
        by_cut = pytest.mark.parametrize("cut", cuts)(test)
        return pytest.mark.parametrize(
            "kit", list(programs.items()), ids=list(programs), indirect=True, scope="module"
        )(by_cut)

    return decorate


def every_pair(program: str, page: str) -> Callable[[Test], Test]:
    """Call a test with `check_pair` and `cell` for cells of a grid in which each pair occurs.

    The page has the table of the program, `file.py:function` from the root of the repository.
    """

    def decorate(test: Test) -> Test:
        by_cell = pytest.mark.parametrize("cell", PAIRS, ids=str)(test)
        return pytest.mark.parametrize(
            "grid", [(program, page)], ids=[program], indirect=True, scope="module"
        )(by_cell)

    return decorate
