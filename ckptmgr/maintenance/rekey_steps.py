# SPDX-License-Identifier: Apache-2.0
"""Steps of a change of keys of one checkpoint; `rekey` says why they come in this order."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CheckpointNotFound, KeyProblem, UnsafeWrite, UnsealedCheckpoint
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import OPAQUE
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.slots import Slot
from ckptmgr.files.load.container import format_in, open_container_file
from ckptmgr.files.load.plaintext import ENCRYPTED, kind_of
from ckptmgr.formats.detect import Kind
from ckptmgr.io.filesystem import InputFile
from ckptmgr.maintenance.convert_target import unproven_step
from ckptmgr.maintenance.reencrypt import (
    reencrypt_file,
    reencrypt_set,
    remove_stale_files,
    stale_files,
)
from ckptmgr.maintenance.rekey_change import (
    Action,
    FilePlan,
    KeyChange,
    RekeyPlan,
    Removal,
    has_first_keys,
    plan_blocks,
    plan_container,
    plan_header,
)
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.manifest.keys import BOUND, ManifestKey, manifest_key_of
from ckptmgr.store.store import Store


class CheckpointKeys:
    """Keys of one checkpoint of one or several ranks; to change them the lease must be held.

    `clock` (seconds since 1970) names new files of ranks, and says which files have expired.
    """

    def __init__(
        self,
        store: Store,
        checkpoint: Checkpoint,
        change: KeyChange,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._store = store
        self._checkpoint = checkpoint
        self._change = change
        names = checkpoint.shards or (checkpoint.path.name,)
        self._paths = [store.directory / name for name in names]
        self._manifest: Manifest | None = None

    def plan(self) -> RekeyPlan:
        """Return what `change` would do."""
        kinds = {self._kind(path) for path in self._paths}
        if kinds == {Kind.CKPTMGR_CONTAINER}:
            plans = [self._plan_header(path) for path in self._paths]
            is_proven = all(plan.is_proven for plan in plans)
            is_done = not any(plan.writes for plan in plans)
            is_done = self._is_authentication_done(is_proven=is_proven) and is_done
            if not is_done:
                self._check_digests()
                self._check_manifest_key(plans)
            return self._result(Action.NOTHING if is_done else Action.HEADER, *plans)
        if kinds == {Kind.MINDSPORE_ENCRYPTED} and not self._checkpoint.shards:
            (path,) = self._paths
            with self._opened(path) as raw:
                blocks = plan_blocks(raw, self._change, path=str(path))
            is_done = self._is_authentication_done(is_proven=True)
            if blocks.needs_reencryption or not is_done:
                self._check_proofs()
            if blocks.needs_reencryption:
                return self._result(Action.REENCRYPT, blocks)
            return self._result(Action.NOTHING if is_done else Action.HEADER, blocks)
        if kinds & {Kind.CKPTMGR_CONTAINER, Kind.MINDSPORE_ENCRYPTED}:
            raise UnsafeWrite(
                "is of files that are encrypted in ways whose keys cannot be changed together",
                path=self._checkpoint.path,
                hint="ckptmgr reencrypt encrypts all of them anew; save as safetensors for keys that change",
            )
        return RekeyPlan(checkpoint=self._checkpoint, action=Action.PLAIN)

    def change(self) -> RekeyPlan:
        """Add and remove keys, durably; return the plan that was carried out."""
        planned = self.plan()
        if planned.action is Action.HEADER:
            if self._kind(self._paths[0]) is Kind.MINDSPORE_ENCRYPTED:
                self._finish_swap()
            self._authenticate(is_final=False)
            if len(self._paths) > 1:
                # A set with old keys in one half and new keys in the other would open with neither.
                self._rewrite_headers(replace(self._change, remove=(), remove_ids=()))
            self._rewrite_headers(self._change)
            self._authenticate(is_final=True)
        elif planned.action is Action.REENCRYPT:
            self._reencrypt_file()
            self._authenticate(is_final=True)
        return planned

    def plan_reencryption(self) -> RekeyPlan:
        """Return what `reencrypt` would do."""
        kinds = {self._kind(path) for path in self._paths}
        if not kinds & set(ENCRYPTED):
            return RekeyPlan(checkpoint=self._checkpoint, action=Action.PLAIN)
        if not kinds <= set(ENCRYPTED):
            raise UnsafeWrite("is of plain and of encrypted files", path=self._checkpoint.path)
        plans = [self._plan_file_reencryption(path) for path in self._paths]
        needs_reencryption = any(plan.needs_reencryption for plan in plans)
        is_proven = needs_reencryption or all(plan.is_proven for plan in plans)
        is_done = self._is_authentication_done(is_proven=is_proven)
        action = Action.REENCRYPT
        if not needs_reencryption:
            action = Action.NOTHING if is_done else Action.HEADER
        if action is not Action.NOTHING:
            self._check_proofs()
        elif self._stale_files():
            action = Action.CLEAN_UP
        return self._result(action, *plans)

    def reencrypt(self) -> RekeyPlan:
        """Re-encrypt it, durably; return the plan that was carried out."""
        planned = self.plan_reencryption()
        if planned.action is Action.REENCRYPT and self._is_set:
            self._reencrypt_set()
        elif planned.action is Action.REENCRYPT:
            self._reencrypt_file()
            self._authenticate(is_final=True)
        elif planned.action is Action.HEADER:
            self._finish_swap()
            self._authenticate(is_final=True)
        remove_stale_files(self._store, self._stale_files())
        return planned

    def _plan_file_reencryption(self, path: Path) -> FilePlan:
        with self._opened(path) as raw:
            if kind_of(raw, name=path.name) is Kind.CKPTMGR_CONTAINER:
                return plan_container(raw, self._change)
            return plan_blocks(raw, self._change, path=str(path))

    @property
    def _is_set(self) -> bool:
        return bool(self._checkpoint.shards)

    def _stale_files(self) -> list[str]:
        if not self._is_set:
            return []
        return stale_files(self._store, self._checkpoint, now=self._clock())

    def _check_digests(self) -> None:
        """Raise UnsafeWrite when digests cover headers: a new header would count as damage."""
        manifest = self._manifest
        if manifest is None:
            return
        if not all(one.digest.blank_bytes for one in manifest.shards or (manifest.file,)):
            raise UnsafeWrite(
                "the digests in its manifest cover its header, which must not change then",
                path=self._checkpoint.path,
                hint="ckptmgr reencrypt writes it anew",
            )

    def _check_manifest_key(self, plans: Sequence[FilePlan]) -> None:
        """Raise UnsafeWrite when a re-encryption was interrupted.

        The change would seem done, while a key to remove knows the key of the manifest.
        """
        auth = None if self._manifest is None else self._manifest.auth
        if auth is None:
            return
        in_headers = frozenset[Removal]().union(*(plan.removals for plan in plans))
        if self._removals_in(auth) <= in_headers or not all(map(self._has_first_keys, self._paths)):
            return
        if self._rewrapped(auth, is_final=True).key == auth.key:
            raise UnsafeWrite(
                "who is to be removed does not open it, but knows the key of its manifest: a reencrypt, or a rekey that"
                " added them, was interrupted",
                path=self._checkpoint.path,
                hint="do that again to finish it, or ckptmgr reencrypt with a key that opens it now",
            )

    def _has_first_keys(self, path: Path) -> bool:
        with self._opened(path) as raw:
            return has_first_keys(raw)

    def _removals_in(self, auth: ManifestKey) -> frozenset[Removal]:
        with translated_errors(str(self._checkpoint.path)):
            return self._change.removals_among(auth.slots or auth.own_slots, bound=BOUND)

    def _check_proofs(self) -> None:
        """Raise KeyProblem when the new manifest would prove less, or more, than the old one."""
        if self._manifest is not None:
            self._store.check_rewritable(self._checkpoint)
        elif self._store.trust.is_strict and (self._is_set or not self._is_non_checkpoint()):
            raise unproven_step(self._checkpoint, self._store.trust)

    def _is_non_checkpoint(self) -> bool:
        """Return whether the file is no checkpoint and so gets no manifest, whatever its name."""
        (path,) = self._paths
        with self._opened(path) as raw:
            if kind_of(raw, name=path.name) is not Kind.CKPTMGR_CONTAINER:
                return False
            keys = self._change.keys
            container = open_container_file(raw, raw, path=str(path), key=keys, mode=None)
            return format_in(container) == OPAQUE

    def _reencrypt_file(self) -> None:
        reencrypt_file(
            self._store,
            self._checkpoint,
            old=self._change.keys,
            new=self._change.added,
            manifest=self._manifest,
            auth=self._during,
        )

    def _reencrypt_set(self) -> None:
        if self._manifest is None:
            raise CheckpointNotFound("there is no manifest", path=self._checkpoint.path)
        reencrypt_set(
            self._store,
            self._manifest,
            old=self._change.keys,
            new=self._change.added,
            clock=self._clock,
        )

    def _finish_swap(self) -> None:
        """Finish a re-encryption that was interrupted after the swap."""
        if self._manifest is not None:
            self._store.update_manifest(self._manifest)

    def _result(self, action: Action, plan: FilePlan, *others: FilePlan) -> RekeyPlan:
        removals = plan.removals.union(*(other.removals for other in others))
        auth = None if self._manifest is None else self._manifest.auth
        if auth is not None:
            removals |= self._removals_in(auth)
        return RekeyPlan(
            checkpoint=self._checkpoint,
            action=action,
            before=plan.before,
            after=plan.after,
            removals=removals,
        )

    def _kind(self, path: Path) -> Kind:
        with self._opened(path) as raw:
            return kind_of(raw, name=path.name)

    def _plan_header(self, path: Path, change: KeyChange | None = None) -> FilePlan:
        with self._opened(path) as raw:
            return plan_header(raw, change or self._change, path=str(path))

    def _rewrite_headers(self, change: KeyChange) -> None:
        for path in self._paths:
            if self._kind(path) is Kind.CKPTMGR_CONTAINER:
                self._rewrite_header(path, change)

    def _rewrite_header(self, path: Path, change: KeyChange) -> None:
        # Opened before it is read: a file that is copied to this name meanwhile never gets this
        # header.
        file = self._store.fs.change(path)
        try:
            self._store.leases.check(self._checkpoint.series, self._checkpoint.name)
            for write in self._plan_header(path, change).writes:
                file.write_at(write.offset, write.data)
                file.sync()
        finally:
            file.close()

    def _is_authentication_done(self, *, is_proven: bool) -> bool:
        """Read the manifest; return whether its authentication needs no change.

        Where the files open only for others, so does a manifest that is done.
        """
        try:
            manifest = self._manifest = self._store.read_manifest(self._checkpoint.name)
        except KeyProblem:
            if is_proven:
                raise
            return True
        if manifest is None or self._change.is_repair:
            return True
        if manifest.auth is None:
            raise UnsealedCheckpoint(
                "the manifest is not authenticated, and a change of keys does not make it so",
                path=self._checkpoint.path,
                hint="save it anew, or move the manifest away if you trust the name of the file",
            )
        return self._rewrapped(manifest.auth, is_final=True) is manifest.auth

    def _afterwards(self, auth: ManifestKey) -> ManifestKey:
        if self._change.is_exclusive:
            # A key that no longer opens the file may know the manifest's key, as the data key.
            return manifest_key_of(self._change.added)
        return self._rewrapped(auth, is_final=True)

    def _during(self, auth: ManifestKey | None) -> ManifestKey:
        if auth is None:
            return manifest_key_of(self._change.added)
        return self._rewrapped(auth, is_final=False)

    def _authenticate(self, *, is_final: bool) -> None:
        if self._manifest is None or self._change.is_repair:
            return
        change = self._afterwards if is_final else self._during
        self._store.reauthenticate(self._checkpoint.name, change)

    def _rewrapped(self, auth: ManifestKey, *, is_final: bool) -> ManifestKey:
        """Return the manifest's authentication during or after the change."""
        change = self._change

        def removes(slot: Slot) -> bool:
            return is_final and change.removes(slot, bound=BOUND)

        slots = auth.slots or auth.own_slots
        with translated_errors(str(self._checkpoint.path)):
            add = change.missing(slots, bound=BOUND)
            if not add and not any(map(removes, slots)):
                return auth
        own: tuple[Key, ...] = change.all_keys.raw_keys
        try:
            return auth.rewrapped(add=add, remove=removes, own=own)
        except ValueError as error:
            raise UnsafeWrite(
                f"nobody would be able to check the manifest: {error}",
                path=self._checkpoint.path,
                hint="add another key as well",
            ) from error

    @contextmanager
    def _opened(self, path: Path) -> Iterator[InputFile]:
        with (
            translated_errors(str(path)),
            contextlib.closing(self._store.fs.open(path)) as raw,
        ):
            yield raw
