# SPDX-License-Identifier: Apache-2.0
"""Options for reading checkpoint files: trust, cipher mode, rank, and the choice of names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmgr.config.keys import resolve_keys
from ckptmgr.core.trust import DEFAULT_TRUST, Trust

if TYPE_CHECKING:
    from ckptmgr.crypto.keys.signing import PublicKey


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


def read_options(
    dec_key: object,
    dec_mode: str | None,
    *,
    trusted_keys: Iterable[str | os.PathLike[str] | PublicKey],
    allow_unsealed: bool,
    allow_unencrypted: bool,
) -> ReadOptions:
    """Return the options that the arguments of a load ask for.

    Raises:
        TypeError, ValueError: An argument is unusable.
        KeyProblem: A source gives no key.
    """
    return ReadOptions(
        trust=Trust(
            keys=resolve_keys(
                "dec_key",
                dec_key,
                mode=dec_mode or "AES-GCM",
                format="ckpt" if dec_mode else "safetensors",
                is_for_reading=True,
            ),
            trusted_keys=trusted_keys,
            allow_unsealed=allow_unsealed,
            allow_unencrypted=allow_unencrypted,
        ),
        mode=dec_mode,
    )


def everything(name: str) -> bool:
    """Choose every name."""
    del name
    return True
