# SPDX-License-Identifier: Apache-2.0
"""What is encrypted anew for another reason than its keys opens for exactly those that it opened for before."""

from __future__ import annotations

from pathlib import Path

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import UnsafeWrite
from ckptmgr.crypto.container.header import HeaderCopy
from ckptmgr.crypto.keys.ring import Keys, ring_of


def check_recipients(header: HeaderCopy, keys: Keys, *, path: Path | str) -> None:
    """Raise unless a container is for all of these keys and for nobody else.

    Args:
        header: Of the container.
        keys: What it would be encrypted with.
        path: For messages.

    Raises:
        UnsafeWrite: Somebody could not open it any more, or somebody new could.
    """
    ring = ring_of(keys)
    with translated_errors(str(path)):
        is_same = ring.is_exactly_for(header.slots, bound=header.fixed.pack())
    if not is_same:
        raise UnsafeWrite(
            f"is encrypted for {', '.join(slot.label for slot in header.slots)}; given: {', '.join(ring.labels)}",
            path=path,
            hint="give all of these and nobody else (CLI: --key for each); the public key of a pair will do",
        )
