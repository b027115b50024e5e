# SPDX-License-Identifier: Apache-2.0
"""What a change of keys means for an encrypted `.ckpt`: it has one key, and another one means encrypting it anew."""

from __future__ import annotations

from collections.abc import Sequence

from ckptmgr.core.errors import UnsafeWrite
from ckptmgr.crypto.errors import CryptoError
from ckptmgr.crypto.keys.key import Key
from ckptmgr.crypto.mindspore.blocks import open_blocks, sniff_mode
from ckptmgr.formats.source import Source, read_bytes
from ckptmgr.maintenance.rekey_change import FilePlan, KeyChange, Removal

_HEAD_BYTES = 16


def plan_blocks(raw: Source, change: KeyChange, *, path: str) -> FilePlan:
    """Return what a change of keys does to an encrypted `.ckpt`.

    Raises:
        UnsafeWrite: It would have another number of keys than one, or something that is no key.
        CryptoError: It does not open, or is not sealed.
    """
    mode = str(sniff_mode(read_bytes(raw, 0, min(_HEAD_BYTES, raw.size))))
    added = [key for ring in change.add for key in ring.raw_keys]
    key = _opener(raw, mode, keys=(*change.keys.raw_keys, *added))
    before = (f"key {key.key_id}",)
    rings = (ring for ring in change.remove if key.key_id in ring.key_ids)
    ids = (one for one in change.remove_ids if one == key.key_id)
    removals: frozenset[Removal] = frozenset((*rings, *ids))
    # A key that is given as one of the old ones, too, opens what is to be encrypted anew under another data key.
    is_anew_under_it = change.is_only and key in change.keys.raw_keys
    is_done = key in added and len(change.add) == 1 and not is_anew_under_it
    if is_done or change.is_repair:
        return FilePlan(before=before, after=before)
    is_removed = change.is_only or bool(removals)
    if not is_removed and not change.add:
        return FilePlan(before=before, after=before)
    if not is_removed or len(change.add) != 1 or len(added) != 1:
        raise UnsafeWrite(
            "an encrypted .ckpt has exactly one key, which MindSpore takes",
            path=path,
            hint=f"--add one key, the one that opens it now ({key.key_id}) or another in its place"
            if key in added
            else f"add one key and remove the present one: --add SOURCE --remove {key.key_id}",
        )
    after = (f"key {added[0].key_id}",)
    return FilePlan(before=before, after=after, is_anew=True, removals=removals)


def _opener(raw: Source, mode: str, *, keys: Sequence[Key]) -> Key:
    """Return the key that opens a file."""
    failures: list[CryptoError] = []
    for key in keys:
        try:
            open_blocks(raw, key, mode)
        except CryptoError as error:
            failures.append(error)
        else:
            return key
    # That of the key which should open it says most.
    raise failures[0]
