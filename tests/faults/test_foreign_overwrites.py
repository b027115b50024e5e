# SPDX-License-Identifier: Apache-2.0
"""Power cuts while somebody with another key overwrites a file: it opens with one of the two keys, all the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.scenarios import first_broken
from tests.faults.training import KEY, RUNS, SERIES, ModelProcesses, Trainer, disk_with, name_of
from tests.support import api
from tests.support.crashmodel import Crash, ModelDisk, Order, every_crash

ONE = name_of(1)
THEIRS = KEY[::-1]
KEYS: tuple[bytes | None, ...] = (THEIRS, None)


def overwrite(disk: ModelDisk, key: bytes | None) -> None:
    Trainer(disk, key=key).overwrite(ONE, 11.0)
    disk.acknowledge("overwritten")


def opens(disk: ModelDisk, key: bytes | None) -> bool:
    """Return whether the file verifies with a key and nothing else; without one, whether it is plain."""
    own = None if key is None else api.Key(key)
    store = api.place(RUNS, fs=disk, keys=own, allow_unencrypted=not (own is not None))
    (found,) = [one for one in store.scan() if one.name == ONE]
    return api.verify(store, found, keys=own).status is api.Status.OK


def recover(disk: ModelDisk, key: bytes | None) -> None:
    own = None if key is None else api.Key(key)
    api.place(
        RUNS, fs=disk, keys=own, allow_unencrypted=True, processes=ModelProcesses(disk)
    ).recover(SERIES)


def cuts(key: bytes | None) -> Iterator[Crash]:
    """Yield the disks that a power cut leaves, while the file is overwritten."""
    return every_crash(
        disk_with(10.0, key=KEY), lambda disk: overwrite(disk, key), order=Order.WEAK
    )


@pytest.mark.parametrize("key", KEYS, ids=["another key", "no key"])
def test_file_opens_with_the_old_or_the_new_key_and_recoveries_with_both_leave_it_so(
    key: bytes | None,
) -> None:
    seen = set()

    def check(crash: Crash) -> None:
        is_old, is_new = opens(crash.disk, KEY), opens(crash.disk, key)
        assert is_old != is_new
        assert is_new or not crash.disk.acknowledged
        for one in (KEY, key, KEY):
            recover(crash.disk, one)
            assert (opens(crash.disk, KEY), opens(crash.disk, key)) == (is_old, is_new)
        seen.add(is_old)

    assert first_broken(cuts(key), check) is None
    assert seen == {True, False}


def test_recovery_that_puts_the_old_manifest_back_may_itself_be_cut() -> None:
    def again() -> Iterator[Crash]:
        for crash in cuts(THEIRS):
            if opens(crash.disk, KEY):
                yield from every_crash(
                    crash.disk, lambda disk: recover(disk, KEY), order=Order.WEAK
                )

    def check(crash: Crash) -> None:
        assert opens(crash.disk, KEY)

    assert first_broken(again(), check) is None
