# SPDX-License-Identifier: Apache-2.0
"""Results of `verify` that `ls` shows later: one file for each run of `verify`, a line for each result.

```
<directory>/.ckptmgr-checks/checks-<random>.jsonl
```

* A run appends to a file of its own under a temporary name and renames it at its end, so that
  several runs at a time lose nothing of each other. It then takes over what smaller files of
  earlier runs say, those of killed ones, too, and removes these; a file of another machine when
  it is a day old.
* A record names the checkpoint that it is about by its id, which covers all digests, and the sizes
  and times of its files: of a checkpoint that was replaced or repaired since, it says nothing.
* Every user with write permission can forge or remove one. So it decides nothing, makes no state on
  the screen better than the manifest makes it, and says nothing good where keys were given, which
  do not prove it.
* Writing one is best effort: a directory that cannot be written is verified as well.
* A quick check that passes does not replace damage that a deeper one found.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ckptmgr.core.model import Checkpoint
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.source import read_bytes
from ckptmgr.formats.strict_json import parse_object
from ckptmgr.io.filesystem import FileStatus, OutputFile, discard, rename_temp
from ckptmgr.io.permissions import note_mode
from ckptmgr.io.temp_names import is_temp_of, parse_temp, temp_name
from ckptmgr.maintenance.verdict import Level, Status, Verification
from ckptmgr.store.manifest.codec import manifest_name
from ckptmgr.store.store import Store

FOLDER_NAME = ".ckptmgr-checks"
_SCHEMA = "ckptmgr.check/1"
_PREFIX, _SUFFIX = "checks-", ".jsonl"
_TEMP_OF = f"{_PREFIX}new{_SUFFIX}"
_MAX_BYTES = 1 << 26
_MAX_LINE_BYTES = 1 << 14
_GROWTH = 2  # a file that is larger than twice the records merged into it stays as it is
_FORGOTTEN_S = 86_400.0  # a run notes results far more often
_AT = b', "at": "'  # in no JSON string: a quote there follows a backslash
_LEVELS = [level.value for level in Level]
_REMEMBERED = (Status.OK, Status.PLAIN, Status.PARTIAL, Status.DAMAGED, Status.MISSING)
_STATUSES = [status.value for status in _REMEMBERED]
_BAD = (Status.DAMAGED.value, Status.MISSING.value)
_MOST_PROBLEM = 400
_MOST_LOOKS = 5
_MOST_LISTED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PastCheck:
    """Result of an earlier check of a checkpoint that has not changed since.

    Attributes:
        at: When it was made, UTC.
        level: How thorough it was.
        status: Its `Status`.
        problem: The problem; None where there was none.
    """

    at: datetime
    level: str
    status: str
    problem: str | None

    @property
    def is_bad(self) -> bool:
        """Whether the checkpoint was damaged, or files of it missing."""
        return self.status in _BAD


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """One line: a result, and the checkpoint that it is about as it was."""

    name: str
    id: str
    files: tuple[str, ...]
    check: PastCheck
    line: bytes

    @property
    def order(self) -> tuple[datetime, bool]:
        """Later results come later; of two at the same time the worse one."""
        return self.check.at, self.check.is_bad


class Recorder:
    """Keeps the results of one run of `verify` in one directory; see the module."""

    def __init__(self, store: Store, *, at: datetime) -> None:
        self._store = store
        self._at = at.astimezone(UTC)
        self._folder = store.directory / FOLDER_NAME
        self._held = contextlib.ExitStack()
        self._file: OutputFile | None = None
        self._temp = self._new_temp()
        self._own: list[_Record] = []
        self._size_bytes = 0
        self._mode = note_mode(store.file_mode)
        self._is_off = False

    def note(self, answer: Verification) -> None:
        """Keep a result, if the directory can be written."""
        checkpoint = answer.checkpoint
        if self._is_off or checkpoint.id is None or answer.status not in _REMEMBERED:
            return
        try:
            file = self._file or self._create(checkpoint)
            record = _record_of(answer, _files(self._store, checkpoint), at=self._at)
            file.write_at(self._size_bytes, record.line)
        except OSError:
            self._is_off = True
            return
        self._own.append(record)
        self._size_bytes += len(record.line)

    def close(self) -> None:
        """Give the records their name, with those of earlier runs about checkpoints still there."""
        fs = self._store.fs
        with self._held, contextlib.suppress(OSError):
            if self._file is None:
                return
            self._file.close()
            if not self._own:
                discard(fs, self._temp)
                return
            merged, absorbed = self._merged(fs.list(self._folder))
            names = set(fs.names(self._store.directory))
            kept = [one for one in merged if manifest_name(one.name) in names]
            self._write(kept)
            for name in absorbed:
                discard(fs, self._folder / name)

    def _create(self, first: Checkpoint) -> OutputFile:
        """Make and hold the folder, and the file of this run in it.

        The directory itself is not held: a checkpoint in it may be read through a link.
        """
        fs = self._store.fs
        with fs.hold_directory(self._store.directory):
            fs.make_directory(self._folder, mode=None)
            self._held.enter_context(fs.hold_directory(self._folder))
        # Who may read the checkpoints may read the records.
        status = fs.status(self._store.directory / manifest_name(first.name))
        self._mode = note_mode(self._store.file_mode if status is None else status.mode)
        self._file = fs.create(self._temp, mode=self._mode, owner_of=self._temp)
        return self._file

    def _new_temp(self) -> Path:
        token = self._store.processes.token()
        return self._folder / temp_name(_TEMP_OF, token=token, series="verify")

    def _merged(self, entries: Mapping[str, FileStatus]) -> tuple[list[_Record], list[str]]:
        """Return one record for each name, and the files that need not stay."""
        absorbed, size_bytes = [self._temp.name], self._size_bytes
        own = entries.get(self._temp.name)
        now_s = 0.0 if own is None else own.modified_at  # by the clock of the disk
        others = {
            name: status.size_bytes
            for name, status in entries.items()
            if status.is_file
            and name != self._temp.name
            and self._is_finished(name, age_s=now_s - status.modified_at)
        }
        for name in sorted(others, key=lambda one: others[one]):
            if others[name] > _GROWTH * size_bytes:
                break
            absorbed.append(name)
            size_bytes += others[name]
        by_name: dict[str, list[_Record]] = {}
        for one in (*_records_in(self._store, self._folder, absorbed[1:]), *self._own):
            by_name.setdefault(one.name, []).append(one)
        return [_last_word(records) for records in by_name.values()], absorbed

    def _is_finished(self, name: str, *, age_s: float) -> bool:
        """Return whether no run appends to a file any more, as far as this machine can know.

        Of a run on another machine it cannot; one that goes on holds its own records in memory.
        """
        if _is_final(name):
            return True
        found = parse_temp(name)
        if found is None or not is_temp_of(name, _TEMP_OF):
            return False
        is_dead = self._store.processes.is_dead(found[0])
        return age_s > _FORGOTTEN_S if is_dead is None else is_dead

    def _write(self, records: Iterable[_Record]) -> None:
        fs, temp = self._store.fs, self._new_temp()
        data = b"".join(one.line for one in records)
        with contextlib.closing(fs.create(temp, mode=self._mode, owner_of=temp)) as file:
            try:
                file.write_at(0, data)
                file.sync()  # the records that it replaces are removed next
            except BaseException:
                discard(fs, temp)
                raise
        rename_temp(fs, temp, self._folder / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")


@contextlib.contextmanager
def recorder(store: Store, *, at: datetime) -> Iterator[Recorder]:
    """Yield what keeps the results of a run in a directory; they get their name at the end."""
    made = Recorder(store, at=at)
    try:
        yield made
    finally:
        made.close()


def recall(store: Store, checkpoints: Collection[Checkpoint]) -> dict[str, PastCheck]:
    """Return the past checks of checkpoints as they are now, by name."""
    records = _all_records(store) if checkpoints else {}
    found: dict[str, PastCheck] = {}
    for one in checkpoints:
        about = [record for record in records.get(one.name, ()) if record.id == one.id]
        if not about:
            continue
        files: tuple[str, ...] = ()
        with contextlib.suppress(OSError):
            files = tuple(_files(store, one))
        about = [record for record in about if files and record.files == files]
        past = _last_word(about).check if about else None
        # Keys do not prove a record, so where they are given it says nothing good.
        if past is not None and (past.is_bad or not store.trust.is_strict):
            found[one.name] = past
    return found


def _all_records(store: Store) -> dict[str, list[_Record]]:
    folder = store.directory / FOLDER_NAME
    names: frozenset[str] | None = None
    found: dict[str, list[_Record]] = {}
    with contextlib.suppress(OSError):
        status = store.fs.status(folder)
        if status is None or not status.is_directory:
            return {}
        for _ in range(_MOST_LOOKS):  # runs may merge some meanwhile
            before, names = names, _record_files(store, folder)
            if names == before:
                break
            found = {}
            for record in _records_in(store, folder, names):
                found.setdefault(record.name, []).append(record)
    return found


def _record_files(store: Store, folder: Path) -> frozenset[str]:
    names = store.fs.names(folder)
    return frozenset(name for name in names if _is_final(name) or is_temp_of(name, _TEMP_OF))


def _is_final(name: str) -> bool:
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def _last_word(records: Iterable[_Record]) -> _Record:
    """Return the record that counts of those about one checkpoint; at least one is given."""
    first, *later = sorted(records, key=lambda one: one.order)
    for one in later:
        is_same = (one.id, one.files) == (first.id, first.files)
        is_weaker = _LEVELS.index(one.check.level) < _LEVELS.index(first.check.level)
        if not (is_same and first.check.is_bad and is_weaker and not one.check.is_bad):
            first = one
    return first


def _files(store: Store, checkpoint: Checkpoint) -> list[str]:
    """Return the size and time of each data file, as text, because strict JSON has no fractions.

    Of many files, as ranks save them, it is one digest: a line has a largest size.
    """
    paths = [checkpoint.path.with_name(name) for name in checkpoint.shards] or [checkpoint.path]
    found = [store.fs.status(path) for path in paths]
    files = ["-" if one is None else f"{one.size_bytes} {one.modified_at!r}" for one in found]
    if len(files) <= _MOST_LISTED:
        return files
    return [f"{len(files)} files {hashlib.sha256(repr(files).encode()).hexdigest()}"]


def _record_of(answer: Verification, files: Sequence[str], *, at: datetime) -> _Record:
    checkpoint = answer.checkpoint
    check = PastCheck(
        at=at,
        level=answer.level.value,
        status=answer.status.value,
        problem="; ".join(answer.problems)[:_MOST_PROBLEM] or None,
    )
    record = {
        "schema": _SCHEMA,
        "name": checkpoint.name,
        "id": checkpoint.id,
        "at": at.isoformat(),
        "level": check.level,
        "status": check.status,
        "problem": check.problem,
        "files": files,
    }
    line = f"{json.dumps(record)}\n".encode()
    return _Record(
        name=checkpoint.name, id=str(checkpoint.id), files=tuple(files), check=check, line=line
    )


def _records_in(store: Store, folder: Path, names: Iterable[str]) -> list[_Record]:
    """Return the records of some files.

    Of lines that differ only in their time the last one is parsed: killed runs leave many.
    """
    latest: dict[tuple[bytes, bytes], tuple[bytes, bytes]] = {}
    for name in names:
        for line in _lines(store, folder / name):
            before, _, rest = line.partition(_AT)
            at, _, after = rest.partition(b'"')
            if at >= latest.get((before, after), (b"", b""))[0]:
                latest[before, after] = at, line
    found = (_parsed(line) for _, line in latest.values())
    return [one for one in found if one is not None]


def _lines(store: Store, path: Path) -> list[bytes]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        with contextlib.closing(store.fs.open(path)) as file:
            data = read_bytes(file, 0, min(file.size, _MAX_BYTES))
    except (FormatError, OSError):
        return []
    return data.splitlines(keepends=True)


def _parsed(line: bytes) -> _Record | None:
    if len(line) > _MAX_LINE_BYTES or not line.endswith(b"\n"):
        return None  # a record that is no record says nothing
    try:
        record = parse_object(line, what="record of a check", offset=0)
        at = datetime.fromisoformat(str(record.get("at"))).astimezone(UTC)
    except (FormatError, ValueError, OverflowError):
        return None
    name, identity, files = record.get("name"), record.get("id"), record.get("files")
    level, status, problem = record.get("level"), record.get("status"), record.get("problem")
    if record.get("schema") != _SCHEMA or status not in _STATUSES or level not in _LEVELS:
        return None
    if not (isinstance(name, str) and isinstance(identity, str) and isinstance(files, list)):
        return None
    check = PastCheck(
        at=at,
        level=str(level),
        status=str(status),
        problem=problem if isinstance(problem, str) else None,
    )
    return _Record(name=name, id=identity, files=tuple(map(str, files)), check=check, line=line)
