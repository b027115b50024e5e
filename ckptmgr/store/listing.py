# SPDX-License-Identifier: Apache-2.0
"""List the checkpoints of a directory by their manifests and file names; no checkpoint is read.

The list also has files without a manifest, leftovers, files that cannot be read, and data files of
ranks that no manifest names; it lacks MindSpore's strategy files, whose names end in `.ckpt`, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ckptmgr.core import shard_names
from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint, KeyProblem, UnprovenCheckpoint
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import (
    ATTEMPT,
    DATA_SUFFIXES,
    ParsedName,
    is_same_prefix,
    parse_name,
    parse_step_name,
    stem_of,
    without_envelope,
)
from ckptmgr.core.shard_names import (
    ShardName,
    is_checkpoint_name,
    is_set_name,
    parse_shard_name,
    set_stem,
)
from ckptmgr.core.trust import Trust
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.source import read_bytes
from ckptmgr.io.filesystem import FileStatus
from ckptmgr.io.gc_pause import gc_paused
from ckptmgr.io.leases import Processes
from ckptmgr.io.owners import about_stranger, is_of_stranger
from ckptmgr.io.passing_errors import no_such_file
from ckptmgr.io.temp_names import final_name, is_temp_of, parse_temp
from ckptmgr.store.lone_manifests import LoneManifest
from ckptmgr.store.manifest.cache import CachedListing, ManifestCache
from ckptmgr.store.manifest.codec import SUFFIX, Manifest, manifest_name
from ckptmgr.store.manifest.reader import ManifestReader
from ckptmgr.store.real_files import NO_REGULAR_FILE
from ckptmgr.store.trash_folder import may_be_in_trash


def entry_of(path: Path, status: FileStatus, state: State, problem: str) -> Checkpoint:
    """Return a checkpoint of which only the directory entry is known."""
    # The name of a set carries the same fields as the names of its files.
    stem = shard_names.set_stem(path.name)
    name = f"{stem}.ckpt" if shard_names.is_set_name(path.name) else path.name
    parsed = parse_name(name)
    numbered = parse_step_name(name) if parsed is None else None
    named = parsed or numbered
    return Checkpoint(
        path=path,
        series=named.prefix if named is not None else stem,
        step=0 if numbered is None else numbered.step,
        attempt=0 if numbered is None else numbered.attempt,
        saved_at=modified_time(status.modified_at),
        size_bytes=status.size_bytes,
        state=state,
        format=_format_of(path.name),
        problem=problem,
    )


def _format_of(name: str) -> str:
    is_safetensors = without_envelope(name).endswith(".safetensors")
    return "safetensors" if is_safetensors else "ckpt"


def modified_time(seconds: float) -> datetime:
    """Return the time of a change of a file, UTC; that of 1970 for one outside the calendar."""
    # Some file systems store such times.
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC)


def bare_file(path: Path, status: FileStatus, *, is_strict: bool = False) -> Checkpoint:
    """Return a checkpoint for a file without manifest; `is_strict`: given keys must prove it.

    Its final step is filled in when the whole series is known.
    """
    parsed = parse_name(path.name)
    state = State.UNPROVEN if is_strict else State.UNVERIFIED
    checkpoint = entry_of(path, status, state, "no manifest: nothing vouches for this file")
    if parsed is None:
        # `net-2023.ckpt` may come from another program: without a manifest it belongs to no series.
        return replace(checkpoint, series=stem_of(path.name), step=0, attempt=0)
    why = "exception: breakpoint file" if parsed.is_breakpoint else "manual"
    return replace(checkpoint, epoch=parsed.epoch, step=parsed.step_in_epoch, why=why)


def number_bare_steps(found: list[Checkpoint]) -> list[Checkpoint]:
    """Turn (epoch, step in epoch) of bare files into a step that grows with both.

    The largest step in the series counts as the length of an epoch. That is exact once a file from
    the end of an epoch exists, and the order is always right.
    """
    longest: dict[str, int] = {}
    for checkpoint in found:
        if checkpoint.epoch is not None and checkpoint.is_bare:
            longest[checkpoint.series] = max(longest.get(checkpoint.series, 1), checkpoint.step)
    if not longest:
        return found
    return [
        replace(c, step=max(0, c.epoch - 1) * longest[c.series] + c.step)
        if c.is_bare and c.epoch is not None
        else c
        for c in found
    ]


def problem_of_shards(manifest: Manifest, entries: Mapping[str, FileStatus]) -> str | None:
    """Return which file of a sharded checkpoint is missing or has another size, or None."""
    for entry in manifest.shards:
        status = entries.get(entry.name)
        if status is None:
            return f"{entry.name} is missing"
        if not status.is_file:
            return f"{entry.name} is a link or no regular file; put the file itself here"
        if status.size_bytes != entry.digest.size_bytes:
            return f"{entry.name} has {status.size_bytes} bytes, but the manifest says {entry.digest.size_bytes}"
    return None


def missing_shard(
    manifest: Manifest, directory: Path, entries: Mapping[str, FileStatus]
) -> FileNotFoundError | None:
    """Return the error for the first file of a sharded checkpoint that is missing, or None."""
    missing = (entry.name for entry in manifest.shards if entry.name not in entries)
    return next((no_such_file(directory / name) for name in missing), None)


def unnamed_shards(
    directory: Path, entries: Mapping[str, FileStatus], found: Sequence[Checkpoint]
) -> Iterator[Checkpoint]:
    """Yield the data files of ranks that belong to none of the listed checkpoints `found`.

    Where a manifest cannot be read, its files are unknown, so every file that it may name is left
    out. The same holds where its files are missing or the manifest is unproven: it may have been
    put over the manifest that names these files.
    """
    named = {name for checkpoint in found for name in checkpoint.shards}
    doubtful = {checkpoint.name for checkpoint in found if checkpoint.state is not State.OK}
    for name, status in entries.items():
        shard = parse_shard_name(name)
        if shard is None or name in named or shard.set_name in doubtful:
            continue
        problem = "what one rank saved for a checkpoint that is not there"
        leftover = entry_of(directory / name, status, State.LEFTOVER, problem)
        yield replace(leftover, series=shard.series)


def lone_sets(present: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints, newest by name, that have the files of all ranks but no manifest.

    Either the save was killed before its commit, or the manifest was lost. An interrupted removal
    leaves the same, but of a checkpoint that is older than a whole one; that is left out.
    """
    files: dict[ShardName, list[Checkpoint]] = {}
    for one in present:
        shard = parse_shard_name(one.name)
        if shard is not None and one.state is State.LEFTOVER:
            files.setdefault(shard._replace(rank=0), []).append(one)
    return [
        _as_set(shard, found)
        for shard, found in files.items()
        if len(found) == shard.world and not _is_superseded(shard, present)
    ]


