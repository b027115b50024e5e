# SPDX-License-Identifier: Apache-2.0
"""Checks of a directory before a run, or after trouble: can it be saved to and resumed from?

Every check is a `Diagnosis`; none raises. Files that the disk checks write are removed again.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from types import MappingProxyType
from typing import Literal

from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.sizes import size_text
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.maintenance.verify import Level, Status, verify_checkpoint
from ckptmgr.policy.lines import lines_of
from ckptmgr.store.store import Store
from ckptmgr.store.trash import DirectoryTrash

Grade = Literal["ok", "warn", "fail", "skip"]

_NO_FIGURES: Mapping[str, float] = MappingProxyType({})
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*[^;]*?>=\s*([0-9][0-9.]*)[^;]*(;.*)?")
_MOST_TRIED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Result of one check.

    Attributes:
        check: Name of the check.
        grade: `ok`; `warn` where work goes on; `fail` where saves or resumes will; `skip` where it
            could not be checked.
        message: The check and its result.
        hint: The way out, or None.
        figures: Numbers, with their units in the names.
    """

    check: str
    grade: Grade
    message: str
    hint: str | None = None
    figures: Mapping[str, float] = field(default_factory=lambda: _NO_FIGURES, hash=False)


def check_space(store: Store, found: Sequence[Checkpoint]) -> Diagnosis:
    """Compare the free space with the largest checkpoint: a save needs that much beside the others."""
    free = store.fs.free_bytes(store.directory)
    inodes = store.fs.free_inodes(store.directory)
    largest = max((one.size_bytes for one in found), default=0)
    if free is None:
        return Diagnosis(check="space", grade="skip", message="the file system does not say")
    figures = {"free_bytes": free, "largest_bytes": largest}
    text = f"{size_text(free)} free"
    if largest:
        text += f", the largest checkpoint has {size_text(largest)}"
    if inodes is not None:
        figures["free_inodes"] = inodes
        if inodes < 16:
            hint = "remove files there; checkpoints are few and large files"
            return Diagnosis(
                check="space",
                grade="fail",
                message=f"{inodes} more files can be created",
                hint=hint,
                figures=figures,
            )
    hint = "ckptmgr prune --now frees space at once"
    if free < largest or free == 0:
        return Diagnosis(check="space", grade="fail", message=text, hint=hint, figures=figures)
    if free < 3 * largest:
        return Diagnosis(check="space", grade="warn", message=text, hint=hint, figures=figures)
    return Diagnosis(check="space", grade="ok", message=text, figures=figures)


def check_leftovers(store: Store, found: Sequence[Checkpoint]) -> Diagnosis:
    """Count the leftovers of interrupted saves, and the batches in the trash."""
    left = [one for one in found if one.state is State.LEFTOVER]
    writing = [one for one in found if one.state is State.WRITING]
    size = sum(one.size_bytes for one in left)
    figures: dict[str, float] = {"leftovers": len(left), "leftover_bytes": size}
    try:
        stored = [batch.size_bytes for batch in DirectoryTrash(store).batches()]
    except OSError as error:
        text = f"the trash cannot be read: {error.strerror}"
        return Diagnosis(check="leftovers", grade="fail", message=text, figures=figures)
    figures["trash_bytes"] = sum(stored)
    texts = [f"{len(left)} of interrupted saves, {size_text(size)}" if left else "none"]
    if writing:
        texts.append(f"{len(writing)} being written now")
    if stored:
        texts.append(f"{size_text(sum(stored))} in the trash")
    if not left:
        return Diagnosis(check="leftovers", grade="ok", message="; ".join(texts), figures=figures)
    hint = (
        "the next save of the series removes them, and ckptmgr prune; ckptmgr ls --all shows them"
    )
    return Diagnosis(
        check="leftovers", grade="warn", message="; ".join(texts), hint=hint, figures=figures
    )


def check_resume(
    store: Store, found: Sequence[Checkpoint], options: ReadOptions, *, is_deep: bool
) -> Iterator[Diagnosis]:
    """Open the newest checkpoint of each line of runs, and where it fails older ones."""
    level = Level.DEEP if is_deep else Level.QUICK
    finished = [one for one in found if one.state not in (State.LEFTOVER, State.WRITING)]
    trusted = [one for one in finished if one.state is not State.OTHER_OWNER]
    lines = lines_of(trusted or finished)
    if not lines:
        yield Diagnosis(check="resume", grade="ok", message="nothing to resume: no checkpoint yet")
    for line in lines:
        # A resume takes a save from the middle of a step last.
        newest_first = sorted(reversed(line.checkpoints), key=lambda one: one.is_emergency)
        yield _resume_of(store, newest_first, options, level)
    # Of which run they are, and whether they are its newest, only their manifests could say.
    for one in found if any(one.is_countable for one in found) else ():
        if one.state is State.CORRUPT and one.run_id is None:
            text = f"{one.name}: {one.problem}; a resume passes over it"
            hint = "ckptmgr verify says what is wrong with it"
            yield Diagnosis(check="resume", grade="warn", message=text, hint=hint)


