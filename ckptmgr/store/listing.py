# SPDX-License-Identifier: Apache-2.0
"""What a directory holds that is, was or will be a checkpoint, by its manifests and its names; no data is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint, KeyProblem, UnprovenCheckpoint
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import DATA_SUFFIXES, parse_name
from ckptmgr.core.shard_names import is_set_name, parse_shard_name
from ckptmgr.io.filesystem import FileStatus
from ckptmgr.io.leases import Processes
from ckptmgr.io.temp_names import final_name, is_temp_of, parse_temp
from ckptmgr.store.bare_files import bare_file, entry_of, number_bare_steps
from ckptmgr.store.lone_manifests import LoneManifest
from ckptmgr.store.manifest.cache import SeenInListing, SeenManifests
from ckptmgr.store.manifest.codec import SUFFIX, Manifest, manifest_name
from ckptmgr.store.manifest.files import ManifestReader
from ckptmgr.store.real_files import NO_REGULAR_FILE
from ckptmgr.store.shard_listing import missing_shard, problem_of_shards, unnamed_shards
from ckptmgr.store.trash_folder import may_be_in_trash

_BEING_WRITTEN = "being written by a live process"


def listed(
    files: ManifestReader, processes: Processes, seen: SeenManifests, *, now_s: float
) -> list[Checkpoint]:
    """Return all that is, was or will be a checkpoint, in no particular order; never raises because of what it finds.

    Args:
        files: The manifests of the directory.
        processes: Tells dead writers from live ones.
        seen: What was read before, of the same manifests with the same keys.
        now_s: Seconds since the epoch, as the disk counts them.
    """
    if files.fs.status(files.directory) is None:
        return []
    missing: set[str] = set()
    while True:
        entries = files.fs.list(files.directory)
        known = seen.listing(entries, now_s=now_s)
        found = _Listing(files, processes, entries, known).run()
        seen.keep(known)
        # A listing is not one instant: data that a save renames meanwhile may be seen under neither name. The next listing
        # begins after that.
        before, missing = missing, {c.name for c in found if c.state is State.MISSING}
        if missing == before:
            return found


def listed_alone(files: ManifestReader, processes: Processes, name: str) -> Checkpoint | None:
    """Return what a directory holds under one name, or None; of a sharded checkpoint only what its manifest says.

    A manifest without data is a leftover here: only the whole directory tells whether it is more.

    Raises:
        OSError: From the disk.
    """
    found = ((one, files.fs.status(files.directory / one)) for one in (name, manifest_name(name)))
    entries = {one: status for one, status in found if status is not None}
    known = SeenManifests().listing({}, now_s=0)
    listing = _Listing(files, processes, entries, known, is_alone=True)
    return next((c for c in listing.run() if c.name == name), None)


class _Listing:
    def __init__(
        self,
        files: ManifestReader,
        processes: Processes,
        entries: Mapping[str, FileStatus],
        known: SeenInListing,
        *,
        is_alone: bool = False,
    ) -> None:
        self._files = files
        self._processes = processes
        self._directory = files.directory
        self._entries = entries
        self._known = known
        self._is_alone = is_alone

    def run(self) -> list[Checkpoint]:
        entries = self._entries
        found: list[Checkpoint] = []
        lone: list[LoneManifest] = []
        for name, status in entries.items():
            if name.endswith(SUFFIX) and not name.startswith("."):
                one = self._known.get(name) or self._from_manifest(name, status)
                if isinstance(one, LoneManifest):
                    lone.append(one)
                else:
                    found.append(one)
            elif parse_shard_name(name) is not None:
                continue
            elif _is_data_name(name) and manifest_name(name) not in entries and status.is_file:
                bare = bare_file(
                    self._directory / name, status, is_strict=self._files.trust.is_strict
                )
                found.append(bare)
            elif parse_temp(name) is not None:
                found.append(self._from_temp(name, status))
        found += [self._without_data(one, found) for one in lone]
        return [*number_bare_steps(found), *unnamed_shards(self._directory, entries, found)]

    def _without_data(self, lone: LoneManifest, found: Sequence[Checkpoint]) -> Checkpoint:
        name = lone.manifest.name
        path, status = self._directory / name, self._entries[manifest_name(name)]
        if not self._is_alone and lone.newer_in(found) is None:
            temps = [temp for temp in self._entries if is_temp_of(temp, name)]
            if any(self._is_live(temp) for temp in temps):
                return entry_of(path, status, State.WRITING, _BEING_WRITTEN)
            is_saved = any(lone.is_completed_by(self._files, temp) for temp in temps)
            if not is_saved and not may_be_in_trash(self._files.fs, self._directory, name):
                return lone.missing(self._directory)
        return entry_of(path, status, State.LEFTOVER, "a manifest without its data file")

    def _from_manifest(self, name: str, status: FileStatus) -> Checkpoint | LoneManifest:
        data_name = name.removesuffix(SUFFIX)
        data = self._entries.get(data_name)
        path = self._directory / data_name
        if data is not None and not data.is_file:
            problem = f"{NO_REGULAR_FILE}; put the file itself here"
            return entry_of(path, data, State.CORRUPT, problem)
        is_lone = data is None and not is_set_name(data_name)
        key_problem = None
        try:
            try:
                # Which half of an overwrite counts, only the data tells.
                manifest = (
                    self._files.load(name, trust=self._files.trust)
                    if is_lone
                    else self._files.read(data_name)
                )
            except KeyProblem as error:
                if is_lone:  # it proves nothing, so it is not missed
                    problem = f"a manifest without its data file: {error.message}"
                    return entry_of(path, status, State.LEFTOVER, problem)
                key_problem = error
                manifest = self._files.read_unproven(data_name)
        except (CkptmgrError, OSError) as error:
            problem = error.message if isinstance(error, CkptmgrError) else str(error)
            # Damage is final; of anything else whoever wants this checkpoint must hear.
            obstacle = None if isinstance(error, CorruptCheckpoint) else error.with_traceback(None)
            unread = entry_of(path, data or status, State.CORRUPT, problem)
            return replace(unread, obstacle=obstacle)
        if manifest is None:  # removed while we were looking
            problem = "vanished while the directory was listed"
            return entry_of(path, data or status, State.LEFTOVER, problem)
        if is_lone:
            return LoneManifest(manifest)
        if key_problem is not None:
            return manifest.to_checkpoint(
                self._directory,
                state=self._unproven_state(key_problem),
                problem=key_problem.message,
            )
        checkpoint = self._with_data(manifest, data)
        if checkpoint.state is State.OK:
            self._known.note(name, checkpoint, checkpoint.shards or (data_name,))
        return checkpoint

    def _unproven_state(self, problem: KeyProblem) -> State:
        """Return the state of a checkpoint that the given keys do not prove."""
        if self._files.trust.accepts_unsealed:
            return State.UNVERIFIED
        return State.UNPROVEN if isinstance(problem, UnprovenCheckpoint) else State.OTHER_KEY

    def _with_data(self, manifest: Manifest, data: FileStatus | None) -> Checkpoint:
        problem, obstacle = None, None
        if data is None:
            problem = problem_of_shards(manifest, self._entries)
            obstacle = missing_shard(manifest, self._directory, self._entries)
        elif data.size_bytes != (expected := manifest.file.digest.size_bytes):
            problem = f"{data.size_bytes} bytes, but the manifest says {expected}"
        state = State.OK if problem is None else State.CORRUPT
        found = manifest.to_checkpoint(self._directory, state=state, problem=problem)
        return replace(found, obstacle=obstacle)

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


def _is_data_name(name: str) -> bool:
    return name.endswith(DATA_SUFFIXES) and not name.startswith(".")
