# SPDX-License-Identifier: Apache-2.0
"""`Run`: the common part of a manager and a callback, for one process or many ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmgr.config.config import CheckpointConfig, trust_of
from ckptmgr.core.arguments import no_effect
from ckptmgr.core.place import capabilities_at
from ckptmgr.engine.engine import engine_for
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.save.job import SaveOptions
from ckptmgr.observe.observers import Observers
from ckptmgr.parallel.team import Team
from ckptmgr.policy.save import SavePolicy
from ckptmgr.series.commit import Alone, Commit, Destination, Here
from ckptmgr.series.reader import SeriesReader
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.state.arrays import named_tensors
from ckptmgr.store.name_limits import check_name_lengths
from ckptmgr.store.store import Store
from ckptmgr.training.companions import Companion
from ckptmgr.training.due import DueSaves
from ckptmgr.training.forecast import Forecaster
from ckptmgr.training.history import Progress
from ckptmgr.training.options import RunOptions

if TYPE_CHECKING:  # a run without a mirror needs none of it
    from ckptmgr.remote.mirror import Mirror, MirrorUploads


class Run:
    """Configuration, ranks, engine and policy of a run, its companions, its reader and its writers.

    A manager and a callback each have one.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        options: RunOptions,
        team: Team,
        *,
        observers: Observers,
        has_before_update: bool,
    ) -> None:
        self.config = config
        self.trust = trust_of(config, options.trust)
        self.team = team
        self.system = options.system
        self.clock = options.system.clock
        self.observers = observers
        self.engine = engine_for(
            config, has_before_update=has_before_update, has_peers=team.is_many
        )
        self.forecaster = Forecaster(config, observers)
        self.companions: list[Companion] = [self.forecaster]
        if team.is_many:
            from ckptmgr.parallel.slicer import tensor_specs

            tensor_specs(named_tensors(config.append_dict or {}))  # refuses texts

    def due(self, policy: SavePolicy, progress: Callable[[], Progress]) -> DueSaves:
        """Return what decides about saves; `progress` returns the saves so far."""
        return DueSaves(
            policy,
            only_kept=self.config.only_kept,
            measured=self.config.save_when_measured,
            progress=progress,
            clock=self.clock,
            observers=self.observers,
            coordinator=self.team.coordinator,
            timeout_s=self.team.timeout_s,
        )

    def alone(self) -> Run:
        """Return the same run as one process; the slices stay those of this rank."""
        one = copy(self)
        one.team = Team(slicer=self.team.slicer)
        return one

    @property
    def options(self) -> SaveOptions:
        """How files are written."""
        return SaveOptions(
            format=self.config.format,
            key=self.config.keys,
            mode=self.config.enc_mode,
            has_crc=self.config.crc_check,
            compression_level=self.config.compression_level,
            file_mode=self.config.file_mode,
            verify_after_write=self.config.verify_after_write,
        )

    def writer(self, directory: Path, series: str, *, has_epochs: bool = False) -> SeriesWriter:
        """Return the writer of a series; the directory or address does not change yet.

        `has_epochs` says whether the file names contain an epoch.

        Raises:
            ValueError: The name is too long for the file system.
        """
        address = str(directory)
        is_remote = not capabilities_at(address).in_place
        if is_remote:
            from ckptmgr.objects.staging import staging_directory

            directory = staging_directory(address, series)
        check_name_lengths(
            directory,
            series,
            extension=self.options.extension,
            has_epochs=has_epochs,
            world=None if self.team.coordinator is None else self.team.coordinator.world,
        )
        ranks, options, clock = self.team.coordinator, self.options, self.clock
        store = Store(
            directory,
            fs=self.system.fs,
            trust=self.trust,
            processes=self.system.processes,
            clock=time.time if ranks is None else clock,
            file_mode=options.file_mode,
        )
        destination: Callable[[SeriesWriter], Destination] = Here
        commit: Callable[[SeriesWriter], Commit] = Alone
        if is_remote:
            from ckptmgr.remote.upload import Upload

            destination = partial(Upload, url=address)
        if ranks is not None:
            from ckptmgr.parallel.rank_commit import together

            commit = together(ranks, timeout_s=self.team.timeout_s, sharing=self.team.sharing)
        return SeriesWriter(
            store,
            series,
            options=options,
            clock=clock,
            observers=self.observers,
            commit=commit,
            destination=destination,
        )

    def reader(self, writer: SeriesWriter) -> SeriesReader:
        """Return the reader of the series of `writer`."""
        ranks = self.team.coordinator
        options = ReadOptions(
            trust=self.trust,
            rank=None if ranks is None else ranks.rank,
            world=1 if ranks is None else ranks.world,
        )
        return SeriesReader(
            writer.listing,
            writer.series,
            options=options,
            slicer=self.team.slicer,
            own_runs=lambda: writer.own_runs,
        )

    def uploads(
        self, mirror: Mirror | str | None, writer: SeriesWriter, *, below: Path
    ) -> MirrorUploads | None:
        """Return the uploads of a mirror of the directory, which is `below` or in it; None without one.

        Raises:
            ValueError: There is a coordinator.
        """
        if mirror is None:
            return None
        from ckptmgr.remote.mirror import MirrorUploads, mirror_of

        if self.team.is_many:
            raise no_effect(
                "mirror",
                "with a coordinator",
                "many ranks write one checkpoint; upload it beside the run with ckptmgr copy SEL URL",
            )
        return MirrorUploads(
            mirror_of(mirror, writer.store.directory.relative_to(below)),
            writer,
            observers=self.observers,
            clock=self.clock,
        )
