# SPDX-License-Identifier: Apache-2.0
"""What `ckptmgr.parallel` offers."""

from __future__ import annotations

import pytest

from ckptmgr import parallel


def test_every_offered_name_is_there() -> None:
    assert dir(parallel) == sorted(parallel.__all__)
    for name in parallel.__all__:
        assert getattr(parallel, name).__name__ == name


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        parallel.nothing  # noqa: B018
