# SPDX-License-Identifier: Apache-2.0
"""Open an encrypted container with a key, and check that it is the file in its manifest."""

from __future__ import annotations

import logging

from ckptmgr.core.errors import ChecksumMismatch, KeyProblem
from ckptmgr.core.names import OPAQUE
from ckptmgr.crypto.container.floe import HEADER_BYTES
from ckptmgr.crypto.container.header import Content
from ckptmgr.crypto.container.source import ContainerSource, open_container
from ckptmgr.crypto.container.unlock import CopyState, find_copies
from ckptmgr.crypto.errors import CryptoError
from ckptmgr.crypto.keys.ring import Keys, ring_of
from ckptmgr.formats.source import Source, read_bytes
from ckptmgr.io.scatter import read_checked
from ckptmgr.io.threads import PIECE_BYTES

_LOG = logging.getLogger(__name__)

_FORMATS = {
    Content.SAFETENSORS: "safetensors",
    Content.MINDSPORE_CKPT: "ckpt",
    Content.OPAQUE: OPAQUE,
    Content.FRAMES: "safetensors",
}


def open_container_file(
    raw: Source, checked: Source, *, path: str, key: Keys | None, mode: str | None
) -> ContainerSource:
    """Return the plaintext of a container; `checked` is `raw`, compared with any manifest.

    Raises:
        KeyProblem: There is no key, or the mode differs.
        ChecksumMismatch: It is not the file in the manifest.
        CryptoError: As `open_container`.
    """
    if key is None:
        raise KeyProblem(
            f"the file is encrypted ({container_mode(raw)}); a key is needed",
            path=path,
            hint="pass a key: enc_key of CheckpointConfig, dec_key of a load, --key of a command",
        )
    ring = ring_of(key)
    if not ring.can_open:
        raise KeyProblem(
            f"there are only public keys here ({', '.join(ring.labels)}), which encrypt and do not open",
            path=path,
            hint="give the private key, such as enc_key='file:alice.key' (CLI: --key file:alice.key)",
        )
    try:
        container = open_container(raw, ring.identities)
    except CryptoError:
        read_bytes(checked, 0, min(1, raw.size))  # raises if it is not the file that was saved
        raise
    if mode not in (None, container.mode):
        raise KeyProblem(
            f"the file says {container.mode}, not {mode}",
            path=path,
            hint=f"open it with mode {container.mode}",
        )
    for name, state in zip("AB", container.unlocked.states, strict=True):
        if state is not CopyState.CURRENT:
            _LOG.warning(
                "%s: header copy %s is %s, the other one was used; ckptmgr rekey %s --key SOURCE mends it",
                path,
                name,
                state.value,
                path,
            )
    if checked is raw:
        return container
    # Every segment is bound to the unlocked header; the manifest must be of the same save. A second
    # read of the header could return other bytes. The start of the payload commits to the header
    # before it.
    start = read_checked(checked, container.head_bytes - HEADER_BYTES, HEADER_BYTES)
    if start != container.unlocked.message.header:
        raise ChecksumMismatch("the file changed while it was being read", path=path)
    return container


def format_in(container: ContainerSource) -> str:
    """Return the format of the plaintext: `safetensors`, `ckpt`, or `OPAQUE`."""
    return _FORMATS[container.content]


def unit_of(container: ContainerSource) -> int:
    """Return the unit of parallel reads: whole segments, or 0 if one is longer than a piece."""
    return PIECE_BYTES // container.block_bytes * container.block_bytes


def container_format(raw: Source) -> str:
    """Return the format in the header of a container; needs no key and proves nothing.

    Raises:
        CryptoError: The header cannot be parsed.
    """
    return _FORMATS[find_copies(raw)[0].header.fixed.content]


def container_openers(raw: Source) -> tuple[str, ...]:
    """Return the labels of the keys in the newest header; needs no key and proves nothing.

    Raises:
        CryptoError: The header cannot be parsed.
    """
    return tuple(slot.label for slot in find_copies(raw)[0].header.slots)


def container_mode(raw: Source) -> str:
    """Return the cipher mode in the header of a container; needs no key and proves nothing.

    Raises:
        CryptoError: The header cannot be parsed.
    """
    return find_copies(raw)[0].header.fixed.suite.mode
