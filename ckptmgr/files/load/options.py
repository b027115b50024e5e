# SPDX-License-Identifier: Apache-2.0
"""Options for reading checkpoint files: trust, cipher mode, rank, and the choice of names."""

from __future__ import annotations

from dataclasses import dataclass

from ckptmgr.core.trust import DEFAULT_TRUST, Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to read a file.

    Attributes:
        trust: The keys that open and prove it, and the proofs that may be missing.
        mode: The required cipher mode, or None for the one in the file.
        rank: The rank that reads a sharded checkpoint, of `world` ranks; or None.
        world: Number of ranks that read.
    """

    trust: Trust = DEFAULT_TRUST
    mode: str | None = None
    rank: int | None = None
    world: int = 1


def everything(name: str) -> bool:
    """Choose every name."""
    del name
    return True
