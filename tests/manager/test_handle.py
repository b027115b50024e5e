# SPDX-License-Identifier: Apache-2.0
"""The figures of a handle."""

from __future__ import annotations

from ckptmgr.handle import SaveStats


def test_speed_is_bytes_over_the_time_until_durable() -> None:
    stats = SaveStats(size_bytes=3_000_000_000, write_s=1.0, sync_s=0.25, commit_s=0.25)
    assert stats.gigabytes_per_s == 2.0


def test_speed_of_what_took_no_time_is_zero() -> None:
    assert SaveStats(size_bytes=1).gigabytes_per_s == 0.0
