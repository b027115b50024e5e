# SPDX-License-Identifier: Apache-2.0
"""How checkpoint files are read: what is trusted, in which cipher mode, and for which rank."""

from __future__ import annotations

from dataclasses import dataclass

from ckptmgr.core.trust import DEFAULT_TRUST, Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to read a file.

    Attributes:
        trust: Which keys open and prove it, and what is accepted without proof.
        mode: The cipher mode to insist on, or None to take the one the file names.
        rank: Which file of a sharded checkpoint to read, and `world`, out of how many; None for none.
        world: Number of ranks that read.
    """

    trust: Trust = DEFAULT_TRUST
    mode: str | None = None
    rank: int | None = None
    world: int = 1