def _as_set(shard: ShardName, files: Sequence[Checkpoint]) -> Checkpoint:
    by_step = parse_step_name(f"{shard.stem}.ckpt")
    by_epoch = _parsed_by_epoch(shard.stem)
    names = tuple(sorted(one.name for one in files))
    return replace(
        files[0],
        path=files[0].path.with_name(shard.set_name),
        step=0 if by_step is None else by_step.step,
        epoch=None if by_epoch is None else by_epoch.epoch,
        size_bytes=sum(one.size_bytes for one in files),
        shards=names,
        problem=f"the files of all {shard.world} ranks are here, but no manifest",
    )


def _is_superseded(shard: ShardName, present: Sequence[Checkpoint]) -> bool:
    """Return whether a whole checkpoint of the run is as new or newer, by its name."""
    place = _place(shard.stem)
    whole = [one for one in present if one.state is State.OK and one.is_countable]
    return not place or any(
        len(other) == len(place) and other >= place
        for one in whole
        if one.series == shard.series
        or (len(place) > 2 and is_same_prefix(one.series, shard.series))
        for other in [_place(set_stem(one.name) if is_set_name(one.name) else stem_of(one.name))]
    )


def _place(stem: str) -> tuple[int, ...]:
    """Return (step, attempt), or (epoch, step in epoch, attempt), of a name; empty for others."""
    by_step = parse_step_name(f"{stem}.ckpt")
    if by_step is not None:
        return (by_step.step, by_step.attempt)
    by_epoch = _parsed_by_epoch(stem)
    if by_epoch is None:
        return ()
    attempt = ATTEMPT.search(stem)
    number = 0 if attempt is None else int(attempt[0].removeprefix("-r"))
    return (by_epoch.epoch, by_epoch.step_in_epoch, number)


