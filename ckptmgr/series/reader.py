# SPDX-License-Identifier: Apache-2.0
"""`SeriesReader`: lists, finds and reads the checkpoints of one series."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, NamedTuple

from ckptmgr.core.errors import CheckpointNotFound, UnsupportedState
from ckptmgr.core.model import UNFINISHED, Checkpoint
from ckptmgr.core.names import step_name
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.state import StoredState, verified_state
from ckptmgr.io.passing_errors import may_be_whole
from ckptmgr.series.candidates import why_nothing
from ckptmgr.series.selectors import FORMS, LATEST, best, latest, of_step, parse_selector
from ckptmgr.state import tree
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.name_leases import is_same
from ckptmgr.store.numbering import next_attempt
from ckptmgr.store.store import Store

if TYPE_CHECKING:  # a save needs none of these
    from ckptmgr.files.load.in_place import InPlaceState
    from ckptmgr.files.load.values import Value
    from ckptmgr.state.slices import Slicer

_SHOWN_NAMES = 5


class NamedValues(NamedTuple):
    """The values of a checkpoint by name, and the names that no rank saved for this one."""

    values: dict[str, Value]
    kept: tuple[str, ...]


class SeriesReader:
    """Lists, finds and reads the checkpoints of a series.

    `slicer` knows which leaves of a state are slices of larger tensors. `own_runs` returns the run
    that reads and its parents, whose checkpoints come before those of other runs.
    """

    def __init__(
        self,
        store: Store,
        series: str,
        *,
        options: ReadOptions,
        slicer: Slicer | None = None,
        own_runs: Callable[[], Set[str]] = frozenset,
    ) -> None:
        self.store = store
        self.series = series
        self.own_runs = own_runs
        self._options = options
        self._slicer = slicer

    def checkpoints(self) -> list[Checkpoint]:
        """Return the committed checkpoints, oldest first."""
        present = self.store.scan_for(self.series)
        found = [c for c in present if c.series == self.series]
        return sorted((c for c in found if c.state not in UNFINISHED), key=lambda c: c.order)

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint without known damage of the line that is meant, or None.

        That is the line of the run that reads, else the one that committed last; see `meant_line`.

        Raises:
            OSError: The disk cannot read a manifest, and that checkpoint may be newer.
        """
        return next(iter(latest(self.checkpoints(), self.own_runs())), None)

    def _readable(self) -> list[Checkpoint]:
        """Return the committed checkpoints, as `checkpoints` does.

        Raises:
            OSError: The disk cannot read a manifest that may be intact.
        """
        found = self.checkpoints()
        for one in found:
            if one.obstacle is not None and may_be_whole(one.obstacle):
                raise one.obstacle
        return found

    def best(self, metric: str, mode: str) -> Checkpoint | None:
        """Return the checkpoint with the best finite value of a metric, or None.

        Raises:
            ValueError: `mode` is neither `min` nor `max`.
            OSError: The disk cannot read a manifest.
        """
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', but got {mode!r}")
        return next(iter(best(self._readable(), metric, mode)), None)

    def find(self, checkpoint: Checkpoint | int | str) -> Checkpoint:
        """Return a checkpoint by its step, its name, its path, or a selector; see `parse_selector`.

        Raises:
            CheckpointNotFound: There is no such checkpoint, or there are several.
            ValueError: A selector is not complete.
            OSError: For `latest` and `best:...`: the disk cannot read a manifest.
        """
        if isinstance(checkpoint, Checkpoint):
            return checkpoint
        listed = self.checkpoints
        if isinstance(checkpoint, str):
            selector = parse_selector(checkpoint)
            listed = self._readable if checkpoint.startswith("best:") else listed
        else:
            selector = of_step(index(checkpoint))
        if selector is None:
            found = [c for c in listed() if checkpoint in (c.name, str(c.path))]
        else:
            found = selector.choose(listed(), self.own_runs())
        if len(found) == 1:
            return found[0]
        raise self._not_one(checkpoint, found)

    def _not_one(self, wanted: int | str, found: Sequence[Checkpoint]) -> CheckpointNotFound:
        if found:
            names = ", ".join(one.name for one in found[:_SHOWN_NAMES])
            more = ", ..." if len(found) > _SHOWN_NAMES else ""
            return CheckpointNotFound(
                f"{wanted!r} names {len(found)} checkpoints: {names}{more}",
                path=self.store.directory,
                hint="name one by its step, its name or its id",
            )
        others = why_nothing(self.store.scan(), lambda one: one.series == self.series)
        return CheckpointNotFound(
            f"no checkpoint {wanted!r} in series {self.series!r}",
            path=self.store.directory,
            hint="; ".join(others) or f"give a file name, {FORMS}",
        )

    def is_there(self, checkpoint: Checkpoint) -> bool:
        """Return whether a listed checkpoint is unchanged; True if the disk cannot answer."""
        try:
            now = self.store.look(checkpoint.name)
        except OSError:
            return True
        return now is not None and now.state not in UNFINISHED and is_same(now, checkpoint)

    def removed(self, checkpoint: Checkpoint) -> CheckpointNotFound:
        """Return the error for a listed checkpoint that is gone or was overwritten."""
        newest = self.latest()
        there = "there is none now" if newest is None else f"the newest is now {newest.name}"
        return CheckpointNotFound(
            f"was removed, or saved again, after it was listed, as by the retention policy of a run; {there}",
            path=checkpoint.path,
            hint=f"look again; manager.load({LATEST!r}) does so until it has the newest",
        )

    def read(
        self,
        checkpoint: Checkpoint,
        state: object = None,
        *,
        only: Sequence[str] | None = None,
        renames: Mapping[str, str] | None = None,
    ) -> StoredState | InPlaceState:
        """Return one verified checkpoint, or only these parts of it, to be restored into `state`.

        Its tensors are in memory. If `state` can take them in place, they are still in the file,
        which stays open. `renames` as in `StoredState`.

        Raises:
            UnsupportedState: Parts are asked for, or other names, and `state` holds slices of
                larger tensors.
        """
        sharded = self._sharded(checkpoint, state)
        if sharded is not None and (only is not None or renames) and self._has_slices(state):
            raise UnsupportedState(
                f"{'renamed' if renames else 'only'} has no effect on a state that holds slices of larger tensors",
                path=checkpoint.path,
                hint="restore the whole state, or load the part in one process, without a layout",
            )
        if sharded is not None:
            from ckptmgr.files.load.shard_state import read_sharded

            if only is not None:
                return read_sharded(self.store, sharded, options=self._options).cut(only)
            read = read_sharded(
                self.store, sharded, options=self._options, state=state, slicer=self._slicer
            )
            return replace(read, renames=renames)
        from ckptmgr.files.load.open import open_listed

        with contextlib.ExitStack() as stack:
            opened, manifest = stack.enter_context(
                open_listed(
                    self.store, checkpoint, options=self._options, is_read_once=state is None
                )
            )
            return verified_state(
                opened,
                stack,
                path=checkpoint.path,
                manifest=manifest,
                state=state,
                only=only,
                renames=renames,
            )

    def values(self, checkpoint: Checkpoint) -> NamedValues:
        """Return the verified values of a checkpoint by name; of a sharded one this rank's."""
        sharded = self._sharded(checkpoint, None)
        if sharded is not None:
            from ckptmgr.files.load.shard_state import read_sharded

            found = read_sharded(self.store, sharded, options=self._options, slicer=self._slicer)
            return NamedValues(dict(found.arrays), found.kept)
        from ckptmgr.files.load.open import open_listed
        from ckptmgr.files.load.values import read_values

        with open_listed(self.store, checkpoint, options=self._options) as (opened, _):
            return NamedValues(read_values(opened), ())

    def is_divided_alike(self, manifest: Manifest | None) -> bool:
        """Return whether as many processes saved a checkpoint as read it.

        If not, their data was divided otherwise. A file without a manifest is of one process.
        """
        saved = 1 if manifest is None else manifest.world_size
        return saved == (1 if self._options.rank is None else self._options.world)

    def _sharded(self, checkpoint: Checkpoint, state: object) -> Manifest | None:
        """Return the manifest if the read needs several files or parts of one, or None."""
        if not checkpoint.shards:
            return self._to_be_cut(checkpoint, state)
        manifest = self.store.read_manifest(checkpoint.name)
        if manifest is None or not manifest.shards:
            return None
        rank = self._options.rank
        if rank is None or self._options.world != len(manifest.shards):
            return manifest
        from ckptmgr.files.load.open import open_listed
        from ckptmgr.files.load.shard_pieces import PIECES

        with open_listed(self.store, checkpoint, options=self._options) as (opened, _):
            return manifest if PIECES in opened.metadata else None

    def _to_be_cut(self, checkpoint: Checkpoint, state: object) -> Manifest | None:
        """Return the manifest of a single file as a set of one rank, if `state` holds slices."""
        if not self._has_slices(state):
            return None
        manifest = self.store.read_manifest(checkpoint.name)
        return None if manifest is None else replace(manifest, shards=(manifest.file,))

    def _has_slices(self, state: object) -> bool:
        if self._slicer is None or state is None:
            return False
        try:
            return bool(tree.flatten(state, self._slicer).slices)
        except UnsupportedState:  # such as an object that can only load a state
            return False

    def free_name(
        self, step: int, present: Sequence[Checkpoint], *, format: str
    ) -> tuple[str, int]:
        """Return an unused name and its attempt number; see `free_name`."""
        return free_name(
            self.store,
            self.series,
            step,
            present,
            name_of=lambda attempt: step_name(self.series, step, attempt=attempt, format=format),
        )


def free_name(
    store: Store,
    series: str,
    step: int,
    present: Sequence[Checkpoint],
    *,
    name_of: Callable[[int], str],
) -> tuple[str, int]:
    """Return an unused name for the next save of a step, and its attempt number, from 0.

    `present` lists the directory; `name_of` returns the name of an attempt.
    """
    taken = {checkpoint.name for checkpoint in present}
    first = next_attempt([c for c in present if c.series == series], step, trust=store.trust)
    return next(
        (name, attempt)
        for attempt in itertools.count(first)
        if (name := name_of(attempt)) not in taken
        and store.fs.status(store.directory / name) is None
    )
