# SPDX-License-Identifier: Apache-2.0
"""Change which keys open checkpoints: keys, passphrases and public keys; the data stays.

| file | effect |
|---|---|
| container (`.ckpe`) | its header is rewritten, a few KiB; the payload is not touched |
| encrypted `.ckpt` | one key and no slots: re-encrypted as a stream and swapped like a save |
| plain | nothing; it is named |

The order, for each checkpoint: its manifest can be checked by old and new keys; header copies, each
durable before the next; its manifest can be checked by the new keys only. So after a crash it opens
with the old or the new keys, and doing the same again finishes it. A reader with an old key may
have kept the data key of a file: `reencrypt` gives the file a new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CheckpointNotFound, KeyProblem, UnsafeWrite, UnsealedCheckpoint
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import OPAQUE
from ckptmgr.core.trust import DEFAULT_TRUST, Trust
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.slots import Slot
from ckptmgr.files.load.container import format_in, open_container_file
from ckptmgr.files.load.plaintext import ENCRYPTED, kind_of
from ckptmgr.formats.detect import Kind
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.leases import Processes
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
from ckptmgr.maintenance.rewriting import check_proofs, held_for_change, opened_raw
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.manifest.keys import BOUND, ManifestKey, manifest_key_of
from ckptmgr.store.store import Store

__all__ = [
    "Action",
    "RekeyPlan",
    "open_for_rekeying",
    "plan_reencryption",
    "plan_rekeying",
    "reencrypt_checkpoint",
    "rekey_checkpoint",
]


def open_for_rekeying(
    directory: Path,
    change: KeyChange,
    *,
    fs: FileSystem | None = None,
    processes: Processes | None = None,
    trust: Trust = DEFAULT_TRUST,
) -> Store:
    """Return a store that reads manifests which any old or new key authenticates, and no others.

    With a signing key it signs re-encrypted files, and reads only manifests signed by that key.
    Where `trust` accepts unsealed files, a file without manifest is trusted by its name, and a
    manifest that is only authenticated gets signed.
    """
    own = () if trust.signing_key is None else (trust.signing_key.public_key,)
    given = replace(trust, keys=change.all_keys, trusted_keys=own)
    return Store(directory, fs=fs, trust=given, processes=processes)


def plan_rekeying(store: Store, checkpoint: Checkpoint, change: KeyChange) -> RekeyPlan:
    """Return the plan of `rekey_checkpoint`; the store is from `open_for_rekeying`.

    Raises:
        KeyProblem: It does not open with these keys.
        UnsafeWrite: No key would open it any more, or it cannot have such keys.
        CkptmgrError, OSError: It is damaged or cannot be read.
    """
    return CheckpointKeys(store, checkpoint, change).plan()


def rekey_checkpoint(store: Store, checkpoint: Checkpoint, change: KeyChange) -> RekeyPlan:
    """Change the keys of a checkpoint, durably; steps that are done already are not done again.

    Raises:
        StoreLocked: Another process is writing its series.
        CkptmgrError: As `plan_rekeying`; nothing was changed.
        OSError: From the disk. It opens with the old or the new keys; doing the same again finishes
            it.
    """
    with held_for_change(store, checkpoint):
        return CheckpointKeys(store, checkpoint, change).change()


def plan_reencryption(
    store: Store,
    checkpoint: Checkpoint,
    change: KeyChange,
    *,
    clock: Callable[[], float] = time.time,
) -> RekeyPlan:
    """Return what `reencrypt_checkpoint` would do; changes nothing. Raises as `plan_rekeying`."""
    return CheckpointKeys(store, checkpoint, change, clock=clock).plan_reencryption()


def reencrypt_checkpoint(
    store: Store,
    checkpoint: Checkpoint,
    change: KeyChange,
    *,
    clock: Callable[[], float] = time.time,
) -> RekeyPlan:
    """Re-encrypt a checkpoint under a new data key, durably; the change must be exclusive.

    A file that was encrypted for the new keys alone is done. `clock` (seconds since 1970) names the
    new files of ranks, and says which files have expired.

    Raises:
        StoreLocked: Another process is writing its series.
        CkptmgrError: As `plan_rekeying`; nothing was changed.
        OSError: From the disk. It opens with the old or the new keys; doing the same again finishes
            it.
    """
    with held_for_change(store, checkpoint):
        return CheckpointKeys(store, checkpoint, change, clock=clock).reencrypt()


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
            with opened_raw(self._store, path) as raw:
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
            self._reencrypt()
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
        if planned.action is Action.REENCRYPT:
            self._reencrypt()
        elif planned.action is Action.HEADER:
            self._finish_swap()
            self._authenticate(is_final=True)
        remove_stale_files(self._store, self._stale_files())
        return planned

    def _plan_file_reencryption(self, path: Path) -> FilePlan:
        with opened_raw(self._store, path) as raw:
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
        with opened_raw(self._store, path) as raw:
            return has_first_keys(raw)

    def _removals_in(self, auth: ManifestKey) -> frozenset[Removal]:
        with translated_errors(str(self._checkpoint.path)):
            return self._change.removals_among(auth.slots or auth.own_slots, bound=BOUND)

    def _check_proofs(self) -> None:
        """Raise KeyProblem when the new manifest would prove less, or more, than the old one."""
        manifest, trust = self._manifest, self._store.trust
        may_be_other = manifest is None and trust.is_strict and not self._is_set
        if not (may_be_other and self._is_non_checkpoint()):
            check_proofs(self._store, self._checkpoint, manifest, trust)

    def _is_non_checkpoint(self) -> bool:
        """Return whether the file is no checkpoint and so gets no manifest, whatever its name."""
        (path,) = self._paths
        with opened_raw(self._store, path) as raw:
            if kind_of(raw, name=path.name) is not Kind.CKPTMGR_CONTAINER:
                return False
            keys = self._change.keys
            container = open_container_file(raw, raw, path=str(path), key=keys, mode=None)
            return format_in(container) == OPAQUE

    def _reencrypt(self) -> None:
        old, new = self._change.keys, self._change.added
        if not self._is_set:
            reencrypt_file(
                self._store,
                self._checkpoint,
                old=old,
                new=new,
                manifest=self._manifest,
                auth=self._during,
            )
            self._authenticate(is_final=True)
        elif self._manifest is None:
            raise CheckpointNotFound("there is no manifest", path=self._checkpoint.path)
        else:
            reencrypt_set(self._store, self._manifest, old=old, new=new, clock=self._clock)

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
        with opened_raw(self._store, path) as raw:
            return kind_of(raw, name=path.name)

    def _plan_header(self, path: Path, change: KeyChange | None = None) -> FilePlan:
        with opened_raw(self._store, path) as raw:
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
