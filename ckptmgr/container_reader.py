# SPDX-License-Identifier: Apache-2.0
"""Open an encrypted container that lies on a disk, with a key, and as the very file its manifest describes."""

from __future__ import annotations

from ckptmgr.crypto.container_header import FIXED_BYTES
from ckptmgr.crypto.container_source import ContainerSource, open_container
from ckptmgr.crypto.container_unlock import find_copies
from ckptmgr.crypto.errors import CryptoError
from ckptmgr.crypto.floe import HEADER_BYTES
from ckptmgr.crypto.key import Key
from ckptmgr.crypto.wrapping import RawKey
from ckptmgr.errors import ChecksumMismatch, KeyProblem
from ckptmgr.formats.detect import Kind
from ckptmgr.formats.source import Source, read_bytes

ENCRYPTED = (Kind.MINDSPORE_ENCRYPTED, Kind.CKPTMGR_CONTAINER)
"""The kinds of files that need a key."""


def open_container_file(
    raw: Source, checked: Source, *, path: str, key: Key | None, mode: str | None
) -> ContainerSource:
    """Return the plaintext of a container.

    Args:
        raw: The file.
        checked: The same, compared with the digests of its manifest as it is read; `raw` itself when there is none.
        path: For messages.
        key: The key.
        mode: The cipher mode to insist on, or None.

    Raises:
        KeyProblem: There is no key, or the mode is another one.
        ChecksumMismatch: It is not the file that the manifest describes.
        CryptoError: As `open_container`.
    """
    if key is None:
        raise KeyProblem(
            f"the file is encrypted ({container_mode(raw)}); a key is needed",
            path=path,
            hint="pass dec_key or --key",
        )
    try:
        container = open_container(raw, [RawKey(key)])
    except CryptoError:
        read_bytes(checked, 0, min(1, raw.size))  # is it the file that was saved?
        raise
    if mode not in (None, container.mode):
        raise KeyProblem(
            f"the file says {container.mode}, not {mode}",
            path=path,
            hint=f"open it with mode {container.mode}",
        )
    if checked is raw:
        return container  # where nothing vouches for it, a damaged header copy may stand first
    # Every segment is bound to what was unlocked; the manifest must be the one of this very save. Another read of the file
    # could give other bytes than those that were unlocked.
    head = read_bytes(checked, 0, container.head_bytes)
    unlocked = container.unlocked
    in_use = (unlocked.header.fixed.pack(), unlocked.message.header)
    if (head[:FIXED_BYTES], head[-HEADER_BYTES:]) != in_use:
        raise ChecksumMismatch("the file changed while it was being read", path=path)
    return container


def container_mode(raw: Source) -> str:
    """Return the cipher mode that the header of a container names; needs no key and proves nothing.

    Raises:
        CryptoError: The header cannot be parsed.
    """
    return find_copies(raw)[0].header.fixed.suite.mode
