# SPDX-License-Identifier: Apache-2.0
"""The figures of a handle, and who may wait for it."""

from __future__ import annotations

import os

import pytest

from ckptmgr import SaveHandle
from ckptmgr.core.handle import SaveStats


def test_speed_is_bytes_over_the_time_until_durable() -> None:
    stats = SaveStats(size_bytes=3_000_000_000, write_s=1.0, sync_s=0.25, commit_s=0.25)
    assert stats.gigabytes_per_s == 2.0


def test_speed_of_what_took_no_time_is_zero() -> None:
    assert SaveStats(size_bytes=1).gigabytes_per_s == 0.0


def test_wait_for_a_save_of_another_process_is_refused_where_the_fork_was_not_seen() -> None:
    handle = SaveHandle(process=os.getpid() + 1)  # as in a child that was forked from C
    with pytest.raises(RuntimeError, match=f"process {os.getpid() + 1} is saving this"):
        handle.wait()
