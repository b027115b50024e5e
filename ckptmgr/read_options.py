# SPDX-License-Identifier: Apache-2.0
"""How checkpoint files are read: with which keys, and what is accepted."""

from __future__ import annotations

from dataclasses import dataclass

from ckptmgr.crypto.keyring import Keys
from ckptmgr.crypto.signing import PublicKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to read a file.

    Attributes:
        key: The key, or None. Given a key, files that are not authenticated as a whole are refused.
        mode: The cipher mode to insist on, or None to take the one the file names.
        allow_unsealed: Accept plain and unsealed files although a key is given.
        rank: Which file of a sharded checkpoint to read, and `world`, out of how many; None for none.
        world: Number of ranks that read.
        trusted_keys: Whose signatures count. Given any, files whose manifest none of them signed are refused.
    """

    key: Keys | None = None
    mode: str | None = None
    allow_unsealed: bool = False
    rank: int | None = None
    world: int = 1
    trusted_keys: tuple[PublicKey, ...] = ()

    @property
    def is_strict(self) -> bool:
        """Whether manifests must be authenticated by what was given."""
        return (self.key is not None or bool(self.trusted_keys)) and not self.allow_unsealed
