# SPDX-License-Identifier: Apache-2.0
"""`MemoryConfig`: the memory of checkpointing, by native names and those of three frameworks.

It covers the staging of background saves, recent snapshots in memory for rollback, and (opt-in) the
offload of the tensors that PyTorch keeps for the backward pass. The default stages up to two states
in host memory and keeps it between saves.

`from_mindspore`, `from_dtr` and `from_ascend` take the keys of `mindspore.set_offload_context`,
MegEngine's `DTRConfig` and Ascend's `MemoryConfig`, which mean:

| key | here |
|---|---|
| offload_path | `spill_directory` |
| offload_cpu_size, cpu_ratio | `host_budget_bytes`, of which `host_share` is used |
| offload_disk_size | `disk_budget_bytes`; absent means the whole disk |
| hbm_ratio | `device_copy_share` |
| enable_pinned_mem | `is_page_locked` |
| enable_aio, aio_queue_depth (aio_queue_size) | `writes_in_flight`; without aio it is 1 |
| aio_block_size, host_mem_block_size | `write_block_bytes`, `slab_bytes` |
| offload_param, offload_checkpoint | `staging_place`, `snapshot_place` |
| auto_offload | `is_automatic`; absent means False |
| eviction_threshold, evictee_minimum_size | `snapshot_budget_bytes`, `smallest_evictee_bytes` |
| recomp_time_factor, recomp_memory_factor | `restore_time_exponent`, `restore_memory_exponent` |
| enable_sqrt_sampling | `is_sampling` |
| atomic_clean_policy | `wipe` |
| static_memory_policy | `allocation` |
| variable_use_1g_huge_page | `huge_pages` |

Validation and messages are MindSpore's (2.7.0) and MegEngine's. Differences:

* A configuration is valid as a whole or not made; MindSpore applies the keys before the first bad
  one.
* Absent keys take the defaults here, not MindSpore's: a block pool of 1 GiB quanta, 1024 requests
  in flight and locked pages (most systems allow 8 MiB) suit offloading a network, not staging. Not
  so `auto_offload`: without it nothing is offloaded but by `offload_param` and
  `offload_checkpoint`, as in MindSpore 2.7, whose documentation has another default.
* `offload_cpu_size` is used in full; MindSpore takes 80 % of it.

>>> MemoryConfig.from_mindspore({"offload_cpu_size": "2GB", "cpu_ratio": 0.5}).usable_host_bytes
1073741824
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal

from ckptmgr.config import memory_keys

Place = Literal["host", "disk"]
Wipe = Literal["at_end", "each_buffer"]
Allocation = Literal["exact", "arena", "slabs", "arena_and_slabs"]

MIB = 1 << 20
_PLACES = (None, "host", "disk")
_WIPES = (None, "at_end", "each_buffer")
_PLACE_OF: dict[str | None, Place] = {"cpu": "host", "disk": "disk"}
_ALLOCATIONS = ("exact", "arena", "slabs", "arena_and_slabs")
_ASCEND_ALLOCATIONS: tuple[Allocation, ...] = (
    "exact",
    "arena",
    "arena",
    "slabs",
    "arena_and_slabs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Amount, kind and use of the memory of checkpointing.

    Attributes:
        host_budget_bytes: Host memory for staging and snapshots; None for two states of any size.
        host_share: Usable share of that budget, in (0, 1].
        disk_budget_bytes: Bytes of spill files; None for the whole disk.
        spill_directory: Directory of spill files, created with mode 0700; None for no spilling.
        device_copy_share: Share of the free device memory for a copy on the device, in [0, 1];
            training then waits for that copy only. 0 copies to the host at once.
        is_page_locked: Whether staging memory is locked: it is never swapped, and CUDA copies
            faster.
        write_block_bytes: Size of one write to a spill file.
        writes_in_flight: Most writes to a spill file at the same time.
        slab_bytes: Quantum of the staging pool.
        staging_place: Where a staged state waits for its writer, when not automatic; None is the
            host.
        snapshot_place: Where snapshots and offloaded tensors are, when not automatic; None is the
            host.
        is_automatic: Use the host first and spill above the budget, instead of the two places.
        snapshot_budget_bytes: Size of all snapshots above which some are evicted; None for no
            limit.
        smallest_evictee_bytes: Smaller snapshots are never evicted, smaller tensors never
            offloaded.
        restore_time_exponent: Weight, in the choice of snapshots to evict, of the seconds to get their
            states again: a load of the checkpoint before, and the training since then.
        restore_memory_exponent: Weight of the bytes of that checkpoint in that choice.
        is_sampling: Whether that choice is among about the square root of the candidates.
        wipe: When staged plaintext is zeroed: never, when the save ends, or each tensor as soon as it
            is written (`each_buffer`; a failed save is then not tried again).
        allocation: `exact` allocates for each save and keeps nothing; `arena` keeps one region as
            large as the largest state; `slabs` keeps quanta; `arena_and_slabs` keeps one region of
            whole quanta. With an arena only one state can be staged at a time.
        huge_pages: 0 for the system's default, 1 for reserved huge pages or an error, 2 to fall
            back.
    """

    host_budget_bytes: int | None = None
    host_share: float = 1.0
    disk_budget_bytes: int | None = None
    spill_directory: Path | None = None
    device_copy_share: float = 0.0
    is_page_locked: bool = False
    write_block_bytes: int = MIB
    writes_in_flight: int = 8
    slab_bytes: int = 64 * MIB
    staging_place: Place | None = None
    snapshot_place: Place | None = None
    is_automatic: bool = True
    snapshot_budget_bytes: int | None = None
    smallest_evictee_bytes: int = MIB
    restore_time_exponent: float = 1.0
    restore_memory_exponent: float = 1.0
    is_sampling: bool = False
    wipe: Wipe | None = None
    allocation: Allocation = "slabs"
    huge_pages: Literal[0, 1, 2] = 0

    def __post_init__(self) -> None:
        for name in ("host_budget_bytes", "disk_budget_bytes", "snapshot_budget_bytes"):
            if getattr(self, name) is not None:
                _check_at_least(name, getattr(self, name), 1)
        for name in ("write_block_bytes", "writes_in_flight", "slab_bytes"):
            _check_at_least(name, getattr(self, name), 1)
        for name in ("smallest_evictee_bytes", "restore_time_exponent", "restore_memory_exponent"):
            _check_at_least(name, getattr(self, name), 0)
        if not 0 < self.host_share <= 1:
            raise ValueError(f"host_share must be in (0, 1], but got {self.host_share}")
        if not 0 <= self.device_copy_share <= 1:
            raise ValueError(
                f"device_copy_share must be in [0, 1], but got {self.device_copy_share}"
            )
        _check_one_of("staging_place", self.staging_place, _PLACES)
        _check_one_of("snapshot_place", self.snapshot_place, _PLACES)
        _check_one_of("wipe", self.wipe, _WIPES)
        _check_one_of("allocation", self.allocation, _ALLOCATIONS)
        _check_one_of("huge_pages", self.huge_pages, (0, 1, 2))

    @property
    def usable_host_bytes(self) -> int | None:
        """The part of the host budget that may be used, or None when there is no budget."""
        if self.host_budget_bytes is None:
            return None
        return int(self.host_budget_bytes * self.host_share)

    @property
    def may_spill_staging(self) -> bool:
        """Whether staged states may be spilled to the disk."""
        is_allowed = self.is_automatic or self.staging_place == "disk"
        return is_allowed and self.spill_directory is not None

    @classmethod
    def from_mindspore(cls, offload_config: Mapping[str, object]) -> MemoryConfig:
        """Return the configuration of a `mindspore.set_offload_context` dictionary.

        Args:
            offload_config: Keys and values as MindSpore 2.7.0 accepts them; `aio_queue_size` is its
                other spelling of `aio_queue_depth`. Without `auto_offload`, which is False then, the
                places decide, and above `offload_cpu_size` nothing is spilled.

        Raises:
            ValueError, TypeError: An unknown key or an invalid value, with MindSpore's message.
        """
        keys = memory_keys.checked_offload_config(offload_config)
        return cls(
            host_budget_bytes=keys.get("offload_cpu_size"),
            host_share=keys.get("cpu_ratio", 1.0),
            disk_budget_bytes=keys.get("offload_disk_size"),
            spill_directory=Path(keys.get("offload_path", "./offload/")),
            device_copy_share=keys.get("hbm_ratio", 0.0),
            is_page_locked=keys.get("enable_pinned_mem", False),
            write_block_bytes=keys.get("aio_block_size", MIB),
            writes_in_flight=keys.get("aio_queue_depth", 8) if keys.get("enable_aio", True) else 1,
            slab_bytes=keys.get("host_mem_block_size", 64 * MIB),
            staging_place=_PLACE_OF.get(keys.get("offload_param")),
            snapshot_place=_PLACE_OF.get(keys.get("offload_checkpoint")),
            is_automatic=keys.get("auto_offload", False),
        )

    @classmethod
    def from_dtr(
        cls,
        eviction_threshold: object = 0,
        evictee_minimum_size: int | str = MIB,
        recomp_memory_factor: float = 1,
        recomp_time_factor: float = 1,
        *,
        enable_sqrt_sampling: bool = False,
    ) -> MemoryConfig:
        """Return the configuration of a MegEngine `DTRConfig`.

        Args:
            eviction_threshold: Bytes, or a text such as "5GB"; or a `DTRConfig` (any object with
                these attributes), which replaces all arguments.
            evictee_minimum_size: Bytes, or a text.
            recomp_memory_factor: At least 0.
            recomp_time_factor: At least 0.
            enable_sqrt_sampling: As in `megengine.dtr`.

        Raises:
            ValueError: A value out of range; the text is that of MegEngine's assertion.
            TypeError: A value that is no number.
        """
        options = memory_keys.checked_dtr(
            eviction_threshold,
            evictee_minimum_size,
            recomp_memory_factor,
            recomp_time_factor,
            enable_sqrt_sampling,
        )
        return cls(**options)

    @classmethod
    def from_ascend(
        cls,
        atomic_clean_policy: int = 0,
        static_memory_policy: int = 0,
        memory_optimization_policy: str | None = None,
        variable_use_1g_huge_page: int = 0,
    ) -> MemoryConfig:
        """Return the configuration of an Ascend `MemoryConfig`.

        Args:
            atomic_clean_policy: 0 wipes staged plaintext when a save ends, 1 each written buffer.
            static_memory_policy: 0 allocates exactly, 1 and 2 keep an arena, 3 slabs, 4 both.
            memory_optimization_policy: Only None: it chooses recomputation inside Ascend graphs.
            variable_use_1g_huge_page: 0, 1 (huge pages or an error) or 2 (huge pages if there are
                any).

        Raises:
            ValueError: Another value.
        """
        memory_keys.check_ascend(
            atomic_clean_policy,
            static_memory_policy,
            memory_optimization_policy,
            variable_use_1g_huge_page,
        )
        huge_pages: tuple[Literal[0, 1, 2], ...] = (0, 1, 2)
        return cls(
            wipe="each_buffer" if atomic_clean_policy else "at_end",
            allocation=_ASCEND_ALLOCATIONS[static_memory_policy],
            huge_pages=huge_pages[variable_use_1g_huge_page],
        )


def _check_at_least(name: str, value: float, least: int) -> None:
    if not least <= value < inf:
        raise ValueError(f"{name} must be a number of at least {least}, but got {value}")


def _check_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, but got {value!r}")
