# SPDX-License-Identifier: Apache-2.0
"""Times in options, such as `90s` or `1d12h`."""

from __future__ import annotations

from datetime import timedelta

import click

from ckptmgr.cli.exits import UsageProblem


def parse_time(text: str) -> timedelta:
    """Return the time of an option.

    Raises:
        UsageProblem: It is not a time.
    """
    from ckptmgr.policy.text import has_doubtful_unit, parse_duration

    if has_doubtful_unit(text):
        raise UsageProblem(
            f"{text[:40]!r}: m may mean minutes or months", hint="write min, or days: 30min, 30d"
        )
    value = parse_duration(text)
    if value is None:
        raise UsageProblem(f"{text[:40]!r} is not a time", hint="write 90s, 30min, 12h, 2d or 1w")
    return value


def seconds_of(_: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Return the value of an option that takes a time longer than zero, in seconds."""
    if text is None:
        return None
    seconds = parse_time(text).total_seconds()
    if seconds <= 0:
        raise UsageProblem(f"{param.opts[0]} must be longer than zero", hint="write 30s or more")
    return seconds
