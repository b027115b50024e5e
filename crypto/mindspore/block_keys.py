# SPDX-License-Identifier: Apache-2.0
"""Which of several keys is that of an encrypted MindSpore `.ckpt`: such a file has one, and its seal tells which."""

from __future__ import annotations

from ..errors import CryptoError, DecryptionError, KeyLengthError, KeySourceError, UnsealedError
from ..keys.ring import Keys, ring_of, takes_one_key
from ..source import Source
from .source import BlockSource, open_blocks

_MAY_BE_THE_KEY = (DecryptionError, KeyLengthError, UnsealedError)


def open_blocks_with(
    source: Source, keys: Keys, mode: str, *, allow_unsealed: bool = False
) -> BlockSource:
    """Open an encrypted `.ckpt` with whichever of some keys it has.

    Args:
        source: The encrypted bytes.
        keys: The keys; passphrases and private keys among them open no such file.
        mode: As for `open_blocks`.
        allow_unsealed: As for `open_blocks`; takes one key, because without a seal a wrong one is not always noticed.

    Raises:
        KeySourceError: There is no key; or there are several, and no seal.
        CryptoError: As `open_blocks`, about the key that is right as far as that can be told, else about the first.
    """
    found = ring_of(keys).raw_keys
    if len(found) == 1:
        return open_blocks(source, found[0], mode, allow_unsealed=allow_unsealed)
    failures: list[CryptoError] = []
    for key in found:
        try:
            return open_blocks(source, key, mode)
        except CryptoError as error:
            failures.append(error)
    # What the right key proves comes before what a wrong one cannot tell.
    failures.sort(key=lambda error: isinstance(error, _MAY_BE_THE_KEY))
    if failures and allow_unsealed and isinstance(failures[0], UnsealedError):
        raise KeySourceError(
            f"{len(found)} keys are given, and without a seal nothing tells which is the right one",
            hint="give the one that it was saved with",
        ) from failures[0]
    raise failures[0] if failures else takes_one_key(0)
