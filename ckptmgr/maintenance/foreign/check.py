# SPDX-License-Identifier: Apache-2.0
"""Check a checkpoint of another tool as far as its layout allows; nothing is unpickled.

| files | quick | full and deep |
|---|---|---|
| `*.safetensors` | header, names, places, size of the file | the same |
| ZIP archives of `torch.save` | directory of the archive | and the CRC32 of every record |
| `*.json` | that it is JSON | the same |
| `*.index.json` | that every shard is there | the same |
| `.metadata` of DCP | that every file it names is there | the same |

No tool keeps a digest of the whole: a checkpoint that passes is `unverified`. `torch.save` writes a
CRC32 of 0 where `set_crc32_options(False)` says so; such records count as not checked.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickletools
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ckptmgr.core.model import Checkpoint
from ckptmgr.core.trust import ACCEPT_UNENCRYPTED_HINT, Trust
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.safetensors_file import read_safetensors_index
from ckptmgr.formats.source import Source, read_bytes
from ckptmgr.formats.strict_json import fits_memory
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.passing_errors import is_bad_medium
from ckptmgr.maintenance.foreign.layouts import HUB, missing_shards, most_memory_of
from ckptmgr.maintenance.foreign.listing import DiskFolder, tree_of
from ckptmgr.maintenance.foreign.model import ForeignCheckpoint
from ckptmgr.maintenance.verdict import Level, Status, Verification
from ckptmgr.store.store import Store

_ZIP_MAGIC = b"PK\x03\x04"
_ARCHIVES = (".pt", ".pth", ".bin", ".ckpt")
_JSON_NAMES = ("_CHECKPOINT_METADATA", "_METADATA")
_PIECE_BYTES = 1 << 20
_MOST_METADATA_BYTES = 64 << 20
_MOST_JSON_BYTES = 64 << 20
_MOST_DIRECTORY_BYTES = 16 << 20  # of 200,000 records
_NO_DIGEST = "contents, for which the tool keeps no digest: structure only"


def verify_foreign(
    fs: FileSystem, foreign: ForeignCheckpoint, *, level: Level = Level.FULL
) -> Verification:
    """Check one checkpoint of another tool; every fault is part of the answer."""
    check = _Check(fs, foreign.checkpoint, level)
    check.run()
    problem = foreign.checkpoint.problem
    problems = [*([] if problem is None else [problem]), *check.problems, *check.unread]
    status = Status.UNVERIFIED if problem is None else Status.INCOMPLETE
    if check.obstacle is not None:
        status = Status.UNREADABLE
    if check.problems:
        status = Status.DAMAGED if problem is None else Status.INCOMPLETE
    return Verification(
        checkpoint=foreign.checkpoint,
        level=level,
        status=status,
        problems=tuple(dict.fromkeys(problems)),
        checked=tuple(check.checked),
        unchecked=(*check.unchecked, _NO_DIGEST),
        obstacle=check.obstacle,
    )


def checked_foreign(store: Store, one: ForeignCheckpoint, level: Level) -> Verification:
    """Check a checkpoint of another tool; with keys, which it cannot prove, it is unproven."""
    answer = verify_foreign(store.fs, one, level=level)
    if needs_proof(store.trust) and answer.status is Status.UNVERIFIED:
        return replace(
            answer,
            status=Status.UNPROVEN,
            problems=("no key proves what another tool wrote",),
            hint=ACCEPT_UNENCRYPTED_HINT,
        )
    return answer


def needs_proof(trust: Trust) -> bool:
    """Return whether keys were given, which prove nothing that another tool wrote."""
    return (trust.keys is not None or bool(trust.trusted_keys)) and not trust.allow_unencrypted


class _Check:
    def __init__(self, fs: FileSystem, checkpoint: Checkpoint, level: Level) -> None:
        self._fs = fs
        self._path = checkpoint.path
        self._is_hub = checkpoint.format == HUB.tool
        self._level = level
        self.problems: list[str] = []
        self.unread: list[str] = []
        self.checked: dict[str, None] = {}
        self.unchecked: dict[str, None] = {}
        self.obstacle: OSError | None = None

    def run(self) -> None:
        status = self._fs.status(self._path)
        if status is not None and status.is_file:
            self._check("", self._path, lambda _: True)
            return
        self._check_folder(DiskFolder(self._fs, self._path, tree=tree_of(self._path.parent)), "")

    def _check_folder(self, folder: DiskFolder, place: str) -> None:
        try:
            entries = folder.entries()
        except OSError as error:
            self._note(place, error)
            return
        self.problems += [f"{place}{name} is missing" for name in missing_shards(folder)]
        if any(name.endswith(".index.json") for name in entries):
            self.checked["index of shards"] = None
        for name, status in sorted(entries.items()):
            found = folder.real_file(name)
            if status.is_directory and self._is_hub:
                self.unchecked["folders in it"] = None
            elif status.is_directory:
                self._check_folder(folder.folder(name), f"{place}{name}/")
            elif found is None:
                self.unchecked["links to nothing or out of the tree"] = None
            else:
                self._check(f"{place}{name}", found[0], lambda one: folder.file(one) is not None)

    def _check(self, name: str, path: Path, is_beside: Callable[[str], bool]) -> None:
        """Check a file, or that which a link of this name leads to."""
        title = f"{name}: " if name else ""
        try:
            with contextlib.closing(self._fs.open(path)) as file:
                self._check_file(Path(name).name or path.name, file, is_beside)
        except (FormatError, _Damaged) as error:
            self.problems.append(f"{title}{error}")
        except OSError as error:
            self._note(title, error)

    def _note(self, title: str, error: OSError) -> None:
        kept = self.problems if is_bad_medium(error) else self.unread
        kept.append(f"{title}{error.strerror or error}")
        if kept is self.unread:
            self.obstacle = error

    def _check_file(self, name: str, file: Source, is_beside: Callable[[str], bool]) -> None:
        if name.endswith(".safetensors"):
            read_safetensors_index(file)
            self.checked["safetensors headers"] = None
        elif name.endswith(".json") or name in _JSON_NAMES:
            self._check_json(file)
        elif name == ".metadata":
            self._check_metadata(file, is_beside)
        elif name.endswith(_ARCHIVES):
            self._check_archive(file)
        else:
            suffix = Path(name).suffix
            kind = f"*{suffix}" if suffix else "other"
            self.unchecked[f"{kind} files"] = None

    def _check_json(self, file: Source) -> None:
        if file.size > _MOST_JSON_BYTES:
            self.unchecked["JSON of more than 64 MiB"] = None
            return
        try:
            text = read_bytes(file, 0, file.size).decode()
            if not fits_memory(text, most_memory_of(text)):
                self.unchecked["JSON of too many values"] = None
                return
            json.loads(text, object_pairs_hook=_nothing)
        except (ValueError, RecursionError) as error:
            raise _Damaged(f"no JSON: {error}") from error
        self.checked["JSON"] = None

    def _check_metadata(self, file: Source, is_beside: Callable[[str], bool]) -> None:
        """Compare the files that the pickle of DCP names with those that are there."""
        if file.size > _MOST_METADATA_BYTES:
            self.unchecked[".metadata of more than 64 MiB"] = None
            return
        data = read_bytes(file, 0, file.size)
        try:  # the opcodes are listed, and none is carried out
            texts = (value for _, value, _ in pickletools.genops(data) if isinstance(value, str))
            names = sorted({text for text in texts if text.endswith(".distcp")})
        except Exception as error:  # of a damaged pickle: ValueError, struct.error, IndexError ...
            raise _Damaged(f"no pickle: {error}") from error
        lost = [name for name in names if not is_beside(Path(name).name)]
        if lost:
            raise _Damaged(f"{lost[0]} is missing")
        self.checked[".metadata against the files"] = None

    def _check_archive(self, file: Source) -> None:
        if not file.size or read_bytes(file, 0, min(4, file.size)) != _ZIP_MAGIC:
            if not file.size:
                raise _Damaged("an empty file")
            self.unchecked["pickles, which are never opened"] = None
            return
        try:
            with zipfile.ZipFile(_Archive(_Reader(file))) as archive:
                self.checked["directories of archives"] = None
                if self._level is Level.QUICK:
                    return
                if sum(record.compress_size for record in archive.infolist()) > file.size:
                    raise _Damaged("its records take more bytes than the file has")
                for record in archive.infolist():
                    self._check_record(archive, record)
        except _TooLongError:
            self.unchecked["archives with a directory of more than 16 MiB"] = None
        except (zipfile.BadZipFile, NotImplementedError, EOFError, zlib.error) as error:
            raise _Damaged(f"no whole ZIP archive: {error}") from error

    def _check_record(self, archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
        if record.compress_type != zipfile.ZIP_STORED:
            self.unchecked["compressed records"] = None
            return
        if not record.CRC and record.file_size:
            self.unchecked["records without a CRC32"] = None
            return
        with archive.open(record) as content:
            while content.read(_PIECE_BYTES):  # raises BadZipFile at the end where the CRC differs
                pass
        self.checked["CRC32 of every record"] = None


def _nothing(pairs: list[tuple[str, object]]) -> None:
    """Take the place of a JSON object, which nothing reads."""


class _TooLongError(Exception):
    """Report one read of more bytes than a directory of an archive may have."""


class _Archive(io.BufferedReader):
    """A file for zipfile, which reads the whole directory at once, as long as the file says."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MOST_DIRECTORY_BYTES:
            raise _TooLongError
        return super().read(size)


class _Damaged(Exception):
    """Report a file that is not what its name says."""


class _Reader(io.RawIOBase):
    """A source as the file that zipfile reads."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}
        self._position = max(0, start[whence] + offset)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._source.size - self._position))
        if count:
            self._source.read_into(self._position, memoryview(buffer)[:count])
            self._position += count
        return count
