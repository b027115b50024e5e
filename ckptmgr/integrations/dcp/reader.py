# SPDX-License-Identifier: Apache-2.0
"""`StorageReader`: any number of ranks read a checkpoint, each the bytes it needs, checked."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.core.arguments import checked_count
from ckptmgr.core.errors import (
    CheckpointNotFound,
    CkptmgrError,
    CorruptCheckpoint,
    UnsupportedCheckpoint,
    UnsupportedState,
)
from ckptmgr.core.model import Checkpoint
from ckptmgr.crypto.keys.signing import PublicKey
from ckptmgr.integrations.dcp import planners as dcp_planners
from ckptmgr.integrations.dcp.files import ShardSet
from ckptmgr.integrations.dcp.index import RankPiece
from ckptmgr.integrations.dcp.loading import Loading, check_shared
from ckptmgr.integrations.dcp.metadata import metadata_from
from ckptmgr.integrations.dcp.place import checked_config, place_of, set_name_of
from ckptmgr.integrations.dcp.run import lineage_of, note_resumed
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.passing_errors import is_damage, may_be_whole, may_return
from ckptmgr.observe.observers import Observer, Observers, about
from ckptmgr.series.candidates import Skipped, doubt_of, newest_first, skipped_sets
from ckptmgr.series.reader import SeriesReader
from ckptmgr.series.selectors import parse_selector
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.store import Store

_LOG = logging.getLogger(__name__)
_LATEST = "latest"
_STOCK = (".metadata", ".distcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    checkpoint: Checkpoint
    manifest: Manifest
    shards: ShardSet
    metadata: Metadata


class StorageReader(storage.StorageReader):
    """Storage for `dcp.load`: by default the newest checkpoint of a series that is whole.

    After a load the saves of this process continue the run of the checkpoint: retention counts its
    checkpoints.

    Args:
        directory: The directory of the checkpoints; all ranks see it.
        config: The keys; no other field has an effect here. What `StorageWriter` refuses is refused.
        prefix: Name of the series.
        step: The step to load; None for the newest.
        allow_unsealed: With a key, also accept files encrypted under it that are not proven as a
            whole.
        allow_unencrypted: With a key or trusted keys, also accept plain files.
        trusted_keys: Public keys, or their files in PEM: files that none of them signed are
            refused.
        observe: A function, or several, that take an `Event` of `ckptmgr.observe`; on every rank.
        fs: The disk.

    Raises:
        TypeError, ValueError, NotADirectoryError: An argument is unusable.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        prefix: str = "ckpt",
        step: int | None = None,
        allow_unsealed: bool = False,
        allow_unencrypted: bool = False,
        trusted_keys: Iterable[str | os.PathLike[str] | PublicKey] = (),
        observe: Observer | Iterable[Observer] | None = None,
        fs: FileSystem | None = None,
    ) -> None:
        super().__init__()
        checked = checked_config(config)
        self._place = place_of(
            directory,
            checked,
            prefix=prefix,
            allow_unsealed=allow_unsealed,
            allow_unencrypted=allow_unencrypted,
            trusted_keys=trusted_keys,
            fs=fs,
        )
        self._options = self._place.reading()
        self._observers = Observers(observe)
        self._wanted: int | str | None = None if step is None else checked_count("step", step)
        self._found: _Found | None = None
        self._skipped: tuple[Skipped, ...] = ()
        self._problem: Exception | None = None
        self._load_id = str(uuid.uuid4())

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint of the last load, with its step and metrics."""
        return None if self._found is None else self._found.checkpoint

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The newer checkpoints that were passed over for it, with reasons."""
        return self._skipped

    @property
    def doubt(self) -> str | None:
        """The skipped ones that may come back, after a missing file or a failing disk; or None."""
        return doubt_of(self._skipped)

    @property
    def checkpoint_id(self) -> str:
        """The series and the checkpoint to load."""
        wanted = _LATEST if self._wanted is None else self._wanted
        return str(self._place.directory / f"{self._place.series}: {wanted}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it may be a step or a name; DCP calls it to choose a reader."""
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Choose the checkpoint: a name, a path, or a selector as for `CheckpointManager.load`.

        Raises:
            ValueError: It is a path of another directory, or no complete selector.
        """
        self._found = None
        self._load_id = str(uuid.uuid4())
        if checkpoint_id is None:
            return
        text = os.fspath(checkpoint_id)
        is_selector = parse_selector(text) is not None
        self._wanted = text if is_selector else set_name_of(checkpoint_id, self._place)
        if text == _LATEST:
            self._wanted = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata; empty after an error, which the next call raises.

        `storage_meta` has the path and the id of the checkpoint (`save_id`) and an id of this load.
        """
        self._problem = None
        try:
            self._found = self._find()
        except (CkptmgrError, OSError) as error:
            # DCP would only log an exception from here, and raise an AssertionError in its place.
            self._found, self._problem = None, error
            return Metadata(state_dict_metadata={})
        return self._found.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Raise the error of `read_metadata`.

        Raises:
            CheckpointNotFound: There is no such checkpoint.
            UnsupportedCheckpoint: It was not saved through DCP with `StorageWriter`.
            CorruptCheckpoint, KeyProblem, OSError: It is damaged, or the key is wrong.
        """
        if self._problem is not None:
            raise self._problem

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the name of the checkpoint to the plan."""
        return replace(plan, storage_data=self._chosen().checkpoint.name)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have found the same checkpoint.

        Raises:
            CheckpointNotFound: They have not.
        """
        for rank, plan in enumerate(plans):
            if plan.storage_data != plans[0].storage_data:
                raise CheckpointNotFound(
                    f"rank {rank} would load {plan.storage_data}, but rank 0 {plans[0].storage_data}",
                    path=self._place.directory,
                    hint="all ranks must see the same directory; while others save there, say which step",
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of the plan into the tensors and the state of the planner.

        Raises:
            CorruptCheckpoint: The bytes are damaged. The tensors that were read are undefined.
            StateMismatch: A target has another size than its item; or targets share memory and
                would get different values there: nothing was changed.
            UnsupportedState: The planner would unpickle.
            OSError: From the disk.
        """
        found = self._chosen()
        has_objects = any(item.type == LoadItemType.BYTE_IO for item in plan.items)
        if has_objects and not isinstance(planner, dcp_planners.LoadPlanner):
            raise UnsupportedState(
                f"{type(planner).__name__} would unpickle what is no tensor",
                hint="give dcp.load the planner ckptmgr.integrations.dcp.LoadPlanner()",
            )
        with self._observers.timed("load", **about(found.checkpoint)):
            by_rank = _by_rank(plan.items, found.metadata)
            check_shared(found.shards, by_rank, found.metadata, planner)
            for rank, items in by_rank.items():
                with found.shards.file(rank) as file:
                    Loading(file, found.metadata, planner).run(items)
        note_resumed(self._place, found.checkpoint, found.manifest)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _chosen(self) -> _Found:
        if self._found is None:
            raise CheckpointNotFound("read_metadata comes first", path=self._place.directory)
        return self._found

    def _find(self) -> _Found:
        store, self._skipped = self._place.store(), ()
        checkpoint = self._checkpoint(store)
        if checkpoint.obstacle is not None and not is_damage(checkpoint.obstacle):
            raise checkpoint.obstacle
        is_refused = not checkpoint.is_countable and not checkpoint.is_unproven
        if checkpoint.problem is not None and is_refused:
            raise CorruptCheckpoint(checkpoint.problem, path=checkpoint.path)
        manifest = store.read_manifest(checkpoint.name)
        if manifest is None or not manifest.shards:
            raise UnsupportedCheckpoint(
                "is a single file, not one of many ranks",
                path=checkpoint.path,
                hint="load it with ckptmgr.CheckpointManager",
            )
        shards = ShardSet(store, manifest, options=self._options)
        metadata = metadata_from(shards.index())
        metadata.storage_meta = StorageMeta(
            checkpoint_id=str(checkpoint.path), save_id=checkpoint.id, load_id=self._load_id
        )
        return _Found(checkpoint=checkpoint, manifest=manifest, shards=shards, metadata=metadata)

    def _checkpoint(self, store: Store) -> Checkpoint:
        lineage = lineage_of(self._place)
        own_runs = frozenset[str]() if lineage is None else lineage.runs
        reader = SeriesReader(
            store, self._place.series, options=self._options, own_runs=lambda: own_runs
        )
        if self._wanted is not None:
            return reader.find(self._wanted)
        skipped = skipped_sets(store.scan(), self._place.series)
        for lone in skipped:
            _LOG.warning("skipped %s: %s", lone.checkpoint.path, lone.reason)
        for one in newest_first(reader.checkpoints(), own_runs):
            if one.obstacle is not None and may_be_whole(one.obstacle):
                raise one.obstacle
            if one.is_countable:
                self._skipped = tuple(skipped)
                return one
            _LOG.warning("skipped %s: %s", one.path, one.problem)
            skipped.append(
                Skipped(
                    checkpoint=one,
                    reason=one.problem or one.state.value,
                    may_return=may_return(one.obstacle),
                )
            )
        for passed_over in skipped:
            # A run without a checkpoint starts over; this one may only need the right key.
            if passed_over.checkpoint.is_unproven:
                store.read_manifest(passed_over.checkpoint.name)
        directory = self._place.directory
        names = store.fs.list(directory) if store.fs.status(directory) is not None else {}
        if any(name.endswith(_STOCK) for name in names):
            raise UnsupportedCheckpoint(
                "is a checkpoint of torch's FileSystemWriter, which holds pickles",
                path=directory,
                hint="load it with torch's FileSystemReader, and save it again with ckptmgr's StorageWriter",
            )
        raise CheckpointNotFound(f"no checkpoint of series {self._place.series!r}", path=directory)


def _by_rank(items: Iterable[ReadItem], metadata: Metadata) -> dict[int, list[ReadItem]]:
    found: dict[int, list[ReadItem]] = {}
    for item in items:
        piece: RankPiece | None = metadata.storage_data.get(item.storage_index)
        if piece is None:
            raise CheckpointNotFound(f"there is no {item.storage_index} in the checkpoint")
        found.setdefault(piece.rank, []).append(item)
    return dict(sorted(found.items()))
