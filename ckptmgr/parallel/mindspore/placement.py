# SPDX-License-Identifier: Apache-2.0
"""`MindSporePlacement`: the settings of an `AutoParallelContext` that concern checkpoints.

It gives the place of this process among the ranks, and how tensors are cut over them. A setting
that was not given is None and has no effect. Settings that contradict each other, a coordinator, a
directory or a layout are refused by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ckptmgr.parallel.coordinator import Coordinator
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.layout import (
    Layouts,
    ParallelLayout,
    rank_count,
    rank_in_environment,
    rank_of_process,
    read_layouts,
    stage_count,
)
from ckptmgr.parallel.mindspore.context import AutoParallelContext, context_in_force

_RANK_DIRECTORY = re.compile(r"rank_([0-9]{1,9})")
_DEFAULT_THRESHOLD_KIB = 64  # MindSpore's
_UNCUT_MODES = ("stand_alone", "data_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class MindSporePlacement:
    """The place of this process among the ranks, and the strategy that cuts tensors over them.

    Attributes:
        world: `device_num`.
        rank: `global_rank`.
        mode: `parallel_mode`.
        stages: `pipeline_stages`.
        load_file: `strategy_ckpt_load_file`.
        save_file: `strategy_ckpt_save_file`.
        is_sharded: `enable_parallel_optimizer`.
        shard_size: `optimizer_weight_shard_size`; None for all ranks that hold a copy.
        threshold_kib: `parallel_optimizer_threshold`: smaller tensors are not sharded.
    """

    world: int | None = None
    rank: int | None = None
    mode: str | None = None
    stages: int | None = None
    load_file: str | None = None
    save_file: str | None = None
    is_sharded: bool | None = None
    shard_size: int | None = None
    threshold_kib: int = _DEFAULT_THRESHOLD_KIB

    def __post_init__(self) -> None:
        world, rank, stages = self.world, self.rank, self.stages
        problem = None
        if world is not None and rank is not None and rank >= world:
            problem = f"global_rank={rank} is no rank of device_num={world}"
        elif world is not None and world % (stages or 1):
            problem = f"device_num={world} cannot be divided into pipeline_stages={stages}"
        elif self.mode == "stand_alone" and (world or 1) > 1:
            problem = f"parallel_mode='stand_alone' contradicts device_num={world}"
        elif self.mode in _UNCUT_MODES and (stages or 1) > 1:
            problem = f"parallel_mode={self.mode!r} contradicts pipeline_stages={stages}"
        if problem is not None:
            raise ValueError(f"the parallel context contradicts itself: {problem}")

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds whole tensors."""
        return self.mode == "data_parallel"

    def check_coordinator(self, coordinator: Coordinator) -> None:
        """Raise ValueError unless a coordinator agrees on the rank and the number of ranks."""
        rank, world = coordinator.rank, coordinator.world
        for key, ours, theirs in (
            ("global_rank", self.rank, rank),
            ("device_num", self.world, world),
        ):
            if ours is not None and ours != theirs:
                raise ValueError(
                    f"the parallel context says {key}={ours}, but the coordinator is rank {rank} of {world}"
                )
        if self.mode == "stand_alone" and world > 1:
            raise ValueError(
                f"the parallel context says parallel_mode='stand_alone', but the coordinator has {world} ranks"
            )

    @property
    def own_rank(self) -> int:
        """The rank of this process: `global_rank`, or that in the environment, or 0."""
        return rank_of_process() if self.rank is None else self.rank

    @property
    def is_alone(self) -> bool:
        """Whether nothing says that there are other ranks."""
        return self.world == 1 or (self.world is None and self.rank is None)

    def own_directory(self, directory: Path) -> Path:
        """Return the directory `rank_N` of a rank that saves without the others.

        One of several ranks has its own, in the given directory unless that already is it.

        Raises:
            ValueError: The rank is not known, or the directory is that of another rank.
        """
        if self.is_alone:
            return directory
        rank = rank_in_environment() if self.rank is None else self.rank
        if rank is None:
            raise ValueError(
                f"the parallel context says device_num={self.world}, but not which of them this process is: "
                "give global_rank, or a coordinator"
            )
        if self.world is not None and rank >= self.world:
            raise ValueError(
                f"RANK_ID or RANK in the environment is {rank}, but the parallel context says device_num={self.world}"
            )
        named = _RANK_DIRECTORY.fullmatch(directory.name)
        if named is None:
            return directory / f"rank_{rank}"
        if int(named[1]) != rank:
            raise ValueError(
                f"the directory {directory} is that of another rank: the parallel context says global_rank={rank}"
            )
        return directory

    def layouts(self, given: Layouts | None, *, world: int | None) -> Layouts | None:
        """Return the layouts of a run: the given ones, or those of the strategy file, or None.

        `world` is the number of ranks, None when it is not known.

        Raises:
            ValueError: They contradict the context, or are given twice and differ.
            CkptmgrError: About the strategy file.
        """
        found = given
        if self.load_file is not None:
            found = read_layouts(self.load_file)
            if given is not None and dict(given) != found:
                raise ValueError(
                    f"the layout differs from the one in strategy_ckpt_load_file={self.load_file!r}; give one of them"
                )
            problem = self._problem_of_strategy(found, world=world)
            if problem is not None:
                raise ValueError(problem)
        return None if found is None else self.fitted(found)

    def fitted(self, layouts: Layouts) -> Layouts:
        """Return layouts with the optimizer shards that the context gives them.

        Raises:
            ValueError: They contradict the context.
        """
        if self.mode in _UNCUT_MODES:
            self._refuse_cut(layouts)
        return {name: self._sharded(name, layout) for name, layout in layouts.items()}

    def source(self, strategy: str | os.PathLike[str] | None) -> MindSporePlacement:
        """Return what holds for files that a tool reads: nothing beside a given strategy."""
        return self if strategy is None else NOWHERE

    def check_source(self, layouts: Layouts | None, ranks: Iterable[int]) -> None:
        """Raise LayoutError unless the strategy and the ranks of source files fit the context."""
        problem = None
        beyond = [rank for rank in ranks if self.world is not None and rank >= self.world]
        if beyond:
            problem = f"there are files of rank {beyond[0]}, but the parallel context says device_num={self.world}"
        elif layouts is not None and self.load_file is not None:
            problem = self._problem_of_strategy(layouts, world=self.world)
        if problem is not None:
            raise LayoutError(
                problem,
                hint="pass context=AutoParallelContext(...) of the run that wrote the files",
            )

    def _problem_of_strategy(self, layouts: Layouts, *, world: int | None) -> str | None:
        label = f"strategy_ckpt_load_file={self.load_file!r}"
        stages, ranks = stage_count(layouts), rank_count(layouts)
        if self.stages is not None and stages != self.stages:
            return (
                f"{label} has {stages} pipeline stage(s), but the parallel context says pipeline_stages={self.stages}; "
                "merge_pipeline_strategys joins the files of all stages"
            )
        if world is not None and ranks != world:
            return f"{label} is for {ranks} ranks, but there are {world} (device_num)"
        return None

    def _refuse_cut(self, layouts: Layouts) -> None:
        for name, layout in layouts.items():
            if prod(layout.pieces) > 1 or layout.opt_shard_size:
                raise ValueError(
                    f"the parallel context says parallel_mode={self.mode!r}, where each rank holds whole tensors, but the "
                    f"layout cuts {name!r}"
                )

    def _sharded(self, name: str, layout: ParallelLayout) -> ParallelLayout:
        """Return a layout with the optimizer shard that the context gives it.

        One that it has is kept: MindSpore chooses another size where the given one does not divide
        the copies. A strategy file has no shapes, which would show tensors too small for a shard.
        """
        size = layout.opt_shard_size
        if self.is_sharded is False and size:
            raise ValueError(
                f"the layout of {name!r} has an optimizer shard, but the parallel context says "
                "enable_parallel_optimizer=False"
            )
        if not self.is_sharded or self.is_replicated or size:
            return layout
        count = self.shard_size or layout.replica_count
        is_divisible = layout.replica_count % count == 0 and count > 1
        if not layout.shape or not is_divisible or not self._is_large(name, layout):
            return layout
        rows, rest = divmod(layout.shape[0], layout.pieces[0])
        return layout if rest or rows % count else replace(layout, opt_shard_size=count)

    def _is_large(self, name: str, layout: ParallelLayout) -> bool:
        if not self.threshold_kib:
            return True
        if layout.dtype is None:
            raise ValueError(
                f"the layout of {name!r} has a shape but no dtype, so its size is not known, from which "
                "enable_parallel_optimizer shards it; give ParallelLayout(dtype=...), or parallel_optimizer_threshold=0"
            )
        size_bytes = prod(layout.shape or ()) // prod(layout.pieces) * layout.dtype.item_bytes
        return size_bytes >= self.threshold_kib << 10


NOWHERE = MindSporePlacement()
"""No setting was given."""


def placement_of(context: AutoParallelContext | None) -> MindSporePlacement:
    """Return the placement that a context gives, or for None the context of this process.

    Raises:
        TypeError: It is no context.
        ValueError: It contradicts itself.
    """
    given = context_in_force(context).given
    config: Mapping[str, int] = given("parallel_optimizer_config") or {}
    size = given("optimizer_weight_shard_size")
    return MindSporePlacement(
        world=given("device_num"),
        rank=given("global_rank"),
        mode=given("parallel_mode"),
        stages=given("pipeline_stages"),
        load_file=given("strategy_ckpt_load_file") or None,
        save_file=given("strategy_ckpt_save_file") or None,
        is_sharded=given("enable_parallel_optimizer"),
        shard_size=None if size in (None, -1) else size,
        threshold_kib=config.get("parallel_optimizer_threshold", _DEFAULT_THRESHOLD_KIB),
    )