def _resume_of(
    store: Store, newest: Sequence[Checkpoint], options: ReadOptions, level: Level
) -> Diagnosis:
    problems: list[str] = []
    for one in newest[:_MOST_TRIED]:
        answer = verify_checkpoint(store, one, level=level, options=options)
        if answer.status in (Status.OK, Status.UNVERIFIED):
            how = (
                "every tensor was decoded"
                if level is Level.DEEP
                else "sizes, header and manifest fit; --deep reads the tensors"
            )
            doubt = "" if answer.status is Status.OK else ", but nothing vouches for it"
            text = f"{one.name} (step {one.step}) loads{doubt}: {how}"
            if not problems:
                grade: Grade = "ok" if answer.status is Status.OK else "warn"
                return Diagnosis(check="resume", grade=grade, message=text)
            text = f"{'; '.join(problems)}; a resume would go back to {one.name} (step {one.step})"
            return Diagnosis(
                check="resume", grade="warn", message=text, hint="ckptmgr verify checks all of them"
            )
        problems.append(f"{one.name}: {'; '.join(answer.problems) or answer.status.value}")
        if answer.status in (Status.WRONG_KEY, Status.UNPROVEN, Status.UNSEALED):
            text = f"{problems[-1]}"
            return Diagnosis(
                check="resume",
                grade="fail",
                message=text,
                hint=answer.hint or "give its key with --key",
            )
    shown = "; ".join(problems[:2])
    hint = "ckptmgr verify checks all of them; repair mends files of many ranks"
    return Diagnosis(
        check="resume", grade="fail", message=f"no checkpoint loads: {shown}", hint=hint
    )


def check_keys(describe: Callable[[], Sequence[str]], found: Sequence[Checkpoint]) -> Diagnosis:
    """Describe the keys that are given, which `describe` loads, or say that one is needed."""
    try:
        texts = describe()
    except Exception as error:  # whatever is wrong with a key is the finding
        hint = getattr(error, "hint", None)
        return Diagnosis(
            check="keys", grade="fail", message=str(getattr(error, "message", error)), hint=hint
        )
    if texts:
        return Diagnosis(check="keys", grade="ok", message="; ".join(texts))
    sealed = sum(one.cipher is not None for one in found)
    if sealed:
        text = f"no key is given, and {sealed} of {len(found)} checkpoints are encrypted"
        return Diagnosis(
            check="keys", grade="warn", message=text, hint="give it with --key, or CKPTMGR_KEY_FILE"
        )
    return Diagnosis(check="keys", grade="ok", message="none given, and none needed")


def check_versions(
    required: Sequence[str] | None = None, version_of: Callable[[str], str] = metadata.version
) -> Diagnosis:
    """Compare the installed dependencies with the requirements of the package."""
    try:
        wanted = required if required is not None else metadata.requires("ckptmgr") or ()
    except metadata.PackageNotFoundError:
        text = "ckptmgr is not installed as a package, so nothing says what it needs"
        return Diagnosis(check="versions", grade="skip", message=text)
    shown, wrong = [], []
    for match in filter(None, map(_REQUIREMENT.fullmatch, wanted)):
        name, least, marker = match.groups()
        try:
            version = version_of(name)
        except metadata.PackageNotFoundError:
            if not marker:
                wrong.append(f"{name} is not installed")
            continue
        if _numbers(version) < _numbers(least):
            wrong.append(f"{name} {version} is older than {least}")
        if not marker:
            shown.append(f"{name} {version}")
    if wrong:
        hint = "python -m pip install --upgrade ckptmgr installs what it needs"
        return Diagnosis(check="versions", grade="fail", message="; ".join(wrong), hint=hint)
    python = platform.python_version()
    return Diagnosis(check="versions", grade="ok", message=", ".join([f"Python {python}", *shown]))


def check_dates(found: Sequence[Checkpoint], now: datetime) -> Diagnosis | None:
    """Name checkpoints of the future; None without any."""
    late = [one for one in found if (one.saved_at - now).total_seconds() > 60]
    if not late:
        return None
    which = "1 checkpoint was" if len(late) == 1 else f"{len(late)} checkpoints were"
    newest = f"{late[-1].name} at {late[-1].saved_at:%Y-%m-%d %H:%M}"
    text = f"{which} saved in the future, such as {newest}"
    hint = "rules by age (within, daily) wait until then; set the clock of the machine that saves"
    return Diagnosis(check="clock", grade="warn", message=text, hint=hint)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version, without zeros at the end."""
    numbers = [int(part) for part in re.findall(r"[0-9]+", re.split(r"[^0-9.]", version)[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
