# SPDX-License-Identifier: Apache-2.0
"""Whether a file is of the kind that its manifest says.

Digests leave the header copies of a container out, because a change of keys rewrites them. What lies there instead, such as
the header of a plain file over the same payload, only the kind tells.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptmgr.core.errors import TamperedCheckpoint
from ckptmgr.formats.detect import Kind
from ckptmgr.store.manifest.codec import FileEntry, Manifest

_PLAIN = {
    "ckpt": (Kind.MINDSPORE_CKPT,),
    "safetensors": (Kind.SAFETENSORS, Kind.COMPRESSED),
}
_DAMAGED = (Kind.UNKNOWN, Kind.EMPTY, Kind.ZIP_PICKLE)
_HINT = "the file was changed or replaced after it was saved; use an older checkpoint"


def check_kind(kind: Kind, manifest: Manifest | None, *, path: str) -> None:
    """Raise TamperedCheckpoint unless a file is of a kind that its manifest allows.

    Args:
        kind: What its first bytes say. What they say nothing sensible of, its parser or the digests refuse.
        manifest: Says format and cipher; None says nothing.
        path: For messages.
    """
    if manifest is None:
        return
    entry = manifest.file
    is_container = kind is Kind.CKPTMGR_CONTAINER
    # One that was made for a file without manifest knows it by its name only, and digests of all of it.
    is_known = not manifest.is_made_up and kind not in _DAMAGED
    if (entry.digest.blank_bytes and not is_container) or (
        is_known and kind not in _allowed(entry)
    ):
        said = entry.format if entry.cipher is None else f"{entry.format}, {entry.cipher}"
        raise TamperedCheckpoint(
            f"begins like a file of the kind {kind.value!r}, but was saved as {said}",
            path=path,
            hint=_HINT,
        )


def _allowed(entry: FileEntry) -> Sequence[Kind]:
    if entry.cipher is None:
        return _PLAIN.get(entry.format, tuple(Kind))
    if entry.format not in _PLAIN:
        return tuple(Kind)
    is_block_file = entry.format == "ckpt" and not entry.digest.blank_bytes
    return (Kind.MINDSPORE_ENCRYPTED,) if is_block_file else (Kind.CKPTMGR_CONTAINER,)


def check_mode(mode: str, manifest: Manifest | None, *, path: str) -> None:
    """Raise TamperedCheckpoint unless an encrypted file names the cipher mode that its manifest does."""
    if manifest is None or manifest.is_made_up:
        return
    if mode != manifest.file.cipher:
        raise TamperedCheckpoint(
            f"says {mode}, but was saved with {manifest.file.cipher or 'no cipher'}",
            path=path,
            hint=_HINT,
        )
