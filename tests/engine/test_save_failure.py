# SPDX-License-Identifier: Apache-2.0
"""What `on_error` and `back_pressure` accept."""

from __future__ import annotations

from typing import Any

import pytest

from ckptmgr.config.failure import ErrorPolicy, check_back_pressure, parse_on_error
from ckptmgr.engine.background import BackgroundSaver


def handler(_: BaseException) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("on_error", "policy"),
    [
        ("raise", ErrorPolicy()),
        ("warn", ErrorPolicy(action="warn")),
        ("retry(0)", ErrorPolicy(attempts=1)),
        ("retry(3)", ErrorPolicy(attempts=4)),
        (handler, ErrorPolicy(action="call", call=handler)),
    ],
)
def test_on_error_is_understood(on_error: Any, policy: ErrorPolicy) -> None:
    assert parse_on_error(on_error) == policy


@pytest.mark.parametrize(
    "on_error", ["", "ignore", "retry", "retry(-1)", "retry(1000)", "retry(1) "]
)
def test_on_error_that_is_unknown_is_refused(on_error: str) -> None:
    with pytest.raises(ValueError, match="on_error must be"):
        parse_on_error(on_error)


def test_back_pressure_is_understood() -> None:
    assert [check_back_pressure(value) for value in ("wait", "skip", "coalesce")] == [
        "wait",
        "skip",
        "coalesce",
    ]


def test_back_pressure_that_is_unknown_is_refused() -> None:
    unknown: Any = "drop"
    with pytest.raises(ValueError, match="back_pressure must be"):
        BackgroundSaver(back_pressure=unknown)