def _parsed_by_epoch(stem: str) -> ParsedName | None:
    return parse_name(f"{ATTEMPT.sub('', stem)}.ckpt")


_STRATEGY_TAG = b"\x08"  # no checkpoint begins so; one with a damaged head is no whole strategy
_BEING_WRITTEN = "being written by a live process"


def listed(
    files: ManifestReader, processes: Processes, seen: ManifestCache, *, now_s: float
) -> tuple[list[Checkpoint], Mapping[str, FileStatus]]:
    """Return every checkpoint, finished or not, in no particular order, and the directory's entries.

    Damage never raises. `now_s` are seconds since the epoch by the clock of the disk.
    """
    if files.fs.status(files.directory) is None:
        return [], {}
    missing: set[str] = set()
    with gc_paused():
        while True:
            entries = files.fs.list(files.directory)
            known = seen.listing(entries, now_s=now_s)
            found = _Listing(files, processes, entries, known).run()
            seen.keep(known)
            # A listing is not atomic: data that a save renames meanwhile may appear under neither
            # name. A second listing starts after that rename.
            before, missing = missing, {c.name for c in found if c.state is State.MISSING}
            if missing == before:
                return found, entries


def list_entries(
    files: ManifestReader,
    processes: Processes,
    entries: Mapping[str, FileStatus],
    known: CachedListing,
    *,
    others: Collection[Checkpoint],
) -> list[Checkpoint]:
    """Return the checkpoints of some entries; `others` are whole ones, which need no other file."""
    return _Listing(files, processes, entries, known, others=others).run()


def listed_alone(files: ManifestReader, processes: Processes, name: str) -> Checkpoint | None:
    """Return the checkpoint under one name, or None; without the files of ranks.

    A manifest without data counts as a leftover here: the whole directory is needed to find out
    more.

    Raises:
        OSError: From the disk.
    """
    found = ((one, files.fs.status(files.directory / one)) for one in (name, manifest_name(name)))
    entries = {one: status for one, status in found if status is not None}
    known = ManifestCache().listing({}, now_s=0)
    listing = _Listing(files, processes, entries, known, is_alone=True)
    return next((c for c in listing.run() if c.name == name), None)


