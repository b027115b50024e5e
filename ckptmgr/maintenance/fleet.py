# SPDX-License-Identifier: Apache-2.0
"""Verification of a directory in parts, by the workers of a cluster engine.

`verify_part` is the pure function that an engine carries out for each `PartToVerify`; `combined`
makes one answer of the engine's results. Both are the same for every engine, which schedules.
A task holds the sources of keys, which the worker reads, and never a key.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias

from ckptmgr.config.keys import resolve_keys
from ckptmgr.core.errors import CheckpointNotFound, KeyProblem
from ckptmgr.core.model import UNFINISHED, Checkpoint
from ckptmgr.core.trust import Trust
from ckptmgr.core.urls import absolute
from ckptmgr.crypto.keys.material import SCHEMES
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.formats.strict_json import Json
from ckptmgr.maintenance.foreign.check import checked_foreign
from ckptmgr.maintenance.foreign.listing import list_foreign, runs_below
from ckptmgr.maintenance.foreign.model import ForeignCheckpoint
from ckptmgr.maintenance.json_fields import verification_json, verify_line, verify_summary
from ckptmgr.maintenance.parts import Part, parse_part
from ckptmgr.maintenance.past_checks import recorder
from ckptmgr.maintenance.verdict import EXIT_CODES, Level, Verification
from ckptmgr.maintenance.verify import verify_checkpoint, was_removed
from ckptmgr.objects.places import open_place
from ckptmgr.store.manifest.lineage import Lineage
from ckptmgr.store.store import Store

Lines: TypeAlias = list[dict[str, Json]]
"""What one part found: the lines of `ckptmgr verify --part I/N --jsonl`."""

_PARTLY = 3
_NOT_FOR_WORKERS = ("prompt:", "fd:")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartToVerify:
    """One part of a directory and how to check it; small, and safe to show and to store.

    Attributes:
        place: Absolute path of a directory that all workers see, or the address of one in an object
            store.
        part: Such as `2/8`.
        level: `quick`, `full` or `deep`.
        series: Only this series.
        key: Source of the key, such as `env:NAME` or `file:/run/secrets/key`.
        public_keys: Paths of public keys whose signatures count.
        allow_unencrypted: With a key: accept plain files, too.
        allow_unsealed: With a key: accept encrypted files that are not proven as a whole.
    """

    place: str
    part: str
    level: str = "full"
    series: str | None = None
    key: str | None = None
    public_keys: tuple[str, ...] = ()
    allow_unencrypted: bool = False
    allow_unsealed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetVerification:
    """What all parts found.

    Attributes:
        results: One for each checkpoint, by step and time, with the fields of an item of
            `ckptmgr verify --json`.
        summary: Its summary, over all parts that were carried out.
        failed: Part, such as `2/8`, to why it was not carried out, such as the death of its worker;
            nothing is known about the checkpoints in it.
        exit_code: As of `ckptmgr verify`; 3 where nothing bad was found, but a part failed.
    """

    results: tuple[Mapping[str, Json], ...]
    summary: Mapping[str, Json]
    failed: Mapping[str, str]
    exit_code: int

    @property
    def is_ok(self) -> bool:
        """Whether all parts were carried out and nothing bad was found."""
        return self.exit_code == 0


def parts_of(
    place: str | os.PathLike[str],
    count: int,
    *,
    level: str = "full",
    series: str | None = None,
    key: str | None = None,
    public_keys: Sequence[str | os.PathLike[str]] = (),
    allow_unencrypted: bool = False,
    allow_unsealed: bool = False,
) -> list[PartToVerify]:
    """Return the `count` parts of a place; a relative path becomes absolute.

    Raises:
        TypeError: `key` holds the bytes of a key, or `public_keys` is one path.
        ValueError: There are no parts, no such level, or a path of a key is relative.
        KeyProblem: `key` is no source of a key that a worker can read.
    """
    if count < 1:
        raise ValueError(f"'parts' must be at least 1, not {count}")
    if level not in [one.value for one in Level]:
        raise ValueError(f"'level' must be 'quick', 'full' or 'deep', not {level!r}")
    if isinstance(public_keys, str | bytes | os.PathLike):
        raise TypeError("'public_keys' must be a list of files, not one of them")
    _check_source(key)
    text = os.fspath(place)
    return [
        PartToVerify(
            place=absolute(text),
            part=str(Part(index, count)),
            level=level,
            series=series,
            key=key,
            public_keys=tuple(os.path.abspath(one) for one in public_keys),  # noqa: PTH100
            allow_unencrypted=allow_unencrypted,
            allow_unsealed=allow_unsealed,
        )
        for index in range(1, count + 1)
    ]


def verify_part(task: PartToVerify) -> Lines:
    """Verify the checkpoints of one part; return the lines of `ckptmgr verify --part --jsonl`.

    Keys come from the sources of the task alone, not from `CKPTMGR_KEY`.

    Raises:
        CheckpointNotFound: There is no such directory, or it only has folders with runs.
        KeyProblem: A source gives no key.
        OSError: From the disk or the network.
    """
    level, part = Level(task.level), parse_part(task.part)
    store = _open(task)
    own, others = _found(store, task.series)
    lineage, options = Lineage(store.scan()), ReadOptions(trust=store.trust)
    answers: list[Verification] = []
    with recorder(store, at=datetime.now(UTC)) as kept:
        for one in own:
            if not part.holds(one.name):
                continue
            answer = verify_checkpoint(store, one, level=level, options=options, lineage=lineage)
            if not was_removed(store, answer):
                kept.note(answer)
                answers.append(answer)
    answers += [
        checked_foreign(store, one, level) for one in others if part.holds(one.checkpoint.name)
    ]
    lines = [verify_line("verified", verification_json(one)) for one in answers]
    summary = verify_summary(task.level, [one.status.value for one in answers])
    return [*lines, verify_line("summary", summary)]


def combined(
    tasks: Sequence[PartToVerify], outcomes: Sequence[Lines | BaseException]
) -> FleetVerification:
    """Return one answer from the outcomes of all tasks: their lines, or why there are none.

    Raises:
        BaseException: That of the first part, if all of them failed.
    """
    failures = [one for one in outcomes if isinstance(one, BaseException)]
    if len(failures) == len(outcomes):
        raise failures[0]
    lines = [line for one in outcomes if not isinstance(one, BaseException) for line in one]
    results = [
        {name: value for name, value in line.items() if name not in ("schema", "event")}
        for line in lines
        if line["event"] == "verified"
    ]
    results.sort(key=lambda one: (one["step"] or 0, one["saved_at"], one["path"]))
    failed = {
        task.part: _sentence(one)
        for task, one in zip(tasks, outcomes, strict=True)
        if isinstance(one, BaseException)
    }
    statuses = Counter(str(one["status"]) for one in results)
    code = next((code for status, code in EXIT_CODES.items() if statuses[status.value]), 0)
    return FleetVerification(
        results=tuple(results),
        summary={
            **verify_summary(tasks[0].level, statuses.elements()),
            "parts": len(tasks),
            "failed": failed,
        },
        failed=failed,
        exit_code=code or (_PARTLY if failed else 0),
    )


def _sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _check_source(key: object) -> None:
    if key is None:
        return
    if not isinstance(key, str):
        raise TypeError(
            "'key' must be the source of a key, such as 'env:NAME' or 'file:/run/secrets/key': engines store and show"
            " the arguments of tasks (the value is not shown)"
        )
    source = key.removeprefix("passphrase:")
    if not key.startswith(SCHEMES) or source.startswith(_NOT_FOR_WORKERS):
        raise KeyProblem(
            "'key' is no source that a worker can read (not shown)",
            hint="use env:NAME, file:/PATH or cmd:COMMAND; a worker has no terminal",
        )
    scheme, _, path = source.partition(":")
    if scheme in ("file", "wrapped") and not path.startswith("/"):
        raise ValueError(
            "the file in 'key' is relative, and workers run elsewhere: pass its absolute path"
        )


def _open(task: PartToVerify) -> Store:
    trust = Trust(
        keys=resolve_keys(
            "key", task.key, mode="AES-GCM", format="safetensors", is_for_reading=True
        ),
        trusted_keys=task.public_keys,
        allow_unencrypted=task.allow_unencrypted,
        allow_unsealed=task.allow_unsealed,
    )
    return open_place(task.place, trust=trust)


def _found(
    store: Store, series: str | None
) -> tuple[list[Checkpoint], Sequence[ForeignCheckpoint]]:
    """Return the checkpoints of a place, oldest first, and those of other tools."""
    has_folders = store.can.folders
    if has_folders and not store.directory.is_dir():
        raise CheckpointNotFound("no such directory", path=store.directory)
    others: Sequence[ForeignCheckpoint] = ()
    own = [one for one in store.scan_for(series) if one.state not in UNFINISHED]
    if has_folders:
        listing = list_foreign(store.fs, store.directory, with_hub=True)
        others = listing.checkpoints
        own = [one for one in own if not listing.has(one)]
        if not own and not others:
            raise _none_in(store)
    elif not own and series is None:
        raise CheckpointNotFound("no checkpoint is below this address", path=store.directory)
    own.sort(key=lambda one: (one.order, one.saved_at, one.name))
    return (
        [one for one in own if series in (None, one.series)],
        [one for one in others if series in (None, one.checkpoint.series)],
    )


def _none_in(store: Store) -> CheckpointNotFound:
    runs, _ = runs_below(store.fs, store.directory)
    if runs:
        return CheckpointNotFound(
            f"no checkpoint in this directory itself, but in {runs[0].path.name} and other folders below it",
            path=store.directory,
            hint="verify them one by one",
        )
    return CheckpointNotFound(
        "no checkpoints here",
        path=store.directory,
        hint="a worker that lacks the mount sees an empty directory",
    )
