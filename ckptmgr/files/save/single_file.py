# SPDX-License-Identifier: Apache-2.0
"""Save one file under a given name, outside of any series of checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmgr.core.handle import SaveStats
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import parse_name, stem_of
from ckptmgr.core.place import capabilities_at, refusal_at
from ckptmgr.core.trust import Trust
from ckptmgr.files.save.job import SaveOptions, SaveOrder, draft_entry
from ckptmgr.files.save.saver import save_items
from ckptmgr.formats.tensor import Item
from ckptmgr.io.permissions import DEFAULT_FILE_MODE
from ckptmgr.io.signals import defer_signals, deliver_signals
from ckptmgr.observe.observers import REGISTERED
from ckptmgr.store.change_leases import lease_of_name
from ckptmgr.store.manifest.codec import Manifest, manifest_name
from ckptmgr.store.store import Store

if TYPE_CHECKING:
    from ckptmgr.crypto.keys.signing import SigningKey


def save_single_file(
    path: Path,
    items: Sequence[Item],
    *,
    options: SaveOptions,
    metadata: Mapping[str, str] | None = None,
    facts: Mapping[str, object] | None = None,
    metrics: Mapping[str, float] | None = None,
    signing_key: SigningKey | None = None,
) -> Checkpoint:
    """Save items to `path`, whose directory exists; durable when it returns.

    `facts` may have the counters `step_num` and `epoch_num`. They and `metrics` go into the
    manifest. At an address the name must be free, and the file is written into the temporary folder
    before its upload.

    Raises:
        ValueError: An option is not for an address.
        UnsafeWrite: The address has another checkpoint of this name.
        UnsupportedCheckpoint, StoreLocked, StoreFull, SaveFailed, OSError: As `save_checkpoint`.
    """
    trust = Trust(keys=options.key, signing_key=signing_key, allow_unencrypted=True)
    save = partial(
        save_named,
        name=path.name,
        items=items,
        options=options,
        metadata=metadata,
        facts=facts,
        metrics=metrics,
    )
    if capabilities_at(path).in_place:
        return save(Store(path.parent, trust=trust))
    from ckptmgr.objects.staging import in_staging, remove_staging, staging_directory, sweep_killed

    check_at_address(path, options)
    store = Store(staging_directory(str(path.parent), path.name), trust=trust)
    try:
        saved = in_staging(store.directory, partial(save, store, address=path))
        sweep_killed(store)
    finally:
        remove_staging(store)
    return saved


def check_at_address(path: Path, options: SaveOptions) -> None:
    """Raise ValueError for an option without effect at the place of a file."""
    given = {
        "manifest=False": not options.has_manifest,
        "file_mode": options.file_mode != DEFAULT_FILE_MODE,
    }
    for option, capability in (("manifest=False", "bare"), ("file_mode", "modes")):
        refused = refusal_at(capabilities_at(path), option, capability)
        if refused is not None and given[option]:
            raise ValueError(f"{refused.message}: {path}")


def save_named(
    store: Store,
    name: str,
    items: Sequence[Item],
    *,
    options: SaveOptions,
    metadata: Mapping[str, str] | None = None,
    facts: Mapping[str, object] | None = None,
    metrics: Mapping[str, float] | None = None,
    address: Path | None = None,
) -> Checkpoint:
    """Save items under one name of a store; arguments and errors as `save_single_file`.

    With an address the file is uploaded there, and removed from the store.
    """
    path = store.directory / name if address is None else address
    order = SaveOrder(
        name=name,
        items=items,
        options=options,
        series=name,
        draft=_draft(path, options, facts or {}, metrics or {}),
        metadata=metadata,
    )
    started = time.perf_counter()
    with (
        REGISTERED.watch(series=name, step=None, why="manual") as watch,
        defer_signals(),
        lease_of_name(store, name),
    ):
        with deliver_signals():
            manifest = save_items(store, order)
            if address is not None:
                from ckptmgr.objects.staging import upload_staged

                reads_back = options.verify_after_write
                upload_staged(str(address.parent), store, name, reads_back=reads_back)
        cost = SaveStats(blocked_s=time.perf_counter() - started)
        cost.note_written(
            manifest.stats,
            size_bytes=manifest.file.digest.size_bytes,
            passed_s=cost.blocked_s,
        )
        watch.costs(cost)
        watch.durable(path, epoch=manifest.epoch, metrics=manifest.metrics, health=manifest.health)
    saved = manifest.to_checkpoint(path.parent)
    if options.has_manifest:
        return saved
    # As it is listed: of its facts, nothing is in the file.
    return replace(saved, state=State.UNVERIFIED, step=0, epoch=None, metrics={}, run_id=None)


def remove_single_file(path: Path) -> None:
    """Remove a file and the manifest that it may have, durably; do nothing where there is none.

    Raises:
        IsADirectoryError: It is a directory.
        StoreLocked: Another process is saving it.
        OSError: From the disk.
    """
    if path.is_dir():
        raise IsADirectoryError(21, os.strerror(21), str(path))
    if not path.parent.is_dir():
        return
    store = Store(path.parent)
    with defer_signals(), lease_of_name(store, path.name):
        # The data first: without its manifest it would be a file that nothing vouches for.
        for name in (path.name, manifest_name(path.name)):
            if store.fs.status(path.parent / name) is not None:
                store.fs.unlink(path.parent / name)
                store.fs.sync_directory(path.parent)


def _draft(
    path: Path, options: SaveOptions, facts: Mapping[str, object], metrics: Mapping[str, float]
) -> Manifest:
    parsed = parse_name(path.name)
    epoch = _counter(facts, "epoch_num")
    return Manifest(
        file=draft_entry(path.name, options),
        series=stem_of(path.name) if parsed is None else parsed.prefix,
        run_id="",
        step=_counter(facts, "step_num") or 0,
        epoch=epoch if parsed is None or epoch is not None else parsed.epoch,
        sequence=0,
        saved_at=datetime.fromtimestamp(time.time(), UTC),
        metrics=metrics,
        stats={},
    )


def _counter(facts: Mapping[str, object], name: str) -> int | None:
    value = facts.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
