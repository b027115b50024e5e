# SPDX-License-Identifier: Apache-2.0
"""Slabs: their pages in the kernel, and refusals of the kernel."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import MemoryConfig, StagingExhausted
from ckptmgr.engine.budget import Ledger
from ckptmgr.engine.slabs import Slab, SlabPool
from tests.support.descriptors import nothing_stays_open
from tests.support.staging_memory import MIB, mapping_flags

PAGE = 4096


def huge_pages_free() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("HugePages_Free"))


no_huge_pages = pytest.mark.skipif(
    huge_pages_free() > 0, reason="this system has reserved huge pages"
)


@pytest.mark.parametrize("is_shared", [False, True])
def test_slab_is_left_out_of_core_dumps(is_shared: bool) -> None:
    slab = Slab(PAGE, config=MemoryConfig(), is_shared=is_shared)
    assert "dd" in mapping_flags(slab.view)
    slab.close()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no transparent huge pages"
)
def test_private_slab_asks_for_transparent_huge_pages() -> None:
    slab = Slab(64 * MIB, config=MemoryConfig(), is_shared=False)
    assert "hg" in mapping_flags(slab.view)
    slab.close()


def test_private_slab_has_no_descriptor() -> None:
    slab = Slab(PAGE, config=MemoryConfig(), is_shared=False)
    with pytest.raises(ValueError, match="no descriptor"):
        _ = slab.descriptor
    slab.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_enable_pinned_mem_locks_the_memory(is_shared: bool) -> None:
    slab = Slab(16 * PAGE, config=MemoryConfig(is_page_locked=True), is_shared=is_shared)
    assert "lo" in mapping_flags(slab.view)
    slab.close()


UNPRIVILEGED = """
import ctypes, resource
# Without capabilities root obeys the limit, too.
ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
from ckptmgr.formats.tensor import tensor_from_array
from ckptmgr.config.memory import MemoryConfig
from ckptmgr.engine.staging import StagingPool
import numpy as np
try:
    StagingPool(MemoryConfig(is_page_locked=True)).stage([tensor_from_array("a", np.zeros(9))])
except MemoryError as error:
    print(type(error).__name__, error)
"""


def test_enable_pinned_mem_beyond_the_limit_names_the_limit_and_the_way_out() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith(
        "StagingExhausted 67108864 bytes of staging memory cannot be locked"
    )
    assert "the limit of this process is 4096 bytes" in done.stdout
    assert "ulimit -l" in done.stdout


@no_huge_pages
@pytest.mark.parametrize("is_shared", [False, True])
def test_variable_use_1g_huge_page_1_without_huge_pages_is_an_error(is_shared: bool) -> None:
    with pytest.raises(StagingExhausted, match=r"no reserved huge pages(.|\n)*nr_hugepages"):
        Slab(PAGE, config=MemoryConfig(huge_pages=1), is_shared=is_shared)


@no_huge_pages
@pytest.mark.parametrize("is_shared", [False, True])
def test_variable_use_1g_huge_page_2_without_huge_pages_falls_back(is_shared: bool) -> None:
    slab = Slab(PAGE, config=MemoryConfig(huge_pages=2), is_shared=is_shared)
    assert "ht" not in mapping_flags(slab.view)
    slab.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_huge_pages_where_there_are_some_back_the_slab(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    # Reserving huge pages would change the machine, so the system call only notes the request.
    asked: list[tuple[int, int]] = []

    def noting_mmap(descriptor: int, length: int, **options: Any) -> mmap.mmap:
        asked.append((length, options.get("flags", 0) & 0x40000))
        options["flags"] = options.get("flags", mmap.MAP_SHARED) & ~0x40000
        return real_mmap(descriptor, length, **options)

    def noting_memfd(name: str, flags: int) -> int:
        asked.append((0, flags & 4))
        return real_memfd(name, flags & ~4)

    real_mmap, real_memfd = mmap.mmap, os.memfd_create
    monkeypatch.setattr(mmap, "mmap", noting_mmap)
    monkeypatch.setattr(os, "memfd_create", noting_memfd)
    slab = Slab(5 * PAGE, config=MemoryConfig(huge_pages=1), is_shared=is_shared)
    assert slab.view.nbytes == 5 * PAGE
    assert (0, 4) in asked if is_shared else (2 * MIB, 0x40000) in asked
    slab.close()


def test_slab_of_impossible_size_is_refused_with_the_way_out() -> None:
    for size in (1 << 60, 1 << 80):
        with pytest.raises(StagingExhausted, match=r"does not give(.|\n)*host_budget_bytes"):
            Slab(size, config=MemoryConfig(), is_shared=False)


def test_shared_slab_of_impossible_size_leaves_no_descriptor_open() -> None:
    with nothing_stays_open(), pytest.raises(StagingExhausted):
        Slab(1 << 60, config=MemoryConfig(), is_shared=True)


def test_pool_without_room_names_the_figures_and_keeps_what_it_had() -> None:
    config = MemoryConfig(host_budget_bytes=3 * PAGE)
    ledger = Ledger(config)
    pool = SlabPool(config, ledger=ledger, is_shared=False)
    held = pool.take([PAGE])
    with pytest.raises(StagingExhausted, match="of 12288 usable bytes 8192 are taken"):
        pool.take([PAGE, 5 * PAGE])
    pool.give_back(held)
    pool.close()
    assert ledger.host_bytes == 0


def test_pool_whose_system_refuses_gives_the_budget_back() -> None:
    config = MemoryConfig()
    ledger = Ledger(config)
    pool = SlabPool(config, ledger=ledger, is_shared=False)
    with pytest.raises(StagingExhausted):
        pool.take([1 << 60])
    assert ledger.host_bytes == 0


def test_ledger_refuses_what_exceeds_a_budget_and_takes_back_anything() -> None:
    ledger = Ledger(MemoryConfig(host_budget_bytes=10, disk_budget_bytes=20))
    assert ledger.add_host(10)
    assert not ledger.add_host(1)
    assert ledger.host_room_bytes() == 0
    assert ledger.add_host(-4)
    assert ledger.host_room_bytes() == 4
    assert not ledger.add_disk(21)
    assert ledger.add_disk(20)
    assert (ledger.host_bytes, ledger.disk_bytes) == (6, 20)
