# SPDX-License-Identifier: Apache-2.0
"""Results of `verify` that `ls` shows later: one small record for each checkpoint.

```
<directory>/.ckptmgr-checks/net-1_20.ckpt.json
```

* A record names the checkpoint that it is about by its id, which covers all digests, and the sizes
  and times of its files: of a checkpoint that was replaced or repaired since, it says nothing.
* Every user with write permission can forge one. So it can only make a state worse on the screen,
  decides nothing, and says nothing good where keys were given, which do not prove it.
* Writing one is best effort: a directory that cannot be written is verified as well.
* A quick check that passes does not replace damage that a deeper one found.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ckptmgr.core.model import Checkpoint
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.source import read_bytes
from ckptmgr.formats.strict_json import parse_object
from ckptmgr.io.filesystem import rename_temp
from ckptmgr.io.temp_names import temp_name
from ckptmgr.maintenance.verdict import Level, Status, Verification
from ckptmgr.store.store import Store

FOLDER_NAME = ".ckptmgr-checks"
_SCHEMA = "ckptmgr.check/1"
_MAX_BYTES = 1 << 20
_LEVELS = [level.value for level in Level]
_REMEMBERED = (Status.OK, Status.PLAIN, Status.PARTIAL, Status.DAMAGED, Status.MISSING)
_BAD = (Status.DAMAGED.value, Status.MISSING.value)
_MOST_PROBLEM = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class PastCheck:
    """Result of an earlier check of a checkpoint that has not changed since.

    Attributes:
        at: When it was made, UTC.
        level: How thorough it was.
        status: Its `Status`.
        problem: What was wrong; None where nothing was.
    """

    at: datetime
    level: str
    status: str
    problem: str | None

    @property
    def is_bad(self) -> bool:
        """Whether the checkpoint was damaged, or files of it missing."""
        return self.status in _BAD


@contextlib.contextmanager
def held_records(store: Store) -> Iterator[bool]:
    """Make and hold the folder of the records; yield whether the directory allows it.

    Around many calls of `remember`, each of which would sync the directory otherwise. The directory
    itself is not held: a checkpoint in it may be read through a link.
    """
    fs, folder = store.fs, store.directory / FOLDER_NAME
    is_held = False
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError), fs.hold_directory(store.directory):
            fs.make_directory(folder, mode=0o755)
            held.enter_context(fs.hold_directory(folder))
            is_held = True
        yield is_held


def remember(store: Store, answer: Verification, *, at: datetime) -> None:
    """Keep the result of a check, if the directory can be written; see the module."""
    if answer.checkpoint.id is None or answer.status not in _REMEMBERED:
        return
    with held_records(store) as is_held:
        if is_held:
            _remember(store, answer, at)


def _remember(store: Store, answer: Verification, at: datetime) -> None:
    checkpoint = answer.checkpoint
    is_bad = answer.status.value in _BAD
    path = store.directory / FOLDER_NAME / _record_name(checkpoint.name)
    before = _trusted(store, _read(store, path, checkpoint))
    is_weaker = before is not None and _LEVELS.index(answer.level.value) < _LEVELS.index(
        before.level
    )
    if before is not None and before.is_bad and is_weaker and not is_bad:
        return
    record: dict[str, object] = {
        "schema": _SCHEMA,
        "id": checkpoint.id,
        "at": at.astimezone(UTC).isoformat(),
        "level": answer.level.value,
        "status": answer.status.value,
        "problem": "; ".join(answer.problems)[:_MOST_PROBLEM] or None,
    }
    with contextlib.suppress(OSError):
        record["files"] = _files(store, checkpoint)
        _write(store, path, f"{json.dumps(record)}\n".encode())


def recall(store: Store, checkpoints: Iterable[Checkpoint]) -> dict[str, PastCheck]:
    """Return what is remembered about checkpoints as they are now, by name."""
    folder = store.directory / FOLDER_NAME
    found: dict[str, PastCheck] = {}
    try:
        status = store.fs.status(folder)
        names = set(store.fs.names(folder)) if status is not None and status.is_directory else set()
    except OSError:
        return found
    for one in checkpoints:
        if _record_name(one.name) in names:
            past = _trusted(store, _read(store, folder / _record_name(one.name), one))
            if past is not None:
                found[one.name] = past
    return found


def forget_gone(store: Store, present: Sequence[Checkpoint]) -> None:
    """Remove the records of checkpoints that are not there any more, as far as possible."""
    kept = {_record_name(one.name) for one in present}
    folder = store.directory / FOLDER_NAME
    with contextlib.suppress(OSError):
        if store.fs.status(folder) is None:
            return
        with store.fs.hold_directory(store.directory), store.fs.hold_directory(folder):
            for name, status in store.fs.list(folder).items():
                if status.is_file and name.endswith(".json") and name not in kept:
                    store.fs.unlink(folder / name)


def _record_name(name: str) -> str:
    return f"{name}.json"


def _files(store: Store, checkpoint: Checkpoint) -> list[str]:
    """Return the size and time of each data file; as text, because strict JSON has no fractions."""
    paths = [checkpoint.path.with_name(name) for name in checkpoint.shards] or [checkpoint.path]
    found = [store.fs.status(path) for path in paths]
    return ["-" if one is None else f"{one.size_bytes} {one.modified_at!r}" for one in found]


def _read(store: Store, path: Path, checkpoint: Checkpoint) -> PastCheck | None:
    try:
        with contextlib.closing(store.fs.open(path)) as file:
            data = read_bytes(file, 0, min(file.size, _MAX_BYTES + 1))
        record = parse_object(data, what="record of a check", offset=0)
        if record.get("id") != checkpoint.id or record.get("files") != _files(store, checkpoint):
            return None
        return _parsed(record)
    except (FormatError, OSError, ValueError, OverflowError):
        return None  # a record that is no record says nothing


def _parsed(record: Mapping[str, object]) -> PastCheck | None:
    at, problem = record.get("at"), record.get("problem")
    level, status = record.get("level"), record.get("status")
    is_known = status in [one.value for one in _REMEMBERED] and level in _LEVELS
    if record.get("schema") != _SCHEMA or not is_known:
        return None
    return PastCheck(
        at=datetime.fromisoformat(str(at)).astimezone(UTC),
        level=str(level),
        status=str(status),
        problem=problem if isinstance(problem, str) else None,
    )


def _trusted(store: Store, past: PastCheck | None) -> PastCheck | None:
    """Return a record unless it says something good that the keys do not prove."""
    return None if past is None or (store.trust.is_strict and not past.is_bad) else past


def _write(store: Store, path: Path, data: bytes) -> None:
    fs = store.fs
    temp = path.with_name(temp_name(path.name, token=store.processes.token(), series="verify"))
    with contextlib.closing(fs.create(temp, mode=0o644, owner_of=path)) as file:
        try:
            file.write_at(0, data)
        except BaseException:
            fs.unlink(temp)
            raise
    rename_temp(fs, temp, path)
