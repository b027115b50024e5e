# SPDX-License-Identifier: Apache-2.0
"""`SnapshotCache` and its choice of victims."""

from __future__ import annotations

from math import exp
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import CheckpointNotFound, MemoryConfig, StagingExhausted
from ckptmgr.engine.snapshots import Evictee, SnapshotCache, choose_victim, log_score
from ckptmgr.engine.staging import StagingPool
from tests.support.descriptors import nothing_stays_open, open_descriptors
from tests.support.staging_memory import MIB, filled, values


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


def cache_of(**options: Any) -> SnapshotCache:
    return SnapshotCache(MemoryConfig(smallest_evictee_bytes=1, **options), Clock())


def evictee(step: int, **options: Any) -> Evictee:
    values: dict[str, Any] = {
        "size_bytes": 100,
        "restore_s": 1.0,
        "restore_bytes": 1,
        "used_at_s": 0.0,
        "is_pinned": False,
    }
    return Evictee(step=step, **(values | options))


def test_get_gives_the_state_as_it_was_put() -> None:
    with cache_of() as cache:
        cache.put(3, [filled("w", 9, 1)])
        cache.put(4, [filled("w", 9, 2)], is_committed=True)
        first, second = cache.get(3), cache.get(4)
        assert values(first.items) == values([filled("w", 9, 1)])
        assert values(second.items) == values([filled("w", 9, 2)])
        assert (first.step, first.size_bytes) == (3, 9)
        assert (first.is_committed, second.is_committed) == (False, True)


def test_get_unknown_step_names_those_there_are() -> None:
    with cache_of() as cache:
        cache.put(3, [])
        with pytest.raises(CheckpointNotFound, match=r"step 4 in memory; there are \[3\]"):
            cache.get(4)


def test_newest_goes_back_at_least_so_many_steps() -> None:
    with cache_of() as cache:
        for step in (10, 20, 30):
            cache.put(step, [])
        found = [cache.newest(steps_back=back).step for back in (0, 1, 10, 11, 20)]
        assert found == [30, 20, 20, 10, 10]
        with pytest.raises(CheckpointNotFound, match="no snapshot is 21 steps old"):
            cache.newest(steps_back=21)


def test_newest_of_an_empty_cache_is_not_found() -> None:
    with cache_of() as cache, pytest.raises(CheckpointNotFound):
        cache.newest()


def test_put_same_step_replaces_it() -> None:
    with cache_of(snapshot_budget_bytes=9) as cache:
        cache.put(1, [filled("w", 9, 1)])
        assert cache.put(1, [filled("w", 8, 2)]) == []
        assert values(cache.get(1).items) == values([filled("w", 8, 2)])
        assert cache.resident_bytes == 8


def test_drop_after_forgets_the_other_future() -> None:
    with cache_of() as cache:
        for step in (1, 2, 3):
            cache.put(step, [])
        cache.drop_after(1)
        assert cache.steps == [1]


def test_close_gives_all_memory_back() -> None:
    cache = cache_of()
    cache.put(1, [filled("w", MIB)])
    with nothing_stays_open():
        cache.close()
        cache.close()
    assert cache.resident_bytes == 0


def test_eviction_threshold_bounds_the_resident_bytes() -> None:
    with cache_of(snapshot_budget_bytes=250) as cache:
        evicted = []
        for step in range(6):
            evicted += cache.put(step, [filled("w", 100)], is_committed=True)
            assert cache.resident_bytes <= 250
        assert evicted == [0, 1, 2, 3]  # equal costs: the longest unused first
        assert cache.steps == [4, 5]


def test_get_makes_a_snapshot_recently_used() -> None:
    with cache_of(snapshot_budget_bytes=200) as cache:
        for step in (1, 2):
            cache.put(step, [filled("w", 100)], is_committed=True)
        cache.get(1)
        assert cache.put(3, [filled("w", 100)]) == [2]


def test_uncommitted_snapshots_are_pinned_until_they_are_committed() -> None:
    with cache_of(snapshot_budget_bytes=250) as cache:
        cache.put(1, [filled("w", 100)])
        cache.put(2, [filled("w", 100)])
        with pytest.raises(StagingExhausted, match=r"of 250 bytes 200 are taken by steps \[1, 2\]"):
            cache.put(3, [filled("w", 100)])
        cache.commit(2)
        cache.commit(99)
        assert cache.put(3, [filled("w", 100)]) == [2]
        assert cache.steps == [1, 3]


def test_evictee_minimum_size_keeps_small_snapshots() -> None:
    config = MemoryConfig(snapshot_budget_bytes=1000, smallest_evictee_bytes=500)
    with SnapshotCache(config, Clock()) as cache:
        cache.put(1, [filled("w", 100)], is_committed=True)
        cache.put(2, [filled("w", 600)], is_committed=True)
        assert cache.put(3, [filled("w", 900)]) == [2]
        assert cache.steps == [1, 3]


