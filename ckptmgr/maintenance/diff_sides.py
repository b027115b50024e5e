# SPDX-License-Identifier: Apache-2.0
"""The two checkpoints of a comparison: specs, values, and the contents of tensors in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Protocol

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CheckpointNotFound
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.regions import regions_of_run
from ckptmgr.files.load.bulk import read_through
from ckptmgr.files.load.inspection import indexed_tensors
from ckptmgr.files.load.open import OpenCheckpoint, open_source, with_manifest
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.shards import ShardedCheckpoint
from ckptmgr.files.load.state import DATA, checked_skeleton
from ckptmgr.files.load.statistics import chunks_of
from ckptmgr.formats.index import READ_BYTES
from ckptmgr.formats.mindspore.entries import TextEntry
from ckptmgr.formats.tensor import TensorSpec, flat_memory
from ckptmgr.io.digest import RANGE_BYTES
from ckptmgr.state.values import StateValue, values_of
from ckptmgr.store.store import Store


class DiffSide(Protocol):
    """An open checkpoint; its tensors are named once each."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors by the name that is shown."""
        ...

    @property
    def values(self) -> Mapping[str, StateValue]:
        """Stored values beside the tensors, by path."""
        ...

    @property
    def is_verified(self) -> bool:
        """Whether something vouches for the bytes that are read."""
        ...

    @property
    def has_values(self) -> bool:
        """Whether `values` is all that is stored beside the tensors."""
        ...

    @property
    def window_bytes(self) -> int:
        """Bytes of a tensor that are best read at once."""
        ...

    def chunks(self, name: str, chunk_bytes: int) -> Iterator[memoryview]:
        """Yield the content of a tensor in views of `chunk_bytes`; the last one is shorter."""
        ...


@contextmanager
def open_side(store: Store, checkpoint: Checkpoint, options: ReadOptions) -> Iterator[DiffSide]:
    """Open a checkpoint for a comparison.

    Raises:
        CkptmgrError: It is damaged or missing, or the keys do not open it.
        OSError: From the disk.
    """
    with contextlib.ExitStack() as stack:
        if checkpoint.shards:
            manifest = store.read_manifest(checkpoint.name)
            if manifest is None:
                raise CheckpointNotFound("there is no manifest", path=checkpoint.path)
            yield RanksSide(
                stack.enter_context(ShardedCheckpoint(store, manifest, options=options))
            )
            return
        path = str(checkpoint.path)
        with translated_errors(path):
            raw = stack.enter_context(contextlib.closing(store.fs.open(checkpoint.path)))
            opened = with_manifest(
                store,
                checkpoint.name,
                lambda manifest: open_source(raw, path=path, options=options, manifest=manifest),
            )
            yield FileSide(opened)


class FileSide:
    """The contents of one file."""

    has_values = True
    window_bytes = READ_BYTES

    def __init__(self, opened: OpenCheckpoint) -> None:
        self._opened = opened
        self._entries = dict(indexed_tensors(opened))
        self.specs = {name: entry.spec for name, entry in self._entries.items()}
        self.is_verified = opened.is_sealed or opened.has_digests
        if not self.is_verified and opened.index.crc is not None:
            read_through(opened, check_crc=True)
            self.is_verified = True
        self.values = _values(opened)

    def chunks(self, name: str, chunk_bytes: int) -> Iterator[memoryview]:
        """Yield the content of a tensor; see `DiffSide`."""
        return chunks_of(self._opened.source, self._entries[name], chunk_bytes=chunk_bytes)


class RanksSide:
    """The contents of the files of many ranks: their tensors as whole ones."""

    is_verified = True
    has_values = False
    window_bytes = RANGE_BYTES

    def __init__(self, files: ShardedCheckpoint) -> None:
        self._files = files
        self._tensors = {_label(spec, ranks): (spec, ranks) for spec, ranks in files.tensors()}
        self.specs = {label: spec for label, (spec, _) in self._tensors.items()}
        self.values: Mapping[str, StateValue] = {}

    def chunks(self, name: str, chunk_bytes: int) -> Iterator[memoryview]:
        """Yield the content of a tensor; see `DiffSide`."""
        spec, ranks = self._tensors[name]
        rank = None if ranks is None else ranks[0]
        size = spec.size_bytes // spec.dtype.item_bytes
        step = chunk_bytes // spec.dtype.item_bytes
        for start in range(0, size, step):
            parts = [
                flat_memory(self._files.read({spec.name: region}, rank=rank)[spec.name])
                for region in regions_of_run(spec.shape, start, min(start + step, size))
            ]
            yield parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _label(spec: TensorSpec, ranks: tuple[int, ...] | None) -> str:
    """Return the name of a tensor, with its ranks where they differ."""
    if ranks is None:
        return spec.name
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{spec.name} ({word} {', '.join(map(str, ranks))})"


def _values(opened: OpenCheckpoint) -> dict[str, StateValue]:
    """Return the texts of a file, and what its state holds beside the tensors."""
    values: dict[str, StateValue] = {
        entry.name: entry.text for entry in opened.index.entries if isinstance(entry, TextEntry)
    }
    skeleton = checked_skeleton(opened)
    if skeleton is not None:
        values |= values_of(skeleton)
    if DATA in opened.metadata:
        values[DATA] = opened.metadata[DATA]
    return values
