# SPDX-License-Identifier: Apache-2.0
"""`StagingPool`: its copies, their memory, and its leftovers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import MemoryConfig, StagingExhausted
from ckptmgr.engine.budget import Ledger
from ckptmgr.engine.staging import StagedState, StagingPool
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.tensor import Item, Tensor, Text, tensor_from_array
from ckptmgr.io.cgroups import GroupMemory
from ckptmgr.state.items import TensorPart, tensors_in
from tests.support.descriptors import nothing_stays_open
from tests.support.interrupts import is_interrupted
from tests.support.staging_memory import MIB, failing, filled, map_tensors, values
from tests.support.strategies import tensors, texts

PAGE = 4096
items_of_any_kind = st.lists(
    st.one_of(tensors(), st.builds(lambda text: Text(name="t", text=text), texts())), max_size=6
)


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    with nothing_stays_open():
        yield


def spilling(directory: Path, **options: Any) -> MemoryConfig:
    return MemoryConfig(spill_directory=directory, **options)


@pytest.mark.parametrize("allocation", ["exact", "arena", "slabs", "arena_and_slabs"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_stage_any_items_gives_equal_items(allocation: Any, is_shared: bool) -> None:
    with StagingPool(MemoryConfig(allocation=allocation), is_shared=is_shared) as pool:

        @given(items=items_of_any_kind)
        def check(items: list[Item]) -> None:
            staged = pool.stage(items)
            assert values(staged.items) == values(items)
            staged.release()

        check()


@given(items=items_of_any_kind, room_bytes=st.integers(1, 200))
def test_stage_with_any_budget_gives_equal_items(
    tmp_path_factory: pytest.TempPathFactory, items: list[Item], room_bytes: int
) -> None:
    config = spilling(
        tmp_path_factory.getbasetemp() / "spill",
        host_budget_bytes=room_bytes * 64,
        slab_bytes=64,
        write_block_bytes=3,
    )
    with StagingPool(config) as pool:
        staged = pool.stage(items)
        assert pool.ledger.host_bytes <= room_bytes * 64
        assert values(staged.items) == values(items)
        staged.release()
    assert pool.ledger.host_bytes == pool.ledger.disk_bytes == 0


def test_stage_map_parameter_keeps_its_parts() -> None:
    with StagingPool() as pool:
        staged = pool.stage([map_tensors("m"), filled("after", 3)])
        assert values(staged.items) == values([map_tensors("m"), filled("after", 3)])
        staged.release()


def test_stage_changed_original_leaves_the_copy() -> None:
    array = np.arange(5 * MIB, dtype=np.uint8)
    small = np.zeros(3, np.uint8)
    with StagingPool() as pool:
        staged = pool.stage([tensor_from_array("big", array), tensor_from_array("small", small)])
        before = values(staged.items)
        array += 1
        small += 1
        assert values(staged.items) == before
        assert staged.size_bytes == 5 * MIB + 3
        staged.release()


def test_staged_content_is_read_only_memory() -> None:
    with StagingPool() as pool:
        staged = pool.stage([filled("w", PAGE)])
        (item,) = staged.items
        assert isinstance(item, Tensor)
        assert item.content().readonly
        staged.release()


def test_staged_content_after_release_is_refused() -> None:
    with StagingPool() as pool:
        staged = pool.stage([filled("w", 1)])
        staged.release()
        staged.release()
        (item,) = staged.items
        assert isinstance(item, Tensor)
        with pytest.raises(ValueError, match="after its release"):
            item.content()


def test_stage_content_of_wrong_size_is_refused_and_nothing_stays() -> None:
    tensor = filled("w", 2 * MIB)
    liar = Tensor(spec=tensor.spec, content=lambda: memoryview(b"short"))
    empty = filled("none", 0)
    empty_liar = Tensor(spec=empty.spec, content=lambda: memoryview(b"x"))
    with StagingPool(MemoryConfig(host_budget_bytes=4 * MIB, slab_bytes=MIB)) as pool:
        for bad in (liar, empty_liar):
            with pytest.raises(FormatError, match="the content has"):
                pool.stage([tensor, bad])
        pool.stage([filled("w", 4 * MIB)]).release()


@pytest.mark.parametrize("size_bytes", [1, 3 * MIB])
@pytest.mark.parametrize("budget_bytes", [None, PAGE])
def test_stage_failing_content_raises_it_and_nothing_stays(
    tmp_path: Path, size_bytes: int, budget_bytes: int | None
) -> None:
    pool = StagingPool(spilling(tmp_path, host_budget_bytes=budget_bytes, wipe="at_end"))
    items = [filled("a", 2 * MIB), failing("b", size_bytes, LookupError("lost"))]
    with nothing_stays_open(), pytest.raises(LookupError, match="lost"):
        pool.stage(items)
    assert pool.ledger.disk_bytes == 0
    pool.close()
    assert pool.ledger.host_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_stage_interrupted_raises_the_interrupt_and_the_pool_still_works() -> None:
    with StagingPool() as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.stage([failing("a", 9 * MIB, KeyboardInterrupt())])
        pool.stage([filled("a", 9 * MIB)]).release()


def test_stage_after_close_is_refused_and_staged_memory_lives_until_its_release() -> None:
    pool = StagingPool()
    staged = pool.stage([filled("w", PAGE)])
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.stage([])
    assert values(staged.items) == values([filled("w", PAGE)])
    staged.release()
    assert pool.ledger.host_bytes == 0


def test_release_while_a_view_is_held_keeps_its_memory() -> None:
    pool = StagingPool(MemoryConfig(allocation="exact"))
    staged = pool.stage([filled("w", PAGE)])
    (item,) = staged.items
    assert isinstance(item, Tensor)
    view = item.content()
    staged.release()
    pool.close()
    assert bytes(view) == b"\x07" * PAGE


def test_default_pool_stages_two_states_and_refuses_the_third() -> None:
    with StagingPool() as pool:
        first, second = pool.stage([filled("a", 9)]), pool.stage([filled("b", 9)])
        with pytest.raises(StagingExhausted, match="2 staged states are not released yet"):
            pool.stage([])
        first.release()
        pool.stage([]).release()
        second.release()


def test_default_pool_keeps_its_slabs_between_states() -> None:
    with StagingPool() as pool:
        for _ in range(3):
            pool.stage([filled("a", 9)]).release()
        assert pool.usage.allocations == 1
        assert pool.usage.kept_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("allocation", "allocations", "kept_pages"),
    [("exact", 5, 0), ("arena", 2, 5), ("slabs", 2, 8), ("arena_and_slabs", 2, 8)],
)
def test_static_memory_policy_says_what_is_allocated_and_kept(
    allocation: Any, allocations: int, kept_pages: int
) -> None:
    config = MemoryConfig(allocation=allocation, slab_bytes=4 * PAGE)
    with StagingPool(config) as pool:
        for pages in (3, 5, 5, 2, 5):
            pool.stage([filled("a", (pages - 1) * PAGE), filled("b", PAGE)]).release()
        assert pool.usage.allocations == allocations
        assert pool.usage.kept_bytes == kept_pages * PAGE


@pytest.mark.parametrize("allocation", ["arena", "arena_and_slabs"])
def test_arena_refuses_a_second_state_at_the_same_time(allocation: Any) -> None:
    config = MemoryConfig(allocation=allocation, host_budget_bytes=64 * MIB)
    with StagingPool(config) as pool:
        staged = pool.stage([filled("a", 9)])
        with pytest.raises(StagingExhausted, match="1 staged states are not released") as caught:
            pool.stage([filled("a", 9)])
        assert "static_memory_policy=3" in str(caught.value)
        staged.release()


def test_host_mem_block_size_is_the_quantum_of_resident_memory() -> None:
    with StagingPool(MemoryConfig(slab_bytes=3 * PAGE)) as pool:
        for size in (1, 4 * PAGE, 200 * PAGE):
            staged = pool.stage([filled("a", size)])
            assert pool.ledger.host_bytes % (3 * PAGE) == 0
            staged.release()


def test_state_of_many_quanta_takes_few_slabs() -> None:
    with StagingPool(MemoryConfig(slab_bytes=PAGE)) as pool:
        pool.stage([filled(f"t{index}", PAGE) for index in range(500)]).release()
        assert pool.usage.allocations <= 17


def test_kept_slabs_that_fit_nothing_are_freed() -> None:
    with StagingPool(MemoryConfig(slab_bytes=PAGE)) as pool:
        pool.stage([filled("a", PAGE)]).release()
        pool.stage([filled("a", 9 * PAGE)]).release()
        assert pool.ledger.host_bytes == 9 * PAGE


def test_kept_slabs_larger_than_wanted_do_not_use_up_the_budget() -> None:
    config = MemoryConfig(slab_bytes=PAGE, host_budget_bytes=12 * PAGE)
    with StagingPool(config) as pool:
        pool.stage([filled("a", 12 * PAGE)]).release()
        staged = pool.stage([filled("a", 5 * PAGE), filled("b", 5 * PAGE)])
        assert pool.ledger.host_bytes <= 12 * PAGE
        staged.release()


def test_offload_cpu_size_bounds_the_host_bytes(tmp_path: Path) -> None:
    config = spilling(tmp_path, host_budget_bytes=2 * MIB, slab_bytes=MIB)
    with StagingPool(config) as pool:
        staged = [pool.stage([filled("a", MIB, value)]) for value in (1, 2, 3)]
        assert pool.ledger.host_bytes == 2 * MIB
        assert [state.spilled_bytes for state in staged] == [0, 0, MIB]
        assert values(staged[2].items) == values([filled("a", MIB, 3)])
        for state in staged:
            state.release()


def test_cpu_ratio_is_the_share_that_is_used(tmp_path: Path) -> None:
    config = spilling(tmp_path, host_budget_bytes=4 * MIB, host_share=0.5, slab_bytes=MIB)
    with StagingPool(config) as pool:
        staged = pool.stage([filled(name, MIB) for name in "abc"])
        assert staged.spilled_bytes == MIB
        staged.release()


def test_budget_that_is_no_multiple_of_the_quantum_is_used_to_its_last_page(tmp_path: Path) -> None:
    config = spilling(tmp_path, host_budget_bytes=11 * PAGE, slab_bytes=8 * PAGE)
    with StagingPool(config) as pool:
        staged = pool.stage([filled("a", 8 * PAGE), filled("b", 3 * PAGE)])
        assert staged.spilled_bytes == 0
        staged.release()


def test_offload_path_is_made_private_and_stays_empty(tmp_path: Path) -> None:
    config = spilling(tmp_path / "deep" / "spill", host_budget_bytes=PAGE)
    with StagingPool(config) as pool:
        staged = pool.stage([filled("a", MIB)])
        assert (tmp_path / "deep" / "spill").stat().st_mode & 0o777 == 0o700
        assert list((tmp_path / "deep" / "spill").iterdir()) == []
        staged.release()


def test_offload_disk_size_bounds_the_spill_files(tmp_path: Path) -> None:
    config = spilling(tmp_path, host_budget_bytes=PAGE, disk_budget_bytes=2 * MIB)
    with StagingPool(config) as pool:
        staged = pool.stage([filled("a", 2 * MIB)])
        with pytest.raises(StagingExhausted, match="2097152 bytes 2097152 are taken") as caught:
            pool.stage([filled("b", MIB)])
        assert "raise host_budget_bytes" in str(caught.value)
        staged.release()
        pool.stage([filled("b", MIB)]).release()


def test_without_auto_offload_the_host_is_all_there_is(tmp_path: Path) -> None:
    config = spilling(tmp_path, host_budget_bytes=MIB, is_automatic=False, staging_place="host")
    with (
        StagingPool(config) as pool,
        pytest.raises(StagingExhausted, match="1048576 usable bytes of host memory 0 are taken"),
    ):
        pool.stage([filled("a", 2 * MIB)])


def test_without_a_spill_directory_what_exceeds_the_budget_is_refused() -> None:
    with (
        StagingPool(MemoryConfig(host_budget_bytes=MIB)) as pool,
        pytest.raises(StagingExhausted, match="nothing may be spilled") as caught,
    ):
        pool.stage([filled("a", 2 * MIB)])
    assert isinstance(caught.value, MemoryError)


def test_offload_param_disk_keeps_the_host_free(tmp_path: Path) -> None:
    config = spilling(tmp_path, is_automatic=False, staging_place="disk")
    with StagingPool(config) as pool:
        staged = pool.stage([filled("a", MIB), filled("b", 10)])
        assert pool.ledger.host_bytes == 0
        assert staged.spilled_bytes == MIB + 10
        staged.release()


def test_auto_offload_overrides_the_place(tmp_path: Path) -> None:
    with StagingPool(spilling(tmp_path, staging_place="disk")) as pool:
        staged = pool.stage([filled("a", MIB)])
        assert staged.spilled_bytes == 0
        staged.release()


def test_spill_directory_that_cannot_be_made_raises_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = spilling(tmp_path / "file", host_budget_bytes=PAGE)
    with StagingPool(config) as pool:
        with pytest.raises(FileExistsError):
            pool.stage([filled("a", MIB)])
        assert pool.ledger.disk_bytes == 0


def test_slabs_that_cannot_be_had_leave_no_spill_file(tmp_path: Path) -> None:
    config = spilling(tmp_path, host_budget_bytes=1 << 60)
    vast = failing("vast", 1 << 60, LookupError())
    with StagingPool(config) as pool:
        with pytest.raises(StagingExhausted, match="the system does not give"):
            pool.stage([vast, filled("a", 1)])
        assert pool.ledger.disk_bytes == 0


def test_atomic_clean_policy_0_wipes_when_the_state_is_released() -> None:
    with StagingPool(MemoryConfig(wipe="at_end")) as pool:
        staged = pool.stage([filled("a", MIB), filled("b", 5)])
        first, second = (item.content() for item in staged.items if isinstance(item, Tensor))
        staged.discard(tensors_in(staged.items)[0])
        assert bytes(first) == b"\x07" * MIB
        staged.release()
        assert bytes(first) == bytes(MIB)
        assert bytes(second) == bytes(5)


def test_atomic_clean_policy_1_wipes_each_buffer_when_it_is_done(tmp_path: Path) -> None:
    config = spilling(tmp_path, wipe="each_buffer", host_budget_bytes=2 * MIB, slab_bytes=MIB)
    with StagingPool(config) as pool:
        staged = pool.stage([map_tensors("m"), filled("a", MIB), filled("spilled", MIB)])
        item = staged.items[1]
        assert isinstance(item, Tensor)
        first = item.content()
        for each in staged.items[1:]:
            assert isinstance(each, Tensor)
            staged.discard(each)
            assert bytes(first) == bytes(MIB)
        with pytest.raises(ValueError, match="after its release"):
            item.content()
        assert values(staged.items[:1]) == values([map_tensors("m")])
        staged.release()


def test_part_that_is_saved_alone_is_wiped_alone_and_foreign_tensors_stay() -> None:
    with StagingPool(MemoryConfig(wipe="each_buffer")) as pool:
        staged = pool.stage([filled("a", 9)])
        (whole,) = tensors_in(staged.items)
        foreign = filled("a", 9)
        for tensor in (Tensor(whole.spec, TensorPart(whole=whole, start=2, stop=5)), foreign):
            staged.discard(tensor)
        assert bytes(whole.content()) == b"\x07\x07\0\0\0\x07\x07\x07\x07"
        assert bytes(foreign.content()) == b"\x07" * 9
        staged.release()


def test_without_a_wipe_policy_memory_is_left_as_it_is() -> None:
    with StagingPool() as pool:
        staged = pool.stage([filled("a", PAGE)])
        (item,) = staged.items
        assert isinstance(item, Tensor)
        view = item.content()
        staged.release()
        assert bytes(view) == b"\x07" * PAGE


def test_stage_from_several_threads_keeps_states_apart() -> None:
    config = MemoryConfig(host_budget_bytes=64 * MIB, slab_bytes=MIB)
    failures: list[int] = []

    def stage_often(value: int) -> None:
        expected = values([filled("a", 2 * MIB, value), filled("b", 100, value)])
        for _ in range(10):
            staged = pool.stage([filled("a", 2 * MIB, value), filled("b", 100, value)])
            if values(staged.items) != expected:
                failures.append(value)
            staged.release()

    with StagingPool(config) as pool:
        threads = [threading.Thread(target=stage_often, args=(value,)) for value in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_ctrl_c_at_any_point_of_staging_leaves_all_memory_for_the_next() -> None:
    items: list[Item] = [tensor_from_array("a", np.ones(9)), Text(name="t", text="text")]
    larger = tensor_from_array("b", np.ones(5 * PAGE, np.uint8))
    for state in (items, [*items, larger]):  # in a kept slab, and in a new one
        at = 0
        for at in itertools.count(1):
            with StagingPool(MemoryConfig(slab_bytes=4 * PAGE)) as pool:
                pool.stage(items).release()
                made: list[StagedState] = []
                was_interrupted = is_interrupted(lambda: made.append(pool.stage(state)), at=at)  # noqa: B023
                for one in made:
                    one.release()
                for one in [pool.stage(items) for _ in range(2)]:  # the most that may be staged
                    one.release()
                assert pool.host_bytes == pool.usage.kept_bytes
            if not was_interrupted:
                break
        assert at > 50


def limited(room: int, **memory: Any) -> StagingPool:
    group = GroupMemory(limit=room, used=0)
    config = MemoryConfig(**memory)
    return StagingPool(config, ledger=Ledger(config, limit_of_group=lambda: group))


def test_state_beyond_the_limit_of_a_container_is_refused_with_the_way_out() -> None:
    with limited(1 << 20) as pool:
        with pytest.raises(StagingExhausted, match="container or job") as caught:
            pool.stage([tensor_from_array("w", np.zeros(2 << 20, np.uint8))])
        assert "async_save=False" in str(caught.value)
        pool.stage([tensor_from_array("w", np.zeros(1 << 19, np.uint8))]).release()


def test_state_beyond_the_limit_of_a_container_is_spilled_where_it_may_be(tmp_path: Path) -> None:
    with limited(1 << 20, spill_directory=tmp_path, slab_bytes=1 << 16) as pool:
        staged = pool.stage([tensor_from_array("w", np.full(2 << 20, 7, np.uint8))])
        assert pool.ledger.disk_bytes > 0
        assert bytes(staged.items[0].content()) == b"\7" * (2 << 20)  # type: ignore[union-attr]
        staged.release()


def test_memory_that_is_kept_needs_no_room_in_a_container() -> None:
    rooms = iter([GroupMemory(limit=4 << 20, used=0)])  # asked once
    ledger = Ledger(MemoryConfig(), limit_of_group=lambda: next(rooms))
    with StagingPool(MemoryConfig(slab_bytes=1 << 20), ledger=ledger) as pool:
        for _ in range(2):
            pool.stage([tensor_from_array("w", np.zeros(2 << 20, np.uint8))]).release()