class _Listing:
    def __init__(
        self,
        files: ManifestReader,
        processes: Processes,
        entries: Mapping[str, FileStatus],
        known: CachedListing,
        *,
        is_alone: bool = False,
        others: Collection[Checkpoint] = (),
    ) -> None:
        self._files = files
        self._processes = processes
        self._directory = files.directory
        self._entries = entries
        self._at = files.fs.status(files.directory)
        self._temps = [
            one
            for one, status in entries.items()
            if one[0] == "." and parse_temp(one) is not None and not self._is_of_stranger(status)
        ]
        self._known = known
        self._is_alone = is_alone
        self._others = others

    def run(self) -> list[Checkpoint]:
        entries = self._entries
        found: list[Checkpoint] = []
        lone: list[LoneManifest] = []
        for name, status in entries.items():
            if name.endswith(SUFFIX) and name[0] != ".":
                if not (self._is_alone or is_checkpoint_name(name.removesuffix(SUFFIX))):
                    continue
                if self._is_beside_own_data(name, status):
                    continue
                one = self._known.get(name) or self._from_manifest(name, status)
                if isinstance(one, LoneManifest):
                    lone.append(one)
                else:
                    found.append(one)
            elif name[0] == ".":
                if parse_temp(name) is not None:
                    found.append(self._from_temp(name, status))
            elif parse_shard_name(name) is not None or self._is_described(name):
                continue
            elif (
                name.endswith(DATA_SUFFIXES)
                and status.is_file
                and (self._is_alone or not self._is_strategy(self._directory / name))
            ):
                found.append(self._judged(self._without_manifest(name, status), status))
        if lone:
            present = [*found, *self._others]
            found += [self._without_data(one, present) for one in lone]
        return [*number_bare_steps(found), *unnamed_shards(self._directory, entries, found)]

    def _is_of_stranger(self, status: FileStatus) -> bool:
        return is_of_stranger(status, self._at)

    def _is_described(self, data_name: str) -> bool:
        name = manifest_name(data_name)
        manifest = self._entries.get(name)
        return manifest is not None and not self._is_beside_own_data(name, manifest)

    def _is_beside_own_data(self, name: str, manifest: FileStatus) -> bool:
        """Return whether a stranger put a manifest beside the data of a trusted user."""
        if self._files.trust.can_prove or not self._is_of_stranger(manifest):
            return False
        data = self._entries.get(name.removesuffix(SUFFIX))
        return data is not None and not self._is_of_stranger(data)

    def _judged(self, found: Checkpoint, status: FileStatus) -> Checkpoint:
        """Return a checkpoint, which decides nothing where neither owner nor keys vouch for it."""
        if not self._is_of_stranger(status) or found.is_unproven or self._files.trust.proves(found):
            return found
        problem = about_stranger(status)
        return replace(found, state=State.OTHER_OWNER, problem=problem, obstacle=None)

    def _is_strategy(self, path: Path) -> bool:
        if path.suffix != ".ckpt" or parse_name(path.name) is not None:
            return False
        try:
            with closing(self._files.fs.open(path)) as file:
                if read_bytes(file, 0, 1) != _STRATEGY_TAG:
                    return False
                from ckptmgr.formats.strategy import MAX_STRATEGY_BYTES, parse_strategy

                size = min(file.size, MAX_STRATEGY_BYTES + 1)
                return bool(parse_strategy(read_bytes(file, 0, size)).layouts)
        except (FormatError, OSError):
            return False

    def _without_manifest(self, name: str, status: FileStatus) -> Checkpoint:
        path = self._directory / name
        if any(self._files.in_temp(temp, name, trust=Trust()) for temp in self._temps):
            problem = "the manifest of its interrupted save has no name"
            return entry_of(path, status, State.LEFTOVER, problem)
        return bare_file(path, status, is_strict=self._files.trust.is_strict)

    def _without_data(self, lone: LoneManifest, found: Sequence[Checkpoint]) -> Checkpoint:
        name = lone.manifest.name
        path, status = self._directory / name, self._entries[manifest_name(name)]
        if not self._is_alone and lone.newer_in(found) is None:
            temps = [temp for temp in self._temps if is_temp_of(temp, name)]
            if any(self._is_live(temp) for temp in temps):
                return entry_of(path, status, State.WRITING, _BEING_WRITTEN)
            is_saved = any(lone.is_completed_by(self._files, temp) for temp in temps)
            if not is_saved and not may_be_in_trash(self._files.fs, self._directory, name):
                return lone.missing(self._directory)
        return entry_of(path, status, State.LEFTOVER, "a manifest without its data file")

    def _from_manifest(self, name: str, status: FileStatus) -> Checkpoint | LoneManifest:
        found = self._read(name, status)
        if isinstance(found, LoneManifest):
            if self._files.trust.can_prove or not self._is_of_stranger(status):
                return found
            found = found.manifest.to_checkpoint(self._directory)
        return self._judged(found, status)

    def _read(self, name: str, status: FileStatus) -> Checkpoint | LoneManifest:
        data_name = name.removesuffix(SUFFIX)
        data = self._entries.get(data_name)
        path = self._directory / data_name
        if data is not None and not data.is_file:
            problem = f"{NO_REGULAR_FILE}; put the file itself here"
            return entry_of(path, data, State.CORRUPT, problem)
        is_lone = data is None and not is_set_name(data_name)
        read: Manifest | Checkpoint | None
        key_problem = None
        try:
            try:
                # Only the data decides which side of an overwrite counts.
                read = (
                    self._files.load(name, trust=self._files.trust)
                    if is_lone
                    else self._files.read_listed(path)
                )
            except KeyProblem as error:
                if is_lone:  # it proves nothing, so its data is not missing
                    problem = f"a manifest without its data file: {error.message}"
                    return entry_of(path, status, State.LEFTOVER, problem)
                key_problem = error
                read = self._files.read_unproven(data_name)
        except (CkptmgrError, OSError) as error:
            problem = error.message if isinstance(error, CkptmgrError) else str(error)
            # Damage is final. Any other obstacle is raised when the caller asks for this
            # checkpoint.
            obstacle = None if isinstance(error, CorruptCheckpoint) else error.with_traceback(None)
            state = State.UNREADABLE if isinstance(error, PermissionError) else State.CORRUPT
            unread = entry_of(path, data or status, state, problem)
            return replace(unread, obstacle=obstacle)
        if read is None:  # removed by another process during the listing
            problem = "vanished while the directory was listed"
            return entry_of(path, data or status, State.LEFTOVER, problem)
        if is_lone and isinstance(read, Manifest):
            return LoneManifest(read)
        if key_problem is not None and isinstance(read, Manifest):
            return read.to_checkpoint(
                self._directory,
                state=self._unproven_state(key_problem),
                problem=key_problem.message,
            )
        checkpoint = self._with_data(read, data)
        if checkpoint.state is State.OK and (
            self._files.trust.can_prove or not self._is_of_stranger(status)
        ):
            self._known.note(name, checkpoint, checkpoint.shards or (data_name,))
        return checkpoint

    def _unproven_state(self, problem: KeyProblem) -> State:
        """Return the state of a checkpoint that the given keys do not prove."""
        if self._files.trust.accepts_unsealed:
            return State.UNVERIFIED
        return State.UNPROVEN if isinstance(problem, UnprovenCheckpoint) else State.OTHER_KEY

    def _with_data(self, read: Manifest | Checkpoint, data: FileStatus | None) -> Checkpoint:
        problem, obstacle = None, None
        if isinstance(read, Checkpoint):
            found, size_bytes = read, read.size_bytes
        else:
            found, size_bytes = read.to_checkpoint(self._directory), read.file.digest.size_bytes
        if data is None and isinstance(read, Manifest):
            problem = problem_of_shards(read, self._entries)
            obstacle = missing_shard(read, self._directory, self._entries)
        elif data is not None and data.size_bytes != size_bytes:
            problem = f"{data.size_bytes} bytes, but the manifest says {size_bytes}"
        if problem is None:
            return found
        return replace(found, state=State.CORRUPT, problem=problem, obstacle=obstacle)

    def _from_temp(self, name: str, status: FileStatus) -> Checkpoint:
        is_live = self._is_live(name)
        state = State.WRITING if is_live else State.LEFTOVER
        problem = _BEING_WRITTEN if is_live else "left by an interrupted save"
        data_name = final_name(name).removesuffix(SUFFIX)
        parsed = parse_name(data_name)
        found = entry_of(self._directory / name, status, state, problem)
        return replace(found, series=data_name if parsed is None else parsed.prefix)

    def _is_live(self, temp: str) -> bool:
        token = parse_temp(temp)
        return token is not None and self._processes.is_dead(token[0]) is False
