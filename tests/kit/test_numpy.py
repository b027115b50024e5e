# SPDX-License-Identifier: Apache-2.0
"""The example with plain NumPy goes on bit for bit: `make kit FRAMEWORK=numpy`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kit.cuts import every_cut

pytestmark = [pytest.mark.kit, pytest.mark.usefixtures("kit")]


@every_cut({"examples/numpy_loop.py:main": {"steps_per_epoch": 10, "keep": 2, "fork": True}})
def test_loop_goes_on_as_if_it_had_not_been_cut(cut: str, check: Callable[[str], None]) -> None:
    check(cut)
