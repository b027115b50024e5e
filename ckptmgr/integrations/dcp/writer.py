# SPDX-License-Identifier: Apache-2.0
"""`StorageWriter`: each rank writes one file, and the coordinator commits all of them, or none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.core.arguments import checked_count, checked_epoch, checked_metrics
from ckptmgr.core.errors import SaveFailed, UnsupportedState
from ckptmgr.core.handle import SaveStats
from ckptmgr.core.model import Checkpoint
from ckptmgr.files.load.shard_pieces import PIECES
from ckptmgr.files.save.job import SaveFacts, SaveOptions, SaveOrder
from ckptmgr.files.save.saver import save_items
from ckptmgr.integrations.dcp.dedup import is_compared
from ckptmgr.integrations.dcp.index import INDEX_NAME, INDEX_VERSION, MARK
from ckptmgr.integrations.dcp.items import bytes_tensor, stored
from ckptmgr.integrations.dcp.metadata import dcp_index_of, pieces_of
from ckptmgr.integrations.dcp.place import checked_config, parse_step, place_of
from ckptmgr.integrations.dcp.run import Ancestry, DcpRun, end_run, lineage_of, run_of
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.observe.observers import Observer, Observers, SaveWatch
from ckptmgr.parallel.proposal import SaveProposal, merged_manifest, vote_of
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.name_limits import check_name_lengths

DCP_TIMEOUT_S = 3600.0
_MOST_RANKS = 10**6  # how many there are is known when they save


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """A save that the coordinator has begun."""

    run: DcpRun
    proposal: SaveProposal
    planned: frozenset[MetadataIndex]
    watch: SaveWatch
    started: float

    def report(self, checkpoint: Checkpoint, stats: Mapping[str, float]) -> None:
        """Report to observers that it is durable, with the largest costs of the ranks."""
        cost = SaveStats()
        passed_s = time.perf_counter() - self.started
        cost.note_written(stats, size_bytes=checkpoint.size_bytes, passed_s=passed_s)
        self.watch.costs(cost)
        self.watch.durable(checkpoint.path, epoch=checkpoint.epoch, metrics=checkpoint.metrics)


class StorageWriter(storage.StorageWriter):
    """Storage for `dcp.save` and `dcp.async_save`: one for each save, or with `checkpoint_id=`.

    Args:
        directory: The directory of the checkpoints; all ranks see it.
        config: Retention, keys, compression, `verify_after_write`, `file_mode`. The loop decides when to save,
            and the files are always safetensors, in containers with a key.
        prefix: Name of the series; the checkpoint is `<prefix>-<step>.shards`.
        step: Global step; that of the coordinator counts.
        epoch: Epoch number, or None.
        metrics: Name to value, for `best(...)`.
        timeout_s: How long a save may take. Files of a failed one are garbage after twice this
            time.
        observe: A function, or several, that take an `Event` of `ckptmgr.observe`; on the
            coordinator. They are sent to torch's checkpoint process, too.
        clock: Seconds since 1970.
        fs: The disk.

    Raises:
        TypeError, ValueError, NotADirectoryError: An argument is unusable.

    Attributes:
        checkpoint: The checkpoint of the last save, on the coordinator; elsewhere None.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        prefix: str = "ckpt",
        step: int | None = None,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
        timeout_s: float = DCP_TIMEOUT_S,
        observe: Observer | Iterable[Observer] | None = None,
        clock: Callable[[], float] = time.time,
        fs: FileSystem | None = None,
    ) -> None:
        super().__init__()
        self._config = checked_config(config)
        self._place = place_of(directory, self._config, prefix=prefix, clock=clock, fs=fs)
        self._step = None if step is None else checked_count("step", step)
        self._epoch = checked_epoch(epoch)
        self._metrics = checked_metrics(metrics)
        self._timeout_s = timeout_s
        self._observers = Observers(observe)
        self._options = SaveOptions(
            format="safetensors",
            key=self._place.trust.keys,
            mode=self._config.enc_mode,
            has_crc=self._config.crc_check,
            compression_level=self._config.compression_level,
            file_mode=self._config.file_mode,
            verify_after_write=self._config.verify_after_write,
        )
        check_name_lengths(
            self._place.directory,
            self._place.series,
            extension=self._options.extension,
            has_epochs=False,
            world=_MOST_RANKS,
        )
        self._save: _Save | None = None
        self._draft: Manifest | None = None
        self.checkpoint: Checkpoint | None = None

    @property
    def checkpoint_id(self) -> str:
        """The path of the checkpoint, unless its step was saved before."""
        return str(self._place.directory / f"{self._place.series}-{self._step}.shards")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it may be a step or a name; DCP calls it to choose a writer."""
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the step of the next save from `"500"`, or a path `<directory>/<prefix>-500`.

        Raises:
            ValueError: It is something else.
        """
        self.checkpoint = None
        if checkpoint_id is not None:
            self._step = parse_step(checkpoint_id, self._place)

    def storage_meta(self) -> StorageMeta:
        """Return the description of the storage for planners."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save.

        Raises:
            ValueError: There is no step, or the ranks are to save without collectives.
        """
        if self._step is None:
            raise ValueError(
                "nobody said which step this is: StorageWriter(..., step=500), or dcp.save(..., checkpoint_id='500')"
            )
        if kwargs.get("use_collectives", True) is False:
            raise ValueError(
                "use_collectives=False: ranks that do not hear of each other cannot make one checkpoint"
            )
        self._save = self._draft = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Take the lease, and send each rank the name of its file.

        Raises:
            StoreLocked: Another process writes this series.
            SaveFailed: The ranks would save only a part of a tensor.
            UnsupportedState: The planner leaves out items that it has planned before.
        """
        if not all(plan.usable for plan in plans):
            raise UnsupportedState(
                "the planner leaves out what has not changed since its last plan",
                hint="use ckptmgr.integrations.dcp.SavePlanner, which can cache plans",
            )
        index = dcp_index_of(plans)
        run = run_of(self._place, options=self._options, observers=self._observers)
        step = checked_count("step", -1 if self._step is None else self._step)
        started = time.perf_counter()
        with self._observers.watch(series=self._place.series, step=step, why="manual") as watch:
            proposal = run.begin(
                step,
                world=len(plans),
                timeout_s=self._timeout_s,
                watch=watch,
                retention=self._config.retention_policy(),
            )
        planned = frozenset(item.index for plan in plans for item in plan.items)
        self._save = _Save(
            run=run, proposal=proposal, planned=planned, watch=watch, started=started
        )
        compared = is_compared(plans)
        tasks: list[dict[str, object]] = [
            {"offer": proposal.to_json(), "rank": rank, "world": len(plans), "compared": compared}
            for rank in range(len(plans))
        ]
        tasks[0]["index"] = index.to_json()
        return [replace(plan, storage_data=task) for plan, task in zip(plans, tasks, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this rank durably.

        Raises:
            UnsupportedState: A value cannot be stored without pickling.
            StoreFull: Not enough disk space.
            SaveFailed, OSError: As `save_items`.
        """
        task = plan.storage_data
        proposal = SaveProposal.from_json(task["offer"])
        items = [stored(item, planner) for item in plan.items]
        if "index" in task:
            items.append(bytes_tensor(INDEX_NAME, task["index"]))
        pieces = pieces_of(plan, items, is_compared=task["compared"])
        name = proposal.file_name(task["rank"], world=task["world"])
        order = SaveOrder(
            name=name,
            items=items,
            options=self._options,
            series=self._place.series,
            draft=self._drafted(proposal, name),
            is_rank_file=True,
            metadata={MARK: str(INDEX_VERSION), PIECES: pieces.to_text()},
        )
        with nullcontext() if self._save is None else self._save.watch:
            self._draft = save_items(self._place.store(), order)
        size_bytes = self._draft.file.digest.size_bytes
        file = WriteResult(MetadataIndex(order.name), size_bytes, vote_of(self._draft))
        future: Future[list[WriteResult]] = Future()
        future.set_result([file, *(WriteResult(item.index, 0, None) for item in plan.items)])
        return future

    def _drafted(self, proposal: SaveProposal, name: str) -> Manifest:
        facts = SaveFacts(
            step=self._step or 0, at=proposal.at, epoch=self._epoch, metrics=self._metrics
        )
        # The facts of the coordinator about a save count.
        run = DcpRun(self._place, options=self._options) if self._save is None else self._save.run
        retention = self._config.retention_policy()
        return run.writer.draft(
            name, self._options, facts, place=proposal.place, retention=retention
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, then apply the retention policy.

        Raises:
            SaveFailed: A rank has left out an item, or the commit failed. There is no such
                checkpoint.
            OSError: From the disk. There is no such checkpoint.
        """
        save, draft = self._save, self._draft
        if save is None or draft is None:
            raise SaveFailed("finished before it was begun")

        def manifest() -> Manifest:
            lost = save.planned - {one.index for result in results for one in result}
            if lost:
                raise SaveFailed(f"no rank has written {min(index.fqn for index in lost)!r}")
            return merged_manifest(draft, [result[0].storage_data for result in results])

        with save.watch:
            self.checkpoint = save.run.commit(save.proposal, manifest)
        save.report(self.checkpoint, draft.stats)
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.checkpoint.path))
        save.run.retain(self._config.retention_policy())

    def __getstate__(self) -> dict[str, Any]:
        # dcp.async_save may hand a writer to a process of torch's, whose saves belong to the run of
        # this one.
        lineage = lineage_of(self._place)
        return {**vars(self), "_save": None, "_draft": None, "_lineage": lineage}

    def __setstate__(self, state: dict[str, Any]) -> None:
        lineage: Ancestry | None = state.pop("_lineage")
        vars(self).update(state)
        if lineage is not None:
            run_of(self._place, options=self._options, lineage=lineage)

    def close(self) -> None:
        """End the run of this process, and let other processes write this series."""
        end_run(self._place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
