# SPDX-License-Identifier: Apache-2.0
"""Files of many ranks (`rank_0/net.ckpt`, `rank_1/net.ckpt` ...), read slice by slice.

A file with a manifest is checked against it, an encrypted one against its seal; no byte is used
unchecked. All threads together read one slice at a time, so the largest slices bound the memory.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import (
    CheckpointFileNotFound,
    CheckpointNotFound,
    CkptmgrError,
    KeyProblem,
    UnprovenCheckpoint,
)
from ckptmgr.core.names import COMPRESSED_SUFFIX, CONTAINER_SUFFIX
from ckptmgr.core.regions import ByteRun
from ckptmgr.files.load.open import OpenCheckpoint, open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.formats.index import TensorEntry, check_content, read_tensor_into
from ckptmgr.formats.mindspore.entries import MapEntry, TextEntry
from ckptmgr.formats.source import Source
from ckptmgr.formats.tensor import TensorSpec
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.mindspore.rank_steps import ChosenRanks, choose_step, refuse_mixture
from ckptmgr.store.manifest.codec import Manifest, manifest_name
from ckptmgr.store.store import Store

Entry = TensorEntry | TextEntry | MapEntry

_OPEN_FILES = 64
_WINDOW_BYTES = 4 << 20
_GAP_BYTES = 64 << 10
_RANK_DIRECTORY = re.compile(r"rank_([0-9]{1,9})")


def find_rank_files(
    directory: Path, *, format: str, file_suffix: str | None = None
) -> dict[int, list[Path]]:
    """Return the files of every rank directory that has any, by rank.

    Containers of the format (`ckpt` or `safetensors`) count as well. With a `file_suffix` only the
    shortest of the names whose stem ends with it count.

    Raises:
        CheckpointNotFound: A rank directory has no file with the suffix.
        LayoutError: Two directories have the number of one rank.
    """
    found: dict[int, list[Path]] = {}
    for folder in sorted(directory.glob("rank_[0-9]*")):
        match = _RANK_DIRECTORY.fullmatch(folder.name)
        if match is None or not folder.is_dir():
            continue
        pattern = f"*{file_suffix or ''}.{format}"
        endings = ("", CONTAINER_SUFFIX, COMPRESSED_SUFFIX)
        found_here = (file for ending in endings for file in folder.glob(pattern + ending))
        files = sorted(file for file in found_here if file.is_file())
        if files and int(match[1]) in found:
            raise LayoutError(
                f"is a second directory of rank {int(match[1])}", path=folder, hint="move it away"
            )
        if files:
            found[int(match[1])] = files if file_suffix is None else _shortest(files)
        elif file_suffix is not None:
            raise CheckpointNotFound(
                f"no {format} file ends with {file_suffix!r}",
                path=folder,
                hint="give the longest common suffix of all files",
            )
    return dict(sorted(found.items()))


def _shortest(files: Sequence[Path]) -> list[Path]:
    length = min(len(file.name) for file in files)
    return [file for file in files if len(file.name) == length]


def source_files(
    directory: Path,
    function: str,
    *,
    reading: ReadOptions,
    file_suffix: str | None = None,
    step: str | None = None,
    is_whole: bool = False,
) -> ChosenRanks:
    """Return the files of all ranks at one step, of one format; `function` is named in messages.

    With a `file_suffix` only safetensors files whose stem ends with it count. `is_whole` takes the
    file of the first rank alone, which holds whole tensors.

    Raises:
        CheckpointNotFound: There are none, or none of the step.
        LayoutError: They are of both formats, or of no common step.
    """
    ckpt = find_rank_files(directory, format="ckpt") if file_suffix is None else {}
    safetensors = find_rank_files(directory, format="safetensors", file_suffix=file_suffix)
    if ckpt and safetensors:
        raise LayoutError(
            f"For '{function}', the 'src_checkpoints_dir' cannot contain both ckpt file and safetensors file"
            " simultaneously",
            path=directory,
        )
    found = ckpt or safetensors
    if not found:
        raise _nothing_found(directory, function)

    found, left_out = _proven(found, reading)

    def has_step(path: Path, wanted: int) -> bool:
        with OpenRankFiles({0: path}, reading) as file:
            return file.one_step() == wanted

    if not is_whole or len(found) == 1:
        chosen = choose_step(found, step=step, has_step=has_step)
        return replace(chosen, notes=(*left_out, *chosen.notes))
    first, *others = found
    chosen = choose_step({first: found[first]}, step=step, has_step=has_step)
    note = f"read rank_{first} only: no strategy says how the files of {len(others)} other ranks are cut"
    return replace(chosen, notes=(*left_out, *chosen.notes, note))


def _proven(
    found: Mapping[int, list[Path]], reading: ReadOptions
) -> tuple[dict[int, list[Path]], list[str]]:
    """Return the files that the keys prove (all of a rank without any), and notes on others."""
    if not reading.trust.can_prove:
        return dict(found), []
    kept: dict[int, list[Path]] = {}
    notes: list[str] = []
    for rank, paths in found.items():
        problems = {path: _why_unproven(path, reading) for path in paths}
        # Without a proven file, the error that follows gives the reason.
        kept[rank] = [path for path in paths if problems[path] is None] or paths
        notes += [
            f"left out rank_{rank}/{path.name}: {problems[path]}"
            for path in paths
            if path not in kept[rank]
        ]
    return kept, notes


def _why_unproven(path: Path, reading: ReadOptions) -> str | None:
    try:
        manifest = Store(path.parent, trust=reading.trust).read_manifest(path.name)
    except KeyProblem as error:
        return error.message
    except (CkptmgrError, OSError):
        return None  # raised later if the file is chosen
    return None if manifest is not None else "it has no manifest"


def _nothing_found(directory: Path, function: str) -> CheckpointNotFound:
    if directory.is_dir():
        state = "no folder rank_0, rank_1, ... with .ckpt or .safetensors files is in it"
    else:
        state = "it is no directory" if directory.exists() else "there is no such directory"
    return CheckpointNotFound(
        f"For '{function}', the 'src_checkpoints_dir' can not be empty. ({state})",
        path=directory,
        hint="name the directory that holds a folder rank_N for each rank, with its files",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """Path, format and index of the file of a rank, which need not be open."""

    path: Path
    format: str
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


class OpenRankFiles:
    """Open files of many ranks, by rank; a context manager, safe for use by several threads.

    `takes` filters the entries of a file by rank and name; None takes all.
    """

    def __init__(
        self,
        paths: Mapping[int, str | os.PathLike[str]],
        options: ReadOptions | None = None,
        *,
        fs: FileSystem | None = None,
        takes: Callable[[int, str], bool] | None = None,
    ) -> None:
        self._fs = fs
        self._takes = takes
        self.paths = {rank: _described(Path(path)) for rank, path in sorted(paths.items())}
        self._options = options or ReadOptions()
        self._known: dict[int, RankFile] = {}
        self._manifests: dict[int, Manifest | None] = {}
        self._open: OrderedDict[int, tuple[OpenCheckpoint, ExitStack]] = OrderedDict()
        self._names: tuple[str, ...] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> OpenRankFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1][1].close()

    def __contains__(self, rank: int) -> bool:
        return rank in self.paths

    def one_step(self, *, by_lineage: bool = False) -> int | None:
        """Return the global step of all files, where a manifest has it.

        With `by_lineage` the runs must have been resumed equally often, too.

        Raises:
            MixedSteps: The files are proven to be of different steps.
            UnprovenCheckpoint: A file has no manifest, although keys were given that prove one.
            CkptmgrError: A manifest is damaged, or the key is wrong.
        """
        with self._lock:
            manifests = {rank: self._manifest(rank) for rank in self.paths}
        if self._options.trust.can_prove:
            for rank, manifest in manifests.items():
                if manifest is None:
                    raise UnprovenCheckpoint(
                        "there is no manifest, so nothing proves of which training step this file is",
                        path=self.paths[rank],
                        hint=self._options.trust.accept_hint,
                    )
        return refuse_mixture(self.paths, manifests, by_lineage=by_lineage)

    def file(self, rank: int) -> RankFile:
        """Return path, format and index of the file of a rank, or raise CkptmgrError."""
        with self._lock:
            if rank not in self._known:
                self._opened(rank)
            return self._known[rank]

    def tensor(self, rank: int, name: str) -> TensorSpec | None:
        """Return shape and type of a tensor in the file of a rank; None without file or tensor."""
        entry = self.file(rank).entries.get(name) if rank in self.paths else None
        return entry.spec if isinstance(entry, TensorEntry) else None

    def names(self) -> Sequence[str]:
        """Return the names in all files, in file order, each once."""
        if self._names is None:
            found = (name for rank in self.paths for name in self.file(rank).entries)
            self._names = tuple(dict.fromkeys(found))
        return self._names

    def read_runs(self, rank: int, name: str, runs: Iterator[ByteRun], target: memoryview) -> None:
        """Copy runs of a tensor's bytes, in ascending source order, into flat memory of the caller.

        Runs close together are read at once; the bytes between them are dropped.
        """
        with self._lock:
            opened = self._opened(rank)
            entry = self._entry(rank, name)
            with translated_errors(opened.path):
                content = _Content(opened.source, entry)
                for batch in _batches(runs):
                    content.copy(batch, target)

    def read_array(self, rank: int, name: str) -> np.ndarray:
        """Return a whole tensor of the file of a rank."""
        with self._lock:
            opened = self._opened(rank)
            entry = self._entry(rank, name)
            array = np.empty(entry.spec.shape, entry.spec.dtype.to_numpy())
            with translated_errors(opened.path):
                read_tensor_into(opened.source, entry, array.reshape(-1).view(np.uint8).data)
            return array

    def _store(self, path: Path) -> Store:
        return Store(path.parent, fs=self._fs, trust=self._options.trust)

    def _manifest(self, rank: int) -> Manifest | None:
        if rank not in self._manifests:
            path = self.paths[rank]
            self._manifests[rank] = self._store(path).read_manifest(path.name)
        return self._manifests[rank]

    def _entry(self, rank: int, name: str) -> TensorEntry:
        entry = self._known[rank].entries.get(name)
        if not isinstance(entry, TensorEntry):
            raise CheckpointNotFound(f"holds no tensor {name!r}", path=self.paths[rank])
        return entry

    def _opened(self, rank: int) -> OpenCheckpoint:
        if rank in self._open:
            self._open.move_to_end(rank)
            return self._open[rank][0]
        path = self.paths.get(rank)
        if path is None or not path.is_file():
            raise CheckpointFileNotFound(f"there is no file of rank {rank}", path=path)
        manifest = self._manifest(rank)
        with ExitStack() as stack:
            raw = stack.enter_context(closing(self._store(path).fs.open(path)))
            opened = open_source(
                raw, path=os.fspath(path), options=self._options, manifest=manifest
            )
            self._known[rank] = RankFile(
                path=path,
                format=opened.format,
                entries={
                    entry.name: entry
                    for entry in opened.index.entries
                    if self._takes is None or self._takes(rank, entry.name)
                },
                metadata=opened.metadata,
            )
            self._open[rank] = opened, stack.pop_all()
        while len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1][1].close()
        return opened


def _described(path: Path) -> Path:
    """Return the target of a link such as `latest.ckpt`, unless the link has a manifest."""
    if path.is_symlink() and not (path.parent / manifest_name(path.name)).exists():
        return path.resolve()
    return path


class _Content:
    """Reads the content of a tensor by offset; its file may store it in several pieces."""

    def __init__(self, source: Source, entry: TensorEntry) -> None:
        self._source = source
        self._entry = entry
        self._scratch = bytearray()

    def copy(self, batch: Sequence[ByteRun], target: memoryview) -> None:
        first, last = batch[0], batch[-1]
        if len(batch) == 1:
            self._read(first.source_offset, target[first.target_offset :][: first.length])
            return
        size_bytes = last.source_offset + last.length - first.source_offset
        if len(self._scratch) < size_bytes:
            self._scratch = bytearray(size_bytes)
        view = memoryview(self._scratch)[:size_bytes]
        self._read(first.source_offset, view)
        for run in batch:
            start = run.source_offset - first.source_offset
            target[run.target_offset :][: run.length] = view[start : start + run.length]

    def _read(self, offset: int, view: memoryview) -> None:
        for piece in self._entry.pieces:
            if offset < piece.length and view.nbytes:
                part = view[: piece.length - offset]
                self._source.read_into(piece.offset + offset, part)
                check_content(self._entry, part, offset=piece.offset + offset)
                view = view[part.nbytes :]
                offset = 0
            else:
                offset -= piece.length


def _batches(runs: Iterator[ByteRun]) -> Iterator[list[ByteRun]]:
    """Join runs whose source bytes are close together, up to a window."""
    batch: list[ByteRun] = []
    for run in runs:
        if batch:
            end = batch[-1].source_offset + batch[-1].length
            size_bytes = run.source_offset + run.length - batch[0].source_offset
            if run.source_offset - end > _GAP_BYTES or size_bytes > _WINDOW_BYTES:
                yield batch
                batch = []
        batch.append(run)
    if batch:
        yield batch