def test_offload_checkpoint_disk_keeps_snapshots_in_files(tmp_path: Path) -> None:
    with cache_of(
        snapshot_place="disk", is_automatic=False, spill_directory=tmp_path, host_budget_bytes=1
    ) as cache:
        cache.put(1, [filled("w", MIB)])
        assert values(cache.get(1).items) == values([filled("w", MIB)])
        assert any(str(tmp_path) in target for _, target in open_descriptors())


def test_offload_checkpoint_cpu_evicts_instead_of_spilling(tmp_path: Path) -> None:
    with cache_of(
        snapshot_place="host",
        is_automatic=False,
        spill_directory=tmp_path,
        host_budget_bytes=2 * MIB,
    ) as cache:
        for step in (1, 2):
            cache.put(step, [filled("w", MIB)], is_committed=True)
        assert cache.put(3, [filled("w", MIB)]) == [1]
        with pytest.raises(StagingExhausted):
            cache.put(4, [filled("w", 3 * MIB)])
        assert cache.steps == [3]


def test_snapshots_and_staging_share_one_budget() -> None:
    config = MemoryConfig(host_budget_bytes=2 * MIB, slab_bytes=MIB, allocation="exact")
    with StagingPool(config) as pool, SnapshotCache(config, ledger=pool.ledger) as cache:
        cache.put(1, [filled("w", MIB)])
        pool.stage([filled("a", MIB)]).release()
        with pytest.raises(StagingExhausted):
            pool.stage([filled("a", 2 * MIB)])


def test_recomp_time_factor_weighs_the_seconds_of_a_restore() -> None:
    slow_and_old = evictee(1, restore_s=9.0, used_at_s=0)
    fast_and_new = evictee(2, restore_s=3.0, used_at_s=80)
    victims = [
        choose_victim(
            [slow_and_old, fast_and_new],
            MemoryConfig(restore_time_exponent=factor, smallest_evictee_bytes=0),
            now_s=100,
        )
        for factor in (0, 1, 3)
    ]
    assert victims == [1, 1, 2]


def test_recomp_memory_factor_weighs_the_bytes_of_a_restore() -> None:
    hungry_and_old = evictee(1, restore_bytes=900, used_at_s=0)
    frugal_and_new = evictee(2, restore_bytes=300, used_at_s=80)
    victims = [
        choose_victim(
            [hungry_and_old, frugal_and_new],
            MemoryConfig(restore_memory_exponent=factor, smallest_evictee_bytes=0),
            now_s=100,
        )
        for factor in (0, 3)
    ]
    assert victims == [1, 2]


@pytest.mark.parametrize("is_sampling", [False, True])
def test_enable_sqrt_sampling_looks_at_every_tenth_of_a_hundred(is_sampling: bool) -> None:
    config = MemoryConfig(is_sampling=is_sampling, smallest_evictee_bytes=0)
    # Each is cheaper to restore than those before it.
    snapshots = [evictee(step, restore_s=100.0 - step) for step in range(100)]
    assert choose_victim(snapshots, config, now_s=1) == (90 if is_sampling else 99)


def test_choose_victim_of_pinned_and_small_ones_is_none() -> None:
    snapshots = [evictee(1, is_pinned=True), evictee(2, size_bytes=99)]
    config = MemoryConfig(smallest_evictee_bytes=100)
    assert choose_victim(snapshots, config, now_s=9) is None


@given(
    restore_s=st.floats(0.001, 1e6),
    restore_bytes=st.integers(1, 1 << 50),
    size_bytes=st.integers(1, 1 << 50),
    staleness_s=st.floats(0.001, 1e6),
    time_exponent=st.floats(0, 3),
    memory_exponent=st.floats(0, 3),
)
def test_log_score_is_the_logarithm_of_the_published_score(
    restore_s: float,
    restore_bytes: int,
    size_bytes: int,
    staleness_s: float,
    time_exponent: float,
    memory_exponent: float,
) -> None:
    config = MemoryConfig(
        restore_time_exponent=time_exponent, restore_memory_exponent=memory_exponent
    )
    score = restore_s**time_exponent * restore_bytes**memory_exponent / size_bytes / staleness_s
    snapshot = evictee(
        1, restore_s=restore_s, restore_bytes=restore_bytes, size_bytes=size_bytes, used_at_s=0
    )
    assert exp(log_score(snapshot, config, now_s=staleness_s)) == pytest.approx(score, rel=1e-6)


def test_log_score_of_zeros_is_finite() -> None:
    snapshot = evictee(1, restore_s=0.0, restore_bytes=0, size_bytes=0, used_at_s=5)
    assert abs(log_score(snapshot, MemoryConfig(), now_s=5)) < 1e3
