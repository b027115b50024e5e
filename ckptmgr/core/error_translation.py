# SPDX-License-Identifier: Apache-2.0
"""Translation of format and crypto errors into `CkptmgrError`s that name the file."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import (
    ChecksumMismatch,
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    TamperedCheckpoint,
    TruncatedCheckpoint,
    UnprovenCheckpoint,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
)
from ckptmgr.core.trust import ACCEPT_UNSEALED_HINT, Trust
from ckptmgr.crypto import errors as crypto_errors
from ckptmgr.formats import errors as format_errors


def unproven_error(path: str | os.PathLike[str], trust: Trust) -> UnprovenCheckpoint:
    """Return the error of a file without manifest under a strict `trust`."""
    return UnprovenCheckpoint(
        "keys were given, but no manifest proves which checkpoint this file is",
        path=path,
        hint=trust.accept_hint,
    )


@contextmanager
def translated_errors(path: str) -> Iterator[None]:
    """Translate errors that leave the block; used once, where a file is opened."""
    try:
        yield
    except format_errors.FormatError as error:
        raise _from_format(error, path) from error
    except crypto_errors.CryptoError as error:
        raise _from_crypto(error, path) from error


def _from_format(error: format_errors.FormatError, path: str) -> CkptmgrError:
    if isinstance(error, format_errors.UnsupportedError):
        return UnsupportedCheckpoint(str(error), path=path)
    kind: type[CorruptCheckpoint] = CorruptCheckpoint
    if isinstance(error, format_errors.TruncatedError):
        kind = TruncatedCheckpoint
    elif isinstance(error, format_errors.ChecksumError):
        kind = ChecksumMismatch
    return kind(str(error), path=path, offset=error.offset, tensor=error.tensor)


def _from_crypto(error: crypto_errors.CryptoError, path: str) -> CkptmgrError:
    if isinstance(error, crypto_errors.TamperedError):
        return TamperedCheckpoint(str(error), path=path, offset=error.offset, hint=error.hint)
    if isinstance(error, crypto_errors.TruncatedCiphertextError):
        return TruncatedCheckpoint(str(error), path=path, offset=error.offset, hint=error.hint)
    if isinstance(error, crypto_errors.UnsealedError):
        hint = f"MindSpore itself wrote it, or its end was cut off; {ACCEPT_UNSEALED_HINT}"
        return UnsealedCheckpoint(str(error), path=path, hint=hint)
    if isinstance(error, crypto_errors.UnsupportedSuiteError):
        return UnsupportedCheckpoint(str(error), path=path, hint=error.hint)
    return KeyProblem(str(error), path=path, hint=error.hint)
